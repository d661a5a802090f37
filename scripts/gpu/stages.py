"""The stages, their parts, and what to do after each."""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import traceback

import carried
import peers
import profiler
import sanitizers
import tables
import trained
from processes import CACHE, ENVIRONMENT, PeakMemory, Trouble, run, skipped

# Stage, part, and the seconds that a part may take; it may also use the time that earlier parts left. `smoke engine profile` and
# `training distill texts` have 480 s each.
STAGES = {
    "smoke": {"versions": 15, "mask": 30, "operators": 15, "brief": 40},
    "engine": {"kernels": 85, "loops": 35, "overlap": 15, "hydra": 30, "steps": 60, "endurance": 20, "transformers": 35},
    "profile": {"profile-plain": 55, "profile-tree": 45},
    "training": {"fused": 15, "backbone": 50, "medusa1": 50, "peer": 45, "peer-transformers": 45, "medusa2": 50},
    "distill": {"backbone": 50, "distill": 75, "transformers-batch": 40},
    "texts": {"wider-heads": 5, "train-tiny": 45, "choose-tree": 30, "bench": 30},
    "layers": {"layers": 60},
    "sanitizers": {"memcheck": 330, "racecheck": 120, "synccheck": 90},
}
ON_REQUEST = ("sanitizers",)
BESIDE_PARTS = 40  # seconds to unpack the program, to look at the machine, and to remove what was written
ENDING = 0.03  # of the whole time
NEEDS = {"medusa1": "backbone", "medusa2": "backbone", "distill": "backbone", "train-tiny": "wider-heads", "choose-tree": "train-tiny", "bench": "choose-tree"}
NO_COUNTERS = "ncu needs permission to read counters (ERR_NVGPUCTRPERM: run as root); in gVisor it cannot: take a machine with another runtime"
NO_SANITIZER = "compute-sanitizer does not start in gVisor: take a machine with another runtime; else its message names the kernel and the address"
# What to do after a part that failed.
AFTER_FAILURE = {
    "versions": "install what the message names; nothing else can run before",
    "mask": "torch could not be asked about its attention: compare torch and driver versions with docs/gpu.md",
    "operators": "its message names what libtorch or a kernel computes otherwise here: nothing that is trained or distilled with it is right",
    "overlap": "a kernel reads before await_inputs what the one before it writes: its texts show from which step on",
    "brief": "run the stage sanitizers: it names the kernel and the address",
    "kernels": "run the stage sanitizers, then the kernel with the largest distance alone",
    "fused": "the operation with the largest distance names the kernel: nothing that is trained with it is right",
    "layers": "its message names the devices: train with one (no backbone.device_map) until that is right",
    "loops": "decode with --engine tch: if that is right, one of the kernels is wrong",
    "profile-plain": NO_COUNTERS,
    "profile-tree": NO_COUNTERS,
    "medusa1": "lower micro_batch_size in scripts/gpu/trained.py, or take a GPU with 80 GB",
    **dict.fromkeys(sanitizers.TOOLS, NO_SANITIZER),
}


@dataclasses.dataclass
class Check:
    """What the stages of one command share."""

    program: pathlib.Path
    scratch: pathlib.Path
    out: pathlib.Path
    machine: dict
    # When the command started, for the names of its files.
    started: datetime.datetime
    # Seconds for each second of a part's limit.
    share: float
    # When the present part must end.
    deadline: float
    # Whether an earlier run left timings of products, which are not taken again.
    has_old_timings: bool


def check(names, programs, out, seconds, started):
    """Runs the stages in order, in `seconds` from `started` on. Raises Trouble at the end if a part failed."""
    began = datetime.datetime.now()
    parts = seconds_of(names or [name for name in STAGES if name not in ON_REQUEST])
    program = carried.unpacked(programs)
    carried.link_libtorch()
    machine = doctor(program)
    of_parts = sum(sum(most.values()) for most in parts.values())
    left = (seconds or of_parts + BESIDE_PARTS) * (1 - ENDING) - (time.monotonic() - started)
    check_writable(out)
    failed = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        of = Check(program, pathlib.Path(scratch), out, machine, began, left / of_parts, time.monotonic(), (CACHE / "cuda").exists())
        for name, most in parts.items():
            stage_failed, stuck = run_stage(name, most, of)
            failed += stage_failed
            if stuck:
                break
    if failed:
        raise Trouble(f"failed: {', '.join(failed)}; the results are kept in {out}")


