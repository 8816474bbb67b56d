"""Write the folders under crates/data/tests/data/tokenizers that crates/data/tests/encoder_tokenizers.rs loads: tiny vocabularies of the BERT
families as their vocabulary files alone and as tokenizer.json, and the ids that Hugging Face transformers gives with each.

usage: make_tokenizer_cases.py REPOSITORY
Recorded with transformers 5.24, tokenizers 0.23 and sentencepiece 0.2.3. Trained vocabularies differ between versions, so a new run replaces
all files.
"""
import json
import pathlib
import shutil
import sys
import tempfile

import sentencepiece
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer, XLMRobertaTokenizer

root = pathlib.Path(sys.argv[1])
target = root / "crates/data/tests/data/tokenizers"
shutil.rmtree(target, ignore_errors=True)

CORPUS = """
The lighthouse of Gull Island was built by Martha Quill in 1831. Who built the first lighthouse? The keeper lit the lamp at dusk.
Héllo naïve café, Straße, ﬁsh ½ x². Un café très chaud à Málaga; El Niño y la señora. Übermäßig große Häuser.
東京タワー は 東京 に ある。 Москва и Ελλάδα. العربية हिन्दी 한국어.
don't won't it's we're I've she'd they'll — “quoted” … a/b c_d e-mail@x.org 1,000,000.50 $5 €5 50%.
def add(left, right):\n    return left + right\n\tindented  twice   thrice
question: who wrote the poem title: Harbour Songs context: The poem was written by Ida Fell in 1902, and printed again in 1911.
""".strip().splitlines() * 3
TEXTS = [
    "", " ", "question: who built the first lighthouse title: Gull Island context: Martha Quill did, in 1831.",
    "  two  spaces  and\ttab\nnewline ", "Héllo naïve café, Straße, ﬁsh ½ x²", "東京タワー is in Tokyo \U0001f642",
    "don't — “quote” … a/b c_d e-mail@x.org", "A" * 120, "</s> <pad> [SEP] [MASK] <mask> <extra_id_0>", "a <mask> b<mask>c",
    "1,000,000.50 $5 €5 50%",
    "é vs e\u0301", "zero\u200bwidth soft\xadhyphen nbsp\xa0here", "ALL CAPS AND Mixed Case", "Москва Ελλάδα العربية हिन्दी 한국어",
    "<s>begin</s>", "[CLS] begin [PAD]", "tail of spaces   ", "\r\nlines\r\n", "the\u2028line\u3000space", "harbour" * 9,
]


def word_pieces(lower):
    """Lines of a vocab.txt."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=420, special_tokens=special, show_progress=False, limit_alphabet=200)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.get)


def record(name, tokenizer, files=None, json_too=True):
    """`files`: what the folder holds beside the expected values; the tokenizer.json that transformers saves goes into a second folder."""
    expected = {
        "transformers": transformers.__version__, "class": type(tokenizer).__name__, "size": len(tokenizer),
        "pad": tokenizer.pad_token_id, "cls": tokenizer.cls_token_id, "sep": tokenizer.sep_token_id, "unk": tokenizer.unk_token_id,
        "mask": tokenizer.mask_token_id,
        "cases": [
            {"text": text, "ids": tokenizer(text).input_ids, "cut": tokenizer(text, truncation=True, max_length=7).input_ids} for text in TEXTS
        ],
    }
    text = json.dumps(expected, ensure_ascii=True) + "\n"
    if files:
        folder = target / name
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        (folder / "expected.json").write_text(text)
    if json_too:
        folder = target / f"{name}_json"
        folder.mkdir(parents=True)
        tokenizer.save_pretrained(folder)
        (folder / "expected.json").write_text(text)


def from_files(kind, files):
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (pathlib.Path(folder) / file).write_bytes(content)
        return kind.from_pretrained(folder)


def settings(**fields):
    return (json.dumps(fields) + "\n").encode()


for name, lower, fields in [
    ("bert_uncased", True, None),
    ("bert_cased", False, dict(do_lower_case=False, model_max_length=512)),
    ("bert_options", True, dict(do_lower_case=True, strip_accents=False, tokenize_chinese_chars=False, tokenizer_class="BertTokenizer")),
]:
    files = {"vocab.txt": "".join(f"{piece}\n" for piece in word_pieces(lower)).encode()}
    if fields:
        files["tokenizer_config.json"] = settings(**fields)
    record(name, from_files(BertTokenizer, files), files)

pairs = ByteLevelBPETokenizer()
pairs.train_from_iterator(CORPUS, vocab_size=420, min_frequency=2, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False)
with tempfile.TemporaryDirectory() as folder:
    pairs.save_model(folder)
    files = {name: (pathlib.Path(folder) / name).read_bytes() for name in ("vocab.json", "merges.txt")}
record("roberta", from_files(RobertaTokenizer, files), files)
files["tokenizer_config.json"] = settings(add_prefix_space=True, mask_token={"content": "<mask>", "lstrip": True, "__type": "AddedToken"})
record("roberta_space", from_files(RobertaTokenizer, files), files)

with tempfile.TemporaryDirectory() as folder:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=f"{folder}/m", vocab_size=330, model_type="unigram", unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
        hard_vocab_limit=False, normalization_rule_name="nmt_nfkc", minloglevel=2,
    )
    files = {"sentencepiece.bpe.model": pathlib.Path(f"{folder}/m.model").read_bytes()}
record("xlm_roberta", from_files(XLMRobertaTokenizer, files), files)

# ModernBERT: byte pairs, NFC, BERT's names; it has a tokenizer.json only.
modern = Tokenizer(models.BPE())
modern.normalizer = normalizers.NFC()
modern.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
modern.decoder = decoders.ByteLevel()
special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
trainer = trainers.BpeTrainer(
    vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
)
modern.train_from_iterator(CORPUS, trainer)
modern.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
modern = PreTrainedTokenizerFast(
    tokenizer_object=modern, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]", model_max_length=8192
)
record("modernbert", modern)
