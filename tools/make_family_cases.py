"""Write the stored values that crates/models/tests/families.rs and crates/data/tests/byt5.rs compare with: tiny random models of
T5's relatives and what Hugging Face transformers computes with them; and token ids of its byT5 tokenizer.

usage: make_family_cases.py REPOSITORY
Recorded with torch 2.15 and transformers 5.24. The numbers depend on torch's random generator, so a new run replaces all files.
"""
import copy
import json
import pathlib
import sys
import warnings

import torch
import transformers
from transformers import ByT5Tokenizer, MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

warnings.filterwarnings("ignore")
root = pathlib.Path(sys.argv[1])
VOCABULARY = 40
sizes = dict(vocab_size=VOCABULARY, decoder_start_token_id=0, dropout_rate=0.0, d_model=12, num_layers=2)
mt5 = MT5Config(**sizes, d_kv=5, d_ff=20, num_heads=2, num_decoder_layers=1)
# num_heads * d_kv != d_model; other numbers of layers, buckets and distance, as the T5-efficient shapes have them.
efficient = T5Config(
    **sizes, d_kv=3, d_ff=10, num_heads=6, num_decoder_layers=3, relative_attention_num_buckets=8, relative_attention_max_distance=10
)
gated = T5Config(**sizes, d_kv=4, d_ff=16, num_heads=2, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
byt5 = T5Config(
    **{**sizes, "vocab_size": 384}, d_kv=4, d_ff=24, num_heads=2, num_decoder_layers=1, feed_forward_proj="gated-gelu",
    tie_word_embeddings=False, tokenizer_class="ByT5Tokenizer",
)


def untied(model):
    """A vocabulary head of its own, as the published mT5, byT5 and T5 v1.1 have."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.config.tie_word_embeddings = False
    return model


def record(name, model):
    folder = root / "crates/models/tests/data/families" / name
    folder.mkdir(parents=True, exist_ok=True)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():  # rows that differ, and norms that are not all one
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    model = type(model).from_pretrained(folder).eval()  # what its own library makes of the folder counts
    (folder / "generation_config.json").unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(3, model.config.vocab_size, (1, n), generator=generator)
    inputs, labels = draw(31), draw(6)
    with torch.no_grad():
        logits = model(input_ids=inputs, labels=labels).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
        tokens = model.generate(input_ids=inputs, max_length=10, num_beams=1, do_sample=False, use_cache=False)
    expected = {
        "transformers": transformers.__version__, "input": inputs[0].tolist(), "labels": labels[0].tolist(),
        "losses": losses.tolist(), "first_logits": logits[0].tolist(), "max_length": 10, "generated": tokens[0, 1:].tolist(),
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


torch.manual_seed(20)
record("mt5", untied(MT5ForConditionalGeneration(copy.deepcopy(mt5))))
record("mt5_tied", MT5ForConditionalGeneration(copy.deepcopy(mt5)))
record("t5_efficient", T5ForConditionalGeneration(copy.deepcopy(efficient)))
record("t5_v11", untied(T5ForConditionalGeneration(copy.deepcopy(gated))))
record("t5_tied_unscaled", T5ForConditionalGeneration(copy.deepcopy(gated)))
record("byt5", untied(T5ForConditionalGeneration(copy.deepcopy(byt5))))

tokenizer = ByT5Tokenizer()
texts = [
    "", " ", "question: who wrote it? title: A context: b", "a </s>", "h\u00e9llo <extra_id_0> x", "a  <pad>  b",
    "\u65e5\u672c </s> z", "<extra_id_124><extra_id_125>", "\u00e9</s>", " a\n</s>\n b", "<unk>", "a<extra_id_1", "\U0001f600", "</s></s>",
    "tab\tand\u00a0</s>\u00a0nbsp", "<<pad>>", "<extra_id_12><extra_id_1>2", "</s",
]
encoded = [{"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids} for text in texts]
rows = [
    [], [100, 101, 1], [230, 233], [233, 154, 168, 233, 68], [0, 100, 2, 101, 1, 0], [198, 1, 172], [243, 162, 155, 131, 35, 52],
    [262, 100, 259 + 124], [227, 131, 131], [240, 167, 131, 68], [3, 258, 4],
]
decoded = [{"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)} for ids in rows]
file = root / "crates/data/tests/data/byt5.json"
file.parent.mkdir(parents=True, exist_ok=True)
specials = {token: tokenizer.convert_tokens_to_ids(token) for token in ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_124>"]}
file.write_text(json.dumps({"transformers": transformers.__version__, "size": len(tokenizer), "specials": specials, "encoded": encoded, "decoded": decoded}, indent=1) + "\n")
