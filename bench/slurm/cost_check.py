"""Predicted and measured beside each other: bench/cost_model.py against ranks on virtual nodes whose cables are slowed.

usage: cost_check.py [--nodes 2 4] [--mbit 1000 4000] [--shape small] [--passages 5] [--shards 2] [--updates 4] [--tercio BINARY]

One rank on each node with one thread, each with as many shards. First all cables are as fast as memory: that gives the time of
a shard. Then each is slowed to a rate in both directions by a token bucket, and what an update takes longer is set beside what the
model predicts for one rank a node on such a link. Efficiency is tokens per second on the slowed cables over those on the fast ones;
both runs have as many ranks on as many cores, so it speaks of communication only, also where there are fewer cores than ranks.
Needs root and the packages that `NET=1 tools/cluster install` adds; Python's standard library; some minutes of a quiet machine.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("cost_model", ROOT / "bench" / "cost_model.py")
cost_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cost_model)


def cluster(*words, **settings):
    environment = os.environ | {"NET": "1"} | settings
    return subprocess.run([str(ROOT / "tools" / "cluster"), *map(str, words)], env=environment, check=True, capture_output=True, text=True).stdout


def slow_down(folder, nodes, mbit):
    """Every cable to this rate, in both directions; 0 takes the limit away."""
    for node in range(1, nodes + 1):
        for where, device in (("head", f"v-node{node}"), (f"node{node}", "eth0")):
            if mbit:
                cluster("exec", folder, where, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit",
                        "burst", "1mb", "latency", "50ms")
            else:
                subprocess.run([str(ROOT / "tools" / "cluster"), "exec", folder, where, "tc", "qdisc", "del", "dev", device, "root"],
                               env=os.environ | {"NET": "1"}, check=False, capture_output=True)


def train(a, folder, nodes, name):
    """Seconds an update and tokens per second, medians, the first update left out."""
    words = ["train", "reader", "--name", name, "--checkpoint_dir", folder, "--init", "random", "--model_size", a.shape,
             "--tokenizer", ROOT / "tests/golden/tokenizers/t5", "--train_data", ROOT / "bench/reader_input.json",
             "--n_context", a.passages, "--text_maxlength", 250, "--global_batch_size", nodes * a.shards, "--micro_batch_size", 1,
             "--optim", "adamw", "--total_steps", a.updates + 1, "--save_freq", 1000000, "--log_freq", 1, "--threads", 1, "--quiet",
             "--backend", "tcp", "--keep_last", 1]
    script = f"export SLURM_CONF={folder}/etc/slurm.conf; exec \"$@\""
    command = ["exec", folder, "head", "bash", "-c", script, "-", "srun", "-N", nodes, "--ntasks-per-node=1", os.path.abspath(a.tercio)]
    cluster(*command, *words)
    with open(pathlib.Path(folder) / name / "metrics.jsonl", encoding="utf8") as f:
        lines = [line for line in map(json.loads, f) if "event" not in line]
    seconds = [later["time"] - line["time"] for line, later in zip(lines, lines[1:])]
    rates = [line["tokens_per_second"] for line in lines[1:]]
    waits = [line.get("exposed_communication", 0.0) for line in lines[1:]]
    return statistics.median(seconds), statistics.median(rates), statistics.median(waits)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    p.add_argument("--mbit", type=int, nargs="+", default=[1000, 4000])
    p.add_argument("--shape", choices=cost_model.SHAPES, default="small")
    p.add_argument("--passages", type=int, default=5)
    p.add_argument("--shards", type=int, default=2, help="shards of a rank in an update")
    p.add_argument("--updates", type=int, default=4)
    p.add_argument("--tercio", default=str(ROOT / "target/release/tercio"))
    a = p.parse_args()
    model = argparse.Namespace(ranks_per_node=1, latency_us=100.0, local_gbs=5.0, add_gbs=8.0)
    print(f"t5-{a.shape}, {sum(cost_model.parameters(a.shape)) * 4 / 1e6:.0f} MB of gradients, {a.shards} shards of {a.passages} passages a rank, "
          f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}")
    print("| ranks | cable | update, s | longer by, s | predicted, s | efficiency | predicted |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for nodes in a.nodes:
        with tempfile.TemporaryDirectory() as folder:
            cluster("start", folder, nodes, OWNER=str(os.getpid()))
            try:
                fast, rate, waits = train(a, folder, nodes, "fast")
                print(f"| {nodes} | as memory | {fast:.2f} | ({waits * fast:.2f} waited) | | 1 | |", flush=True)
                for mbit in a.mbit:
                    slow_down(folder, nodes, mbit)
                    seconds, slowed, _ = train(a, folder, nodes, f"at-{mbit}")
                    slow_down(folder, nodes, 0)
                    late = cost_model.exposed(a.shape, fast / a.shards, nodes, mbit * 1e6 / 8, model)
                    print(f"| {nodes} | {mbit / 1000:g} Gbit/s | {seconds:.2f} | {seconds - fast:.2f} | {late:.2f} | {slowed / rate:.3f} | "
                          f"{fast / (fast + late):.3f} |", flush=True)
            except subprocess.CalledProcessError as error:
                sys.exit(f"{error}\n{error.stderr[-3000:]}")
            finally:
                cluster("stop", folder)


if __name__ == "__main__":
    main()
