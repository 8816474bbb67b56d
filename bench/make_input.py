"""Write reader_input.json: 8 questions x 100 real passages (CIA World Factbook, public domain).

usage: make_input.py PASSAGES.tsv OUT.json
PASSAGES.tsv: a header line, then `id TAB text TAB title`, titles of the Factbook's passages being `Place - Field`.
"""
import json, random, sys
rows = [l.rstrip("\n").split("\t") for l in open(sys.argv[1], encoding="utf8")][1:]
book = [r for r in rows if " - " in r[2] and len(r[1].split()) >= 40 and r[2].split(" - ")[0] in r[1]]
rng = random.Random(7)
out = []
for i in range(8):
    ctxs = rng.sample(book, 100)
    place, field = ctxs[0][2].split(" - ", 1)
    out.append({"id": str(i), "question": f"what is known about the {field.lower()} of {place}", "answers": [" ".join(ctxs[0][1].split()[-4:])],
                "target": " ".join(ctxs[0][1].split()[-4:]), "ctxs": [{"id": c[0], "title": c[2], "text": c[1]} for c in ctxs]})
json.dump(out, open(sys.argv[2], "w"), ensure_ascii=False, indent=0)
