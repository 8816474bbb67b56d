#!/usr/bin/env python3
"""Sum of one long buffer over the processes of this machine: Tercio beside Open MPI, in turns, medians.

    cargo build --release -p tercio-comm --example all_reduce [--features mpi]
    python3 bench/all_reduce.py [--ranks 2] [--bytes 400000000] [--repeats 5] [--pairs local:default,tcp:tcp]

Needs mpicc and mpirun (Debian: openmpi-bin libopenmpi-dev). Every repeat starts all processes anew.
"""
import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPI_OPTIONS = {"default": [], "tcp": ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def line_of(command, environment):
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def ours(binary, backend, options):
    common = {
        "TERCIO_WORLD_SIZE": str(options.ranks), "TERCIO_LOCAL_SIZE": str(options.ranks),
        "TERCIO_MEETING": f"127.0.0.1:{free_port()}", "TERCIO_SECRET": secrets.token_hex(16),
    }
    command = [binary, "--bytes", str(options.bytes), "--rounds", str(options.rounds), "--backend", backend]
    if backend == "mpi":
        # MPI numbers the ranks; everything else is ours.
        script = 'export TERCIO_RANK=$OMPI_COMM_WORLD_RANK TERCIO_LOCAL_RANK=$OMPI_COMM_WORLD_RANK; exec "$@"'
        return line_of(["mpirun", "--oversubscribe", "-n", str(options.ranks), "sh", "-c", script, "sh", *command],
                       common | MPI_ENVIRONMENT)
    processes = []
    try:
        for rank in range(options.ranks):
            own = {"TERCIO_RANK": str(rank), "TERCIO_LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=os.environ | common | own, stdout=subprocess.PIPE, text=True))
        out = [process.communicate(timeout=600)[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit(f"{binary} --backend {backend}: exit codes {[process.returncode for process in processes]}")
        return json.loads(out[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=ROOT / "target/release/examples/all_reduce")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=400_000_000)
    parser.add_argument("--rounds", type=int, default=5, help="rounds within a process; its median counts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", default="local:default,tcp:tcp", help="backend:options of Open MPI, by commas")
    options = parser.parse_args()
    pairs = [pair.split(":") for pair in options.pairs.split(",")]

    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder) / "all_reduce"
        subprocess.run(["mpicc", "-O3", "-march=native", "-o", theirs, ROOT / "bench/all_reduce.c"], check=True)
        seen = {}
        for repeat in range(options.repeats):
            for backend, kind in pairs:
                mpirun = ["mpirun", "--oversubscribe", *MPI_OPTIONS[kind], "-n", str(options.ranks), theirs]
                for name, line in (
                    (f"tercio {backend}", lambda: ours(options.binary, backend, options)),
                    (f"Open MPI {kind}", lambda: line_of([*mpirun, str(options.bytes), str(options.rounds)], MPI_ENVIRONMENT)),
                ):
                    seen.setdefault(name, []).append(line()["seconds"])
                    print(f"{repeat}: {name}: {seen[name][-1]:.3f} s (load {os.getloadavg()[0]:.1f})", file=sys.stderr)

    print(f"| {options.ranks} processes, {options.bytes / 1e6:.0f} MB of f32 | median s | best s | GB/s | of Open MPI |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for backend, kind in pairs:
        peer = statistics.median(seen[f"Open MPI {kind}"])
        for name in (f"tercio {backend}", f"Open MPI {kind}"):
            median = statistics.median(seen[name])
            print(f"| {name} | {median:.3f} | {min(seen[name]):.3f} | {options.bytes / median / 1e9:.2f} | {peer / median:.2f} |")


if __name__ == "__main__":
    main()
