"""Nsight Compute over the kernels of a few decoding steps: microseconds, bytes and GB/s of each."""

import csv
import io
import shutil

from processes import run, skipped

PARTS = ("profile-plain", "profile-tree")
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
# To seconds and bytes, from the units that ncu prints.
UNITS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1, "second": 1, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def measure(part, program, seconds):
    """`gpu-check profile-*` marks the steps with cuProfilerStart and cuProfilerStop; one line a kernel's name."""
    if not shutil.which("ncu"):
        return skipped("there is no ncu (Nsight Compute)")
    # The first run times products and keeps the fastest ways: under ncu, which slows each launch, others would be chosen.
    first = run([program, "gpu-check", part], seconds)
    if first["failed"]:
        return first
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join((TIME, READ, WRITTEN)), "--csv", program, "gpu-check", part]
    told = run(command, seconds - first["seconds"])
    steps = sum(line.get("steps", 0) for line in told["lines"])
    told["lines"] += by_kernel(told["output"], part, steps)
    if not told["failed"] and not any(line.get("check") == "profile" for line in told["lines"]):
        told["failed"] = f"ncu measured no kernel: {told['output'][-500:]}"
    return told


def by_kernel(text, part, steps):
    """The longest first, from ncu's CSV (a row a launch and metric; lines of ncu's own begin with ==). A metric that ncu could not read is
    left out: kernels without a time have no line, and those without bytes no GB/s."""
    table = [row for row in text.splitlines() if row.startswith('"')]
    kernels = {}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        value = number(row)
        if value is not None:
            of = kernels.setdefault(row["Kernel Name"].split("(")[0], {})
            of.setdefault(row["Metric Name"], []).append(value)
    kernels = {name: of for name, of in kernels.items() if of.get(TIME)}
    total = sum(sum(of[TIME]) for of in kernels.values())
    return [kernel_line(name, of, part, max(steps, 1), total) for name, of in sorted(kernels.items(), key=lambda pair: -sum(pair[1][TIME]))]


def number(row):
    """In seconds or bytes; None for `n/a` and for a unit that is not known."""
    try:
        return float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
    except (ValueError, KeyError, AttributeError):
        return None


def kernel_line(name, of, part, steps, total):
    seconds = sum(of[TIME])
    is_counted = all(len(of.get(metric, ())) == len(of[TIME]) for metric in (READ, WRITTEN))
    speed = (sum(of[READ]) + sum(of[WRITTEN])) / seconds / 1e9 if is_counted and seconds else None
    return {"check": "profile", "of": part, "kernel": name, "launches_per_step": len(of[TIME]) / steps, "us_per_step": seconds * 1e6 / steps, "share": seconds / total if total else 0, "gigabytes_per_second": speed}
