#!/bin/bash
# Pre-train with torchrun, on one machine or several.
#
#   one machine:      examples/torchrun.sh model.train_ds.manifest_filepath=train.jsonl …
#   several machines: the same on each, with
#                     NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=first-machine   on the first, NODE_RANK=1 on the second, …
#
# RANKS_PER_NODE: ranks per machine; default: the number of GPUs.
# MASTER_PORT:    a free port on the first machine; default: 29500. The next one (29501) must also be free.
# TORCHRUN:       torchrun of the environment that has nest-ssl, if it is not the one on the PATH.
set -euo pipefail

num_gpus() { nvidia-smi --list-gpus 2>/dev/null | grep --count '^GPU' || true; }

nodes=${NUM_NODES:-1}
ranks=${RANKS_PER_NODE:-$(num_gpus)}
if [ "$ranks" -lt 1 ]; then
    echo "torchrun.sh: no GPU found; for ranks on the CPU set RANKS_PER_NODE=2 and trainer.accelerator=cpu" >&2
    exit 1
fi

if [ "$nodes" -eq 1 ]; then
    rendezvous=(--standalone) # any free port
else
    rendezvous=(
        --nnodes "$nodes"
        --node-rank "${NODE_RANK:?torchrun.sh: set NODE_RANK to 0 on the first machine, 1 on the second, …}"
        --master-addr "${MASTER_ADDR:?torchrun.sh: set MASTER_ADDR to the first machine}"
        --master-port "${MASTER_PORT:-29500}"
    )
fi

exec ${TORCHRUN:-torchrun} "${rendezvous[@]}" --nproc-per-node "$ranks" \
    -m nest_ssl pretrain trainer.devices="$ranks" trainer.num_nodes="$nodes" "$@"
