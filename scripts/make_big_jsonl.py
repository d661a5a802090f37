#!/usr/bin/env python3
"""Writes a big data set of conversations, to see that a run on it takes no more memory than one on a small set.

    python3 scripts/make_big_jsonl.py OUT.jsonl BYTES

ShareGPT's form, seeded, one conversation a line, about BYTES bytes in all; words and turns are those of data/tiny/train.jsonl,
lengths are log-normal, as ShareGPT's are. Needs nothing but Python.
"""

import json
import random
import sys
from pathlib import Path

SEED = 7
TURNS = Path(__file__).resolve().parent.parent / "data" / "tiny" / "train.jsonl"


def answers():
    """Each text of the tiny set without its marks, as (question, answer)."""
    with TURNS.open(encoding="utf-8") as lines:
        for line in lines:
            parts = [part.split("|>", 1)[-1] for part in json.loads(line)["text"].split("<|end|>")]
            yield from zip(parts[::2], parts[1::2])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    out, size = Path(sys.argv[1]), int(float(sys.argv[2]))
    rng, known = random.Random(SEED), list(answers())
    written = row = 0
    with out.open("w", encoding="utf-8") as file:
        while written < size:
            conversation = []
            for _ in range(max(1, min(64, round(rng.lognormvariate(1.2, 0.9))))):
                question, answer = rng.choice(known)
                conversation += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            line = json.dumps({"id": row, "conversations": conversation}, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())
            row += 1
    print(f"{row} conversations, {written} bytes in {out}")


if __name__ == "__main__":
    main()
