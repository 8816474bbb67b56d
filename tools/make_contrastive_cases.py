"""Write the stored values that crates/train/tests/contrastive_cases.rs compares with: losses of a retriever, and their gradients
with respect to its vectors, by PyTorch in 64 bits: in-batch and hard negatives, temperatures, smoothing, and the sum with distillation.

usage: make_contrastive_cases.py REPOSITORY
Recorded with torch 2.15. The numbers depend on torch's random generator, so a new run replaces the file.
"""
import json
import pathlib
import sys

import torch
import torch.nn.functional as F

WIDTH = 16
SETTINGS = [
    dict(loss="contrastive", hard_negatives=0),
    dict(loss="contrastive", hard_negatives=2),
    dict(loss="contrastive", hard_negatives=1, temperature=0.25),
    dict(loss="contrastive", hard_negatives=1, temperature=2.0, label_smoothing=0.2),
    dict(loss="both", hard_negatives=1, n_context=2),
    dict(loss="both", hard_negatives=2, n_context=3, temperature=0.5, teacher_temperature=2.0, kl_weight=0.7, contrastive_weight=1.3),
    dict(loss="both", hard_negatives=2, n_context=3, kl_mean="batch", label_smoothing=0.1, kl_weight=2.0),
]
DEFAULTS = dict(
    n_context=1, temperature=1.0, teacher_temperature=1.0, kl_weight=1.0, contrastive_weight=1.0, kl_mean="element", label_smoothing=0.0,
)

generator = torch.Generator().manual_seed(5)


def questions():
    """Passages from the best score to the worst; the second question has two that answer it, the last one few passages."""
    made = []
    for q, judged in enumerate(["tfff", "ftftf", "tff", "fft", "tf"]):
        scores = torch.randn(len(judged), generator=generator).sort(descending=True).values.tolist()
        made.append({"question": f"question {q}", "ctxs": [
            {"id": f"{q}-{k}", "title": "t", "text": f"passage {q} {k}", "score": scores[k], "hasanswer": judged[k] == "t"}
            for k in range(len(judged))
        ]})
    return made


def chosen(question, settings):
    """The passages of a question as the shard has them: those that are distilled, then the positive and hard negatives that are
    not among them; the positive's place, and the places of others that answer."""
    ctxs = question["ctxs"]
    scored = ctxs[: settings["n_context"]] if settings["loss"] == "both" else []
    positive = next(c for c in ctxs if c["hasanswer"])
    hard = [c for c in ctxs if not c["hasanswer"]][: settings["hard_negatives"]]
    used = scored + [c for c in [positive] + hard if c not in scored]
    others = [i for i, c in enumerate(used) if c["hasanswer"] and c is not positive]
    return used, scored, used.index(positive), others


def case(all_questions, given):
    settings = DEFAULTS | given
    parts = [chosen(q, settings) for q in all_questions]
    draw = lambda n: torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    vectors_q, vectors_p = draw(len(parts)), draw(sum(len(used) for used, *_ in parts))
    scores = vectors_q @ vectors_p.T / (WIDTH**0.5 * settings["temperature"])
    starts = torch.tensor([0] + [len(used) for used, *_ in parts]).cumsum(0).tolist()
    contrast, divergences, scored_passages = [], [], 0
    for q, (used, scored, positive, others) in enumerate(parts):
        out = [starts[q] + i for i in others]
        row = [p for p in range(scores.shape[1]) if p not in out]
        target = torch.tensor([row.index(starts[q] + positive)])
        contrast.append(F.cross_entropy(scores[q : q + 1, row], target, label_smoothing=settings["label_smoothing"]))
        if scored:
            gold = torch.tensor([c["score"] for c in scored], dtype=torch.float64) / settings["teacher_temperature"]
            own = scores[q, starts[q] : starts[q] + len(scored)]
            divergences.append(F.kl_div(own.log_softmax(0), gold.softmax(0), reduction="sum"))
            scored_passages += len(scored)
    loss = torch.stack(contrast).mean()
    if divergences:
        count = {"element": scored_passages, "batch": len(parts)}[settings["kl_mean"]]
        loss = settings["contrastive_weight"] * loss + settings["kl_weight"] * torch.stack(divergences).sum() / count
    loss.backward()
    return dict(
        settings=given, passages=[[c["id"] for c in used] for used, *_ in parts], questions=vectors_q.tolist(), vectors=vectors_p.tolist(),
        loss=loss.item(), question_gradients=vectors_q.grad.tolist(), passage_gradients=vectors_p.grad.tolist(),
    )


def main():
    made = questions()
    cases = [case(made, settings) for settings in SETTINGS]
    out = pathlib.Path(sys.argv[1]) / "crates/train/tests/data/contrastive.json"
    out.write_text(json.dumps(dict(width=WIDTH, questions=made, cases=cases)) + "\n")


main()
