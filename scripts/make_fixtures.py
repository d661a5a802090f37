#!/usr/bin/env python3
"""Writes tests/fixtures/*.safetensors: small random Llama and Mistral models with what transformers computes on them.

    python3 scripts/make_fixtures.py            # needs torch 2.11, transformers 5, safetensors
    python3 scripts/make_fixtures.py --check    # computes again and compares with the files, writes nothing

One file holds one model: its weights under their Hugging Face names, and `reference.input_ids` [T],
`reference.last_hidden_state` [T, H] (after the final norm), `reference.logits` [T, V], in float32 on CPU.
Metadata: this script's sha256, versions, seed, and the config twice: `config` as transformers 5 saves it
(`rope_parameters`), `config_v4` as the models published before it have it (`rope_theta`, `rope_scaling`).
Weights are rounded to the stored dtype first, so that a reader that widens them sees exactly the same model.
"""

import hashlib
import json
import pathlib
import sys

import safetensors.torch
import torch
import transformers

SCRIPT = pathlib.Path(__file__).resolve()
FIXTURES = SCRIPT.parents[1] / "tests" / "fixtures"
SEED = 20240119
LIMIT_BYTES = 200_000
SHAPE = dict(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=72, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


def rope(theta=10000.0):
    return dict(rope_type="default", rope_theta=theta)


# name: (family, stored dtype, length, what differs from SHAPE, what to take away so that the logits must change)
CASES = {
    "llama_own_head": ("llama", torch.float32, 24, dict(hidden_size=48, num_key_value_heads=4, intermediate_size=48, rope_parameters=rope()), None),
    "llama_tied_theta_500000_mqa": (
        "llama", torch.bfloat16, 40,
        dict(tie_word_embeddings=True, num_key_value_heads=1, rope_parameters=rope(500000.0)),
        dict(rope_parameters=rope()),
    ),
    "llama3_scaling": ("llama", torch.bfloat16, 40, dict(rope_parameters=LLAMA3), dict(rope_parameters=rope(500000.0))),
    "llama_linear_scaling": (
        "llama", torch.float16, 40,
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
        dict(rope_parameters=rope()),
    ),
    "llama_wide_heads": ("llama", torch.bfloat16, 40, dict(head_dim=24, rope_parameters=rope()), None),
    "llama_attention_bias": ("llama", torch.bfloat16, 40, dict(attention_bias=True, rope_parameters=rope()), dict(attention_bias=False)),
    "mistral_sliding_window": (
        "mistral", torch.bfloat16, 40,
        dict(sliding_window=8, rope_parameters=rope()), dict(sliding_window=None),
    ),
    "mistral_no_window": (
        "mistral", torch.bfloat16, 40,
        dict(sliding_window=None, rope_parameters=rope(1000000.0)), dict(sliding_window=8),
    ),
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
}


def build(family, settings):
    config_class, model_class = FAMILIES[family]
    config = config_class(**settings, attn_implementation="eager")
    config.architectures = [model_class.__name__]
    return model_class(config).to(torch.float32).eval()


@torch.no_grad()
def fill(model, dtype, generator):
    """Weights large enough that every part of the model is seen in the logits."""
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.2 * noise
        elif name.endswith("bias"):
            values = 0.3 * noise
        elif "embed_tokens" in name:
            values = 0.25 * noise
        else:
            values = noise / parameter.shape[1] ** 0.5
        parameter.copy_(values.to(dtype))


@torch.no_grad()
def run(model, input_ids):
    out = model.model(input_ids=input_ids[None], use_cache=False).last_hidden_state
    return out[0], model.lm_head(out)[0]


def config_v4(config):
    """The same config with the keys of transformers 4."""
    config = dict(config)
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config["torch_dtype"] = config.pop("dtype")
    return config


def make(name, family, dtype, length, settings, without):
    generator = torch.Generator().manual_seed(SEED)
    model = build(family, SHAPE | settings)
    fill(model, dtype, generator)
    input_ids = torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator)
    hidden, logits = run(model, input_ids)
    if without is not None:
        other = build(family, SHAPE | settings | without)
        other.load_state_dict(model.state_dict(), strict=False)
        change = (run(other, input_ids)[1] - logits).abs().max().item()
        assert change > 0.05, f"{name}: taking {sorted(without)} away changes the logits by {change} only"
    weights = {k: v.to(dtype).contiguous() for k, v in model.state_dict().items()}
    if settings.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    config = json.loads(model.config.to_json_string(use_diff=False))
    keys = set(SHAPE) | {"model_type", "architectures", "rope_parameters", "head_dim", "sliding_window", "attention_bias", "hidden_act", "mlp_bias"}
    config = {k: v for k, v in config.items() if k in keys} | {"dtype": str(dtype).removeprefix("torch.")}
    tensors = weights | {"reference.input_ids": input_ids, "reference.last_hidden_state": hidden, "reference.logits": logits}
    metadata = {
        "format": "pt", "script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "seed": str(SEED),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "config": json.dumps(config), "config_v4": json.dumps(config_v4(config)),
    }
    return {k: v.contiguous() for k, v in tensors.items()}, metadata


def compare(path, tensors):
    stored = safetensors.torch.load_file(path)
    assert stored.keys() == tensors.keys(), f"{path.name}: other tensors"
    worst = max((stored[k].double() - tensors[k].double()).abs().max().item() for k in stored)
    assert worst < 1e-5, f"{path.name}: differs by {worst}"
    return worst


def main():
    torch.set_num_threads(1)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        path = FIXTURES / f"{name}.safetensors"
        tensors, metadata = make(name, *case)
        if "--check" in sys.argv[1:]:
            print(f"{path.name}: equal within {compare(path, tensors):.1e}")
            continue
        safetensors.torch.save_file(tensors, path, metadata)
        assert path.stat().st_size < LIMIT_BYTES, f"{path.name} has {path.stat().st_size} bytes"
        print(f"{path.name}: {path.stat().st_size} bytes, largest logit {tensors['reference.logits'].abs().max():.2f}")


if __name__ == "__main__":
    main()
