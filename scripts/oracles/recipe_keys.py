#!/usr/bin/env python3
"""Toggles every recipe key of docs/training.md on the tiny model and looks whether the trained weights change.

    scripts/oracles/recipe_keys.py [--medusa-train target/release/medusa-train]

Each case trains three steps of a base run with one key changed and compares the bytes of its weights with the base's. A key changes them or is
listed here as one that must not, with its reason. Fails if one does otherwise, and if the page has a key without a case.
"""
import argparse
import copy
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data/tiny"
CHANGES, SAME = "changes", "same"
# Keys without a case, and why.
WITHOUT = {
    "stage.medusa1": "the base run has it",
    "stage.medusa2": "the second base run has it",
    "stage.medusa2.lora": "the second base run has it",
    "backbone.path": "every run has it",
    "backbone.device_map": "it needs several GPUs",
    "data.hidden_states": "it needs hidden states of a server; tests/captured_states.rs trains on them",
    "data.train": "every run has it",
    "optimizer.zero_stage": "it needs several processes; tests/several_processes.rs compares them",
    "train.output_dir": "every run has its own",
}


def base(medusa2):
    stage = {"medusa2": {"lora": {"rank": 4, "alpha": 8.0}}} if medusa2 else {"medusa1": {}}
    return {
        "backbone": {"path": str(TINY / "backbone"), "dtype": "float32"},
        "heads": {"medusa_num_heads": 2},
        "stage": stage,
        "data": {"train": [str(TINY / "train.jsonl")], "max_length": 96, "limit": 200},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"name": "linear", "warmup_steps": 1},
        "train": {"max_steps": 3, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "save_every": 2},
    }


# Stage, key, another value, what it does to the weights. A key of the second stage is tried on the run with adapters.
CASES = [
    (1, "backbone.dtype", "bfloat16", CHANGES),
    (1, "backbone.quantization", "nf4", CHANGES),
    (1, "heads.medusa_num_heads", 3, CHANGES),
    (1, "heads.medusa_num_layers", 2, CHANGES),
    (1, "heads.shared_lm_head", True, CHANGES),
    (1, "heads.w2_rank", 8, CHANGES),
    (1, "heads.shared_w2", True, CHANGES),
    (1, "heads.draft_vocab_size", 256, CHANGES),
    (1, "heads.architecture", "hydra", CHANGES),
    (1, "heads.dropout", 0.2, CHANGES),
    (1, "heads.init_from", "FINAL", CHANGES),
    (2, "stage.medusa2.medusa_heads_coefficient", 0.4, CHANGES),
    (2, "stage.medusa2.medusa_scheduler", "sine", CHANGES),
    (2, "stage.medusa2.self_distillation", True, CHANGES),
    (2, "stage.medusa2.lora.rank", 8, CHANGES),
    (2, "stage.medusa2.lora.alpha", 32.0, CHANGES),
    (2, "stage.medusa2.lora.dropout", 0.2, CHANGES),
    (2, "stage.medusa2.lora.target_modules", ["q_proj", "v_proj"], CHANGES),
    (2, "stage.medusa2.lora.init_from", "FINAL", CHANGES),
    (1, "loss.medusa_decay_coefficient", 0.5, CHANGES),
    (1, "loss.targets", "backbone", CHANGES),
    (1, "loss.on_unlabelled", True, CHANGES),
    (1, "data.mix", [0.3, 0.7], CHANGES),
    (1, "data.validation", [str(TINY / "eval.jsonl")], (SAME, "validation rows are not trained on")),
    (1, "data.validation_fraction", 0.3, CHANGES),
    (1, "data.columns", {"text": "other"}, CHANGES),
    (1, "data.chat_template", "vicuna", (SAME, "these rows are texts, which no template renders")),
    (1, "data.loss_on", "all", CHANGES),
    (1, "data.max_length", 64, CHANGES),
    (1, "data.long_rows", "truncate", CHANGES),
    (1, "data.limit", 20, CHANGES),
    (1, "data.packing", False, CHANGES),
    (1, "data.shuffle", False, CHANGES),
    (1, "optimizer.name", "adamw8bit", CHANGES),
    (1, "optimizer.learning_rate", 2e-3, CHANGES),
    (2, "optimizer.medusa_lr_multiplier", 2.0, CHANGES),
    (1, "optimizer.betas", [0.8, 0.99], CHANGES),
    (1, "optimizer.eps", 1e-4, CHANGES),
    (1, "optimizer.weight_decay", 0.1, CHANGES),
    (1, "optimizer.max_grad_norm", 0.01, CHANGES),
    (1, "schedule.name", "constant", CHANGES),
    (1, "schedule.warmup_steps", 2, CHANGES),
    (1, "schedule.warmup_ratio", 0.9, CHANGES),
    (1, "schedule.min_ratio", 0.5, CHANGES),
    (1, "train.epochs", 1, CHANGES),
    (1, "train.max_steps", 4, CHANGES),
    (1, "train.micro_batch_size", 4, CHANGES),
    (1, "train.gradient_accumulation_steps", 1, CHANGES),
    (1, "train.seed", 7, CHANGES),
    (1, "train.log_every", 2, (SAME, "it is of the log")),
    (1, "train.save_every", 1, (SAME, "it is of the checkpoints")),
    (1, "train.eval_every", 1, (SAME, "evaluations only measure")),
    (1, "train.eval_answers", 2, (SAME, "evaluations only measure")),
    (1, "train.keep_best", "loss", (SAME, "it keeps other heads beside the last ones")),
    (1, "train.patience", 9, (SAME, "no evaluation of these few ends the run")),
    (1, "train.keep_checkpoints", 1, (SAME, "it is of the checkpoints")),
    (2, "train.recompute", True, (SAME, "the same numbers are computed again")),
    (1, "train.hidden_state_cache", "CACHE", (SAME, "the same hidden states are read from files")),
]
# What a key needs beside it, or in place of another key.
BESIDE = {
    "heads.dropout": {"heads.architecture": "hydra"},
    "loss.on_unlabelled": {"loss.targets": "backbone"},
    "data.mix": {"data.train": [str(TINY / "train.jsonl"), str(TINY / "eval.jsonl")]},
    "data.long_rows": {"data.packing": False, "data.max_length": 24},
    "schedule.warmup_ratio": {"schedule.warmup_steps": None},
    "train.epochs": {"train.max_steps": None, "data.limit": 20},
    "train.eval_every": {"data.validation": [str(TINY / "eval.jsonl")], "train.eval_answers": 2},
    "train.eval_answers": {"data.validation": [str(TINY / "eval.jsonl")], "train.eval_every": 3},
    "train.keep_best": {"data.validation": [str(TINY / "eval.jsonl")], "train.eval_every": 1, "train.eval_answers": 2},
    "train.patience": {"data.validation": [str(TINY / "eval.jsonl")], "train.eval_every": 1, "train.keep_best": "loss", "train.eval_answers": 2},
}


