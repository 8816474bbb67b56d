"""Write the stored values that crates/models/tests/classifier.rs compares with: tiny random classifiers of every family and what
Hugging Face transformers computes with them.

usage: make_classifier_cases.py REPOSITORY
Recorded with the versions that every expected.json names. The numbers depend on torch's random generator, so a new run replaces all files.
"""
import json
import pathlib
import shutil
import sys
import warnings

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    BertConfig, BertForSequenceClassification, BertModel, DistilBertConfig, DistilBertForSequenceClassification, ModernBertConfig,
    ModernBertForSequenceClassification, RobertaConfig, RobertaForSequenceClassification, XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

warnings.filterwarnings("ignore")
root = pathlib.Path(sys.argv[1]) / "crates/models/tests/data/classifiers"
shutil.rmtree(root, ignore_errors=True)
LENGTHS = [9, 1, 14, 5]
labels = lambda *names: dict(id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
sizes = dict(vocab_size=40, initializer_range=0.3)
bert = dict(
    **sizes, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=20,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
distil = dict(
    **sizes, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0,
    seq_classif_dropout=0.0,
)
modern = dict(
    **sizes, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, max_position_embeddings=32,
    local_attention=6, pad_token_id=0, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None,
)


def record(name, kind, config):
    folder = root / name
    folder.mkdir(parents=True)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are not all one and zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    # What its own library makes of the folder counts.
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    count, ids, logits, loss = model.config.num_labels, [], [], 0
    for place, length in enumerate(LENGTHS):
        text = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
        if model.config.problem_type == "multi_label_classification":
            target = torch.tensor([[float((place >> i) & 1) for i in range(count)]])
        else:
            target = torch.tensor([place % count])
        out = model(input_ids=text, labels=target)
        loss = loss + out.loss / len(LENGTHS)
        ids.append(text[0].tolist())
        logits.append(out.logits[0].tolist())
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    head = [n for n in gradients if n.split(".")[0] in ("classifier", "pre_classifier", "head") or ".pooler." in n]
    save_file({n: gradients[n] for n in head}, folder / "gradients.safetensors")
    expected = {
        "torch": torch.__version__, "transformers": transformers.__version__, "labels": list(model.config.id2label.values()),
        "ids": ids, "logits": logits, "loss": loss.item(), "gradient_norms": {n: g.norm().item() for n, g in gradients.items()},
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


torch.manual_seed(3)
single = dict(problem_type="single_label_classification", **labels("sport", "world", "science"))
several = dict(problem_type="multi_label_classification", **labels("a", "b", "c", "d"))
record("bert", BertForSequenceClassification, BertConfig(**bert, **single))
record("bert_multi_label", BertForSequenceClassification, BertConfig(**bert, **several))
record("distilbert", DistilBertForSequenceClassification, DistilBertConfig(**distil, **single))
record("roberta", RobertaForSequenceClassification, RobertaConfig(**bert, **single))
record("xlm_roberta", XLMRobertaForSequenceClassification, XLMRobertaConfig(**bert, **several))
record("modernbert", ModernBertForSequenceClassification, ModernBertConfig(**modern, **single))
mean = dict(classifier_pooling="mean", classifier_bias=True, norm_bias=True, classifier_activation="silu")
record("modernbert_mean", ModernBertForSequenceClassification, ModernBertConfig(**modern, **mean, **several))

# Hidden states of several layers, averaged: what flair's embeddings are with layer_mean.
folder = root.parent / "classifier_layers"
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir()
BertModel(BertConfig(**bert)).save_pretrained(folder)
model = BertModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
layers, ids, cls, mean = [0, -1, 1], [], [], []
for length in LENGTHS:
    text = torch.randint(3, model.config.vocab_size, (1, length))
    states = model(input_ids=text, output_hidden_states=True).hidden_states
    average = torch.stack([states[layer][0] for layer in layers]).mean(0)
    ids.append(text[0].tolist())
    cls.append(average[0].tolist())
    mean.append(average.mean(0).tolist())
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
(folder / "expected.json").write_text(json.dumps({**versions, "layers": layers, "ids": ids, "cls": cls, "mean": mean}) + "\n")
