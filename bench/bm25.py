"""BM25 over a collection: hits@k of Tercio, and questions a second, build time, size and memory beside tantivy, in turn.

usage: bm25.py --peer VENV --passages FILE --questions DIR [--tercio BINARY] [--rounds 5] [--depth 100]
DIR has .jsonl files of {question, answers}: trivia-worldcapitals, trivia-elements and trivia.test (of which hits count the first 600
questions, and speed all). VENV needs tantivy. Prints one JSON object. More of both sides in peer_bm25.py.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

import sides

SETS = {"trivia-worldcapitals": None, "trivia-elements": None, "trivia.test": 600}
AT = [1, 5, 20, 100]


def last_json(command):
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.exit(f"exit status {done.returncode} of: {' '.join(str(x) for x in command)}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def own(command):
    """Run a command of ours, in a process of its own so that its peak of memory is known."""
    return last_json([sys.executable, os.path.abspath(__file__), "own", *command])


def wrapped(command):
    result = last_json(command)
    result["peak_rss_gb"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 3)
    print(json.dumps(result))


def hits(found):
    with open(found, encoding="utf8") as f:
        ranks = [next((i for i, c in enumerate(json.loads(line)["ctxs"]) if c["hasanswer"]), None) for line in f]
    return {f"hits@{k}": round(sum(r is not None and r < k for r in ranks) / len(ranks), 4) for k in AT}


def size(folder):
    return sum(e.stat().st_size for e in os.scandir(folder) if e.is_file())


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--peer", required=True, metavar="VENV")
    p.add_argument("--tercio", default=os.path.join(sides.ROOT, "target", "release", "tercio"))
    p.add_argument("--passages", required=True)
    p.add_argument("--questions", required=True, metavar="DIR")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--depth", type=int, default=100)
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--index-flags", nargs="*", default=[], help="further flags of `tercio index`, without dashes: fields=text")
    a = p.parse_args()
    python, peer = sides.python(a), os.path.join(sides.HERE, "peer_bm25.py")
    out = {"processor": sides.cpu_model(), "tercio": sides.first_line(a.tercio, "--version"), "depth": a.depth}
    with tempfile.TemporaryDirectory() as work:
        index, theirs, cache = (os.path.join(work, n) for n in ("index", "tantivy", "cache"))
        os.mkdir(theirs)
        flags = [f"--{f}" for f in a.index_flags]
        most = max(a.threads)
        ours = own([a.tercio, "index", "--passages", a.passages, "--output", index, "--cache-dir", cache, "--threads", most, "--json",
                    "--quiet", *flags])
        built = last_json([python, peer, "build", a.passages, theirs, most])
        out["build"] = {
            side: {"seconds": round(r["seconds"], 2), "peak_rss_gb": r["peak_rss_gb"], "megabytes": round(size(d) / 1e6, 2)}
            for side, r, d in (("tercio", ours, index), ("tantivy", built, theirs))
        }
        common = [a.tercio, "search", "--index", index, "--cache-dir", cache, "--n-docs", a.depth, "--json", "--quiet"]
        out["hits"] = {}
        for name, first in SETS.items():
            source, found = os.path.join(work, "questions.jsonl"), os.path.join(work, "found.jsonl")
            with open(os.path.join(a.questions, name + ".jsonl"), encoding="utf8") as f, open(source, "w", encoding="utf8") as g:
                lines = f.readlines()[:first]
                g.writelines(lines)
            own([*common, "--queries", source, "--output", found])
            out["hits"][name] = {"questions": len(lines), **hits(found)}
        asked = os.path.join(a.questions, "trivia.test.jsonl")
        run = os.path.join(work, "found.trec")
        out["search"] = {}
        for threads in a.threads:
            rates = {"tercio": [], "tantivy": []}
            peaks = {}
            for r in range(a.rounds):
                for side in ("tantivy", "tercio") if r % 2 == 0 else ("tercio", "tantivy"):
                    if side == "tantivy":
                        done = last_json([python, peer, "search", theirs, asked, threads, a.depth])
                        seconds = done["seconds"]
                    else:
                        done = own([*common, "--queries", asked, "--output", run, "--threads", threads])
                        seconds = done["search_seconds"]
                    rates[side].append(done["questions"] / seconds)
                    peaks[side] = max(peaks.get(side, 0), done["peak_rss_gb"])
            median = {side: statistics.median(v) for side, v in rates.items()}
            out["search"][f"{threads} threads"] = {
                **{side: {"questions_per_second": round(median[side]), "all": [round(x) for x in rates[side]],
                          "peak_rss_gb": peaks[side]} for side in rates},
                "ratio": round(median["tercio"] / median["tantivy"], 2),
            }
    print(json.dumps(out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        wrapped(sys.argv[2:])
    else:
        main()
