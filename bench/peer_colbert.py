"""Time PyLate on retrieval_input.json: contrastive training steps and document encoding.

usage: peer_colbert.py train|encode --model DIR [--batch 16] [--micro 0] [--steps 4] [--bf16] [--threads 2]
Prints one JSON line. The model is a BERT folder such as all-MiniLM-L6-v2, projection 128; --micro: cached contrastive in mini-batches of so many.
"""
import argparse, json, os, resource, statistics, time
import torch
from pylate import losses, models
import pylate, sentence_transformers
p = argparse.ArgumentParser(); p.add_argument("mode"); p.add_argument("--model", required=True); p.add_argument("--batch", type=int, default=16)
p.add_argument("--micro", type=int, default=0); p.add_argument("--steps", type=int, default=4); p.add_argument("--bf16", action="store_true"); p.add_argument("--threads", type=int, default=2); p.add_argument("--documents", type=int, default=512)
a = p.parse_args(); torch.set_num_threads(a.threads); torch.manual_seed(0)
data = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "retrieval_input.json")))
model = models.ColBERT(model_name_or_path=a.model, embedding_size=128, device="cpu")
out = {"peer": f"pylate {pylate.__version__} torch {torch.__version__}", "mode": a.mode, "batch": a.batch, "bf16": a.bf16}
if a.mode == "train":
    loss_fn = losses.CachedContrastive(model=model, mini_batch_size=a.micro, temperature=1.0) if a.micro else losses.Contrastive(model=model, temperature=1.0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-6)
    model.train(); times, values = [], []
    for i in range(a.steps + 1):
        rows = [data["triples"][(i * a.batch + j) % len(data["triples"])] for j in range(a.batch)]
        t = time.perf_counter()
        features = [model.tokenize([r["query"] for r in rows], is_query=True)] + [model.tokenize([r[k] for r in rows], is_query=False, pad=True) for k in ("positive", "negative")]
        with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
            loss = loss_fn(features, None)
        loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
        if i: times.append(time.perf_counter() - t)
        values.append(round(loss.item(), 4))
    out |= {"seconds_per_step": round(statistics.median(times), 4), "examples_per_second": round(a.batch / statistics.median(times), 2), "losses": values}
else:
    docs = data["documents"][: a.documents]
    model.encode(docs[:32], is_query=False, batch_size=32, show_progress_bar=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
        t = time.perf_counter(); e = model.encode(docs, is_query=False, batch_size=32, show_progress_bar=False); s = time.perf_counter() - t
    out |= {"seconds_per_step": round(s, 4), "documents_per_second": round(len(docs) / s, 1), "tokens_kept": sum(len(x) for x in e)}
out["peak_rss_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
print(json.dumps(out))
