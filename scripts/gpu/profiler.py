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
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join((TIME, READ, WRITTEN)), "--csv", program, "gpu-check", part]
    told = run(command, seconds)
    steps = sum(line.get("steps", 0) for line in told["lines"])
    told["lines"] += [] if told["failed"] else by_kernel(told["output"], part, steps)
    return told


def by_kernel(text, part, steps):
    """The longest first, from ncu's CSV (a row a launch and metric; lines of ncu's own begin with ==)."""
    table = [line for line in text.splitlines() if line.startswith('"')]
    kernels = {}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        of = kernels.setdefault(row["Kernel Name"].split("(")[0], {TIME: 0.0, READ: 0.0, WRITTEN: 0.0, "launches": 0})
        of[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
        of["launches"] += row["Metric Name"] == TIME
    total = sum(of[TIME] for of in kernels.values())
    lines = []
    for name, of in sorted(kernels.items(), key=lambda pair: -pair[1][TIME]):
        moved = of[READ] + of[WRITTEN]
        lines.append({"check": "profile", "of": part, "kernel": name, "launches_per_step": of["launches"] / max(steps, 1), "us_per_step": of[TIME] * 1e6 / max(steps, 1), "share": of[TIME] / total if total else 0, "gigabytes_per_second": moved / of[TIME] / 1e9 if of[TIME] else 0})
    return lines
