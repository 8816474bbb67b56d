"""Open a ColBERT folder that Tercio saved with PyLate and compare embeddings and scores: a maintainer's check, run by hand.

usage: check_pylate.py DIR [--tercio target/release/tercio]
Needs a Python environment with pylate. Fails (exit status 1) when PyLate does not open the folder, or when a vector of a query or a document
differs from that of `tercio embed --multi-vector` by more than 1e-4, or their numbers do; pooled vectors are compared as sets.
"""
import argparse
import array
import json
import os
import subprocess
import sys
import tempfile

import numpy
import pylate
from pylate import models

TEXTS = [
    "who repaired the church bell?",
    "A wooden boat, near the river; in the year 1872!",
    "x",
    "... !? ;",
    "the harbour wall " * 300,
    "日本語 é",
]

p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
p.add_argument("model", metavar="DIR")
p.add_argument("--tercio", default=os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "target", "release", "tercio"))
a = p.parse_args()


def tercio(kind, folder, factor):
    """Vectors of the texts by `tercio embed`, one matrix a text."""
    path, output = os.path.join(folder, f"{kind}.jsonl"), os.path.join(folder, f"{kind}-{factor}")
    with open(path, "w", encoding="utf8") as f:
        for i, text in enumerate(TEXTS):
            item = {"id": str(i), "question": text} if kind == "questions" else {"id": str(i), "title": "", "text": text}
            f.write(json.dumps(item) + "\n")
    command = [a.tercio, "embed", "--multi-vector", "--model_path", a.model, f"--{kind}", path, "--output", output, "--quiet"]
    command += ["--pool_factor", str(factor)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(os.path.join(output, "manifest.json"), encoding="utf8") as f:
        width = json.load(f)["dimension"]
    lengths = array.array("I")
    with open(os.path.join(output, "shard-00000.lengths"), "rb") as f:
        lengths.frombytes(f.read())
    rows = numpy.fromfile(os.path.join(output, "shard-00000.tokens"), dtype="<f4").reshape(-1, width)
    return numpy.split(rows, numpy.cumsum(lengths)[:-1])


def in_order(rows):
    return rows[numpy.lexsort(numpy.round(rows, 3).T[::-1])]


model = models.ColBERT(model_name_or_path=a.model, device="cpu")
problems = []
cases = [("questions", True, 1), ("passages", False, 1), ("passages", False, 2), ("passages", False, 3)]
with tempfile.TemporaryDirectory() as folder:
    for kind, is_query, factor in cases:
        # Tercio puts the prompts of the folder before the texts; PyLate does where it is asked.
        task = "query" if is_query else "document"
        prompt = task if task in (model.prompts or {}) else None
        theirs = model.encode(TEXTS, is_query=is_query, pool_factor=factor, prompt_name=prompt, show_progress_bar=False)
        for text, own, other in zip(TEXTS, tercio(kind, folder, factor), theirs):
            what = f"{kind}, pooled by {factor}: {text[:40]!r}"
            if own.shape != other.shape:
                problems.append(f"{what}: {own.shape} vectors here, {other.shape} there")
                continue
            if factor > 1:
                own, other = in_order(own), in_order(other)
            if numpy.abs(own - other).max() > 1e-4:
                problems.append(f"{what}: a difference of {numpy.abs(own - other).max():.2e}")
print(f"pylate {pylate.__version__}: {len(cases) * len(TEXTS)} texts compared, {len(problems)} differ")
for problem in problems:
    print(problem)
sys.exit(1 if problems else 0)
