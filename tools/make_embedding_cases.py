"""Write the stored values that crates/models/tests/modernbert.rs and sentence.rs compare with: tiny random ModernBERT models with their states and
gradients by Hugging Face transformers, and tiny sentence-transformers folders with the vectors that sentence-transformers gives.

usage: make_embedding_cases.py REPOSITORY
Recorded with torch 2.15, transformers 5.24 and sentence-transformers 6.2. The numbers depend on torch's random generator, so a new run replaces
all files. The tokenizers come from crates/data/tests/data/tokenizers (tools/make_tokenizer_cases.py).
"""
import json
import pathlib
import shutil
import sys
import tempfile
import warnings

import sentence_transformers
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, ModernBertConfig, ModernBertForMaskedLM, ModernBertModel

warnings.filterwarnings("ignore")
root = pathlib.Path(sys.argv[1])
data = root / "crates/models/tests/data"
tokenizers = root / "crates/data/tests/data/tokenizers"
special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)


def spread(model):
    """Rows that differ, norms that are not all one, biases that are not all zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def modernbert(name, model, older=None):
    """`older`: fields of config.json as transformers 4 wrote them, in the place of those of 5."""
    folder = fresh(data / "modernbert" / name)
    spread(model).save_pretrained(folder)
    if older:
        config = json.loads((folder / "config.json").read_text())
        for key in ("layer_types", "rope_parameters"):
            del config[key]
        (folder / "config.json").write_text(json.dumps({**config, **older}, indent=2) + "\n")
    # In 64 bits (but for what its own code rounds): some gradients of a model this small lose three digits in 32.
    model = ModernBertModel.from_pretrained(folder, attn_implementation="eager").eval().double()
    generator = torch.Generator().manual_seed(3)
    lengths = [31, 9, 1, 14]
    texts = [torch.randint(3, model.config.vocab_size, (n,), generator=generator) for n in lengths]
    states = torch.cat([model(input_ids=text[None]).last_hidden_state[0] for text in texts])
    weights = torch.randn(states.shape, generator=generator)
    (states * weights.double()).sum().backward()
    tensors = {"states": states.detach(), "weights": weights}
    tensors |= {f"grad/{name}": p.grad for name, p in model.named_parameters()}
    save_file({k: v.float().contiguous() for k, v in tensors.items()}, folder / "expected.safetensors")
    expected = {"transformers": transformers.__version__, "texts": [text.tolist() for text in texts]}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


torch.manual_seed(41)
plain = ModernBertConfig(
    vocab_size=50, hidden_size=24, intermediate_size=20, num_hidden_layers=4, num_attention_heads=3, local_attention=6, **special
)
modernbert("plain", ModernBertModel(plain))
biases = ModernBertConfig(
    vocab_size=40, hidden_size=16, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2, local_attention=9, norm_bias=True,
    attention_bias=True, mlp_bias=True, hidden_activation="gelu_pytorch_tanh", norm_eps=1e-3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 500.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}
    },
    **special,
)
modernbert("biases", ModernBertModel(biases))
masked = ModernBertConfig(
    vocab_size=40, hidden_size=16, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2, local_attention=4,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}
    },
    **special,
)
older = {"global_attn_every_n_layers": 2, "global_rope_theta": 1000.0, "local_rope_theta": 20.0}
modernbert("masked_language_model", ModernBertForMaskedLM(masked), older)

TEXTS = ["Who built the first lighthouse?", "", "Héllo naïve café", "The keeper lit the lamp at dusk, and printed the harbour songs again in 1911.", "x"]


def encoder(model, tokenizer):
    folder = tempfile.mkdtemp()
    spread(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizers / tokenizer).save_pretrained(folder)
    return folder


def older_folder(folder):
    """The module files as sentence-transformers 2 to 5 wrote them."""
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = "sentence_transformers.models." + module["type"].rsplit(".")[-1]
        path = folder / module["path"] / "config.json"
        if module["type"].endswith("Pooling"):
            settings = json.loads(path.read_text())
            way = settings["pooling_mode"]
            switches = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
            switches = {f"pooling_mode_{key}": way == value for key, value in switches.items()}
            path.write_text(json.dumps({"word_embedding_dimension": settings["embedding_dimension"], **switches}, indent=4) + "\n")
        if module["type"].endswith("Normalize"):
            shutil.rmtree(folder / module["path"])
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    length = json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}, indent=4) + "\n")


def sentence(name, modules, max_seq_length, older=False, **settings):
    folder = fresh(data / "sentence" / name)
    model = SentenceTransformer(modules=modules, device="cpu", **settings)
    model.max_seq_length = max_seq_length
    model.save(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    if older:
        older_folder(folder)
    model = SentenceTransformer(str(folder), device="cpu")
    tensors, expected = {}, {"sentence_transformers": sentence_transformers.__version__, "max_seq_length": model.max_seq_length}
    for prompt in [None, *settings.get("prompts", {})]:
        key = prompt or "none"
        tensors[key] = torch.from_numpy(model.encode(TEXTS, prompt_name=prompt, batch_size=1))
        before = settings["prompts"][prompt] if prompt else settings.get("prompts", {}).get(settings.get("default_prompt_name"), "")
        ids = [model.tokenizer(before + text, truncation=True, max_length=model.max_seq_length).input_ids for text in TEXTS]
        expected[key] = {"prompt": before, "ids": ids}
    save_file(tensors, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=40)


def bert():
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / "bert_uncased_json")
    return encoder(BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)), "bert_uncased_json")


def dense(layer):
    return spread(layer)


prompts = {"query": "question: ", "document": "title: "}
for name, old in [("dense", False), ("dense_older", True)]:
    torch.manual_seed(42)
    transformer = Transformer(bert())
    layers = [dense(Dense(16, 10)), dense(Dense(10, 6, bias=False, activation_function=torch.nn.Identity()))]
    sentence(name, [transformer, Pooling(16, "mean"), *layers, Normalize()], 12, old, prompts=prompts)
torch.manual_seed(43)
modern = ModernBertConfig(
    vocab_size=len(AutoTokenizer.from_pretrained(tokenizers / "modernbert_json")), hidden_size=16, intermediate_size=12, num_hidden_layers=3,
    num_attention_heads=2, local_attention=6, pad_token_id=3, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
)
transformer = Transformer(encoder(ModernBertModel(modern), "modernbert_json"))
sentence("cls", [transformer, Pooling(16, "cls")], 20, prompts={"query": "who: "}, default_prompt_name="query")
