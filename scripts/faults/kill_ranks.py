#!/usr/bin/env python3
"""Kills one process of a run with several at random moments, and resumes it each time.

    scripts/faults/kill_ranks.py RECIPE.toml --nproc 3 --kills 20 --out /tmp/killed [--numbers 1,2,4] [--program target/release/medusa-train]

After each `kill -9` the others must end within 30 s, each with one error. The heads at the end must be those of a run that nobody killed: bitwise,
or within 1e-4 if the run was resumed with other numbers of processes (--numbers). Needs no package. Exits with 1 if something is wrong.
"""

import argparse
import array
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import time

LONGEST_END = 30.0  # seconds from the kill to the end of all processes
TOLERANCE = 1e-4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--numbers", help="resume with these numbers of processes in turn")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--program", default="target/release/medusa-train")
    return parser.parse_args()


def recipe_for(folder, recipe, out):
    """The recipe with its own output folder."""
    text, found = re.subn(r'^output_dir\s*=.*$', f'output_dir = "{folder}"', recipe.read_text(), flags=re.MULTILINE)
    if found != 1:
        sys.exit(f"{recipe}: expected one line output_dir")
    path = out / f"{folder.name}.toml"
    path.write_text(text)
    return path


def start(args, recipe, nproc, errors):
    command = [args.program, str(recipe), "--resume", "--nproc", str(nproc)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)


def workers(parent):
    """The processes that `parent` started, by rank."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_child = folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1] == str(parent)
            variables = folder.joinpath("environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        rank = next((int(value[5:]) for value in variables if value.startswith(b"RANK=")), None)
        if is_child and rank is not None:
            found[rank] = int(folder.name)
    return found


def kill_one(args, recipe, nproc, out, kills):
    """Kills a rank after a random time; returns False if the run ended before."""
    log = out / f"kill-{kills:02}.txt"
    with log.open("w") as errors:
        parent = start(args, recipe, nproc, errors)
        moment = random.uniform(0.1, args.longest)
        try:
            parent.wait(moment)
            return False
        except subprocess.TimeoutExpired:
            pass
        ranks = workers(parent.pid)
        if len(ranks) < nproc:  # not all have started: the parent is killed in their place
            os.kill(parent.pid, signal.SIGKILL)
            victim = "--nproc"
        else:
            victim = random.choice(list(ranks))
            os.kill(ranks[victim], signal.SIGKILL)
        began = time.monotonic()
        status = parent.wait(LONGEST_END + 30)
        took = time.monotonic() - began
        while any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks.values()) and took < LONGEST_END:
            time.sleep(0.1)
            took = time.monotonic() - began
    told = [line for line in log.read_text().splitlines() if line.startswith("error: ") or "did not end" in line]
    print(f"kill {kills}: rank {victim} of {nproc} after {moment:.2f} s; all ended after {took:.2f} s, status {status}; {len(told)} lines of the others", flush=True)
    expected = 0 if victim == "--nproc" else nproc - 1
    if took >= LONGEST_END or status == 0 or (victim != "--nproc" and len(told) != expected):
        sys.exit(f"wrong: see {log}:\n{log.read_text()[-3000:]}")
    return True


def tensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, of in header.items():
        if name != "__metadata__" and of["dtype"] == "F32":
            first, last = of["data_offsets"]
            numbers = array.array("f")
            numbers.frombytes(data[8 + length + first : 8 + length + last])
            yield name, numbers


def difference(a, b):
    """The largest difference between two files of heads."""
    others = dict(tensors(b))
    return max(abs(x - y) for name, numbers in tensors(a) for x, y in zip(numbers, others[name], strict=True))


def main():
    args = arguments()
    random.seed(args.seed)
    args.out.mkdir(parents=True)
    whole, killed = args.out / "whole", args.out / "killed"
    numbers = [int(number) for number in args.numbers.split(",")] if args.numbers else [args.nproc]
    began = time.monotonic()
    with (args.out / "whole.txt").open("w") as errors:
        if start(args, recipe_for(whole, args.recipe, args.out), args.nproc, errors).wait() != 0:
            sys.exit(f"the run that nobody kills failed: see {args.out}/whole.txt")
    args.longest = max(0.5, (time.monotonic() - began) * 3 / args.kills)
    recipe, kills, starts = recipe_for(killed, args.recipe, args.out), 0, 0
    while kills < args.kills:
        nproc = numbers[starts % len(numbers)]
        starts += 1
        if kill_one(args, recipe, nproc, args.out, kills + 1) if nproc > 1 else kill_alone(args, recipe, args.out):
            kills += nproc > 1
        elif (killed / "final").exists():
            print(f"finished after {kills} kills: killing goes on in a new run", flush=True)
            compare(whole, killed, numbers)
            killed.rename(args.out / f"finished-after-{kills}")
    with (args.out / "last.txt").open("w") as errors:
        if start(args, recipe, numbers[starts % len(numbers)], errors).wait() != 0:
            sys.exit(f"the last resumed run failed: see {args.out}/last.txt")
    compare(whole, killed, numbers)
    print(f"{kills} kills, {starts} starts: nothing lost")


def kill_alone(args, recipe, out):
    """A run of one process is killed as a whole."""
    with (out / "alone.txt").open("a") as errors:
        parent = start(args, recipe, 1, errors)
        try:
            parent.wait(random.uniform(0.1, args.longest))
            return False
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
            return True


def compare(whole, killed, numbers):
    heads = [folder / "final" / "heads.safetensors" for folder in (whole, killed)]
    if len(set(numbers)) == 1:
        if heads[0].read_bytes() != heads[1].read_bytes():
            sys.exit(f"wrong: {heads[0]} and {heads[1]} differ by up to {difference(*heads)}")
        print("the heads are bitwise those of the run that nobody killed", flush=True)
    else:
        most = difference(*heads)
        print(f"the heads differ by at most {most:.2e} from those of the run that nobody killed", flush=True)
        if most > TOLERANCE:
            sys.exit("wrong")


if __name__ == "__main__":
    main()
