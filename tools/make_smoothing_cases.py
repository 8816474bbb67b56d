"""Write the stored values that crates/engine/tests/label_smoothing.rs compares with: PyTorch's CrossEntropyLoss with label
smoothing over logits `factor * x W^T`, in 64 bits: the loss of every row, and gradients of their weighted sum.

usage: make_smoothing_cases.py REPOSITORY
Recorded with torch 2.15. The numbers depend on torch's random generator, so a new run replaces the file.
"""
import json
import pathlib
import sys

import torch

# Rows beyond the engine's block of 64; as few classes as can be; logits of a usual and of a great size.
SHAPES = [dict(rows=5, width=7, classes=11, size=1.0), dict(rows=70, width=3, classes=2, size=1.0), dict(rows=9, width=4, classes=67, size=20.0)]
SMOOTHING = [0.1, 0.5]
FACTOR, WEIGHT = 0.6, 0.25

generator = torch.Generator().manual_seed(3)


def main():
    cases = []
    for shape in SHAPES:
        draw = lambda *sizes: torch.randn(sizes, generator=generator).double()
        for smoothing in SMOOTHING:
            # Values that f32 holds, so that both sides begin with the same.
            x = (draw(shape["rows"], shape["width"]) * shape["size"]).float().double().requires_grad_()
            w = draw(shape["classes"], shape["width"]).float().double().requires_grad_()
            labels = torch.randint(0, shape["classes"], (shape["rows"],), generator=generator)
            losses = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none")(FACTOR * x @ w.T, labels)
            (WEIGHT * losses.sum()).backward()
            flat = lambda t: t.detach().flatten().tolist()
            cases.append(dict(
                shape, smoothing=smoothing, factor=FACTOR, weight=WEIGHT, labels=labels.tolist(), x=flat(x), w=flat(w),
                losses=flat(losses), dx=flat(x.grad), dw=flat(w.grad),
            ))
    out = pathlib.Path(sys.argv[1]) / "crates/engine/tests/data/label_smoothing.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(torch=torch.__version__, cases=cases)) + "\n")


main()
