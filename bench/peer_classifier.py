"""A text classifier of transformers: training steps or prediction, padded to the longest text of a batch; prints one JSON line.

usage: peer_classifier.py train|predict --model DIR [--input FILE] [--batch 32] [--tokens 512] [--steps 5] [--threads 2] [--sort] [--bf16]
`--model` is a folder of an encoder or a classifier. `--input`: JSON lines with `text`, or retrieval_input.json, whose documents are taken
(the default). Labels are made up: a step costs the same whatever they are. A step of train is forward, cross-entropy, backward, clip at 5, AdamW
on one batch, tokenized before; a step of predict is the labels of all texts, tokenizing counted. `--sort` takes the texts by length,
as flair's predict does. Loading and a first batch are not timed.
"""
import argparse
import contextlib
import json
import os
import resource
import statistics
import time

import torch
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
p.add_argument("what", choices=["train", "predict"])
p.add_argument("--model", required=True)
p.add_argument("--input", default=os.path.join(HERE, "retrieval_input.json"))
p.add_argument("--batch", type=int, default=32)
p.add_argument("--tokens", type=int, default=512)
p.add_argument("--labels", type=int, default=8)
p.add_argument("--steps", type=int, default=5)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--sort", action="store_true")
p.add_argument("--bf16", action="store_true")
a = p.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)
with open(a.input, encoding="utf8") as f:
    if a.input.endswith(".jsonl"):
        texts = [json.loads(line)["text"] for line in f if line.strip()]
    else:
        texts = json.load(f)["documents"]
if len(texts) < a.batch:
    p.error(f"{a.input} has {len(texts)} texts, fewer than a batch of {a.batch}")
tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
config = transformers.AutoConfig.from_pretrained(a.model)
labels = {} if config.architectures and config.architectures[0].endswith("ForSequenceClassification") else {"num_labels": a.labels}
model = transformers.AutoModelForSequenceClassification.from_pretrained(a.model, dtype=torch.float32, **labels)
cast = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if a.bf16 else contextlib.nullcontext
times, tokens = [], 0


def encode(batch):
    return tokenizer(batch, padding=True, truncation=True, max_length=a.tokens, return_tensors="pt")


if a.what == "train":
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    batches = [encode(texts[i : i + a.batch]) for i in range(0, len(texts) - a.batch + 1, a.batch)]
    for step in range(a.steps + 1):
        batch = batches[step % len(batches)]
        gold = torch.arange(a.batch) % model.config.num_labels
        start = time.perf_counter()
        with cast():
            loss = model(**batch, labels=gold).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step > 0:  # the first one allocates the optimizer's moments
            times.append(time.perf_counter() - start)
            tokens += int(batch["attention_mask"].sum())
    done = a.batch
else:
    model.eval()
    with torch.inference_mode(), cast():
        model(**encode(texts[: a.batch]))
        for _ in range(a.steps):
            start = time.perf_counter()
            order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if a.sort else range(len(texts))
            found = [None] * len(texts)
            for i in range(0, len(texts), a.batch):
                rows = order[i : i + a.batch]
                batch = encode([texts[r] for r in rows])
                probabilities = model(**batch).logits.float().softmax(-1)
                for row, best in zip(rows, probabilities.argmax(-1).tolist()):
                    found[row] = best
                tokens += int(batch["attention_mask"].sum())
            times.append(time.perf_counter() - start)
    done = len(texts)
seconds = statistics.median(times)
print(json.dumps({
    "peer": f"torch {torch.__version__} transformers {transformers.__version__}",
    "mode": a.what,
    "bf16": a.bf16,
    "seconds_per_step": round(seconds, 3),
    "texts_per_second": round(done / seconds, 1),
    "tokens_per_step": round(tokens / len(times)),
    "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
}))
