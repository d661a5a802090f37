#!/usr/bin/env python3
"""Compares the tokens per step that `medusa tree` expects with those of other prompts.

Calibrates on 6, 6 other, 40 and 100 prompts of a file, searches trees of 4, 16 and 63 nodes, and replays each on the backbone's answers to the
file's last half. Replaying is decoding: tests/tree_prediction.rs shows that both take the same steps. Fails if more than one case in
20 is neither within 3 % nor within the interval.

    scripts/oracles/check_tree_prediction.py --backbone data/tiny/backbone --heads checkpoints/tiny_hydra_distill/final --prompts prompts.jsonl

The prompts are lines as for `medusa calibrate --prompts`, at least 200, none of which was trained on. Without --prompts they are the questions of
data/tiny/eval.jsonl.
"""
import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

SETS = {"6": (0, 6), "6 others": (6, 12), "40": (12, 52), "100": (0, 100)}
NODES = [4, 16, 63]
ANSWER = "<|assistant|>"


def tiny_questions():
    lines = Path("data/tiny/eval.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["text"].split(ANSWER)[0] + ANSWER for line in lines]
    return [json.dumps({"prompt": question}) for question in questions]


def tokens_per_step(choices, runs):
    """Replays texts with a static tree: a step commits its root and the right path that the tree has."""
    tree = set(map(tuple, choices))
    tokens, steps = 0, 0
    for run in runs:
        tokens += len(run)
        at = 0
        while at < len(run):
            path = ()
            for rank in run[at]:
                if path + (rank,) not in tree:
                    break
                path += (rank,)
            at += 1 + len(path)
            steps += 1
    return tokens / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--medusa", default="target/release/medusa")
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-new-tokens", default="96")
    args = parser.parse_args()
    prompts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else tiny_questions()
    if len(prompts) < 200:
        sys.exit(f"expected at least 200 prompts, got {len(prompts)}")
    random.Random(1).shuffle(prompts)
    folder = Path(tempfile.mkdtemp())

    def calibrated(name, lines):
        questions, out = folder / f"{name}.jsonl", folder / f"{name}.json"
        questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [args.medusa, "calibrate", "--backbone", args.backbone, "--heads", args.heads, "--dtype", "float32"]
        command += ["--prompts", questions, "--max-new-tokens", args.max_new_tokens, "--out", out, "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return out

    others = json.loads(calibrated("others", prompts[len(prompts) // 2 :]).read_text())["joint"]["runs"]
    outside, cases = 0, 0
    print(f"{'prompts':>9} {'nodes':>6} {'expected':>9} {'interval':>13} {'replayed':>9} {'error':>8}")
    for name, (begin, end) in SETS.items():
        calibration = calibrated(name.replace(" ", "_"), prompts[begin:end])
        for nodes in NODES:
            tree = folder / "tree.json"
            command = [args.medusa, "tree", "--calibration", calibration, "--nodes", str(nodes), "--out", tree, "--quiet"]
            subprocess.run(command, check=True)
            found = json.loads(tree.read_text())
            expected, (low, high) = found["expected_tokens_per_step"], found["expected_interval"]
            replayed = tokens_per_step(found["choices"], others)
            error = expected / replayed - 1
            cases += 1
            is_outside = abs(error) > 0.03 and not low <= replayed <= high
            outside += is_outside
            interval = f"{low:.2f} to {high:.2f}"
            mark = "  <- outside" if is_outside else ""
            print(f"{name:>9} {nodes:>6} {expected:>9.2f} {interval:>13} {replayed:>9.2f} {error:>+8.1%}{mark}")
    print(f"{cases - outside} of {cases} within 3 % or in the interval")
    sys.exit(outside > math.ceil(cases / 20))


if __name__ == "__main__":
    main()
