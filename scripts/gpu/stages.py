"""The stages, their parts, and what to do after each."""

import datetime
import json
import pathlib
import re
import sys
import tempfile
import time

import carried
import peers
import profiler
import sanitizers
import tables
import trained
from processes import Trouble, run, skipped

# Stage, part, and the seconds that a part may take; it may also use the time that earlier parts left.
STAGES = {
    "smoke": {"versions": 20, "mask": 20, "brief": 50},
    "engine": {"kernels": 110, "loops": 45, "hydra": 40, "steps": 85, "endurance": 30, "transformers": 40},
    "profile": {"profile-plain": 45, "profile-tree": 45},
    "training": {"fused": 20, "backbone": 40, "medusa1": 60, "peer": 60, "medusa2": 60},
    "distill": {"backbone": 40, "distill": 80, "transformers-batch": 50},
    "texts": {"train-tiny": 60, "choose-tree": 35, "bench": 30},
    "sanitizers": {"memcheck": 180, "racecheck": 180, "synccheck": 120},
}
ON_REQUEST = ("sanitizers",)
NEEDS = {"medusa1": "backbone", "peer": "backbone", "medusa2": "backbone", "distill": "backbone", "choose-tree": "train-tiny", "bench": "choose-tree"}
# What to do after a part that failed.
AFTER_FAILURE = {
    "versions": "install what the message names; nothing else can run before",
    "mask": "torch's own attention fails on this GPU: compare torch and driver versions with docs/gpu.md",
    "brief": "run the stage sanitizers: it names the kernel and the address",
    "kernels": "run the stage sanitizers, then the kernel with the largest distance alone",
    "fused": "the operation with the largest distance names the kernel: nothing that is trained with it is right",
    "loops": "decode with --engine tch: if that is right, one of the kernels is wrong",
    "profile-plain": "ncu needs permission to read counters (ERR_NVGPUCTRPERM: run as root)",
    "medusa1": "lower micro_batch_size in scripts/gpu/trained.py, or take a GPU with 80 GB",
}


def check(names, programs, out, seconds):
    """Runs the stages in order. Raises Trouble at the end if a part failed."""
    names = names or [name for name in STAGES if name not in ON_REQUEST]
    program = carried.unpacked(programs)
    carried.link_libtorch()
    machine = doctor(program)
    share = seconds / sum(sum(STAGES[name].values()) for name in names) if seconds else 1
    failed = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for name in names:
            failed += run_stage(name, program, pathlib.Path(scratch), machine, out, share)
    if failed:
        raise Trouble(f"failed: {', '.join(failed)}; the results are kept in {out}")


def doctor(program):
    """What the program sees of the machine."""
    doctor = run([program, "doctor", "--json"], 60)
    if doctor["failed"] or not doctor["lines"]:
        raise Trouble(f"{program.name} doctor does not start: {doctor['failed'] or 'it says nothing'}")
    machine = doctor["lines"][0]
    if not machine["engine"]["cuda"]:
        raise Trouble(f"no GPU can be checked here: {machine['engine']['reason']}")
    return machine


def run_stage(name, program, scratch, machine, out, share):
    """Runs a stage's parts, keeps its results after each, prints its table, and returns the parts that failed."""
    started = deadline = time.monotonic()
    results = {"date": datetime.date.today().isoformat(), "stage": name, "command": " ".join(sys.argv), "doctor": machine, "parts": {}}
    for part, most in STAGES[name].items():
        deadline += most * share
        say(f"{name}: {part}")
        results["parts"][part] = run_part(part, program, scratch, deadline - time.monotonic(), results["parts"])
        results["seconds"] = round(time.monotonic() - started, 1)
        keep(results, out)
    print(tables.of(results), flush=True)
    failed = [part for part, result in results["parts"].items() if result["failed"]]
    for part in failed:
        say(f"{part} failed; {AFTER_FAILURE.get(part, 'its message is in the table above')}")
    return failed


def run_part(part, program, scratch, seconds, before):
    """Returns the part's JSON lines, and why it failed or was skipped, if it did."""
    if seconds < 0.5:
        return skipped("no time is left")
    needed = before.get(NEEDS.get(part))
    if needed and (needed["failed"] or needed.get("skipped")):
        return skipped(f"{NEEDS[part]} was not done")
    if part == "backbone" and (scratch / "backbone/model.safetensors").is_file():
        return {"lines": [], "failed": None, "seconds": 0}
    if part in peers.PARTS:
        return run([sys.executable, carried.ROOT / "scripts/gpu_check", "--inside", part, "--folder", scratch], seconds)
    if part in sanitizers.TOOLS:
        return sanitizers.check(part, program, seconds)
    if part in profiler.PARTS:
        return profiler.measure(part, program, seconds)
    if part in trained.PARTS:
        return trained.PARTS[part](program, scratch, seconds)
    return run([program, "gpu-check", part], seconds)


def keep(results, out):
    """Writes both files atomically, the numbers first."""
    gpu = re.sub(r"[^a-z0-9]+", "-", tables.gpu_name(results["doctor"]).lower()).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", lambda of: json.dumps(of, indent=1) + "\n"), (".md", tables.of)):
        path = out / f"{gpu}-{results['date']}-{results['stage']}{suffix}"
        partial = path.with_suffix(suffix + ".partial")
        partial.write_text(text(results))
        partial.rename(path)


def say(what):
    print(f"== {what}", file=sys.stderr, flush=True)