def seconds_of(names):
    """The seconds of each part of each stage. What an earlier stage does is not done again."""
    parts, seen = {}, set()
    for name in names:
        if name not in parts:
            parts[name] = {part: 0 if part in seen else most for part, most in STAGES[name].items()}
            seen |= STAGES[name].keys()
    return parts


def check_writable(out):
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise Trouble(f"--out {out} cannot be written to: {error}") from error


def doctor(program):
    """What the program sees of the machine."""
    doctor = run([program, "doctor", "--json"], 60)
    if doctor["failed"] or not doctor["lines"]:
        raise Trouble(f"{program.name} doctor does not start: {doctor['failed'] or 'it says nothing'}")
    machine = doctor["lines"][0]
    if not machine["engine"]["cuda"]:
        raise Trouble(f"no GPU can be checked here: {machine['engine']['reason']}")
    return machine


def run_stage(name, most, of):
    """Runs a stage's parts, keeps its results after each and prints its table. Returns the parts that failed, and whether one of them
    could not be killed: it keeps the GPU busy, so nothing else is run."""
    began = time.monotonic()
    results = {"date": of.started.date().isoformat(), "time": of.started.strftime("%H%M%S"), "stage": name, "command": " ".join(sys.argv), "environment": environment(), "has_old_timings": of.has_old_timings, "doctor": of.machine, "parts": {}}
    stuck = False
    for part, seconds in most.items():
        of.deadline += seconds * of.share
        say(f"{name}: {part}")
        result = attempt(part, of, of.deadline - time.monotonic(), results["parts"])
        results["parts"][part] = result
        results["seconds"] = round(time.monotonic() - began, 1)
        keep(results, of.out)
        stuck = result.get("stuck", False)
        if stuck:
            break
    print(tables.of(results), flush=True)
    failed = [part for part, result in results["parts"].items() if result["failed"]]
    for part in failed:
        say(f"{part} failed; {AFTER_FAILURE.get(part, 'its message is in the table above')}")
    return failed, stuck


def environment():
    return {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}


def attempt(part, of, seconds, before):
    """Runs a part. An error of these scripts is the part's, too: the others go on."""
    try:
        return run_part(part, of, seconds, before)
    except Exception as error:
        return {"lines": [], "failed": f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}", "seconds": 0}


def run_part(part, of, seconds, before):
    """Returns the part's JSON lines, and why it failed or was skipped, if it did."""
    if part == "backbone" and (of.scratch / "backbone").is_dir():
        return {"lines": [], "failed": None, "seconds": 0}
    needed = before.get(NEEDS.get(part))
    if needed and (needed["failed"] or needed.get("skipped")):
        return skipped(f"{NEEDS[part]} was not done")
    if seconds < 0.5:
        return skipped("no time is left")
    if part in peers.PARTS:
        return run_inside(part, of, seconds)
    if part in sanitizers.TOOLS:
        return sanitizers.check(part, of.program, seconds)
    if part in profiler.PARTS:
        return profiler.measure(part, of.program, seconds)
    if part in trained.PARTS:
        return trained.PARTS[part](of.program, of.scratch, seconds)
    return run([of.program, "gpu-check", part], seconds)


def run_inside(part, of, seconds):
    """A part in Python, in a process of its own."""
    with PeakMemory() as peak:
        told = run([sys.executable, carried.ROOT / "scripts/gpu_check", "--inside", part, "--folder", of.scratch, "--programs", of.program.parent], seconds)
    for line in told["lines"]:
        if "memory_bytes" in line:
            line["device_memory_bytes"] = peak.bytes
    return told


def keep(results, out):
    """Writes both files atomically, the numbers first. What cannot be written is printed at the end of the stage."""
    gpu = re.sub(r"[^a-z0-9]+", "-", tables.gpu_name(results["doctor"]).lower()).strip("-")
    for suffix, text in ((".json", lambda of: json.dumps(of, indent=1) + "\n"), (".md", tables.of)):
        path = out / f"{gpu}-{results['date']}-{results['time']}-{results['stage']}{suffix}"
        try:
            partial = path.with_suffix(suffix + ".partial")
            partial.write_text(without_folders(text(results)))
            partial.rename(path)
        except OSError as error:
            say(f"{path} was not written: {error}")


def without_folders(text):
    """Absolute paths lose their folders: results are published, and where a machine keeps its files is nobody's concern."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", text)


def say(what):
    print(f"== {what}", file=sys.stderr, flush=True)
