#!/usr/bin/env python3
"""Writes tests/fixtures/configs/parameters.json: what transformers makes of the configs in published.json beside it.

    python3 scripts/oracles/count_parameters.py            # needs torch 2.11 and transformers 5; no weights: models on the meta device
    python3 scripts/oracles/count_parameters.py --check    # compares with the file, writes nothing

Of each model: `parameters` (a tied lm_head counts once), `head_dim`, `tied`, `windows` (the sliding window of every layer, or null)
and `rope`: by kind of layer the factor of cosine and sine and the first, middle and last frequency of a short text.
"""

import json
import pathlib
import sys

import torch
import transformers

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "configs"


def build(keys):
    config = transformers.AutoConfig.for_model(**keys)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def rotary(config, model):
    """Frequencies are computed again, on the CPU."""
    embedding = type(model.model.rotary_emb)(config)
    kinds = {"full_attention": "", "sliding_attention": ""}
    if hasattr(embedding, "full_attention_inv_freq"):
        kinds = {kind: f"{kind}_" for kind in kinds}
    else:
        del kinds["sliding_attention"]
    found = {}
    for kind, prefix in kinds.items():
        frequencies = getattr(embedding, f"{prefix}inv_freq").double().tolist()
        picked = [frequencies[0], frequencies[len(frequencies) // 2], frequencies[-1]]
        found[kind] = {"size": 2 * len(frequencies), "factor": getattr(embedding, f"{prefix}attention_scaling"), "frequencies": picked}
    return found


def windows(config):
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def facts(keys):
    model = build(keys)
    attention = model.model.layers[0].self_attn
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "head_dim": attention.head_dim,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "windows": windows(model.config),
        "rope": rotary(model.config, model),
    }


def main():
    published = json.loads((FOLDER / "published.json").read_text())["served"]
    found = {name: facts(keys) for name, keys in published.items()}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(of)}" for name, of in found.items())
    text = "{\n" + lines + "\n}\n"
    path = FOLDER / "parameters.json"
    if sys.argv[1:] == ["--check"]:
        assert path.read_text() == text, f"{path} differs"
        print(f"{path.name}: equal, {len(found)} models")
        return
    path.write_text(text)
    for name, of in found.items():
        print(f"{of['parameters']:>14,} {name}")


if __name__ == "__main__":
    main()
