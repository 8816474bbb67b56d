"""Run peer_reader.py and `tercio bench reader` in turn and print the medians, ratios, versions and a row for BENCHMARKS.md.

usage: reader.py --peer VENV train|generate [--size base] [--questions 1] [--passages 20] [--steps 3] [--threads 2]
                 [--recompute] [--bf16] [--rounds 3] [--tercio target/release/tercio] [--tokenizer DIR] [--save FILE]
Needs Python's standard library only. Each round starts both programs anew, the peer first in odd rounds, Tercio first in even
ones. --save appends every JSON line as it comes. A side that fails ends the run with its own message and exit status 1.
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


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("mode", choices=["train", "generate"])
    p.add_argument("--peer", required=True, metavar="VENV", help="virtual environment with requirements-reader.txt")
    p.add_argument("--tercio", default=os.path.join(ROOT, "target", "release", "tercio"), help="the release binary")
    p.add_argument("--tokenizer", default=os.path.join(ROOT, "tests", "golden", "tokenizers", "t5"))
    p.add_argument("--size", default="base", choices=["small", "base"])
    for name, default in (("questions", 1), ("passages", 20), ("steps", 3), ("threads", 2), ("rounds", 3)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--recompute", action="store_true", help="recompute activations in backward (the peer: gradient checkpointing)")
    p.add_argument("--bf16", action="store_true", help="products in bf16 (the peer: autocast)")
    p.add_argument("--save", metavar="FILE", help="append every JSON line to FILE")
    a = p.parse_args()
    if min(a.questions, a.passages, a.steps, a.threads, a.rounds) < 1:
        p.error("questions, passages, steps, threads and rounds are at least 1")
    return a


def commands(a):
    """The command line of each side, in the same order of settings."""
    common = ["--size", a.size, "--questions", a.questions, "--passages", a.passages, "--steps", a.steps]
    common += ["--threads", a.threads, "--tokenizer", a.tokenizer]
    peer = [os.path.join(a.peer, "bin", "python"), os.path.join(HERE, "peer_reader.py"), a.mode, *common]
    ours = [a.tercio, "bench", "reader", a.mode, "--input", os.path.join(HERE, "reader_input.json"), *common, "--json"]
    if a.recompute:
        peer.append("--checkpoint")
        ours.append("--recompute")
    if a.bf16:
        peer.append("--bf16")
        ours.append("--bf16")
    return {"peer": [str(x) for x in peer], "tercio": [str(x) for x in ours]}


def last_json_line(side, command):
    """Run one side and return the JSON object of its last line of output."""
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    try:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as e:
        sys.exit(f"{side}: could not start {command[0]}: {e.strerror}")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.exit(f"{side}: exit status {done.returncode} of: {' '.join(command)}\n{done.stderr[-3000:]}")
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


def main():
    a = arguments()
    sides = commands(a)
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
    work = f"{a.mode}, t5-{a.size}, {a.questions} x {a.passages}, {'bf16' if a.bf16 else 'f32'}{', recompute' if a.recompute else ''}"
    print(f"processor: {cpu_model()}, {os.cpu_count()} logical, {a.threads} threads used")
    print(f"tercio: {first_line(a.tercio, '--version')}, commit {first_line('git', '-C', ROOT, 'rev-parse', '--short', 'HEAD')}, {first_line('rustc', '--version')}")
    print(f"peer: {peer_version}, python {first_line(os.path.join(a.peer, 'bin', 'python'), '--version').removeprefix('Python ')}")
    print(f"medians of {a.rounds} rounds of {a.steps} steps; spread of the rounds: tercio {spread('tercio')} s, peer {spread('peer')} s")
    share = [x["share_of_peak"] for x in results["tercio"] if isinstance(x.get("share_of_peak"), (int, float))]
    if share:
        print(f"tercio's share of the processor's peak: {statistics.median(share):.2f}")
    print()
    print("| work | tercio s | peer s | times faster | tercio GB | peer GB | share of memory |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| {work} | {ts:.2f} | {ps:.2f} | {ps / ts:.2f} | {tm:.2f} | {pm:.2f} | {tm / pm:.2f} |")


if __name__ == "__main__":
    main()
