"""The folder that travels to the machine with the GPU: the program (compressed), these scripts, and the embedded model."""

import gzip
import importlib.util
import pathlib
import re
import shutil

from processes import Trouble

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = "gpu_check"  # examples/gpu_check: the checks, and every command of medusa
PROGRAMS = ROOT / "target/release/examples"
MOST_BYTES = 40 << 20
FILES = ("scripts/gpu_check", "scripts/gpu", "data/tiny/backbone", "data/tiny/train.jsonl", "data/tiny/eval.jsonl", "data/tiny/prompts.jsonl", "recipes/tiny_stage1.toml")


def prepare(folder, programs):
    """Creates the folder to carry; nothing in it has to be built."""
    if not (programs / PROGRAM).is_file():
        raise Trouble(f"{programs} has no {PROGRAM}; build it first: cargo build --release --locked --example gpu_check")
    if folder.exists():
        raise Trouble(f"{folder} is there already; remove it, or give another folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in FILES:
        copy(ROOT / name, partial / name)
    packed = partial / PROGRAMS.relative_to(ROOT) / f"{PROGRAM}.gz"
    packed.parent.mkdir(parents=True)
    with (programs / PROGRAM).open("rb") as program, gzip.open(packed, "wb", compresslevel=6) as out:
        shutil.copyfileobj(program, out)
    size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise Trouble(f"{partial} has {size / 2**20:.0f} MiB, expected at most {MOST_BYTES >> 20}; was the program built with --release?")
    partial.rename(folder)
    print(f"{folder}: {size / 2**20:.0f} MiB; on the machine with the GPU: {folder.name}/scripts/gpu_check smoke engine profile")


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)


def unpacked(programs):
    """The program, decompressed on the first call."""
    program, packed = programs / PROGRAM, programs / f"{PROGRAM}.gz"
    if not program.is_file() and packed.is_file():
        partial = program.with_suffix(".partial")
        with gzip.open(packed) as data, partial.open("wb") as out:
            shutil.copyfileobj(data, out)
        partial.chmod(0o755)
        partial.rename(program)
    if not program.is_file():
        raise Trouble(f"{programs} has no {PROGRAM}; see scripts/gpu_check --help for how to carry it")
    return program


def link_libtorch():
    """The program looks for libtorch in .libtorch next to target/; links a pip-installed torch there."""
    link = ROOT / ".libtorch"
    if link.exists():
        return
    found = importlib.util.find_spec("torch")  # importing it takes seconds
    if not found or not found.origin:
        raise Trouble("this Python has no torch; install torch 2.11.0 (CUDA 13), or run with the Python that has it")
    package = pathlib.Path(found.origin).parent
    version = re.search(r"__version__ = '([^']*)'", (package / "version.py").read_text())
    if not version or not version[1].startswith("2.11.0"):
        raise Trouble(f"torch {version and version[1]} is installed in {package}; the programs are built for 2.11.0")
    if link.is_symlink():
        link.unlink()
    link.symlink_to(package.parent)
