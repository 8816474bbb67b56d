"""Train under the real torchrun and compare bits with one process alone: a maintainer's check, run by hand.

usage: check_torchrun.py [--torchrun torchrun] [--tercio target/release/tercio] [--ranks 2] [--updates 60]
Needs PyTorch's torchrun (bench/requirements-reader.txt). Three trainings of a tiny reader: alone; under torchrun; under torchrun
with one rank killed in the midst of it, which torchrun starts again. Fails (exit status 1) when parameters or moments
of the last checkpoint differ in a bit, when not every rank had shards, or when more than rank 0 spoke on stdout.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOREIGN = ("TERCIO_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def train(a, folder, name, updates):
    model = ROOT / "tests/golden/fid_reader_t5v10/model"
    words = ["train", "reader", "--name", name, "--checkpoint_dir", folder, "--model_path", model, "--json", "--train_data",
             ROOT / "bench/reader_input.json", "--n_context", 3, "--text_maxlength", 64, "--global_batch_size", 8,
             "--micro_batch_size", 1, "--dropout", 0.1, "--lr", "1e-3", "--total_steps", updates, "--save_freq", 10,
             "--log_freq", 1, "--threads", 1]
    return [str(word) for word in [os.path.abspath(a.tercio), *words]]


def metrics(run):
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def updates(run):
    return [line for line in metrics(run) if "event" not in line]


def rank_of(torchrun, rank):
    """The process of a rank among torchrun's children."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if parent == torchrun and b"RANK=%d" % rank in environment:
            return int(entry.name)
    sys.exit(f"torchrun {torchrun} has no process of rank {rank}")


def run(a, folder, name, words, kill_at=None):
    """Runs to the end; kills a rank once that update is logged. Returns what was said on stdout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    log = pathlib.Path(folder) / f"{name}.log"
    with open(log, "w", encoding="utf8") as stderr:
        process = subprocess.Popen(words + train(a, folder, name, a.updates), env=environment, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            if kill_at is not None:
                while not [line for line in updates(pathlib.Path(folder) / name) if line["step"] >= kill_at]:
                    if process.poll() is not None:
                        sys.exit(f"{name} ended before update {kill_at}:\n{log.read_text()[-3000:]}")
                    time.sleep(0.005)
                os.kill(rank_of(process.pid, a.ranks - 1), signal.SIGKILL)
            out = process.communicate(timeout=600)[0]
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        sys.exit(f"{name}: exit status {process.returncode}\n{log.read_text()[-3000:]}")
    return out


def bits(folder, name, step):
    checkpoint = pathlib.Path(folder) / name / "checkpoint" / f"step-{step}"
    return [(checkpoint / file).read_bytes() for file in ("model.safetensors", "optimizer.safetensors")]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--torchrun", default="torchrun")
    p.add_argument("--tercio", default=str(ROOT / "target/release/tercio"))
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--updates", type=int, default=60)
    a = p.parse_args()
    torchrun = [a.torchrun, "--no-python", "--nproc-per-node", str(a.ranks)]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        run(a, folder, "alone", [])
        expected = bits(folder, "alone", a.updates)
        cases = (("together", torchrun, None), ("killed", [*torchrun, "--max-restarts", "1"], a.updates // 3))
        for name, words, kill_at in cases:
            out = run(a, folder, name, words, kill_at)
            # Of a rank that was killed nothing is heard, and rank 0 speaks at the end only.
            if len(out.splitlines()) != 1 or json.loads(out)["step"] != a.updates:
                problems.append(f"{name}: one line of JSON with step {a.updates} was expected on stdout, found {out!r}")
            if bits(folder, name, a.updates) != expected:
                problems.append(f"{name}: parameters or moments differ from those of one process")
            shards = {tuple(line["shards"]) for line in updates(pathlib.Path(folder) / name)}
            if shards != {(8 // a.ranks,) * a.ranks}:
                problems.append(f"{name}: every rank was to compute {8 // a.ranks} of 8 shards, found {shards}")
            resumed = [line["step"] for line in metrics(pathlib.Path(folder) / name) if line.get("event") == "resume"]
            if bool(resumed) != (kill_at is not None):
                problems.append(f"{name}: resumed at {resumed}")
            print(f"{name}: {a.ranks} ranks, {a.updates} updates, resumed at {resumed}")
    if problems:
        sys.exit("not what one process gives:\n  " + "\n  ".join(problems))
    print("ok: the same bits as one process alone")


if __name__ == "__main__":
    main()
