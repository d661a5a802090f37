#!/usr/bin/env python3
"""PEFT's side of the adapter files (tests/peft.rs).

    python3 scripts/oracles/peft_oracle.py fixture                      # writes tests/fixtures/peft_adapter/
    python3 scripts/oracles/peft_oracle.py keys                         # writes tests/fixtures/peft_keys.json
    python3 scripts/oracles/peft_oracle.py logits BASE ADAPTER IDS OUT  # logits of BASE with ADAPTER on IDS (JSON list), as PEFT computes them

Needs torch 2.11, transformers 5, peft, safetensors. The fixture: an adapter with random A and B on every linear layer and lm_head of
the model in tests/fixtures/llama_own_head.safetensors, as PEFT saves it, and `logits.safetensors`: `logits` [T, V] on its ids. peft_keys.json: the
fields of LoraConfig with their defaults, and how much each start of the weights (`init_lora_weights`) changes the logits of that adapter when
PEFT loads it; null where it does not load.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile

import peft
import safetensors.torch
import torch
import transformers

SCRIPT = pathlib.Path(__file__).resolve()
FIXTURES = SCRIPT.parents[2] / "tests" / "fixtures"
BASE = FIXTURES / "llama_own_head.safetensors"
ADAPTER = FIXTURES / "peft_adapter"
KEYS = FIXTURES / "peft_keys.json"
STARTS = [True, False, "gaussian", "orthogonal", "eva", "mica", "olora", "pissa", "pissa_niter_4", "corda", "loftq", "lora_ga"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def base_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def unpack(folder):
    """The fixture of the base as a Hugging Face folder; returns its ids."""
    with safetensors.safe_open(BASE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        (folder / "config.json").write_text(file.metadata()["config"])
    ids = tensors["reference.input_ids"]
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("reference.")}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return ids


@torch.no_grad()
def fixture():
    torch.manual_seed(20240402)
    with tempfile.TemporaryDirectory() as folder:
        ids = unpack(pathlib.Path(folder))
        config = peft.LoraConfig(r=4, lora_alpha=12, lora_dropout=0.05, target_modules=TARGETS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base_model(folder), config).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
        model.peft_config["default"].base_model_name_or_path = "llama_own_head"
        model.save_pretrained(ADAPTER)
        (ADAPTER / "README.md").unlink(missing_ok=True)
        logits = model(input_ids=ids.unsqueeze(0)).logits[0].contiguous()
    metadata = {
        "script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(),
        "versions": json.dumps({m.__name__: m.__version__ for m in (torch, transformers, peft)}),
    }
    safetensors.torch.save_file({"logits": logits}, ADAPTER / "logits.safetensors", metadata=metadata)


def keys():
    defaults = json.loads((ADAPTER / "adapter_config.json").read_text())
    fields = {field.name: defaults.get(field.name) for field in dataclasses.fields(peft.LoraConfig)}
    expected = safetensors.torch.load_file(ADAPTER / "logits.safetensors")["logits"]
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as adapter:
        ids = unpack(pathlib.Path(base))
        shutil.copy(ADAPTER / "adapter_model.safetensors", adapter)

        @torch.no_grad()
        def change(start):
            config = defaults | {"init_lora_weights": start, "loftq_config": {"loftq_bits": 4}}
            (pathlib.Path(adapter) / "adapter_config.json").write_text(json.dumps(config))
            try:
                model = peft.PeftModel.from_pretrained(base_model(base), adapter).eval()
            except Exception as error:
                print(f"{start}: {error}", file=sys.stderr)
                return None
            return (model(input_ids=ids.unsqueeze(0)).logits[0] - expected).abs().max().item()

        starts = [[start, change(start)] for start in STARTS]
    KEYS.write_text(json.dumps({"peft": peft.__version__, "fields": fields, "starts": starts}, indent=1) + "\n")


@torch.no_grad()
def logits(base, adapter, ids, out):
    model = peft.PeftModel.from_pretrained(base_model(base), adapter).eval()
    ids = torch.tensor([json.loads(pathlib.Path(ids).read_text())])
    safetensors.torch.save_file({"logits": model(input_ids=ids).logits[0].contiguous()}, out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["fixture"]:
        fixture()
    elif sys.argv[1:2] == ["keys"]:
        keys()
    elif sys.argv[1:2] == ["logits"] and len(sys.argv) == 6:
        logits(*sys.argv[2:])
    else:
        sys.exit(__doc__)
