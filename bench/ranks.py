"""Time training on 2 ranks x 1 thread beside 1 rank x 2 threads, in turn: T5-small shapes, 20 passages, 8 shards of one question.

usage: ranks.py [--rounds 3] [--updates 3] [--size small] [--passages 20] [--tercio target/release/tercio] [--ranks 2] [--backend auto]
Needs Python's standard library only. The first update of a run is not counted. Prints each side's median tokens per second, their
ratio, and the share of time in communication that nothing hid.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def run(a, ranks, threads):
    """The logged updates of one run, the first left out."""
    with tempfile.TemporaryDirectory() as folder:
        train = ["train", "reader", "--name", "r", "--checkpoint_dir", folder, "--init", "random", "--model_size", a.size,
                 "--tokenizer", os.path.join(ROOT, "tests", "golden", "tokenizers", "t5"),
                 "--train_data", os.path.join(HERE, "reader_input.json"), "--n_context", a.passages, "--text_maxlength", 250,
                 "--global_batch_size", 8, "--micro_batch_size", 1, "--optim", "adamw", "--total_steps", a.updates + 1,
                 "--log_freq", 1, "--threads", threads, "--quiet"]
        launch = ["launch", "--nproc-per-node", ranks, "--"] if ranks > 1 else []
        more = ["--backend", a.backend] if ranks > 1 else []
        command = [str(x) for x in [a.tercio, *launch, *train, *more]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"exit status {done.returncode} of: {' '.join(command)}\n{done.stderr[-3000:]}")
        with open(os.path.join(folder, "r", "metrics.jsonl"), encoding="utf8") as f:
            lines = [json.loads(line) for line in f]
    return [line for line in lines if "tokens_per_second" in line][1:]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 3), ("updates", 3), ("passages", 20), ("ranks", 2)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--size", default="small")
    p.add_argument("--backend", default="auto")
    p.add_argument("--tercio", default=os.path.join(ROOT, "target", "release", "tercio"))
    a = p.parse_args()
    sides = {"one": (1, a.ranks), "many": (a.ranks, 1)}
    rates, exposed = {"one": [], "many": []}, []
    for r in range(a.rounds):
        for side in ("one", "many") if r % 2 == 0 else ("many", "one"):
            lines = run(a, *sides[side])
            rates[side] += [line["tokens_per_second"] for line in lines]
            if side == "many":
                exposed += [line["exposed_communication"] for line in lines]
            print(f"round {r + 1}/{a.rounds}, {sides[side][0]} x {sides[side][1]}: {rates[side][-len(lines):]} tokens/s", file=sys.stderr)
    one, many = statistics.median(rates["one"]), statistics.median(rates["many"])
    print(f"1 rank x {a.ranks} threads: {one:.0f} tokens/s; {a.ranks} ranks x 1 thread: {many:.0f} tokens/s; ratio {many / one:.3f}; "
          f"exposed communication {100 * statistics.median(exposed):.1f} %")


if __name__ == "__main__":
    main()
