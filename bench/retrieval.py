"""Train a retriever on what BM25 finds and measure what that brings: hits@k of BM25, the untrained model, the trained one, and both fused.

usage: retrieval.py --model DIR --passages passages.tsv --questions DIR --work DIR [--seeds 1,2,3] [--pool N] [--bf16] ...
`--model` is a folder of sentence-transformers (all-MiniLM-L6-v2); DIR of questions holds trivia.dev.jsonl, trivia.test.jsonl and nq.test.jsonl, lines of
{"question", "answers"}. All work is done by the release binary; this file only says which command follows which. What is in the
work folder already is kept, so a run that was ended goes on: take another folder for other settings.

The training data: of the first --train questions of TriviaQA's dev set, BM25's best passage that holds an answer is the positive, its best ones that hold
none are the negatives, among its first --depth (an answer further down is there by chance mostly); questions for which BM25 finds no answer are left out.
Test: the first --test questions of each test set.

With --pool N only N passages are searched, by BM25 too: those that BM25 ranks among its first 100 of all for a test question, and others in even steps through
the file. That embeds faster, and flatters everybody: say it beside the numbers.
"""
import argparse
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = ["trivia", "nq"]
KS = [1, 5, 20, 100]
# MiniLM was trained on bare texts.
TEXTS = ["--question_template", "{question}", "--passage_template", "{title} {text}"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tercio", default=os.path.join(os.path.dirname(HERE), "target", "release", "tercio"), help="the release binary")
    for name, what in [("model", "sentence-transformers folder"), ("passages", "collection"), ("questions", "folder of questions"), ("work", "folder for everything")]:
        p.add_argument(f"--{name}", required=True, help=what)
    p.add_argument("--untrained_vectors", help="folder of `tercio embed` with the untrained model's vectors of all passages, if there is one")
    p.add_argument("--seeds", default="1,2,3")
    for name, default in dict(train=8837, test=600, pool=0, updates=100, batch=32, micro=16, negatives=1, depth=10, maxlength=128, threads=2).items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--lr", default="2e-5")
    # Of cosines: MiniLM's folder normalises, and so does what is trained from it; it was made with this one.
    p.add_argument("--temperature", default="0.05")
    p.add_argument("--bf16", action="store_true", help="products in bf16, in training and embedding")
    return p.parse_args()


class Bench:
    def __init__(self, a):
        self.a = a
        os.makedirs(a.work, exist_ok=True)
        self.precision = ["--bf16"] if a.bf16 else []
        self.threads = ["--threads", str(a.threads)]

    def path(self, *names):
        return os.path.join(self.a.work, *names)

    def tercio(self, made, *words):
        """Runs a command unless what it makes is there; it makes it in one move, or says itself that it is finished."""
        if made and os.path.exists(made):
            return ""
        command = [self.a.tercio, *map(str, words)]
        since = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"exit status {done.returncode} of: {' '.join(command)}\n{done.stderr[-3000:]}")
        print(f"{time.monotonic() - since:7.1f} s  tercio {' '.join(command[1:4])}", file=sys.stderr)
        return done.stdout

    def take(self, source, count, name):
        """The first questions of a file, with ids."""
        target = self.path(f"{name}.jsonl")
        with open(os.path.join(self.a.questions, source), encoding="utf8") as f, open(target, "w", encoding="utf8") as out:
            for i, line in zip(range(count), f):
                out.write(json.dumps({"id": f"{name}-{i}", **json.loads(line)}, ensure_ascii=False) + "\n")
        return target

    def bm25(self, passages, name):
        self.tercio(self.path(name, "manifest.json"), "index", "--kind", "bm25", "--passages", passages, "--output", self.path(name))
        return self.path(name)

    def search(self, index, questions, name, *more, depth=100):
        """The first `depth` passages of each question, as a run, and as FiD's JSON, where it says which of them hold an answer."""
        run = self.path(f"{name}.trec")
        for form, output in [("fid", self.path(f"{name}.json")), ("trec", run)]:
            flags = ["--n_docs", depth, "--format", form, "--output", output, *self.threads]
            self.tercio(output, "search", "--index", index, "--queries", questions, *flags, *more)
        return run

    def pool(self, index, tests):
        """The collection that is searched."""
        a = self.a
        if not a.pool:
            return a.passages
        target = self.path("pool.tsv")
        if os.path.exists(target):
            return target
        found = set()
        for name, questions in tests.items():
            with open(self.search(index, questions, f"all-{name}"), encoding="utf8") as f:
                found.update(line.split()[2] for line in f)
        with open(a.passages, encoding="utf8") as f:
            header, *rows = f.read().split("\n")
        rows = [row for row in rows if row]
        others = [i for i, row in enumerate(rows) if row.split("\t", 1)[0] not in found]
        wanted = max(0, min(a.pool - len(found), len(others)))
        chosen = {others[k * len(others) // wanted] for k in range(wanted)}
        kept = [row for i, row in enumerate(rows) if i in chosen or row.split("\t", 1)[0] in found]
        with open(target + ".tmp", "w", encoding="utf8") as out:
            out.write("\n".join([header, *kept]) + "\n")
        os.rename(target + ".tmp", target)
        return target

    def dense(self, name, model, passages, tests, vectors=None):
        """Runs of a model: its passages embedded, and every test set searched for exactly."""
        if vectors is None:
            vectors = self.path(f"vectors-{name}")
            self.tercio(
                os.path.join(vectors, "manifest.json"), "embed", "--model_path", model, "--passages", passages, "--output", vectors,
                "--passage_maxlength", self.a.maxlength, "--passages_per_shard", 5000, "--json", "--quiet", *self.threads, *self.precision,
            )
        index = self.path(f"flat-{name}")
        self.tercio(
            os.path.join(index, "manifest.json"), "index", "--kind", "flat", "--passages", passages, "--vectors", vectors, "--output", index
        )
        return {
            test: self.search(index, questions, f"{name}-{test}", "--model_path", model) for test, questions in tests.items()
        }

    def fused(self, name, a, b):
        """Both runs of each test set as one by reciprocal rank fusion; its passages are those of the two files in FiD's JSON."""
        runs = {}
        for test in a:
            runs[test] = self.path(f"{name}-{test}.trec")
            self.tercio(runs[test], "fuse", "--runs", a[test], b[test], "--method", "rrf", "--depth", 100, "--output", runs[test])
            first, second = (json.load(open(fid(run), encoding="utf8")) for run in [a[test], b[test]])
            order = {}
            with open(runs[test], encoding="utf8") as f:
                for query, _, document, *_ in map(str.split, f):
                    order.setdefault(query, []).append(document)
            for one, other in zip(first, second):
                passages = {c["id"]: c for c in one["ctxs"] + other["ctxs"]}
                one["ctxs"] = [passages[document] for document in order.get(one["id"], [])]
                for rank, passage in enumerate(one["ctxs"]):
                    passage["score"] = -rank
            with open(fid(runs[test]), "w", encoding="utf8") as f:
                json.dump(first, f)
        return runs

    def train(self, seed, data):
        a = self.a
        run = self.path("runs", f"seed{seed}")
        self.tercio(
            os.path.join(run, "checkpoint", "latest", "model.safetensors") if finished(run, a.updates) else None,
            "train", "retriever", "--name", f"seed{seed}", "--checkpoint_dir", self.path("runs"), "--model_path", a.model, "--no_projection",
            "--question_maxlength", 64, "--passage_maxlength", a.maxlength, *self.recipe(seed, data),
        )
        return run

    def recipe(self, seed, data):
        """Flags of a contrastive training."""
        a = self.a
        return [
            "--train_data", data, "--loss", "contrastive", "--hard_negatives", a.negatives, "--draw_negatives", "--temperature", a.temperature,
            *TEXTS, "--dropout", 0, "--seed", seed, "--optim", "adamw", "--lr", a.lr, "--weight_decay", 0.01, "--scheduler", "linear",
            "--warmup_steps", a.updates // 10, "--total_steps", a.updates, "--global_batch_size", a.batch, "--micro_batch_size", a.micro,
            "--save_freq", a.updates, "--log_freq", 10, *self.threads, *self.precision,
        ]

    def hits(self, files, ks=KS):
        """hits@k of each test set's file in FiD's JSON."""
        told = {test: json.loads(self.tercio(None, "eval", "retrieval", "--data", path, "--json"))["metrics"] for test, path in files.items()}
        return {test: [metrics[f"hits@{k}"] for k in ks] for test, metrics in told.items()}

    def hits_of(self, runs):
        """hits@k of runs."""
        return self.hits({test: fid(run) for test, run in runs.items()})

    def report(self, rows, ks=KS):
        """A table for each test set, and all of it as one line of JSON."""
        for test in TESTS:
            print(f"\n{test} | " + " | ".join(f"hits@{k}" for k in ks) + "\n--- |" + " --- |" * len(ks))
            for name, figures in rows:
                print(f"{name} | " + " | ".join(f"{v:.3f}" for v in figures[test]))
        print(json.dumps({"settings": vars(self.a), "rows": rows}))


def fid(run):
    """The file in FiD's JSON beside a run."""
    return run.removesuffix(".trec") + ".json"


def finished(run, updates):
    try:
        return os.path.basename(os.readlink(os.path.join(run, "checkpoint", "latest"))) == f"step-{updates}"
    except OSError:
        return False


def main():
    a = arguments()
    bench = Bench(a)
    dev = bench.take("trivia.dev.jsonl", a.train, "dev")
    tests = {name: bench.take(f"{name}.test.jsonl", a.test, name) for name in TESTS}
    whole = bench.bm25(a.passages, "bm25")
    mined = bench.path("train.jsonl")
    bench.tercio(
        mined, "mine", "--data", dev, "--run", bench.search(whole, dev, "dev", depth=a.depth), "--passages", a.passages,
        "--negatives", 8, "--output", mined, *bench.threads,
    )
    passages = bench.pool(whole, tests)
    index = whole if passages == a.passages else bench.bm25(passages, "bm25-pool")
    words = {test: bench.search(index, questions, f"bm25-{test}") for test, questions in tests.items()}
    rows = [("BM25", bench.hits_of(words))]
    untrained = bench.dense("untrained", a.model, passages, tests, a.untrained_vectors if passages == a.passages else None)
    rows.append(("untrained", bench.hits_of(untrained)))
    rows.append(("BM25 + untrained", bench.hits_of(bench.fused("fused-untrained", words, untrained))))
    for seed in a.seeds.split(","):
        trained = bench.dense(f"seed{seed}", bench.train(seed, mined), passages, tests)
        rows.append((f"trained, seed {seed}", bench.hits_of(trained)))
        rows.append((f"BM25 + trained, seed {seed}", bench.hits_of(bench.fused(f"fused-seed{seed}", words, trained))))
    bench.report(rows)


if __name__ == "__main__":
    main()
