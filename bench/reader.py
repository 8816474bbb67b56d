"""Run peer_reader.py and `tercio bench reader` in turn and print the medians, ratios, versions and a row for BENCHMARKS.md.

usage: reader.py --peer VENV train|generate [--size base] [--questions 1] [--passages 20] [--steps 3] [--threads 2]
                 [--recompute] [--bf16] [--rounds 3] [--tercio target/release/tercio] [--tokenizer DIR] [--save FILE]
Needs Python's standard library only. Each round starts both programs anew, the peer first in odd rounds, Tercio first in even
ones. --save appends every JSON line as it comes. A side that fails ends the run with its own message and exit status 1.
"""
import os

import sides


def main():
    p = sides.parser(__doc__.splitlines()[0], questions=1, passages=20, steps=3)
    p.add_argument("mode", choices=["train", "generate"])
    p.add_argument("--tokenizer", default=os.path.join(sides.ROOT, "tests", "golden", "tokenizers", "t5"))
    p.add_argument("--size", default="base", choices=["small", "base"])
    a = sides.parse(p)
    common = ["--size", a.size, "--questions", a.questions, "--passages", a.passages, "--steps", a.steps]
    common += ["--threads", a.threads, "--tokenizer", a.tokenizer]
    peer = [sides.python(a), os.path.join(sides.HERE, "peer_reader.py"), a.mode, *common]
    ours = [a.tercio, "bench", "reader", a.mode, "--input", sides.INPUT, *common, "--json"]
    if a.recompute:
        peer.append("--checkpoint")
        ours.append("--recompute")
    if a.bf16:
        peer.append("--bf16")
        ours.append("--bf16")
    sides.run(a, {"peer": peer, "tercio": ours}, f"{a.mode}, t5-{a.size}, {a.questions} x {a.passages}")


if __name__ == "__main__":
    main()