def put(recipe, key, value):
    *tables, name = key.split(".")
    for table in tables:
        recipe = recipe.setdefault(table, {})
    if value is None:
        recipe.pop(name, None)
    else:
        recipe[name] = value


def toml(recipe, prefix=""):
    lines, tables = [], []
    for name, value in recipe.items():
        if isinstance(value, dict) and (prefix + name) not in ("data.columns",):
            tables.append(f"[{prefix}{name}]\n" + toml(value, f"{prefix}{name}."))
        elif isinstance(value, dict):
            lines.append(f"{name} = {{ " + ", ".join(f"{key} = {json.dumps(of)}" for key, of in value.items()) + " }")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines + tables) + "\n"


def trained(args, folder, name, recipe):
    """A hash of the weights of a finished run, and of nothing that names the run."""
    recipe = copy.deepcopy(recipe)
    put(recipe, "train.output_dir", str(folder / name))
    path = folder / f"{name}.toml"
    path.write_text(toml(recipe))
    run = subprocess.run([args.medusa_train, path, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        return None, run.stdout.strip().splitlines()[-1]
    final = folder / name / "final"
    weights = [final / "heads.safetensors", final / "adapter_model.safetensors"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in weights if file.exists())).hexdigest(), ""


def keys_of_page():
    keys, table = set(), ""
    for line in (ROOT / "docs/training.md").read_text().splitlines():
        if found := re.match(r"\| \*\*`\[([\w.]+)\]`\*\*", line):
            table = found[1]
        elif not line.startswith("|"):
            table = ""
        elif table and (found := re.match(r"\| `(\w+)` \|", line)):
            keys.add(f"{table}.{found[1]}")
    return keys


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--medusa-train", default=ROOT / "target/release/medusa-train", type=Path)
    parser.add_argument("--only", default="", help="keys that contain this")
    args = parser.parse_args()
    forgotten = keys_of_page() - {key for _, key, _, _ in CASES} - set(WITHOUT)
    folder = Path(tempfile.mkdtemp())
    other = [dict(json.loads(line), other=json.loads(line)["text"][::-1]) for line in (TINY / "train.jsonl").read_text().splitlines()[:200]]
    (folder / "other.jsonl").write_text("\n".join(map(json.dumps, other)) + "\n")
    parts = [json.loads(line)["text"].partition("<|assistant|>") for line in (TINY / "train.jsonl").read_text().splitlines()[:200]]
    asked = [json.dumps({"prompt": question + mark, "completion": answer}) for question, mark, answer in parts]
    (folder / "asked.jsonl").write_text("\n".join(asked) + "\n")
    BESIDE["loss.on_unlabelled"]["data.train"] = [str(folder / "asked.jsonl")]
    BESIDE["data.loss_on"] = {"data.train": [str(folder / "asked.jsonl")]}
    BESIDE["data.columns"] = {"data.train": [str(folder / "other.jsonl")]}
    base_of = {stage: trained(args, folder, f"base{stage}", base(stage == 2))[0] for stage in (1, 2)}
    wrong = []
    cases = [case for case in CASES if args.only in case[1]]
    for at, (stage, key, value, expected) in enumerate(cases):
        recipe, without_key = base(stage == 2), base(stage == 2)
        for beside, of in BESIDE.get(key, {}).items():
            put(recipe, beside, of)
            put(without_key, beside, of)
        value = {"FINAL": str(folder / f"base{stage}" / "final"), "CACHE": str(folder / "cache")}.get(value, value) if isinstance(value, str) else value
        put(recipe, key, value)
        reference = trained(args, folder, f"without{at}", without_key)[0] if key in BESIDE else base_of[stage]
        found, problem = trained(args, folder, f"case{at}", recipe)
        wanted, reason = expected if isinstance(expected, tuple) else (expected, "")
        got = "failed" if found is None or reference is None else SAME if found == reference else CHANGES
        wrong += [key] if got != wanted else []
        print(f"{'' if got == wanted else 'WRONG '}{key} = {json.dumps(value)[:50]}: {got} {problem or reason}", flush=True)
    print(f"{len(cases) - len(wrong)} of {len(cases)} keys as expected" + (f"; not: {wrong}" if wrong else ""))
    if forgotten:
        print(f"keys of docs/training.md without a case: {sorted(forgotten)}")
    sys.exit(bool(wrong or forgotten))


if __name__ == "__main__":
    main()
