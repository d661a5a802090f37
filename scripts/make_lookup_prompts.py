#!/usr/bin/env python3
"""Writes prompts whose answers repeat the prompt, for `medusa bench --drafter ngram`.

    python3 scripts/make_lookup_prompts.py DATA OUT

DATA has stories_eval.jsonl (`input_ids` of stories260K), sharegpt_toolcall_300.json (ShareGPT, with tool calls) and mt_bench.jsonl.
OUT/retell.jsonl: a story, a newline, and the story's first words again; token ids, for stories260K.
OUT/code.jsonl: JSON of tool calls or code of questions, a newline, and its first characters again; raw text, for any backbone.
"""

import json
import sys
from pathlib import Path

COUNT = 24
STORY_TOKENS = 120
EOS, NEW_LINE = 2, 13  # of stories260K


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def retold(ids):
    ids = [token for token in ids if token != EOS][:STORY_TOKENS]
    return {"prompt_ids": ids + [NEW_LINE] + ids[1:12], "category": "retell"}


def repeated(text, category):
    return {"prompt": text[:220] + "\n" + text[:10], "category": category}


def code(data):
    questions = [turn for row in rows(data / "mt_bench.jsonl") for turn in row["turns"]]
    blocks = [question.split("```")[1].strip("\n") for question in questions if "```" in question]
    conversations = json.loads((data / "sharegpt_toolcall_300.json").read_text())
    turns = [turn for row in conversations for turn in row["conversations"]]
    calls = [turn["value"] for turn in turns if turn["from"] in ("observation", "function_call")]
    calls = [call for call in calls if 60 < len(call) < 160]
    return [repeated(block, "code") for block in blocks] + [repeated(call, "json") for call in calls]


def write(path, prompts):
    path.write_text("".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts))
    print(f"{path}: {len(prompts)} prompts")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    data, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    write(out / "retell.jsonl", [retold(row["input_ids"]) for row in rows(data / "stories_eval.jsonl")[:COUNT]])
    write(out / "code.jsonl", code(data)[:COUNT])


if __name__ == "__main__":
    main()
