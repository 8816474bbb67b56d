"""Time the layers of BERT-base (no embeddings) in PyTorch: forward, backward and AdamW on states of full sequences, without padding.

usage: peer_bert_trunk.py [--sequences 8] [--tokens 180] [--steps 3] [--threads 2] [--bf16] [--fused]
Prints one JSON line: seconds per step (median), tokens per second, peak RSS in GB, losses. Weights are random, there is no dropout.
"""
import argparse, json, resource, statistics, time
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--sequences", type=int, default=8); p.add_argument("--tokens", type=int, default=180); p.add_argument("--steps", type=int, default=3)
p.add_argument("--threads", type=int, default=2); p.add_argument("--bf16", action="store_true"); p.add_argument("--fused", action="store_true", help="PyTorch's fused AdamW")
a = p.parse_args()
torch.set_num_threads(a.threads); torch.manual_seed(0)
H, NH, FF, L, B, T = 768, 12, 3072, 12, a.sequences, a.tokens
class Layer(nn.Module):
    def __init__(s):
        super().__init__()
        s.q = nn.Linear(H, H); s.k = nn.Linear(H, H); s.v = nn.Linear(H, H); s.o = nn.Linear(H, H); s.ln1 = nn.LayerNorm(H, eps=1e-12)
        s.f1 = nn.Linear(H, FF); s.f2 = nn.Linear(FF, H); s.ln2 = nn.LayerNorm(H, eps=1e-12)
    def forward(s, x):
        heads = lambda y: y.view(B, T, NH, H // NH).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads(s.q(x)), heads(s.k(x)), heads(s.v(x)))
        x = s.ln1(x + s.o(y.transpose(1, 2).reshape(B, T, H)))
        return s.ln2(x + s.f2(F.gelu(s.f1(x))))
model = nn.Sequential(*[Layer() for _ in range(L)])
opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=a.fused)
x = torch.randn(B, T, H)
times, losses = [], []
for i in range(a.steps + 1):
    t = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
        y = model(x)
    loss = y.float().pow(2).mean()
    loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
    if i: times.append(time.perf_counter() - t)
    losses.append(round(loss.item(), 4))
s = statistics.median(times)
print(json.dumps({"peer": f"torch {torch.__version__}", "mode": "train", "size": "bert-base trunk", "questions": B, "passages": 0, "bf16": a.bf16, "fused": a.fused,
    "seconds_per_step": round(s, 3), "real_tokens_per_second": round(B * T * len(times) / sum(times)), "real_fraction": 1.0,
    "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2), "losses": losses}))
