"""One run of tantivy (https://pypi.org/project/tantivy) over a collection: build an index, or ask one and tell the time.

usage: peer_bm25.py build PASSAGES DIR THREADS      peer_bm25.py search DIR QUESTIONS THREADS DEPTH
Words are those of Tercio's plain analyzer for both, so that both have the same lists: tantivy's default tokenizer and lower case.
Frequencies are indexed, positions are not. A question is asked as a union of its words; the time is that of `search` alone, without
parsing. k1 and b cannot be set in tantivy (1.2 and 0.75).
"""
import concurrent.futures
import csv
import json
import re
import resource
import sys
import time

import tantivy


def build(passages, folder, threads):
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    schema.add_text_field("text", stored=False, index_option="freq")
    since = time.perf_counter()
    index = tantivy.Index(schema.build(), path=folder)
    writer = index.writer(heap_size=512 << 20, num_threads=threads)
    csv.field_size_limit(1 << 30)
    count = 0
    with open(passages, encoding="utf8", newline="") as f:
        rows = csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        for number, text, title in rows:
            writer.add_document(tantivy.Document(id=number, text=title + " " + text))
            count += 1
    writer.commit()
    writer.wait_merging_threads()
    return {"seconds": time.perf_counter() - since, "passages": count}


def search(folder, questions, threads, depth):
    index = tantivy.Index.open(folder)
    index.reload()
    searcher = index.searcher()
    with open(questions, encoding="utf8") as f:
        texts = [json.loads(line)["question"] for line in f]
    schema = index.schema
    queries = []
    for text in texts:
        words = re.findall(r"[^\W_]+", text.lower())
        terms = [tantivy.Query.term_query(schema, "text", w, "freq") for w in words]
        queries.append(tantivy.Query.boolean_query([(tantivy.Occur.Should, t) for t in terms]))
    for query in queries[:200]:
        searcher.search(query, limit=depth, count=False)
    part = -(-len(queries) // threads)

    def ask(k):
        return sum(len(searcher.search(q, limit=depth, count=False).hits) for q in queries[k * part:(k + 1) * part])

    since = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        found = sum(pool.map(ask, range(threads)))
    return {"seconds": time.perf_counter() - since, "questions": len(texts), "passages": found}


def main():
    what, *rest = sys.argv[1:]
    if what == "build":
        result = build(rest[0], rest[1], int(rest[2]))
    else:
        result = search(rest[0], rest[1], int(rest[2]), int(rest[3]))
    result["peak_rss_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 3)
    result["tantivy"] = tantivy.__version__ if hasattr(tantivy, "__version__") else "unknown"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
