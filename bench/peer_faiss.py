"""Dense search by faiss as a process that takes turns with another one: the peer of crates/search/examples/dense.rs.

usage: peer_faiss.py VECTORS QUERIES DEPTH THREADS EXACT [LISTS PARTS SAMPLE]
VECTORS is a folder that `tercio embed` wrote, QUERIES another or a file of little-endian f32, EXACT the rows (i64) that an exact search found. With
LISTS an IndexIVFPQ of PARTS codes of 8 bits is trained on SAMPLE rows. Commands on standard input: `batch`, `single N` (IndexFlatIP),
`ivfpq PROBES`, `refine PROBES FACTOR` (IndexRefineFlat: FACTOR x DEPTH rows scored again), `quit`; each is answered by a line of JSON.
"""
import json
import os
import sys
import time

vectors, queries, depth, threads, exact = sys.argv[1:6]
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = threads
import faiss  # noqa: E402 (the variables come first)
import numpy as np  # noqa: E402

depth = int(depth)
faiss.omp_set_num_threads(int(threads))


def load(folder):
    """All rows of a folder of vectors as f32."""
    with open(os.path.join(folder, "manifest.json"), encoding="utf8") as f:
        manifest = json.load(f)
    kind = {"f32": "<f4", "f16": "<f2"}[manifest["dtype"]]
    parts = [np.fromfile(os.path.join(folder, s["vectors"]), dtype=kind) for s in manifest["shards"]]
    return np.concatenate(parts).astype(np.float32).reshape(-1, manifest["dimension"])


def blas():
    """The libraries that this process has loaded products from."""
    with open("/proc/self/maps", encoding="utf8") as f:
        names = {line.split()[-1].rsplit("/", 1)[-1] for line in f if "/" in line}
    return sorted(n for n in names if any(b in n.lower() for b in ("blas", "mkl", "blis")))


rows = load(vectors)
asked = load(queries) if os.path.isdir(queries) else np.fromfile(queries, dtype="<f4").reshape(-1, rows.shape[1])
flat = faiss.IndexFlatIP(rows.shape[1])
flat.add(rows)
ready = {"faiss": faiss.__version__, "options": faiss.get_compile_options(), "blas": blas(), "threads": faiss.omp_get_max_threads()}
ivf = refined = None
if len(sys.argv) > 6:
    lists, parts, sample = (int(x) for x in sys.argv[6:9])
    start = time.perf_counter()
    ivf = faiss.IndexIVFPQ(faiss.IndexFlatIP(rows.shape[1]), rows.shape[1], lists, parts, 8, faiss.METRIC_INNER_PRODUCT)
    ivf.train(rows[np.random.default_rng(0).permutation(len(rows))[:sample]])
    ivf.add(rows)
    refined = faiss.IndexRefineFlat(ivf, faiss.swig_ptr(rows))
    ready |= {"build_seconds": time.perf_counter() - start, "code_bytes": ivf.code_size}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    words = line.split()
    start, used = time.perf_counter(), time.process_time()
    if words[0] == "batch":
        found = flat.search(asked, depth)[1]
    elif words[0] == "single":
        for i in range(int(words[1])):
            flat.search(asked[i : i + 1], depth)
        found = None
    elif words[0] == "ivfpq":
        ivf.nprobe = int(words[1])
        found = ivf.search(asked, depth)[1]
    elif words[0] == "refine":
        ivf.nprobe, refined.k_factor = int(words[1]), float(words[2])
        found = refined.search(asked, depth)[1]
    else:
        break
    answer = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used}
    if found is not None and os.path.exists(exact):
        truth = np.fromfile(exact, dtype="<i8").reshape(found.shape)
        share = lambda n: float(np.mean([len(np.intersect1d(f[:n], t[:n])) / n for f, t in zip(found, truth)]))
        answer |= {"recall": share(depth), "recall_10": share(min(10, depth))}
    print(json.dumps(answer), flush=True)
