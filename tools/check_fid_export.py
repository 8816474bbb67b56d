"""Compare a folder of `tercio model export --layout fid` with the model it came from, in PyTorch: a maintainer's check, run by hand.

usage: check_fid_export.py FID_DIR SOURCE_DIR
Fails (exit status 1) when torch.load(weights_only=True) does not open the archive, mapped and not, when tied tensors do not share
their storage, or when a tensor differs from the source's.
"""
import re
import sys

import torch
from safetensors.torch import load_file

fid, source = sys.argv[1:]
path = f"{fid}/pytorch_model.bin"
state = torch.load(path, weights_only=True, map_location="cpu")
mapped = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
assert type(state).__name__ == "OrderedDict" and state.keys() == mapped.keys()
assert all(torch.equal(state[k], mapped[k]) for k in state)
plain = lambda name: re.sub(r"^(block\.\d+)\.module\.", r"\1.", name.removeprefix("encoder.encoder."))
names = {k: f"encoder.{plain(k)}" if k.startswith("encoder.encoder.") else k for k in state}
tensors = load_file(f"{source}/model.safetensors")
aliases = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} | ({"lm_head.weight"} - tensors.keys())
for key, name in names.items():
    if name in aliases:
        assert state[key].data_ptr() == state["shared.weight"].data_ptr(), key
    elif name in tensors:
        assert torch.equal(state[key], tensors[name]), key
    else:
        assert "EncDecAttention.relative_attention_bias" in name and not state[key].any(), key
missing = tensors.keys() - set(names.values())
assert not missing, missing
print(f"torch {torch.__version__}: {len(state)} tensors, all of {len(tensors)} of the source: ok")
