"""One run of tantivy-py over a collection: build an index, ask one and tell the time, or write what it finds.

usage: peer_bm25.py build WORDS PASSAGES DIR THREADS
       peer_bm25.py search WORDS DIR QUESTIONS THREADS DEPTH
       peer_bm25.py found WORDS PASSAGES DIR QUESTIONS OUTPUT DEPTH
WORDS is which words are indexed and asked for: `plain`, all, by tantivy's simple tokenizer and lower case, as Tercio's plain analyzer has
them; `stopwords`, the same behind tantivy's own filter of English stopwords; `same-words`, all are indexed, and the words of Tercio's
stopped analyzer are asked for (its list is read from its source). Frequencies are indexed, positions are not. A question is asked as a union
of its words; the time is that of `search` alone, without parsing. k1 and b cannot be set in tantivy (1.2 and 0.75).
"""
import concurrent.futures
import csv
import json
import os
import re
import resource
import sys
import time

import tantivy

ANALYSIS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "crates", "search", "src", "bm25", "analysis.rs")


def analyzer(words):
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.lowercase())
    if words == "stopwords":
        builder = builder.filter(tantivy.Filter.stopword("english"))
    return builder.build()


def not_asked(words):
    if words != "same-words":
        return set()
    with open(ANALYSIS, encoding="utf8") as f:
        source = f.read()

    def listed(name):
        found = re.search(rf"const {name}: \[&str; (\d+)\] = \[(.*?)\];", source, re.S)
        listed = set(re.findall(r'"(\w+)"', found.group(2)))
        assert len(listed) == int(found.group(1)), f"the list {name} could not be read"
        return listed

    return listed("STOPWORDS") - listed("ASKED")


def rows_of(passages):
    csv.field_size_limit(1 << 30)
    with open(passages, encoding="utf8", newline="") as f:
        rows = csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        yield from rows


def build(words, passages, folder, threads):
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    schema.add_text_field("text", stored=False, tokenizer_name="words", index_option="freq")
    since = time.perf_counter()
    index = tantivy.Index(schema.build(), path=folder)
    index.register_tokenizer("words", analyzer(words))
    writer = index.writer(heap_size=512 << 20, num_threads=threads)
    count = 0
    for number, text, title in rows_of(passages):
        writer.add_document(tantivy.Document(id=number, text=title + " " + text))
        count += 1
    writer.commit()
    writer.wait_merging_threads()
    return {"seconds": time.perf_counter() - since, "passages": count}


def open_with(words, folder, texts):
    index = tantivy.Index.open(folder)
    index.register_tokenizer("words", analyzer(words))
    index.reload()
    left_out, by = not_asked(words), analyzer(words)
    queries = []
    for text in texts:
        asked = by.analyze(text)
        asked = [w for w in asked if w not in left_out] or asked
        terms = [tantivy.Query.term_query(index.schema, "text", w, "freq") for w in asked]
        queries.append(tantivy.Query.boolean_query([(tantivy.Occur.Should, t) for t in terms]))
    return index.searcher(), queries


def items_of(questions):
    with open(questions, encoding="utf8") as f:
        return [json.loads(line) for line in f]


def search(words, folder, questions, threads, depth):
    searcher, queries = open_with(words, folder, [item["question"] for item in items_of(questions)])
    for query in queries[:200]:
        searcher.search(query, limit=depth, count=False)
    part = -(-len(queries) // threads)

    def ask(k):
        return sum(len(searcher.search(q, limit=depth, count=False).hits) for q in queries[k * part:(k + 1) * part])

    since = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        found = sum(pool.map(ask, range(threads)))
    return {"seconds": time.perf_counter() - since, "questions": len(queries), "passages": found}


def found(words, passages, folder, questions, output, depth):
    items = items_of(questions)
    searcher, queries = open_with(words, folder, [item["question"] for item in items])
    texts = {number: (title, text) for number, text, title in rows_of(passages)}
    with open(output, "w", encoding="utf8") as f:
        for item, query in zip(items, queries):
            ctxs = []
            for score, address in searcher.search(query, limit=depth, count=False).hits:
                number = searcher.doc(address)["id"][0]
                ctxs.append({"id": number, "title": texts[number][0], "text": texts[number][1], "score": score})
            f.write(json.dumps({"question": item["question"], "answers": item["answers"], "ctxs": ctxs}) + "\n")
    return {"questions": len(items)}


def main():
    what, words, *rest = sys.argv[1:]
    if words not in ("plain", "stopwords", "same-words"):
        sys.exit(f"WORDS {words}: expected plain, stopwords or same-words")
    result = {"build": build, "search": search, "found": found}[what](words, *(int(x) if x.isdigit() else x for x in rest))
    result["peak_rss_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 3)
    result["tantivy"] = tantivy.__version__
    print(json.dumps(result))


if __name__ == "__main__":
    main()
