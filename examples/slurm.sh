#!/bin/bash
# Pre-train under SLURM; resumes automatically after a preemption, a time limit, a stall or the death of a rank.
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 examples/slurm.sh model.train_ds.manifest_filepath=train.jsonl …
#
# 'nest-ssl' must be on the PATH: activate its environment first (source .venv/bin/activate). sbatch passes the PATH on
# to all nodes, which must see the same folder.
#
# srun starts one task per node, and each task starts one rank per GPU, so exit codes are nest-ssl's.
# RANKS_PER_NODE: ranks per node; default: the number of GPUs.
# MAX_REQUEUES:   how often the job may be requeued; default: 100.
#SBATCH --job-name=nest-ssl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=nest-ssl-%j.log
# --signal=USR1@120: all ranks save and exit 120 s before the time limit. Raise it if a step and a save take longer.
set -uo pipefail

ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:?slurm.sh: no GPU on this node; give --gpus-per-node or RANKS_PER_NODE}}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-$((15000 + 2 * (SLURM_JOB_ID % 10000)))} # the same on every node; the next port is used too

# Without SLURM_PROCID the task is not mistaken for a rank: it launches the ranks of its node.
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    bash -c 'NODE_RANK=$SLURM_NODEID; export NODE_RANK; unset SLURM_PROCID; exec nest-ssl pretrain "$@"' nest-ssl \
    trainer.devices="$ranks" trainer.num_nodes="$SLURM_JOB_NUM_NODES" "$@"
code=$?

# 75: ended, and the same command resumes from the last checkpoint. 0: finished. Everything else needs a person, except
# 138: SIGUSR1 came before Python was up.
[ "$code" -eq 138 ] && code=75
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-100}" ]; then
    echo "slurm.sh: resumable (75): requeueing job $SLURM_JOB_ID" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
