#!/usr/bin/env python3
"""Writes tests/fixtures/vicuna: the files of the repository lmsys/vicuna-7b-v1.5, small. Needs torch.

    python3 scripts/make_vicuna_folder.py

Names and keys are the repository's; the weights are random, few, and float16 as there, in two files of torch.save with their
index. The tokenizer.model is not written: tests put tests/fixtures/tokenizers/llama.model (of scripts/check_tokenizers.py) beside.
"""

import json
import pathlib

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "fixtures" / "vicuna"
HIDDEN, FFN, LAYERS, VOCAB = 64, 96, 2, 672
CONFIG = {
    "_name_or_path": "vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": FFN,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": VOCAB,
}
GENERATION = {
    "bos_token_id": 1, "eos_token_id": 2, "max_length": 4096, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6,
    "transformers_version": "4.31.0",
}


def token(content, **kind):
    return {**kind, "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def tokens(**kind):
    return {name: token(text, **kind) for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))}


TOKENIZER = {
    "add_bos_token": True, "add_eos_token": False, **tokens(__type="AddedToken"), "clean_up_tokenization_spaces": False,
    "legacy": False, "model_max_length": 4096, "pad_token": None, "padding_side": "right", "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
}
SPECIAL = {**tokens(), "pad_token": "<unk>"}


def weights():
    torch.manual_seed(13)
    state = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            state[f"{name}.self_attn.{part}_proj.weight"] = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
        for part, (rows, columns) in {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}.items():
            state[f"{name}.mlp.{part}_proj.weight"] = torch.randn(rows, columns) / columns**0.5
        for part in ("input_layernorm", "post_attention_layernorm"):
            state[f"{name}.{part}.weight"] = torch.ones(HIDDEN)
    state["model.norm.weight"] = torch.ones(HIDDEN)
    state["lm_head.weight"] = torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    return {name: value.half() for name, value in state.items()}


def write(name, content):
    (FOLDER / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    write("config.json", CONFIG)
    write("generation_config.json", GENERATION)
    write("tokenizer_config.json", TOKENIZER)
    write("special_tokens_map.json", SPECIAL)
    state = weights()
    names, weight_map = list(state), {}
    for number, part in enumerate([names[: len(names) // 2], names[len(names) // 2 :]], start=1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: state[name] for name in part}, FOLDER / file)
        weight_map |= {name: file for name in part}
    write("pytorch_model.bin.index.json", {"metadata": {"total_size": sum(value.nbytes for value in state.values())},
                                           "weight_map": weight_map})


if __name__ == "__main__":
    main()
