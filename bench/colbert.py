"""Run PyLate and `tercio bench colbert` in turn on retrieval_input.json and print the medians, ratios, versions and a row for BENCHMARKS.md.

usage: colbert.py --peer VENV train --model DIR [--batch 16] [--micro 0] [--steps 4] [--threads 2] [--recompute] [--bf16] [--rounds 3]
       colbert.py --peer VENV encode --model DIR [--documents 512] [--threads 2] [--bf16] [--rounds 3]
`--model` is a BERT folder, such as all-MiniLM-L6-v2; both sides put a projection to 128 behind it. train: a contrastive step on triples; with
--micro in shards of so many, which PyLate calls cached contrastive. VENV needs pylate. More in sides.py.
"""
import os

import sides


def main():
    p = sides.parser(__doc__.splitlines()[0], batch=16, steps=4, documents=512)
    p.add_argument("what", choices=["train", "encode"])
    p.add_argument("--model", required=True, metavar="DIR", help="a BERT folder")
    p.add_argument("--micro", type=int, default=0, help="triples of a shard; 0: all of a step")
    a = sides.parse(p)
    if a.recompute and a.what == "encode":
        p.error("nothing is recomputed in encoding")
    common = [a.what, "--model", a.model, "--threads", a.threads, "--steps", a.steps]
    if a.what == "train":
        common += ["--batch", a.batch, "--micro", a.micro]
        shards = f" in shards of {a.micro}" if a.micro else ""
        work = f"contrastive step, {a.batch} triples{shards}"
    else:
        common += ["--documents", a.documents]
        work = f"{a.documents} documents to vectors of tokens"
    common += ["--bf16"] if a.bf16 else []
    peer = [sides.python(a), os.path.join(sides.HERE, "peer_colbert.py"), *common]
    data = os.path.join(sides.HERE, "retrieval_input.json")
    ours = [a.tercio, "bench", "colbert", *common, "--input", data, "--json"]
    # The peer has no recomputation here.
    ours += ["--recompute"] if a.recompute else []
    sides.run(a, {"peer": peer, "tercio": ours}, work)


if __name__ == "__main__":
    main()
