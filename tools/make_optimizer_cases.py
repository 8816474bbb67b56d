"""Write the stored values that crates/train/tests/optimizer_cases.rs compares with: steps of Hugging Face transformers'
Adafactor in 64 bits on small parameters with drawn gradients, and statistics after the last of them.

usage: make_optimizer_cases.py REPOSITORY
Recorded with torch 2.15 and transformers 5.24. The numbers depend on torch's random generator, so a new run replaces the file.
"""
import json
import pathlib
import sys

import torch
from transformers.optimization import Adafactor

STEPS = 6
SHAPES = {"matrix": [5, 7], "row": [1, 4], "tall": [19, 2], "vector": [11]}
SETTINGS = [
    dict(lr=1e-2),
    dict(lr=1e-2, scale_parameter=True),
    dict(lr=1e-3, weight_decay=0.3),
    dict(lr=1e-2, scale_parameter=True, weight_decay=0.1, clip_threshold=0.5),
    dict(lr=1e-2, decay_rate=-0.5, clip_threshold=2.0),
    dict(lr=None, relative_step=True, scale_parameter=True),
    dict(lr=None, relative_step=True),
]

generator = torch.Generator().manual_seed(1)


def draw(shape, size):
    return (torch.randn(shape, generator=generator) * size).double()


def main():
    cases = []
    for settings in SETTINGS:
        full = dict(relative_step=False, scale_parameter=False, weight_decay=0.0, clip_threshold=1.0, decay_rate=-0.8)
        full.update(settings)
        parameters = {n: torch.nn.Parameter(draw(s, 0.1 if n == "row" else 1.0)) for n, s in SHAPES.items()}
        start = {n: p.detach().flatten().tolist() for n, p in parameters.items()}
        optimizer = Adafactor(parameters.values(), **full)
        gradients, values = [], []
        for step in range(STEPS):
            of_step = {}
            for name, p in parameters.items():
                # Sizes that rise and fall, so that the running means and the clipping have an effect.
                p.grad = draw(p.shape, [1.0, 0.01, 3.0, 0.1, 20.0, 1.0][step])
                of_step[name] = p.grad.flatten().tolist()
            gradients.append(of_step)
            optimizer.step()
            values.append({n: p.detach().flatten().tolist() for n, p in parameters.items()})
        statistics = {}
        for name, p in parameters.items():
            state = optimizer.state[p]
            parts = [state["exp_avg_sq_row"], state["exp_avg_sq_col"]] if p.dim() > 1 else [state["exp_avg_sq"]]
            statistics[name] = torch.cat([v.flatten() for v in parts]).tolist()
        cases.append(dict(settings=full, start=start, gradients=gradients, values=values, statistics=statistics))
    out = pathlib.Path(sys.argv[1]) / "crates/train/tests/data/adafactor.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(shapes=SHAPES, cases=cases)) + "\n")


main()
