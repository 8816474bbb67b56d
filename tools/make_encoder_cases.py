"""Write the stored values that crates/models/tests/encoders.rs compares with: tiny random encoders of BERT's relatives and what
Hugging Face transformers computes with them.

usage: make_encoder_cases.py REPOSITORY
Recorded with torch 2.15 and transformers 5.24. The numbers depend on torch's random generator, so a new run replaces all files.
"""
import json
import pathlib
import shutil
import sys
import warnings

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig, BertForMaskedLM, BertModel, DistilBertConfig, DistilBertForSequenceClassification, DistilBertModel, RobertaConfig,
    RobertaModel, XLMRobertaConfig, XLMRobertaForMaskedLM, XLMRobertaModel,
)

warnings.filterwarnings("ignore")
root = pathlib.Path(sys.argv[1]) / "crates/models/tests/data/encoders"
shutil.rmtree(root, ignore_errors=True)
LENGTHS = [9, 1, 14, 5]
sizes = dict(vocab_size=60, initializer_range=0.3)
bert = dict(
    **sizes, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=20,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
distil = dict(**sizes, dim=24, n_layers=2, n_heads=4, hidden_dim=36, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0)


def old_names(path):
    """The names that BERT's norms had in its first files."""
    rename = lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    save_file({rename(n): t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})


def as_pickle(folder):
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def record(name, model, bare, types=False, change=None):
    folder = root / name
    folder.mkdir(parents=True)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are not all one and zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # What its own library makes of the folder counts.
    model = bare.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    if change:
        change(folder)
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(11)
    ids, kinds, states = [], [], []
    loss = 0
    for length in LENGTHS:
        text = torch.randint(3, vocabulary, (1, length), generator=generator)
        kind = torch.randint(0, 2, (1, length), generator=generator) if types else torch.zeros_like(text)
        extra = {"token_type_ids": kind} if types else {}
        hidden = model(input_ids=text, **extra).last_hidden_state[0]
        loss = loss + (hidden * torch.sin(torch.arange(hidden.numel()).float()).view_as(hidden)).sum()
        ids.append(text[0].tolist())
        kinds.append(kind[0].tolist())
        states.append(hidden.flatten().tolist())
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norms = {n: g.norm().item() for n, g in gradients.items()}
    save_file(gradients, folder / "gradients.safetensors")
    expected = {
        "transformers": transformers.__version__, "ids": ids, "token_types": kinds if types else None, "states": states,
        "loss": loss.item(), "gradient_norms": norms,
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


torch.manual_seed(5)
record("bert", BertModel(BertConfig(**bert)), BertModel, types=True)
record(
    "bert_masked_lm_old_names", BertForMaskedLM(BertConfig(**bert, hidden_act="gelu_new")), BertModel, types=True,
    change=lambda folder: old_names(folder / "model.safetensors"),
)
record("distilbert", DistilBertModel(DistilBertConfig(**distil)), DistilBertModel)
record(
    "distilbert_classifier_relu", DistilBertForSequenceClassification(DistilBertConfig(**distil, activation="relu")), DistilBertModel,
    change=as_pickle,
)
roberta = {**bert, "type_vocab_size": 1, "pad_token_id": 1}
record("roberta", RobertaModel(RobertaConfig(**roberta)), RobertaModel)
record("xlm_roberta_masked_lm", XLMRobertaForMaskedLM(XLMRobertaConfig(**roberta)), XLMRobertaModel)
