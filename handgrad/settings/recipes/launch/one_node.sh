#!/usr/bin/env bash
# Trains on one machine, a process per GPU; run it again to go on.
#
#   handgrad recipes one_node > one_node.sh
#   CONFIG=gpt2-1558m DATA=/data/fineweb OUT=/data/runs/xl GPUS=4 bash one_node.sh --steps 20000
#
# CONFIG    a recipe           MODEL     a model's size, over the recipe's
# DATA      prepared shards    OUT       the run folder
# GPUS      processes          RESTARTS  how often torchrun starts all of them again after one has failed
# Further arguments go to `handgrad train`.
set -euo pipefail

CONFIG="${CONFIG:-gpt2-124m}"
GPUS="${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}"
if [ "$GPUS" -lt 1 ]; then
    echo "one_node.sh: nvidia-smi lists no GPU; say how many processes to start: GPUS=2 $0" >&2
    exit 64
fi

# Threads of each process. On a CPU the bits depend on it, so a run keeps the number it was begun with.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Told to stop, torchrun tells the ranks, and kills them after 30 s unless it is given more time for the checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

exec torchrun --standalone --nproc-per-node="$GPUS" --max-restarts="${RESTARTS:-3}" \
    -m handgrad train --config "$CONFIG" ${MODEL:+--model "$MODEL"} ${DATA:+--data "$DATA"} ${OUT:+--out "$OUT"} "$@"
