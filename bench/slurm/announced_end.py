#!/usr/bin/env python3
"""From a signal to a complete checkpoint: T5-small shapes, on one or more ranks of this machine.

usage: announced_end.py [--ranks R] [--rounds N] [--signal USR1] [--passages P] [--tercio BINARY]

Every round starts the run again where the last one ended, waits for three more updates, sends the signal to the launcher a
random while later, and prints the seconds until the new checkpoint's folder has its name (it is complete then), the part of
them that was the save itself (the rest was the update under way), until all processes have ended, and how many logged updates
it lacks: none may be lost.
"""
import argparse, json, os, pathlib, random, signal, statistics, subprocess, sys, tempfile, time

root = pathlib.Path(__file__).resolve().parents[2]
arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--ranks", type=int, default=2)
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--signal", default="USR1")
arguments.add_argument("--passages", type=int, default=20)
arguments.add_argument("--tercio", default=str(root / "target/release/tercio"))
wanted = arguments.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing that was started may stay behind


def updates(run):
    """Steps of all logged updates, and of all ends."""
    try:
        lines = [json.loads(line) for line in open(run / "metrics.jsonl") if line.endswith("\n")]
    except FileNotFoundError:
        lines = []
    return [line["step"] for line in lines if "event" not in line]


def newest(run):
    """The step of the newest complete checkpoint; writing ones have another name."""
    found = [int(path.name[5:]) for path in (run / "checkpoint").glob("step-*")]
    return max(found, default=0)


with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / "run"
    train = ["train", "reader", "--checkpoint_dir", folder, "--name", "run", "--init", "random", "--model_size", "small",
             "--tokenizer", str(root / "tests/golden/tokenizers/t5"), "--train_data", str(root / "bench/reader_input.json"),
             "--n_context", str(wanted.passages), "--text_maxlength", "200", "--global_batch_size", "8", "--micro_batch_size", "1",
             "--total_steps", "1000000", "--save_freq", "1000000", "--eval_freq", "1000000", "--log_freq", "1",
             "--keep_last", "1", "--optim", "adamw", "--grace_seconds", "600"]
    command = [wanted.tercio] + (["launch", "--nproc-per-node", str(wanted.ranks), "--"] if wanted.ranks > 1 else []) + train
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TERCIO_", "SLURM_"))}
    rows, draws = [], random.Random(1)
    for round_ in range(wanted.rounds):
        before = len(updates(run))
        with open(pathlib.Path(folder) / "stderr", "w") as log:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
        try:
            while len(updates(run)) < before + 3:
                if process.poll() is not None:
                    raise SystemExit(open(log.name).read())
                time.sleep(0.02)
            times = [line["time"] for line in map(json.loads, open(run / "metrics.jsonl")) if "event" not in line and "time" in line]
            step = times[-1] - times[-2] if len(times) > 1 else 1.0
            time.sleep(draws.random() * step)
            old, told = newest(run), time.monotonic()
            process.send_signal(getattr(signal, "SIG" + wanted.signal))
            while newest(run) == old:
                if process.poll() is not None and newest(run) == old:
                    raise SystemExit("it ended without a checkpoint: " + open(log.name).read())
                time.sleep(0.002)
            saved = time.monotonic() - told
            code = process.wait(timeout=600)
            ended = time.monotonic() - told
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        size = sum(path.stat().st_size for path in (run / "checkpoint" / f"step-{newest(run)}").iterdir())
        lost = updates(run)[-1] - newest(run)
        lines = [json.loads(line) for line in open(run / "metrics.jsonl")]
        last = max(line["time"] for line in lines if "event" not in line)
        save = [line["time"] for line in lines if line.get("event") == "checkpoint"][-1] - last
        rows.append((saved, ended, save))
        print(f"round {round_ + 1}: an update takes {step:.2f} s; signal to checkpoint of {size / 1e6:.0f} MB {saved:.2f} s, "
              f"the save alone {save:.2f} s, to the end of all processes {ended:.2f} s; exit code {code}, updates lost {lost}", flush=True)
    saved, ended, save = zip(*rows)
    print(f"{wanted.ranks} ranks, {wanted.rounds} rounds: checkpoint after {statistics.median(saved):.2f} s (most {max(saved):.2f}), "
          f"the save alone {statistics.median(save):.2f} s (most {max(save):.2f}), end after {statistics.median(ended):.2f} s (most {max(ended):.2f})")
