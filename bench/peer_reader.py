"""Time Fusion-in-Decoder training and answering with PyTorch + transformers, the way FiD does it (every passage padded to text_maxlength).

usage: peer_reader.py train|generate [--size base|small] [--questions 1] [--passages 20] [--steps 3] [--bf16] [--checkpoint] [--tokenizer DIR] [--device cuda] [--compile]
Prints one JSON line: seconds per step (median), tokens per second (real, unpadded), peak RSS in GB, losses.
Weights are random (the shapes of t5-<size>), inputs are reader_input.json beside this file.
"""
import argparse, json, os, resource, statistics, time
import torch, transformers
from transformers import T5Config, T5ForConditionalGeneration, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

p = argparse.ArgumentParser()
p.add_argument("mode"); p.add_argument("--size", default="base"); p.add_argument("--questions", type=int, default=1)
p.add_argument("--passages", type=int, default=20); p.add_argument("--steps", type=int, default=3); p.add_argument("--bf16", action="store_true")
p.add_argument("--checkpoint", action="store_true"); p.add_argument("--tokenizer", required=True); p.add_argument("--threads", type=int, default=2)
p.add_argument("--text_maxlength", type=int, default=250); p.add_argument("--attention", default=None)
p.add_argument("--device", default="cpu", choices=["cpu", "cuda"]); p.add_argument("--compile", action="store_true")
a = p.parse_args()
torch.set_num_threads(a.threads); torch.manual_seed(0)
shape = {"base": dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12), "small": dict(d_model=512, d_ff=2048, num_layers=6, num_heads=8), "large": dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16)}[a.size]
config = T5Config(vocab_size=32128, d_kv=64, dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **shape)
if a.attention: config._attn_implementation = a.attention
model = T5ForConditionalGeneration(config).to(a.device)
if a.compile: model.encoder.compile(); model.decoder.compile()
wait = torch.cuda.synchronize if a.device == "cuda" else lambda: None
tok = AutoTokenizer.from_pretrained(a.tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")  # the folder may hold tokenizer.json only
data = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "reader_input.json")))
def batch(i):
    rows = [data[(i * a.questions + j) % len(data)] for j in range(a.questions)]
    texts = [f"question: {r['question']} title: {c['title']} context: {c['text']}" for r in rows for c in r["ctxs"][: a.passages]]
    enc = tok(texts, add_special_tokens=False, truncation=True, max_length=a.text_maxlength, padding="max_length", return_tensors="pt")
    labels = tok([r["target"] for r in rows], padding=True, return_tensors="pt").input_ids
    labels[labels == 0] = -100
    return enc.input_ids.to(a.device), enc.attention_mask.to(a.device), labels.to(a.device)
def encode(ids, mask):
    h = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return h.view(a.questions, -1, h.size(-1)), mask.view(a.questions, -1)
if a.checkpoint: model.encoder.gradient_checkpointing_enable() if hasattr(model.encoder, "gradient_checkpointing_enable") else model.gradient_checkpointing_enable()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
times, losses, real = [], [], 0
if a.mode == "train":
    model.train()
    for i in range(a.steps + 1):
        ids, mask, labels = batch(i)
        wait(); t = time.perf_counter()
        with torch.autocast(a.device, torch.bfloat16, enabled=a.bf16):
            h, m = encode(ids, mask)
            loss = model(encoder_outputs=BaseModelOutput(last_hidden_state=h), attention_mask=m, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); opt.step(); opt.zero_grad(set_to_none=True); wait()
        if i: times.append(time.perf_counter() - t); real += int(mask.sum())
        losses.append(round(loss.item(), 4))
else:
    model.eval()
    with torch.no_grad():
        for i in range(a.steps + 1):
            ids, mask, _ = batch(i)
            wait(); t = time.perf_counter()
            with torch.autocast(a.device, torch.bfloat16, enabled=a.bf16):
                h, m = encode(ids, mask)
                model.generate(encoder_outputs=BaseModelOutput(last_hidden_state=h), attention_mask=m, max_length=20, min_length=20, num_beams=1, do_sample=False)
                wait()
            if i: times.append(time.perf_counter() - t); real += int(mask.sum())
s = statistics.median(times)
print(json.dumps({"peer": f"torch {torch.__version__} transformers {transformers.__version__}", "mode": a.mode, "size": a.size, "questions": a.questions, "passages": a.passages, "bf16": a.bf16,
    "checkpoint": a.checkpoint, "seconds_per_step": round(s, 3), "real_tokens_per_second": round(real / sum(times)), "real_fraction": round(real / (len(times) * a.questions * a.passages * a.text_maxlength), 3),
    "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2), "losses": losses, **({"device": torch.cuda.get_device_name(), "compile": a.compile, "peak_device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)} if a.device == "cuda" else {})}))
