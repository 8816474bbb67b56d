"""Vectors of the 2,000 documents of retrieval_input.json by sentence-transformers, which sorts them by length; prints one JSON line.

usage: peer_embed.py --model DIR [--threads 2] [--steps 1] [--bf16]
`--model` is a sentence-transformers folder, such as all-MiniLM-L6-v2. Loading and a first batch are not timed.
"""
import argparse
import contextlib
import json
import os
import resource
import statistics
import time

import sentence_transformers
import torch

p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
p.add_argument("--model", required=True)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--steps", type=int, default=1)
p.add_argument("--bf16", action="store_true")
a = p.parse_args()
torch.set_num_threads(a.threads)
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "retrieval_input.json"), encoding="utf8") as f:
    documents = json.load(f)["documents"]
model = sentence_transformers.SentenceTransformer(a.model, device="cpu")
times = []
with torch.autocast("cpu", dtype=torch.bfloat16) if a.bf16 else contextlib.nullcontext():
    model.encode(documents[:64], batch_size=32)
    for _ in range(a.steps):
        start = time.perf_counter()
        model.encode(documents, batch_size=32)
        times.append(time.perf_counter() - start)
seconds = statistics.median(times)
print(json.dumps({
    "peer": f"torch {torch.__version__} sentence-transformers {sentence_transformers.__version__}",
    "mode": "embed",
    "bf16": a.bf16,
    "seconds_per_step": round(seconds, 3),
    "texts_per_second": round(len(documents) / seconds, 1),
    "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
}))
