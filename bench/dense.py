"""Exact and compressed dense search by faiss and by Tercio in turn; prints one JSON object with both sides, medians of all rounds.

usage: dense.py --peer VENV --vectors DIR --queries DIR|FILE [--depth 100] [--threads 2] [--rounds 5] [--single 100] [--index DIR --lists N --code_bytes B]
Build the other side first: cargo build --release -p tercio-search --example dense. VENV needs faiss-cpu. --vectors is a folder that
`tercio embed` wrote (f32 or f16), --queries another or a file of little-endian f32. With --index a compressed index is built there and compared with
an IndexIVFPQ of as many bytes a row, over several numbers of lists.
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


class Side:
    """A process that is asked one thing after the other."""

    def __init__(self, name, command):
        self.name = name
        self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, *words):
        self.process.stdin.write(" ".join(str(w) for w in words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait()


def timed(rounds, asked):
    """Medians of every command of `asked` (name: (side, words)), taking turns."""
    answers = {name: [] for name in asked}
    for _ in range(rounds + 1):
        for name, (side, *words) in asked.items():
            answers[name].append(side.ask(*words))
    # The first round warms up.
    keys = ("seconds", "processor_seconds")
    return {name: {**found[-1], **{k: round(statistics.median(a[k] for a in found[1:]), 4) for k in keys}} for name, found in answers.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--peer", required=True, metavar="VENV", help="virtual environment with faiss-cpu")
    p.add_argument("--example", default=os.path.join(sides.ROOT, "target", "release", "examples", "dense"), help="the built example")
    p.add_argument("--vectors", required=True)
    p.add_argument("--queries", required=True)
    for name, default in {"depth": 100, "threads": 2, "rounds": 5, "single": 100, "lists": 1024, "code_bytes": 48}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--index", help="folder of the compressed index; none: exact search only")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exact = os.path.join(folder, "exact")
        common = [a.vectors, a.queries, a.depth, a.threads]
        index = [a.index, a.lists, a.code_bytes] if a.index else []
        ours = Side("tercio", [a.example, *common, *index])
        ours.ask("hits", exact)
        queries = os.path.getsize(exact) // 8 // a.depth
        peer = [os.path.join(a.peer, "bin", "python"), os.path.join(sides.HERE, "peer_faiss.py"), *common, exact]
        faiss = Side("faiss", peer + ([a.lists, a.code_bytes, 64 * a.lists] if a.index else []))
        asked = {"tercio batch": (ours, "batch"), "faiss batch": (faiss, "batch"), "tercio from disk": (ours, "disk")}
        asked |= {"tercio single": (ours, "single", a.single), "faiss single": (faiss, "single", a.single)}
        found = timed(a.rounds, asked)
        for name, row in found.items():
            row["queries_per_second"] = round((a.single if "single" in name else queries) / row["seconds"], 1)
        table = {"machine": platform.processor() or platform.machine(), "queries": queries, "depth": a.depth, "threads": a.threads, "rounds": a.rounds}
        table |= {"tercio": ours.ready, "faiss": faiss.ready, "exact": found}
        for kind in ("batch", "single"):
            both = [found[f"{side} {kind}"] for side in ("faiss", "tercio")]
            table[f"{kind} ratio"] = round(both[0]["seconds"] / both[1]["seconds"], 2)
            # On a machine that others use, too, this one is steadier.
            table[f"{kind} ratio of processor time"] = round(both[0]["processor_seconds"] / max(both[1]["processor_seconds"], 0.01), 2)
        if a.index:
            curve = {}
            for probes in (4, 8, 16, 32, 64, 128):
                curve |= {f"faiss ivfpq {probes}": (faiss, "ivfpq", probes), f"tercio {probes} estimates": (ours, "compressed", probes, 0)}
                for factor in (2, 4):
                    curve[f"faiss refine {probes} x{factor}"] = (faiss, "refine", probes, factor)
                    curve[f"tercio {probes} x{factor}"] = (ours, "compressed", probes, factor * a.depth)
            table["compressed"] = timed(a.rounds, curve)
            for row in table["compressed"].values():
                row["queries_per_second"] = round(queries / row["seconds"], 1)
        ours.end()
        faiss.end()
    print(json.dumps(table))


if __name__ == "__main__":
    main()
