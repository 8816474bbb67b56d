"""Write the files that crates/data/tests/parquet.rs reads: the same rows as Parquet and as lines of JSON.

usage: make_parquet_cases.py REPOSITORY
Recorded with pyarrow 26.0.
"""
import json
import pathlib
import sys

import pyarrow as pa
import pyarrow.parquet as pq

root = pathlib.Path(sys.argv[1]) / "crates/data/tests/data/parquet"
root.mkdir(parents=True, exist_ok=True)

passages = [
    {"id": k * 10**15 if k % 7 == 3 else k, "title": None if k % 5 == 2 else f"Page {k % 4}", "text": text * (k % 3)}
    for k, text in enumerate(["Aaron was a \"prophet\". ", "tab\there,\nline there ", "日本語 é – \u2028 ", ""] * 15)
]
questions = [
    {
        "id": f"q\t{k}",
        "question": f"who was {k}?",
        "answers": [["Aaron"], [], ["a", "é"]][k % 3],
        "ctxs": None if k == 4 else [
            {"id": str(j), "title": [None, "T"][j % 2], "text": f"passage {j}", "score": k / (j + 3)} for j in range(k)
        ],
    }
    for k in range(9)
]


def lines(name, rows):
    with open(root / f"{name}.jsonl", "w") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


lines("passages", passages)
lines("questions", questions)
text, strings = pa.string(), pa.list_(pa.string())
columns = {
    # A column of no use, as collections with vectors have it, before the others.
    "emb": pa.array([[float(k), 0.5] for k in range(len(passages))], pa.list_(pa.float32())),
    "title": pa.array([p["title"] for p in passages], text),
    "text": pa.array([p["text"] for p in passages], pa.large_string()),
    "id": pa.array([p["id"] for p in passages], pa.int64()),
}
for codec in ["snappy", "zstd", "gzip", "lz4", "none"]:
    # Small groups of rows and small pages, so that there are several; with a dictionary and without.
    pq.write_table(
        pa.table(columns), root / f"passages.{codec}.parquet", compression=codec, row_group_size=25, data_page_size=300,
        use_dictionary=codec != "gzip", data_page_version="2.0" if codec == "zstd" else "1.0", write_statistics=False,
    )
context = pa.struct([("id", text), ("title", text), ("text", text), ("score", pa.float64())])
schema = pa.schema([("id", text), ("question", text), ("answers", strings), ("ctxs", pa.list_(context))])
pq.write_table(pa.Table.from_pylist(questions, schema), root / "questions.parquet", compression="zstd", write_statistics=False)
# Of a codec that is not read.
pq.write_table(pa.table({"id": ["1"], "text": ["a"]}), root / "brotli.parquet", compression="brotli", write_statistics=False)
