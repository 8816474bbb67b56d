"""What the scripts share that time a peer and Tercio in turn: both started anew in every round, medians, versions, a row for BENCHMARKS.md.

Needs Python's standard library only. A side that fails ends the run with its own message and exit status 1.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
INPUT = os.path.join(HERE, "reader_input.json")


def parser(description, **numbers):
    """Arguments of every such script; `numbers` are names and defaults of whole numbers of its own."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--peer", required=True, metavar="VENV", help="virtual environment with requirements-reader.txt")
    p.add_argument("--tercio", default=os.path.join(ROOT, "target", "release", "tercio"), help="the release binary")
    for name, default in {**numbers, "threads": 2, "rounds": 3}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--recompute", action="store_true", help="recompute activations in backward (the peer: gradient checkpointing)")
    p.add_argument("--bf16", action="store_true", help="products in bf16 (the peer: autocast)")
    p.add_argument("--save", metavar="FILE", help="append every JSON line to FILE")
    p.set_defaults(numbers=[*numbers, "threads", "rounds"])
    return p


def parse(p):
    a = p.parse_args()
    if min(getattr(a, name) for name in a.numbers) < 1:
        p.error(f"{', '.join(a.numbers)} are at least 1")
    return a


def python(a):
    return os.path.join(a.peer, "bin", "python")


def last_json_line(side, command):
    """Run one side and return the JSON object of its last line of output."""
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    try:
        done = subprocess.run([str(x) for x in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as e:
        sys.exit(f"{side}: could not start {command[0]}: {e.strerror}")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.exit(f"{side}: exit status {done.returncode} of: {' '.join(str(x) for x in command)}\n{done.stderr[-3000:]}")
    try:
        result = json.loads(lines[-1])
        result["seconds_per_step"], result["peak_rss_gb"]
    except (ValueError, KeyError, TypeError):
        sys.exit(f"{side}: expected one JSON line with seconds_per_step and peak_rss_gb, found: {lines[-1][:300]}")
    return result


def first_line(*command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def cpu_model():
    try:
        with open("/proc/cpuinfo", encoding="utf8") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def run(a, sides, work):
    """Run the commands of `sides` ("peer" and "tercio") in turn, the peer first in odd rounds, and print what came of it."""
    results = {"peer": [], "tercio": []}
    for r in range(a.rounds):
        for side in ("peer", "tercio") if r % 2 == 0 else ("tercio", "peer"):
            result = last_json_line(side, sides[side])
            results[side].append(result)
            print(f"round {r + 1}/{a.rounds} {side}: {json.dumps(result)}", file=sys.stderr, flush=True)
            if a.save:
                with open(a.save, "a", encoding="utf8") as f:
                    f.write(json.dumps({"side": side, "round": r + 1, **result}) + "\n")

    def median(side, field):
        return statistics.median(x[field] for x in results[side])

    def spread(side):
        s = [x["seconds_per_step"] for x in results[side]]
        return f"{min(s):.2f}-{max(s):.2f}"

    ps, pm = median("peer", "seconds_per_step"), median("peer", "peak_rss_gb")
    ts, tm = median("tercio", "seconds_per_step"), median("tercio", "peak_rss_gb")
    peer_version = results["peer"][0].get("peer", "unknown peer")
    work = f"{work}, {'bf16' if a.bf16 else 'f32'}{', recompute' if a.recompute else ''}"
    print(f"processor: {cpu_model()}, {os.cpu_count()} logical, {a.threads} threads used")
    print(f"tercio: {first_line(a.tercio, '--version')}, commit {first_line('git', '-C', ROOT, 'rev-parse', '--short', 'HEAD')}, {first_line('rustc', '--version')}")
    print(f"peer: {peer_version}, python {first_line(python(a), '--version').removeprefix('Python ')}")
    print(f"medians of {a.rounds} rounds of {a.steps} steps; spread of the rounds: tercio {spread('tercio')} s, peer {spread('peer')} s")
    share = [x["share_of_peak"] for x in results["tercio"] if isinstance(x.get("share_of_peak"), (int, float))]
    if share:
        print(f"tercio's share of the processor's peak: {statistics.median(share):.2f}")
    print()
    print("| work | tercio s | peer s | times faster | tercio GB | peer GB | share of memory |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| {work} | {ts:.2f} | {ps:.2f} | {ps / ts:.2f} | {tm:.2f} | {pm:.2f} | {tm / pm:.2f} |")
