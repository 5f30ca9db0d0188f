#!/bin/bash
# Pre-train under SLURM: one task per GPU, started by srun; goes on by itself after a preemption, a time limit or a stall.
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 examples/slurm.sh model.train_ds.manifest_filepath=train.jsonl …
#
# --gpus-per-node and --ntasks-per-node must be the same number. Do not use --gpus-per-task: every task must see all GPUs
# of its node, and takes the one of its place.
# MAX_REQUEUES: how often the job may be put back into the queue (100).
#SBATCH --job-name=nest-ssl
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=nest-ssl-%j.log
# --signal=USR1@120: all ranks save and leave 120 s before the time limit; take more if one step and one save need more.
set -uo pipefail

code=0
srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    nest-ssl pretrain trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.num_nodes="$SLURM_JOB_NUM_NODES" "$@" || code=$?

# 75: ended, and the same command goes on from the last checkpoint. Everything else needs a person, or is finished.
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-100}" ]; then
    echo "slurm.sh: resumable (75); job $SLURM_JOB_ID goes back into the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
