"""A text classifier of flair: training steps or prediction, as flair's trainer and `predict` do them; prints one JSON line.

usage: peer_flair.py train|predict --model DIR [--input FILE] [--batch 32] [--steps 5] [--threads 2]
Arguments and texts are those of peer_classifier.py. A step of train is what `ModelTrainer.fine_tune` does with a batch: `forward_loss` (which cuts texts into
pieces of words itself), backward, clip at 5, AdamW. A step of predict is `TextClassifier.predict` over all texts, sentences made anew. Loading and a first batch are
not timed. flair cuts texts at the tokenizer's own greatest length.
"""
import argparse
import json
import os
import resource
import statistics
import time

import flair
import torch
import transformers
from flair.data import Dictionary, Sentence
from flair.embeddings import TransformerDocumentEmbeddings
from flair.models import TextClassifier

HERE = os.path.dirname(os.path.abspath(__file__))
LABELS = 8
p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
p.add_argument("what", choices=["train", "predict"])
p.add_argument("--model", required=True)
p.add_argument("--input", default=os.path.join(HERE, "retrieval_input.json"))
p.add_argument("--batch", type=int, default=32)
p.add_argument("--steps", type=int, default=5)
p.add_argument("--threads", type=int, default=2)
a = p.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)
flair.device = torch.device("cpu")
with open(a.input, encoding="utf8") as f:
    texts = [json.loads(line)["text"] for line in f if line.strip()] if a.input.endswith(".jsonl") else json.load(f)["documents"]
if len(texts) < a.batch:
    p.error(f"{a.input} has {len(texts)} texts, fewer than a batch of {a.batch}")
labels = Dictionary(add_unk=False)
for i in range(LABELS):
    labels.add_item(f"label{i}")
model = TextClassifier(TransformerDocumentEmbeddings(a.model, fine_tune=True), label_type="class", label_dictionary=labels)
times = []


def sentences(batch):
    made = [Sentence(text) for text in batch]
    for i, sentence in enumerate(made):
        sentence.add_label("class", f"label{i % LABELS}")
    return made


if a.what == "train":
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    batches = [sentences(texts[i : i + a.batch]) for i in range(0, len(texts) - a.batch + 1, a.batch)]
    for step in range(a.steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss, count = model.forward_loss(batches[step % len(batches)])
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step > 0:  # the first one allocates the optimizer's moments
            times.append(time.perf_counter() - start)
    done = a.batch
else:
    model.eval()
    model.predict(sentences(texts[: a.batch]), mini_batch_size=a.batch)
    for _ in range(a.steps):
        made = [Sentence(text) for text in texts]
        start = time.perf_counter()
        model.predict(made, mini_batch_size=a.batch)
        times.append(time.perf_counter() - start)
    done = len(texts)
seconds = statistics.median(times)
print(json.dumps({
    "peer": f"flair {flair.__version__} torch {torch.__version__} transformers {transformers.__version__}",
    "mode": a.what,
    "seconds_per_step": round(seconds, 3),
    "texts_per_second": round(done / seconds, 1),
    "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
}))
