"""The brief check under compute-sanitizer."""

import shutil

from processes import run, skipped

TOOLS = ("memcheck", "racecheck", "synccheck")


def check(tool, program, seconds):
    if not shutil.which("compute-sanitizer"):
        return skipped("there is no compute-sanitizer")
    # libtorch requests more memory than there is, so that it releases its cache: that call is meant to fail.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    # memcheck cannot see the borders between tensors inside one block of libtorch's caching allocator.
    blocks = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    # racecheck reports cuBLAS's kernels, which order their accesses by means that it does not see.
    others = ["--kernel-name-exclude", "kns=nvjet"] if tool == "racecheck" else []
    return run(["compute-sanitizer", "--tool", tool, *quiet, *others, "--error-exitcode", "9", program, "gpu-check", "brief"], seconds, **blocks)
