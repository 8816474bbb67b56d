"""Open a ColBERT folder that Tercio saved with PyLate and compare embeddings and scores: a maintainer's check, run by hand.

usage: check_pylate.py DIR [--tercio target/release/tercio]
Needs a Python environment with pylate. Fails (exit status 1) when PyLate does not open the folder, or when a vector of a query or a document
differs from that of `tercio embed --multi-vector` by more than 1e-4, or their numbers do.
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


def tercio(kind, folder):
    """Vectors of the texts by `tercio embed`, one matrix a text."""
    path, output = os.path.join(folder, f"{kind}.jsonl"), os.path.join(folder, kind)
    with open(path, "w", encoding="utf8") as f:
        for i, text in enumerate(TEXTS):
            item = {"id": str(i), "question": text} if kind == "questions" else {"id": str(i), "title": "", "text": text}
            f.write(json.dumps(item) + "\n")
    command = [a.tercio, "embed", "--multi-vector", "--model_path", a.model, f"--{kind}", path, "--output", output, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(os.path.join(output, "manifest.json"), encoding="utf8") as f:
        width = json.load(f)["dimension"]
    lengths = array.array("I")
    with open(os.path.join(output, "shard-00000.lengths"), "rb") as f:
        lengths.frombytes(f.read())
    rows = numpy.fromfile(os.path.join(output, "shard-00000.tokens"), dtype="<f4").reshape(-1, width)
    return numpy.split(rows, numpy.cumsum(lengths)[:-1])


model = models.ColBERT(model_name_or_path=a.model, device="cpu")
problems = []
with tempfile.TemporaryDirectory() as folder:
    for kind, is_query in (("questions", True), ("passages", False)):
        theirs = model.encode(TEXTS, is_query=is_query, show_progress_bar=False)
        for text, own, other in zip(TEXTS, tercio(kind, folder), theirs):
            if own.shape != other.shape:
                problems.append(f"{kind}: {text[:40]!r}: {own.shape} vectors here, {other.shape} there")
            elif numpy.abs(own - other).max() > 1e-4:
                problems.append(f"{kind}: {text[:40]!r}: a difference of {numpy.abs(own - other).max():.2e}")
print(f"pylate {pylate.__version__}: {2 * len(TEXTS)} texts compared, {len(problems)} differ")
for problem in problems:
    print(problem)
sys.exit(1 if problems else 0)
