"""Run a peer and `tercio bench encoder` or `bench retriever` in turn and print the medians, ratios, versions and a row for BENCHMARKS.md.

usage: encoder.py --peer VENV trunk [--sequences 8] [--tokens 180] [--steps 3] [--threads 2] [--recompute] [--bf16] [--rounds 3]
       encoder.py --peer VENV retriever [--questions 1] [--passages 20] ... [--tokenizer DIR]
trunk: layers of BERT-base alone, no padding on either side. retriever: a step of distillation, padded by the peer as FiD pads.
Needs Python's standard library only; more in sides.py.
"""
import os

import sides


def main():
    p = sides.parser(__doc__.splitlines()[0], questions=1, passages=20, sequences=8, tokens=180, steps=3)
    p.add_argument("what", choices=["trunk", "retriever"])
    p.add_argument("--tokenizer", default=os.path.join(sides.ROOT, "tests", "golden", "tokenizers", "bert"))
    a = sides.parse(p)
    common = ["--steps", a.steps, "--threads", a.threads]
    if a.what == "trunk":
        if a.recompute:
            p.error("the peer's trunk does not recompute")
        common += ["--sequences", a.sequences, "--tokens", a.tokens]
        peer = [sides.python(a), os.path.join(sides.HERE, "peer_bert_trunk.py"), *common]
        ours = [a.tercio, "bench", "encoder", "train", *common, "--json"]
        work = f"BERT-base trunk, {a.sequences} x {a.tokens} tokens"
    else:
        common += ["--questions", a.questions, "--passages", a.passages, "--tokenizer", a.tokenizer]
        peer = [sides.python(a), os.path.join(sides.HERE, "peer_retriever.py"), *common]
        ours = [a.tercio, "bench", "retriever", "train", "--input", sides.INPUT, *common, "--json"]
        work = f"distillation step, BERT-base, {a.questions} x {a.passages}"
    if a.recompute:
        peer.append("--checkpoint")
        ours.append("--recompute")
    if a.bf16:
        peer.append("--bf16")
        ours.append("--bf16")
    sides.run(a, {"peer": peer, "tercio": ours}, work)


if __name__ == "__main__":
    main()
