#!/usr/bin/env python3
"""Writes tests/fixtures/families/*_lora.safetensors: gradients of LoRA adapters on models of tests/fixtures/families.

    python3 scripts/make_lora_gradients.py            # needs torch 2.11, transformers 5, peft, bitsandbytes, safetensors
    python3 scripts/make_lora_gradients.py --check    # computes again and compares with the files, writes nothing

The adapter is PEFT's, of rank 2, on every linear layer of the decoder. A tensor under PEFT's name is `[3, …]`: the matrix, its gradient,
and its gradient on the backbone of NF4 weights, as bitsandbytes makes them on the CPU (blocks of 64, absmax of 8 bits; a fused
projection is quantised whole). The loss is the mean cross-entropy of the next token over `labels` [2, 12] that are not -100;
`losses` [2] are without and with NF4. `gradient.NAME` are gradients of the backbone's norms under their own names, without NF4.
`nf4.logits` and `int8.logits` [24, V] are those of the quantised backbone without adapters on the `reference.input_ids` of its fixture;
int8 is a symmetric scale for every output row. Computed in float32 on CPU. Metadata: `adapter_config`, as PEFT writes it.
"""

import hashlib
import json
import pathlib
import sys

import bitsandbytes.functional as bnb
import peft
import safetensors
import safetensors.torch
import torch
import transformers
from make_family_fixtures import FOLDER, build
from make_fixtures import compare

SCRIPT = pathlib.Path(__file__).resolve()
SEED = 20251123
BASES = ["qwen3", "gemma3", "phi3"]
SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def nf4(weight):
    """Dequantised here: bitsandbytes' CPU kernel is wrong where rows are no whole number of blocks, as in these small layers."""
    pairs, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = torch.stack([pairs.flatten() >> 4, pairs.flatten() & 15], 1).flatten()[: weight.numel()].long()
    return state.code[codes].view(weight.shape) * absmax.repeat_interleave(64)[: weight.numel()].view(weight.shape)


def int8(weight):
    absmax = weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return (weight * (127 / absmax)).round() * (absmax / 127)


@torch.no_grad()
def quantize(model, how):
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(how(module.weight))
    return model


def base(name):
    path = FOLDER / f"{name}.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        model = build(json.loads(file.metadata()["config"]))
    tensors = safetensors.torch.load_file(path)
    model.load_state_dict({key: value.float() for key, value in tensors.items() if not key.startswith("reference.")}, strict=False)
    model.tie_weights()
    return model, tensors["reference.input_ids"]


def random_adapter(model, name, generator):
    config = peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0, target_modules=FUSED if name == "phi3" else SPLIT, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            if "lora_" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def gradients(model, input_ids, labels):
    """The loss, and gradients of all parameters that have one."""
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in key or "norm" in key)
    logits = model(input_ids=input_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def make(name):
    _, input_ids = base(name)
    rows = input_ids.view(2, 12)
    labels = rows.clone()
    labels[0, :5] = -100
    labels[1, 7] = -100
    models = [base(name)[0], quantize(base(name)[0], nf4)]
    models = [random_adapter(model, name, torch.Generator().manual_seed(SEED)) for model in models]
    (loss, plain), (nf4_loss, quantized) = [gradients(model, rows, labels) for model in models]
    tensors = {"input_ids": rows, "labels": labels, "losses": torch.stack([loss, nf4_loss])}
    for key, parameter in models[0].named_parameters():
        if "lora_" in key:
            tensors[key.replace(".default", "")] = torch.stack([parameter.detach(), plain[key], quantized[key]])
        elif "norm" in key:
            tensors["gradient." + key.removeprefix("base_model.model.")] = plain[key]
    with torch.no_grad():
        for what, how in [("nf4", nf4), ("int8", int8)]:
            tensors[f"{what}.logits"] = quantize(base(name)[0], how)(input_ids=input_ids[None], use_cache=False).logits[0]
    config = models[0].peft_config["default"].to_dict()
    kept = ["peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "target_modules", "fan_in_fan_out", "inference_mode"]
    adapter = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items() if key in kept}
    metadata = {
        "format": "pt", "script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "seed": str(SEED),
        "versions": json.dumps({module.__name__: module.__version__ for module in (torch, transformers, peft)}),
        "adapter_config": json.dumps(adapter | {"base_model_name_or_path": name}),
    }
    return {key: value.contiguous() for key, value in tensors.items()}, metadata


def main():
    torch.set_num_threads(1)
    for name in BASES:
        path = FOLDER / f"{name}_lora.safetensors"
        tensors, metadata = make(name)
        if sys.argv[1:] == ["--check"]:
            print(f"{path.name}: equal within {compare(path, tensors):.1e}")
            continue
        safetensors.torch.save_file(tensors, path, metadata)
        print(f"{path.name}: {path.stat().st_size} bytes, losses {tensors['losses'].tolist()}")


if __name__ == "__main__":
    main()
