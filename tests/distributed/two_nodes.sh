#!/usr/bin/env bash
# Runs `python -m handgrad ARGUMENTS` as two ranks on two "nodes" of this machine: network namespaces with a host name and
# an address of their own, joined by a cable of 1 Gbit/s. Needs root; leaves nothing behind.
#
#   tests/distributed/two_nodes.sh train tiny --lanes 2 --out runs/two-nodes
set -euo pipefail

first="handgrad-$$-a" second="handgrad-$$-b"

clean() {
    trap - EXIT
    for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done
    wait || true
    for node in "$first" "$second"; do ip netns del "$node" 2>/dev/null || true; done
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip netns add "$first"
ip netns add "$second"
ip link add cable netns "$first" type veth peer name cable netns "$second"

plug() { # a node, its address
    ip -n "$1" address add "$2/24" dev cable
    ip -n "$1" link set lo up
    ip -n "$1" link set cable up
    ip netns exec "$1" tc qdisc add dev cable root tbf rate 1gbit burst 256kb latency 50ms ||
        echo "two_nodes.sh: no tc here, the cable of $1 is as fast as memory" >&2
}
plug "$first" 10.77.0.1
plug "$second" 10.77.0.2

# gloo looks its own address up by the host's name, which no one knows here: it is told the interface instead.
export GLOO_SOCKET_IFNAME=cable
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

start() { # a node, its rank, what to run
    local node="$1" rank="$2"
    shift 2
    # shellcheck disable=SC2016
    exec ip netns exec "$node" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$node" \
        "${PYTHON:-python}" -m torch.distributed.run --nnodes=2 --node-rank="$rank" --nproc-per-node=1 \
        --master-addr=10.77.0.1 --master-port=29500 -m handgrad "$@"
}
start "$first" 0 "$@" &
start "$second" 1 "$@" &
wait -n
wait -n
