"""Write the small pickles of vectors that crates/models/tests/pickled_vectors.rs reads, as Fusion-in-Decoder and DPR write them.

usage: make_vector_pickles.py FOLDER (crates/models/tests/data/vectors)
Needs numpy only. The numbers are multiples of 1/8, exact in every format, so the tests compute them again.
"""
import json
import pathlib
import pickle
import sys

import numpy as np

IDS = ["1", "two words", "tab\there", "\"quoted\"", "東京", ""]
DIMENSION = 5


def matrix(dtype):
    rows = np.arange(len(IDS), dtype=np.float64)[:, None]
    columns = np.arange(DIMENSION, dtype=np.float64)[None, :]
    return ((rows * 8 - columns) / 8).astype(dtype)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for protocol in (3, 4, 5):
        for dtype in ("float16", "float32", "float64"):
            files[f"fid-{dtype}-{protocol}.pickle"] = (IDS, matrix(dtype)), protocol
    files["dpr-4.pickle"] = [(i, v) for i, v in zip(IDS, matrix("float32"))], 4
    files["dpr-5.pickle"] = [(i, v.copy(), None) for i, v in zip(IDS, matrix("float32"))], 5
    files["integers.pickle"] = (IDS, matrix("float32").astype("int32")), 4
    files["big-endian.pickle"] = (IDS, matrix("float32").astype(">f4")), 4
    files["by-columns.pickle"] = (IDS, np.asfortranarray(matrix("float32"))), 4
    files["short.pickle"] = (IDS[1:], matrix("float32")), 4
    files["objects.pickle"] = ([None] * len(IDS), matrix("float32")), 4
    files["flat.pickle"] = (IDS, matrix("float32")[0]), 4
    files["empty.pickle"] = [], 4
    files["protocol-2.pickle"] = (IDS, matrix("float32")), 2
    for name, (content, protocol) in files.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    facts = {"ids": IDS, "dimension": DIMENSION, "numpy": np.__version__, "python": sys.version.split()[0]}
    (folder / "facts.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
