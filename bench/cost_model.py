"""A model of what many ranks cost: predicted efficiency of training from a measured step and a measured link.

usage: cost_model.py [--shape base|large ...] --shard-seconds S [--shards 1] [--ranks 8 64 512] [--gbit 10 100 400]
                     [--ranks-per-node 8] [--latency-us 20] [--add-gbs 8]
                     [--local-gbs 5]   (all ranks are given as many shards as one rank is measured with: weak scaling)

Assumptions, all of them:
  * An update of a rank is `shards` equal shards; two thirds of a shard's time is backward, spread over the parameters in
    their order, the tied embedding last.
  * Gradients (4 bytes each) leave in buckets of up to 25 MB as backward is done with them, one after the other; only the last
    shard's backward can hide them.
  * A bucket's all-reduce halves along distance 1, 2, 4, ... and goes back: steps within a node at --local-gbs, steps between
    nodes at the link's speed, which the ranks of a node share; every step waits --latency-us twice; sums at --add-gbs.
  * An update ends with three small exchanges of 2 log2(R) latencies. Clipping and Adam are in the measured time.
  * Nothing else: no stragglers, no congestion, a full-bisection network.
Efficiency is the time of one rank alone over the time with R ranks, for the same work per rank. `slurm/cost_check.py` sets it beside
what ranks on slowed cables show.
"""
import argparse
import math

# Parameters: the tied embedding, then one bucket's worth after the other (T5 v1.0: width, feed-forward, layers).
SHAPES = {"small": (512, 2048, 6, 8), "base": (768, 3072, 12, 12), "large": (1024, 4096, 24, 16)}
BUCKET = 4 * (6 << 20)  # bytes; `MOST` of crates/train/src/ranks/parts.rs


def parameters(shape):
    width, ff, layers, heads = SHAPES[shape]
    inner = heads * 64
    encoder = 4 * width * inner + 2 * width * ff + 2 * width
    decoder = 8 * width * inner + 2 * width * ff + 3 * width
    return 32128 * width, layers * (encoder + decoder)


def exposed(shape, shard_seconds, ranks, link, args):
    """Seconds of communication that backward does not hide."""
    embedding, rest = parameters(shape)
    backward = shard_seconds * 2 / 3
    buckets = []  # (seconds after the beginning of backward at which it is ready, bytes)
    done = 0
    while done < rest:
        size = min(BUCKET // 4, rest - done)
        done += size
        buckets.append((backward * done / rest, 4 * size))
    buckets += [(backward, min(BUCKET, 4 * embedding - at)) for at in range(0, 4 * embedding, BUCKET)]
    free = 0.0
    for ready, size in buckets:
        free = max(free, ready) + all_reduce(size, ranks, link, args)
    return free - backward + 3 * 2 * math.log2(ranks) * args.latency_us * 1e-6


def all_reduce(size, ranks, link, args):
    seconds, part = 0.0, size
    for step in range(round(math.log2(ranks))):
        part /= 2
        within = 2 ** (step + 1) <= args.ranks_per_node
        speed = args.local_gbs * 1e9 if within else link / min(args.ranks_per_node, ranks)
        seconds += 2 * (part / speed + args.latency_us * 1e-6) + part / (args.add_gbs * 1e9)
    return seconds


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, default="base")
    p.add_argument("--shard-seconds", type=float, required=True, help="measured: one shard's forward and backward, one rank")
    p.add_argument("--shards", type=int, default=1, help="shards of a rank in an update")
    p.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    p.add_argument("--gbit", type=float, nargs="+", default=[10, 100, 400])
    p.add_argument("--ranks-per-node", type=int, default=8)
    p.add_argument("--latency-us", type=float, default=20)
    p.add_argument("--local-gbs", type=float, default=5, help="GB/s between two ranks of a host, measured")
    p.add_argument("--add-gbs", type=float, default=8, help="GB/s of sums, measured")
    a = p.parse_args()
    if any(r < 2 or r & (r - 1) for r in a.ranks):
        p.error("--ranks are powers of two from 2 on")
    alone = a.shard_seconds * a.shards
    print(f"t5-{a.shape}: {sum(parameters(a.shape)) * 4 / 1e6:.0f} MB of gradients, {a.shards} x {a.shard_seconds} s an update alone")
    print("| ranks | " + " | ".join(f"{g:g} Gbit/s" for g in a.gbit) + " |")
    print("| --- |" + " --- |" * len(a.gbit))
    for ranks in a.ranks:
        cells = []
        for gbit in a.gbit:
            late = exposed(a.shape, a.shard_seconds, ranks, gbit / 8 * 1e9, a)
            cells.append(f"{alone / (alone + late):.3f} ({late:.2f} s exposed)")
        print(f"| {ranks} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
