#!/usr/bin/env bash
# Without a scheduler; on each node, FIRST being the first node's address:
#   ./launch.sh FIRST:12345 NUMBER_OF_NODES THIS_NODES_NUMBER [more of train.py's options]
set -euo pipefail
first=$1 nodes=$2 node=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
exec python "$here/train.py" --coordinator "$first" --processes "$nodes" \
  --process "$node" --domain-size "$(nvidia-smi -L | wc -l)" "$@"
