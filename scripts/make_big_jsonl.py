"""Writes a big data set of conversations, to check that training on it takes no more memory than on a small one.

    python3 scripts/make_big_jsonl.py OUT.jsonl BYTES

ShareGPT's format, seeded, one conversation per line, about BYTES bytes in all. Words and turns come from data/tiny/train.jsonl; the
numbers of turns are log-normal, like ShareGPT's. Needs only Python.
"""

import json
import random
import sys
from pathlib import Path

SEED = 7
TURNS = Path(__file__).resolve().parent.parent / "data" / "tiny" / "train.jsonl"


def answers():
    """The turns of each text of the tiny set without role tokens, as (question, answer)."""
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
