"""Run a classifier of transformers, or flair's, and `tercio bench classifier` in turn and print the medians, ratios, versions and a row for BENCHMARKS.md.

usage: classifier.py --peer VENV train|predict --model DIR [--input FILE] [--batch 32] [--tokens 512] [--steps 5] [--threads 2] [--sort]
       [--bf16] [--flair] [--rounds 3]
`--model` is a folder of an encoder or a classifier that both sides open; `--input` the texts that both sides read: JSON lines with `text`,
or retrieval_input.json (the default). The peer pads to the longest text of a batch; `--sort` lets it predict by length, as flair does.
`--flair`: the peer is flair itself (peer_flair.py), which VENV must have.
Needs Python's standard library only; more in sides.py.
"""
import os

import sides


def main():
    p = sides.parser(__doc__.splitlines()[0], batch=32, tokens=512, steps=5)
    p.add_argument("what", choices=["train", "predict"])
    p.add_argument("--model", required=True, metavar="DIR", help="a folder of an encoder or a classifier")
    p.add_argument("--input", default=os.path.join(sides.HERE, "retrieval_input.json"))
    p.add_argument("--sort", action="store_true", help="the peer takes the texts by length when it predicts")
    p.add_argument("--flair", action="store_true", help="the peer is flair itself")
    a = sides.parse(p)
    if a.flair and (a.sort or a.bf16):
        p.error("flair sorts by itself and has no bf16 on a CPU")
    if a.recompute:
        p.error("the peer's classifier does not recompute")
    if a.sort and a.what == "train":
        p.error("--sort is for predict")
    common = ["--model", a.model, "--input", a.input, "--batch", a.batch, "--steps", a.steps, "--threads", a.threads]
    common += ["--bf16"] if a.bf16 else []
    if a.flair:
        peer = [sides.python(a), os.path.join(sides.HERE, "peer_flair.py"), a.what, *common]
    else:
        peer = [sides.python(a), os.path.join(sides.HERE, "peer_classifier.py"), a.what, *common, "--tokens", a.tokens, *(["--sort"] if a.sort else [])]
    ours = [a.tercio, "bench", "classifier", a.what, *common, "--text_maxlength", a.tokens, "--json"]
    work = {"train": f"classifier training step, batch {a.batch}", "predict": f"labels of the texts, batches of {a.batch}"}[a.what]
    sides.run(a, {"peer": peer, "tercio": ours}, f"{work}, {os.path.basename(os.path.normpath(a.model))}")


if __name__ == "__main__":
    main()
