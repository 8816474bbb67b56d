#!/usr/bin/env bash
# Share of the wire that an all-reduce gets: N virtual nodes (tools/cluster, own networks), every cable slowed to RATE in both
# directions by a token bucket, one rank on each node.
#
#   bench/slurm/wire.sh [NODES] [RATE_MBIT] [BYTES] [ROUNDS]        2 nodes, 1000 Mbit/s, 100 MB, 5 rounds
#
# Prints the example's own line, and the share: bytes that a rank must send, 2 (N-1)/N of all, over what the cable carries in
# the time taken. Frame headers count as lost: a large-segment frame of these cables has 54 bytes on some 64 kB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
nodes=${1:-2} rate=${2:-1000} bytes=${3:-100000000} rounds=${4:-5}
cargo build -q --release -p tercio-comm --example all_reduce
dir=$(mktemp -d)
trap 'tools/cluster stop "$dir"; rm -rf "$dir"' EXIT
NET=1 OWNER=$$ tools/cluster start "$dir" "$nodes"
for ((i = 1; i <= nodes; i++)); do
    tools/cluster exec "$dir" head tc qdisc add dev "v-node$i" root tbf rate "${rate}mbit" burst 1mb latency 50ms
    tools/cluster exec "$dir" "node$i" tc qdisc add dev eth0 root tbf rate "${rate}mbit" burst 1mb latency 50ms
done
eval "$(tools/cluster env "$dir")"
tools/cluster exec "$dir" head srun -N "$nodes" --ntasks-per-node=1 \
    "$PWD/target/release/examples/all_reduce" --bytes "$bytes" --rounds "$rounds" --backend tcp >"$dir/line"
cat "$dir/line"
python3 - "$dir/line" "$nodes" "$rate" "$bytes" <<'P'
import json, sys
nodes, rate, size = map(int, sys.argv[2:])
line = [json.loads(l) for l in open(sys.argv[1]) if l.startswith("{")][-1]
wire = 2 * (nodes - 1) / nodes * size / (rate * 1e6 / 8)
print(f"{nodes} nodes, {rate} Mbit/s, {size} bytes: {line['seconds']:.3f} s; the wire alone {wire:.3f} s: {wire / line['seconds']:.1%} of the wire")
P
