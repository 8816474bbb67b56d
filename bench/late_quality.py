"""Late interaction on real text: MaxSim over the token states of MiniLM, before and after `tercio train colbert`, puts other searches' passages in order.

usage: late_quality.py --model DIR --work DIR [--candidates 50] [--seeds 1,2,3] [--bf16] ...
`--work` is the folder of a `bench/retrieval.py` that has run to its end: its training data (BM25's positives and negatives) trains the model, and of
its test questions the first --candidates passages that BM25 and the untrained MiniLM found together (reciprocal rank fusion) are ranked anew, the same for
every model. So no model can find what those two have not found: the row "candidates" says how much that is.

The model starts from MiniLM with a projection that changes nothing (384 x 384, the unit matrix); untrained, its vectors are MiniLM's token states at length one.
"""
import argparse
import json
import os
import shutil
import struct
import sys

from retrieval import KS, TESTS, TEXTS, Bench, fid, finished


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    p.add_argument("--tercio", default=os.path.join(root, "target", "release", "tercio"), help="the release binary")
    p.add_argument("--model", required=True, help="sentence-transformers folder of MiniLM")
    p.add_argument("--work", required=True, help="folder of retrieval.py")
    p.add_argument("--seeds", default="1,2,3")
    for name, default in dict(candidates=50, updates=100, batch=32, micro=16, negatives=1, maxlength=128, threads=2).items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--lr", default="2e-5")
    # Scores are sums over 32 tokens of a query: of the size that cosines over 0.05 are.
    p.add_argument("--temperature", default="1.0")
    p.add_argument("--bf16", action="store_true", help="products in bf16")
    return p.parse_args()


def start(model, target):
    """A ColBERT model in PyLate's layout: the encoder of `model`, and a projection by the unit matrix."""
    if os.path.exists(target):
        return target
    part = target + ".part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(model, part)
    with open(os.path.join(part, "config.json"), encoding="utf8") as f:
        width = json.load(f)["hidden_size"]
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    with open(os.path.join(part, "modules.json"), "w", encoding="utf8") as f:
        json.dump([{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)], f)
    dense = os.path.join(part, "1_Dense")
    os.makedirs(dense)
    with open(os.path.join(dense, "config.json"), "w", encoding="utf8") as f:
        json.dump({"in_features": width, "out_features": width, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}, f)
    header = json.dumps({"linear.weight": {"dtype": "F32", "shape": [width, width], "data_offsets": [0, 4 * width * width]}}).encode()
    with open(os.path.join(dense, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for i in range(width):
            f.write(struct.pack(f"<{width}f", *(float(i == k) for k in range(width))))
    os.rename(part, target)
    return target


def candidates(bench, test, count):
    """The passages to be ranked, as FiD's JSON."""
    target = bench.path(f"candidates-{count}-{test}.json")
    if not os.path.exists(target):
        with open(fid(bench.path(f"fused-untrained-{test}.trec")), encoding="utf8") as f:
            questions = json.load(f)
        for question in questions:
            question["ctxs"] = question["ctxs"][:count]
        with open(target + ".part", "w", encoding="utf8") as f:
            json.dump(questions, f)
        os.rename(target + ".part", target)
    return target


def train(bench, model, seed):
    a = bench.a
    run = bench.path("late", f"seed{seed}")
    bench.tercio(
        os.path.join(run, "checkpoint", "latest") if finished(run, a.updates) else None,
        "train", "colbert", "--name", f"seed{seed}", "--checkpoint_dir", bench.path("late"), "--model_path", model,
        "--query_length", 32, "--document_length", a.maxlength, *bench.recipe(seed, bench.path("train.jsonl")),
    )
    return run


def main():
    a = arguments()
    bench = Bench(a)
    for test in TESTS:
        if not os.path.exists(fid(bench.path(f"fused-untrained-{test}.trec"))):
            sys.exit(f"{a.work}: expected the folder of a retrieval.py that has run to its end")
    model = start(a.model, bench.path("late-start"))
    given = {test: candidates(bench, test, a.candidates) for test in TESTS}
    ks = [k for k in KS if k <= a.candidates]

    def ranked(name, model):
        files = {}
        for test, data in given.items():
            files[test] = bench.path(f"late-{name}-{test}.json")
            bench.tercio(
                files[test], "rerank", "--model_path", model, "--data", data, "--output", files[test], *TEXTS, "--query_length", 32,
                "--document_length", a.maxlength, *bench.threads, *bench.precision,
            )
        return bench.hits(files, ks)

    rows = [("candidates in their order", bench.hits(given, ks)), ("MaxSim, untrained", ranked("untrained", model))]
    for seed in a.seeds.split(","):
        rows.append((f"MaxSim, seed {seed}", ranked(f"seed{seed}", train(bench, model, seed))))
    bench.report(rows, ks)


if __name__ == "__main__":
    main()
