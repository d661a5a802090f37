"""Training and distilling with medusa: random weights of Llama 2 7B's shape, and the embedded model."""

import json
import re
import shutil

import carried
from processes import PeakMemory, run, skipped

ROWS, ROW_TOKENS, STEPS = 8, 2048, 6  # per optimizer step; the first two steps warm up
TRAINED_TOKENS = ROWS * ROW_TOKENS
PROMPTS = 96


def train_7b(stage):
    def train(program, scratch, seconds):
        recipe = scratch / f"{stage}.toml"
        recipe.write_text(recipe_text(stage, scratch))
        with PeakMemory() as peak:
            trained = run([program, "train", recipe, "--json"], seconds)
        trained["lines"] = [training_line(stage, step, peak.bytes) for step in steps_of(scratch / stage)[2:]]
        shutil.rmtree(scratch / stage, ignore_errors=True)  # its checkpoint and heads take 8 GB
        return trained

    return train


def training_line(stage, step, device_memory):
    return {"check": "training", "stage": stage, "tokens_per_second": step["tokens_per_second"], "memory_bytes": step.get("memory_bytes", 0), "device_memory_bytes": device_memory}


def steps_of(run_folder):
    """The training steps in metrics.jsonl, whose last line a killed run may leave truncated."""
    metrics = run_folder / "metrics.jsonl"
    written = metrics.read_text() if metrics.exists() else ""
    steps = [json.loads(line) for line in written.split("\n")[:-1]]
    return [step for step in steps if step.get("split") != "validation" and "tokens_per_second" in step]


def distill(program, scratch, seconds):
    """Answers to prompts of 64 to 127 tokens, 256 tokens each. A run that is not done in its time tells the speed so far."""
    prompts = scratch / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "word " * (30 + i % 32)}) + "\n" for i in range(PROMPTS)))
    with PeakMemory() as peak:
        told = run([program, "distill", "--backbone", scratch / "backbone", "--prompts", prompts, "--out", scratch / "distilled", "--max-new-tokens", "256", "--temperature", "0.8", "--json"], seconds)
    lines = told["lines"] or speed_so_far(told["errors"])
    told["lines"] = [{**line, "check": "distill", "device_memory_bytes": peak.bytes} for line in lines]
    return told


def speed_so_far(progress):
    """The last speed that was printed while the program ran."""
    speeds = re.findall(r"(\d+) tokens/s", progress)
    return [{"tokens_per_second": float(speeds[-1]), "partial": True}] if speeds else []


def train_tiny(program, scratch, seconds):
    """The recipe of the embedded model, on the GPU, with wider heads of attention."""
    recipe = scratch / "tiny.toml"
    recipe.write_text(tiny_recipe(scratch))
    told = run([program, "train", recipe, "--json"], seconds)
    told["lines"] = [{"check": "tiny", "step": step["step"], "loss": step["loss"], "tokens_per_second": step["tokens_per_second"]} for step in steps_of(scratch / "tiny")[-1:]]
    return told


def tiny_recipe(scratch):
    text = (carried.ROOT / "recipes/tiny_stage1.toml").read_text()
    for ours, here in (("data/tiny/backbone", scratch / "wider_heads"), ("data/tiny/", f"{carried.ROOT}/data/tiny/"), ("checkpoints/tiny_stage1", scratch / "tiny")):
        text = text.replace(f'"{ours}', f'"{here}')
    return text


def of_tiny(scratch):
    return ["--backbone", scratch / "wider_heads", "--heads", scratch / "tiny/final", "--prompts", carried.ROOT / "data/tiny/prompts.jsonl", "--dtype", "bfloat16"]


def choose_tree(program, scratch, seconds):
    calibration = scratch / "calibration.json"
    told = run([program, "calibrate", *of_tiny(scratch), "--out", calibration], seconds)
    if told["failed"]:
        return told
    return run([program, "tree", "--calibration", calibration, "--nodes", "16", "--out", scratch / "tree.json"], max(seconds - told["seconds"], 1))


def bench(program, scratch, seconds):
    """The same prompts plain and with heads, with both engines."""
    told = {"lines": [], "failed": None, "seconds": 0.0}
    for engine in ("cuda", "tch"):
        left = seconds - told["seconds"]
        one = run([program, "bench", *of_tiny(scratch), "--tree", scratch / "tree.json", "--engine", engine, "--json"], left) if left >= 0.5 else skipped("no time is left")
        told["lines"] += [{**line, "check": "bench", "engine": engine} for line in one["lines"]]
        faults = [told["failed"], (one["failed"] or one.get("skipped")) and f"{engine}: {one['failed'] or one['skipped']}"]
        told["failed"] = "; ".join(fault for fault in faults if fault) or None
        told["seconds"] += one["seconds"]
    return told


def recipe_text(stage, scratch):
    lora = '\n[stage.medusa2.lora]\nrank = 32\nalpha = 16.0\ndropout = 0.0\ntarget_modules = "all-linear"\n'
    table = "[stage.medusa1]\n" if stage == "medusa1" else f"[stage.medusa2]\nmedusa_heads_coefficient = 0.2\n{lora}"
    micro = ROWS if stage == "medusa1" else 2
    return f"""[backbone]
path = "{scratch}/backbone"
dtype = "bfloat16"

[heads]
medusa_num_heads = 5
medusa_num_layers = 1

{table}
[loss]
medusa_decay_coefficient = 0.8

[data]
train = ["{scratch}/rows.jsonl"]
max_length = {ROW_TOKENS}
packing = false
shuffle = false

[optimizer]
name = "adamw8bit"
learning_rate = 1e-4

[schedule]
name = "constant"
warmup_steps = 0

[train]
output_dir = "{scratch}/{stage}"
max_steps = {STEPS}
micro_batch_size = {micro}
gradient_accumulation_steps = {ROWS // micro}
seed = 1
log_every = 1
save_every = 1000
keep_checkpoints = 1
"""


PARTS = {"medusa1": train_7b("medusa1"), "medusa2": train_7b("medusa2"), "distill": distill, "train-tiny": train_tiny, "choose-tree": choose_tree, "bench": bench}
