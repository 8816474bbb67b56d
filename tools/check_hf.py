"""Open a T5 or classifier folder that Tercio saved with Hugging Face transformers: a maintainer's check, run by hand.

usage: check_hf.py DIR [--input TEXT] [--target TEXT] [--tercio BINARY]
Of a T5 one loss is computed. Of a classifier (its `architectures` say so) the probabilities of `--input`, and with `--tercio` those of
`tercio predict` beside them, which must agree to 1e-4.
Needs bench/requirements-reader.txt. Fails (exit status 1) when a parameter is missing, unexpected or of another shape, when the
tokenizer or config does not open, when the tokenizer names ids beyond the vocabulary, or when the loss is not finite.
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys

import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, T5ForConditionalGeneration

p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
p.add_argument("model", metavar="DIR")
p.add_argument("--input", default="question: what is the capital of Peru title: Peru - Capital context: name: Lima")
p.add_argument("--target", default="Lima")
p.add_argument("--tercio", metavar="BINARY", help="of a classifier: compare with this binary's predict")
a = p.parse_args()

problems = []


def classifier():
    """The probabilities of a text by transformers, and by Tercio."""
    model, info = AutoModelForSequenceClassification.from_pretrained(a.model, output_loading_info=True, local_files_only=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            problems.append(f"{kind}: {sorted(map(str, info[kind]))}")
    tokenizer = AutoTokenizer.from_pretrained(a.model, local_files_only=True)
    with torch.no_grad():
        logits = model.eval()(**tokenizer([a.input], truncation=True, return_tensors="pt")).logits[0]
    several = model.config.problem_type == "multi_label_classification"
    theirs = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
    names = [model.config.id2label[i] for i in range(len(theirs))]
    print(f"transformers {transformers.__version__}: {type(model).__name__}, {model.config.problem_type}")
    print("  ".join(f"{n} {v:.6f}" for n, v in zip(names, theirs)))
    if a.tercio:
        words = [a.tercio, "predict", "-", "--model", a.model, "--all-probabilities"]
        said = subprocess.run(words, input=json.dumps({"text": a.input}) + "\n", capture_output=True, text=True, check=True).stdout
        ours = json.loads(said)["scores"]
        print("  ".join(f"{n} {ours[n]:.6f}" for n in names))
        worst = max(abs(ours[n] - v) for n, v in zip(names, theirs))
        if worst > 1e-4:
            problems.append(f"a probability differs by {worst}")


if str(json.loads((pathlib.Path(a.model) / "config.json").read_text()).get("architectures")).find("ForSequenceClassification") >= 0:
    classifier()
    if problems:
        sys.exit("not a folder that transformers opens as it is:\n  " + "\n  ".join(problems))
    print("ok")
    sys.exit()
model, info = T5ForConditionalGeneration.from_pretrained(a.model, output_loading_info=True, local_files_only=True)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
    if info.get(kind):
        problems.append(f"{kind}: {sorted(map(str, info[kind]))}")
tokenizer = AutoTokenizer.from_pretrained(a.model, local_files_only=True)
model.eval()
text = tokenizer([a.input], return_tensors="pt")
labels = tokenizer([a.target], return_tensors="pt").input_ids
loss = float("nan")
greatest = int(max(text.input_ids.max(), labels.max()))
if greatest >= model.config.vocab_size:
    problems.append(f"the tokenizer gives id {greatest}, the model has {model.config.vocab_size} embeddings")
elif not problems:
    with torch.no_grad():
        loss = model(input_ids=text.input_ids, attention_mask=text.attention_mask, labels=labels).loss.item()
        ids = model.generate(input_ids=text.input_ids, attention_mask=text.attention_mask, max_length=20, num_beams=1, do_sample=False)
    if not math.isfinite(loss):
        problems.append(f"the loss is {loss}")
    print(f"answer: {tokenizer.decode(ids[0], skip_special_tokens=True)!r}")

config = model.config
tied = model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()  # the config alone does not decide
print(f"transformers {transformers.__version__}: {sum(x.numel() for x in model.parameters()):,} parameters, "
      f"feed-forward {config.feed_forward_proj}, tied head {tied} (config says {config.tie_word_embeddings})")
print(f"input ids: {text.input_ids[0].tolist()}\nlabels: {labels[0].tolist()}\nloss: {loss:.6f}")
if problems:
    sys.exit("not a folder that transformers opens as it is:\n  " + "\n  ".join(problems))
print("ok")
