#!/usr/bin/env python3
"""A backbone as repositories from before safetensors hold it, for tests/torch_backbone.rs: python3 scripts/make_torch_backbone.py

Needs torch 2.11, transformers 5 and safetensors. Writes tests/fixtures/torch_backbone/: a small random Llama as `model.safetensors`, and the
same numbers as `pytorch_model.bin` (a state_dict: one matrix of it a transposed view, two slices of one storage, one of bfloat16, and a
mask of truth values, which is no weight), as two shards with their index (plain dicts of clones, as transformers split them), in torch's
container of before 1.6 (`legacy.bin`), and `calls_code.bin`, which calls a function when Python loads it. Metadata of model.safetensors
says what made them.
"""

import hashlib
import json
import os
import pathlib

import safetensors.torch
import torch
import transformers

SCRIPT = pathlib.Path(__file__).resolve()
FOLDER = SCRIPT.parents[1] / "tests" / "fixtures" / "torch_backbone"
SHAPE = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
    max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)


class Calls:
    """Pickled, it is a call that Python makes when it loads the file."""

    def __reduce__(self):
        return os.system, ("touch it_was_run",)


def main():
    torch.manual_seed(20240119)
    FOLDER.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM(config).to(torch.float16)
    (FOLDER / "config.json").write_text(json.dumps(config.to_dict(), indent=1, sort_keys=True) + "\n")
    state = model.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.bfloat16)
    metadata = {"format": "pt", "script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "torch": torch.__version__}
    safetensors.torch.save_file(dict(state), FOLDER / "model.safetensors", metadata=metadata)
    view = "model.layers.0.mlp.down_proj.weight"
    state[view] = state[view].t().contiguous().t()
    slices = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    both = torch.cat([state[name] for name in slices])
    state[slices[0]], state[slices[1]] = both.chunk(2)
    state["model.layers.0.self_attn.mask"] = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    torch.save(state, FOLDER / "pytorch_model.bin")
    torch.save(state, FOLDER / "legacy.bin", _use_new_zipfile_serialization=False)
    names = list(state)
    half = len(names) // 2
    weight_map = {}
    for number, part in enumerate([names[:half], names[half:]], start=1):
        name = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({key: state[key].clone() for key in part}, FOLDER / name)
        weight_map |= {key: name for key in part}
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
    (FOLDER / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    state["spoilt"] = Calls()
    torch.save(state, FOLDER / "calls_code.bin")


if __name__ == "__main__":
    main()
