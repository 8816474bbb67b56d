"""Time a step of FiD's distillation of a retriever with PyTorch + transformers, the way FiD does it (every text padded to its maximum).

usage: peer_retriever.py --tokenizer DIR [--questions 1] [--passages 20] [--steps 3] [--threads 2] [--bf16] [--checkpoint]
Prints one JSON line: seconds per step (median), tokens per second (real, unpadded), peak RSS in GB, losses.
BERT-base of random weights with a projection to 768 and a LayerNorm, masked mean; inputs are reader_input.json beside this file,
the passages' scores fall by 0.1 from one to the next.
"""
import argparse, json, os, resource, statistics, time
import torch, transformers
import torch.nn as nn
from transformers import BertConfig, BertModel, AutoTokenizer

p = argparse.ArgumentParser()
p.add_argument("--questions", type=int, default=1); p.add_argument("--passages", type=int, default=20); p.add_argument("--steps", type=int, default=3)
p.add_argument("--threads", type=int, default=2); p.add_argument("--bf16", action="store_true"); p.add_argument("--checkpoint", action="store_true")
p.add_argument("--tokenizer", required=True); p.add_argument("--question_maxlength", type=int, default=40); p.add_argument("--passage_maxlength", type=int, default=200)
a = p.parse_args()
torch.set_num_threads(a.threads); torch.manual_seed(0)
D = 768
class Retriever(nn.Module):
    def __init__(s):
        super().__init__()
        s.model = BertModel(BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)); s.proj = nn.Linear(D, D); s.norm = nn.LayerNorm(D)
    def embed(s, ids, mask):
        h = s.norm(s.proj(s.model(input_ids=ids, attention_mask=mask).last_hidden_state))
        return h.masked_fill(~mask.bool()[:, :, None], 0.0).sum(1) / mask.sum(1)[:, None]
    def forward(s, q, qm, d, dm):
        n = d.size(0) // q.size(0)
        return torch.einsum("bd,bnd->bn", s.embed(q, qm), s.embed(d, dm).view(q.size(0), n, -1)) / D**0.5
model = Retriever(); model.train()
if a.checkpoint: model.model.gradient_checkpointing_enable()
tok = AutoTokenizer.from_pretrained(a.tokenizer)
data = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "reader_input.json")))
def batch(i):
    rows = [data[(i * a.questions + j) % len(data)] for j in range(a.questions)]
    enc = lambda texts, most: tok(texts, truncation=True, max_length=most, padding="max_length", return_tensors="pt")
    q = enc([f"question: {r['question']}" for r in rows], a.question_maxlength)
    d = enc([f"title: {c['title']} context: {c['text']}" for r in rows for c in r["ctxs"][: a.passages]], a.passage_maxlength)
    return q.input_ids, q.attention_mask, d.input_ids, d.attention_mask
gold = torch.softmax(-0.1 * torch.arange(a.passages).float(), 0).expand(a.questions, -1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
times, losses, real = [], [], 0
for i in range(a.steps + 1):
    q, qm, d, dm = batch(i)
    t = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
        scores = model(q, qm, d, dm)
    loss = nn.functional.kl_div(torch.log_softmax(scores.float(), -1), gold, reduction="mean")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); opt.step(); opt.zero_grad(set_to_none=True)
    if i: times.append(time.perf_counter() - t); real += int(qm.sum() + dm.sum())
    losses.append(round(loss.item(), 4))
s = statistics.median(times)
places = len(times) * a.questions * (a.question_maxlength + a.passages * a.passage_maxlength)
print(json.dumps({"peer": f"torch {torch.__version__} transformers {transformers.__version__}", "mode": "train", "size": "bert-base", "questions": a.questions, "passages": a.passages,
    "bf16": a.bf16, "checkpoint": a.checkpoint, "seconds_per_step": round(s, 3), "real_tokens_per_second": round(real / sum(times)), "real_fraction": round(real / places, 3),
    "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2), "losses": losses}))
