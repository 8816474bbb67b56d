"""BM25 over a collection: hits@k, questions a second, build time, size and memory of Tercio and of tantivy, in turn.

usage: bm25.py --peer VENV --passages FILE --questions DIR [--tercio BINARY] [--rounds 5] [--depth 100] [--threads 2]
DIR has .jsonl files of {question, answers}: trivia-worldcapitals, trivia-elements and trivia.test (of which hits count the first 600
questions, and speed all). VENV needs tantivy. Hits of both sides are counted by `tercio eval retrieval`, in texts alone. Two rows:
`plain`, every word of a question on both sides; `stopped`, without frequent words: ours by --analyzer stopped, tantivy's by its own
filter of English stopwords, and also asked for the very words that ours asks for. Prints one JSON object.
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
# Our analyzer, and which words tantivy is asked for.
ROWS = {"plain": ["plain"], "stopped": ["stopwords", "same-words"]}


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


def hits(a, found):
    flags = ["--data", found, "--k", ",".join(map(str, AT)), "--json"]
    counts = last_json([a.tercio, "eval", "retrieval", *flags])
    return {f"hits@{k}": round(counts["counts"][min(k, len(counts["counts"])) - 1] / counts["questions"], 4) for k in AT}


def size(folder):
    return sum(e.stat().st_size for e in os.scandir(folder) if e.is_file())


def built(result, folder):
    return {"seconds": round(result["seconds"], 2), "peak_rss_gb": result["peak_rss_gb"], "megabytes": round(size(folder) / 1e6, 2)}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--peer", required=True, metavar="VENV")
    p.add_argument("--tercio", default=os.path.join(sides.ROOT, "target", "release", "tercio"))
    p.add_argument("--passages", required=True)
    p.add_argument("--questions", required=True, metavar="DIR")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--depth", type=int, default=100)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    a = p.parse_args()
    python, peer = sides.python(a), os.path.join(sides.HERE, "peer_bm25.py")
    out = {"processor": sides.cpu_model(), "tercio": sides.first_line(a.tercio, "--version"), "depth": a.depth, "threads": a.threads}
    asked = os.path.join(a.questions, "trivia.test.jsonl")
    with tempfile.TemporaryDirectory() as work:
        cache = os.path.join(work, "cache")
        sets = {}
        for name, first in SETS.items():
            sets[name] = os.path.join(work, name + ".jsonl")
            with open(os.path.join(a.questions, name + ".jsonl"), encoding="utf8") as f, open(sets[name], "w", encoding="utf8") as g:
                g.writelines(f.readlines()[:first])
        for row in a.rows:
            index = os.path.join(work, row)
            made = own([a.tercio, "index", "--passages", a.passages, "--output", index, "--cache-dir", cache, "--threads", a.threads,
                        "--analyzer", row, "--json", "--quiet"])
            result = {"tercio": {"build": built(made, index), "hits": {}}}
            common = [a.tercio, "search", "--index", index, "--cache-dir", cache, "--n-docs", a.depth, "--json", "--quiet"]
            for name, source in sets.items():
                found = os.path.join(work, "found.jsonl")
                own([*common, "--queries", source, "--output", found])
                result["tercio"]["hits"][name] = hits(a, found)
            run = os.path.join(work, "found.trec")
            speed = {"tercio": [*common, "--queries", asked, "--output", run, "--threads", a.threads]}
            for words in ROWS[row]:
                folder = os.path.join(work, "tantivy-" + words)
                os.mkdir(folder)
                made = last_json([python, peer, "build", words, a.passages, folder, a.threads])
                out["tantivy"] = made["tantivy"]
                result[f"tantivy {words}"] = {"build": built(made, folder), "hits": {}}
                for name, source in sets.items():
                    found = os.path.join(work, "found.jsonl")
                    last_json([python, peer, "found", words, a.passages, folder, source, found, a.depth])
                    result[f"tantivy {words}"]["hits"][name] = hits(a, found)
                speed[f"tantivy {words}"] = [python, peer, "search", words, folder, asked, a.threads, a.depth]
            rates = {side: [] for side in speed}
            for r in range(a.rounds):
                for side in list(speed) if r % 2 == 0 else list(speed)[::-1]:
                    done = (own if side == "tercio" else last_json)(speed[side])
                    rates[side].append(done["questions"] / done.get("search_seconds", done["seconds"]))
                    result[side]["search_peak_rss_gb"] = max(result[side].get("search_peak_rss_gb", 0), done["peak_rss_gb"])
            for side, all_of in rates.items():
                result[side]["questions_per_second"] = round(statistics.median(all_of))
                result[side]["all"] = [round(x) for x in all_of]
            ours = statistics.median(rates["tercio"])
            result["ratios"] = {side: round(ours / statistics.median(v), 2) for side, v in rates.items() if side != "tercio"}
            out[row] = result
    print(json.dumps(out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        wrapped(sys.argv[2:])
    else:
        main()
