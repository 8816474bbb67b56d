"""Train a classifier by the same recipe with Tercio and with transformers, seed by seed, and measure both on the test set beside a linear baseline.

usage: classifier_accuracy.py --peer VENV --model DIR --train FILE.jsonl --test FILE.jsonl --work DIR [--seeds 1,2,3] [--epochs 2] [--batch 16] [--lr 5e-5]
          [--maxlength 128] [--threads 2] [--bf16] [--sides tercio,peer,linear]
Lines of the files are {"text", "label"}. The recipe is flair's fine-tuning, shortened by --epochs: AdamW, linear schedule with a tenth of warm-up, no weight
decay, clipping at 5, the last epoch's model; first token, family's head with its pooler started anew on both sides. VENV needs torch, transformers and scikit-learn.
What the work folder has already is not made again. Prints a line for every training and a table of means and standard deviations at the end.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import sides

PEER = r"""
import json, os, random, sys, time
import torch, transformers
from sklearn.metrics import f1_score
a = json.loads(sys.argv[1])
torch.set_num_threads(a["threads"]); torch.manual_seed(a["seed"])
read = lambda name: [json.loads(line) for line in open(name, encoding="utf8")]
train, test = read(a["train"]), read(a["test"])
labels = sorted({x["label"] for x in train})
number = {l: i for i, l in enumerate(labels)}
tokenizer = transformers.AutoTokenizer.from_pretrained(a["model"])
model = transformers.AutoModelForSequenceClassification.from_pretrained(a["model"], num_labels=len(labels))
def batch(rows):
    out = tokenizer([x["text"] for x in rows], truncation=True, max_length=a["maxlength"], padding=True, return_tensors="pt")
    return out, torch.tensor([number[x["label"]] for x in rows])
per_epoch = -(-len(train) // a["batch"])
total = per_epoch * a["epochs"]
optimizer = torch.optim.AdamW(model.parameters(), lr=a["lr"], weight_decay=0.0)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, total // 10, total)
order = random.Random(a["seed"])
autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=a["bf16"])
since = time.perf_counter()
model.train()
for _ in range(a["epochs"]):
    order.shuffle(train)
    for k in range(per_epoch):
        inputs, gold = batch(train[k * a["batch"]:(k + 1) * a["batch"]])
        with autocast():
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits.float(), gold)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step(); schedule.step(); optimizer.zero_grad()
seconds = time.perf_counter() - since
model.eval()
gold, found = [], []
by_length = sorted(test, key=lambda x: len(x["text"]))
with torch.no_grad(), autocast():
    for k in range(0, len(test), 32):
        inputs, right = batch(by_length[k:k + 32])
        found += model(**inputs).logits.argmax(-1).tolist(); gold += right.tolist()
accuracy = sum(g == f for g, f in zip(gold, found)) / len(gold)
print(json.dumps({"accuracy": accuracy, "macro_f1": f1_score(gold, found, average="macro"), "seconds": seconds, "versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}))
"""

LINEAR = r"""
import json, sys
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
read = lambda name: [json.loads(line) for line in open(name, encoding="utf8")]
train, test = read(sys.argv[1]), read(sys.argv[2])
words = TfidfVectorizer(sublinear_tf=True)
model = LogisticRegression(C=10.0, max_iter=1000).fit(words.fit_transform([x["text"] for x in train]), [x["label"] for x in train])
gold, found = [x["label"] for x in test], model.predict(words.transform([x["text"] for x in test]))
print(json.dumps({"accuracy": float((found == gold).mean()), "macro_f1": f1_score(gold, found, average="macro"), "seconds": 0.0}))
"""


def last_json(command):
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        sys.exit(f"exit status {done.returncode} of: {' '.join(str(x) for x in command)[:300]}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def ours(a, seed):
    name = f"seed-{seed}"
    since = time.monotonic()
    train = [a.tercio, "train", "classifier", "--recipe", "fine-tune", "--model_path", a.model, "--train_data", a.train, "--missing_splits", "none", "--checkpoint_dir", a.work,
             "--name", name, "--seed", seed, "--epochs", a.epochs, "--mini_batch_size", a.batch, "--mini_batch_chunk_size", a.batch, "--lr", a.lr, "--weight_decay", 0,
             "--text_maxlength", a.maxlength, "--threads", a.threads, *(["--bf16"] if a.bf16 else [])]
    done = subprocess.run([str(x) for x in train], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"exit status {done.returncode} of: {' '.join(str(x) for x in train)}\n{done.stderr[-3000:]}")
    seconds = time.monotonic() - since
    report = last_json([a.tercio, "eval", "classifier", "--model", os.path.join(a.work, name, a.result), "--data", a.test, "--threads", a.threads, "--json", "--quiet"])
    return {"accuracy": report["accuracy"], "macro_f1": report["macro"]["f1-score"], "seconds": seconds}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--peer", required=True, metavar="VENV")
    p.add_argument("--tercio", default=os.path.join(sides.ROOT, "target", "release", "tercio"))
    for name in ["model", "train", "test", "work"]:
        p.add_argument(f"--{name}", required=True)
    p.add_argument("--result", default="final-model", help="the folder of a run that is evaluated")
    p.add_argument("--seeds", default="1,2,3")
    for name, default in dict(epochs=2, batch=16, maxlength=128, threads=2).items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--bf16", action="store_true", help="products in bf16 on both sides")
    p.add_argument("--sides", default="linear,tercio,peer")
    a = p.parse_args()
    os.makedirs(a.work, exist_ok=True)
    settings = {k: v for k, v in vars(a).items() if k in ("model", "train", "test", "epochs", "batch", "maxlength", "threads", "lr", "bf16")}
    found = {}
    for side in a.sides.split(","):
        for seed in [int(s) for s in a.seeds.split(",")] if side != "linear" else [0]:
            kept = os.path.join(a.work, f"{side}-{seed}.json")
            if not os.path.exists(kept):
                if side == "tercio":
                    result = ours(a, seed)
                elif side == "peer":
                    result = last_json([sides.python(a), "-c", PEER, json.dumps({**settings, "seed": seed})])
                else:
                    result = last_json([sides.python(a), "-c", LINEAR, a.train, a.test])
                with open(kept, "w", encoding="utf8") as f:
                    json.dump(result, f)
            with open(kept, encoding="utf8") as f:
                result = json.load(f)
            found.setdefault(side, []).append(result)
            print(f"{side}, seed {seed}: {json.dumps(result)}", flush=True)
    print("\n| side | accuracy | macro F1 | training, s |\n| --- | --- | --- | --- |")
    for side, results in found.items():
        def column(name):
            values = [r[name] for r in results]
            return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")
        print(f"| {side} | {column('accuracy')} | {column('macro_f1')} | {statistics.median(r['seconds'] for r in results):.0f} |")


if __name__ == "__main__":
    main()
