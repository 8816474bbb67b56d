"""Embed the 2,000 documents of retrieval_input.json by sentence-transformers and by `tercio embed` in turn and print the row for BENCHMARKS.md.

usage: embed.py --peer VENV --model DIR [--bf16] [--threads 2] [--rounds 3]
`--model` is a sentence-transformers folder, such as all-MiniLM-L6-v2; VENV needs sentence-transformers as well. More in sides.py.
"""
import json
import os
import resource
import subprocess
import sys
import tempfile

import sides


def tercio(binary, *flags):
    """One run of `tercio embed`, told in the fields that both sides have."""
    with open(os.path.join(sides.HERE, "retrieval_input.json"), encoding="utf8") as f:
        documents = json.load(f)["documents"]
    with tempfile.TemporaryDirectory() as folder:
        passages = os.path.join(folder, "passages.jsonl")
        with open(passages, "w", encoding="utf8") as f:
            f.writelines(json.dumps({"id": str(i), "title": "", "text": text}) + "\n" for i, text in enumerate(documents))
        output = os.path.join(folder, "vectors")
        command = [binary, "embed", "--passages", passages, "--output", output, "--template", "{text}", "--json", "--quiet", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(json.dumps({
        "mode": "embed",
        "bf16": "--bf16" in flags,
        "seconds_per_step": round(found["seconds"], 3),
        "texts_per_second": round(found["texts_per_second"], 1),
        "peak_rss_gb": round(rss, 2),
    }))


def main():
    p = sides.parser(__doc__.splitlines()[0], steps=1)
    p.add_argument("--model", required=True, metavar="DIR", help="a sentence-transformers folder")
    a = sides.parse(p)
    if a.recompute:
        p.error("nothing is recomputed in embedding")
    bf16 = ["--bf16"] if a.bf16 else []
    threads = ["--threads", a.threads]
    peer = [sides.python(a), os.path.join(sides.HERE, "peer_embed.py"), "--model", a.model, "--steps", a.steps, *threads, *bf16]
    ours = [sys.executable, os.path.abspath(__file__), "tercio", a.tercio, "--model_path", a.model, *threads, *bf16]
    sides.run(a, {"peer": peer, "tercio": ours}, "2,000 documents to vectors")


if __name__ == "__main__":
    if sys.argv[1:2] == ["tercio"]:
        tercio(*sys.argv[2:])
    else:
        main()
