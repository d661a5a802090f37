"""Makes data/tiny/questions.jsonl: what the user asks first in the rows of data/tiny/eval.jsonl, each question once. None of them is trained on, and none is in
data/tiny/prompts.jsonl, on which the calibrated heads are then measured.

    python3 scripts/make_tiny_questions.py
"""

import json
import pathlib
import re

TINY = pathlib.Path(__file__).resolve().parent.parent / "data" / "tiny"


def rows(name):
    return [json.loads(line) for line in (TINY / name).read_text(encoding="utf-8").splitlines()]


def asked(row):
    return re.match(r"<\|user\|>(.*?)<\|end\|>", row["text"], re.DOTALL)[1]


measured = {row["messages"][0]["content"] for row in rows("prompts.jsonl")}
categories = {asked(row): row["category"] for row in rows("eval.jsonl") if asked(row) not in measured}
with (TINY / "questions.jsonl").open("w", encoding="utf-8") as out:
    for question, category in categories.items():
        row = {"messages": [{"role": "user", "content": question}], "category": category}
        print(json.dumps(row, ensure_ascii=False), file=out)
