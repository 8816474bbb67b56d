"""Late interaction's index by fast-plaid and by Tercio in turn, on the same vectors; prints one JSON object with both sides and the ratios of medians.

usage: plaid.py --peer VENV [--documents 10000] [--tokens 80] [--queries 50] [--threads 2] [--rounds 3] [--bits 4] [--vectors DIR]
VENV needs fast-plaid, torch and numpy. The vectors are written to --vectors, where they are not there, by peer_plaid.py --write; the peer makes the
same anew from its seed in every round. Every round starts both sides anew. recall_at_10 is against exact MaxSim of the peer.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

import sides

PEER = os.path.join(sides.HERE, "peer_plaid.py")


def answer(side, command):
    """Run one side; the JSON object of its last line of output."""
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.exit(f"{side}: exit status {done.returncode} of: {' '.join(str(x) for x in command)}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def medians(found):
    """Medians of the numbers of several rounds, everything else of the last."""
    last = found[-1]
    numbers = [k for k, v in last.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return {**last, **{k: round(statistics.median(f[k] for f in found), 4) for k in numbers}}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--peer", required=True, metavar="VENV", help="virtual environment with fast-plaid")
    p.add_argument("--tercio", default=os.path.join(sides.ROOT, "target", "release", "tercio"), help="the release binary")
    for name, default in {"documents": 10000, "tokens": 80, "queries": 50, "threads": 2, "rounds": 3, "bits": 4}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--vectors", metavar="DIR", help="folder of the vectors; default: one that goes again")
    a = p.parse_args()
    if min(a.documents, a.tokens, a.queries, a.threads, a.rounds) < 1 or a.tokens < 32:
        p.error("whole numbers are at least 1, --tokens at least 32")
    python = os.path.join(a.peer, "bin", "python")
    sizes = [f"--{name}={getattr(a, name)}" for name in ("documents", "tokens", "queries", "threads")]
    with tempfile.TemporaryDirectory() as folder:
        vectors = a.vectors or folder
        if not os.path.exists(os.path.join(vectors, "exact_top10.npy")):
            subprocess.run([python, PEER, *sizes, "--write", vectors], check=True)
        ours, theirs = [], []
        for _ in range(a.rounds):
            theirs.append(answer("fast-plaid", [python, PEER, *sizes]))
            ours.append(answer("tercio", [a.tercio, "bench", "plaid", "--vectors", vectors, "--bits", a.bits, "--threads", a.threads, "--json"]))
        theirs, exact = medians(theirs), medians([o.pop("exact") for o in ours])
        ours = medians(ours)
    memory = max(ours["build_peak_rss_gb"], ours["search_peak_rss_gb"])
    ratios = {"build": theirs["build_seconds"] / ours["build_seconds"], "memory": theirs["peak_rss_gb"] / memory}
    ratios |= {kind: ours[f"queries_per_second_{kind}"] / theirs[f"queries_per_second_{kind}"] for kind in ("batch", "single")}
    table = {"machine": platform.processor() or platform.machine(), "threads": a.threads, "rounds": a.rounds, "tercio": ours, "exact": exact, "peer": theirs}
    print(json.dumps(table | {"ratios": {k: round(v, 2) for k, v in ratios.items()}}))


if __name__ == "__main__":
    main()
