#!/usr/bin/env python3
"""Writes 1,000 random conversations as `datasets` writes them, for tests/containers.rs: FOLDER/plain, whose values have one type
each, and FOLDER/mixed, whose contents are strings or lists of parts, and whose arguments have any type. In both, rows.jsonl is the
original, which Python's json module writes.

    scripts/make_containers.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import datasets

WORDS = ["rain", " in", " Oslo", "\n", "é", "🙂", '"quoted"', " {a: 1}", "[b]", "\t", " null", "\\n"]


def words(draw):
    return "".join(draw.choices(WORDS, k=draw.randint(1, 6))) + "."


def arguments(draw, full, mixed):
    if mixed:  # `map` writes numbers with ten digits
        value = draw.choice([1, "two", [True, None], {"deep": 1.5}, words(draw)])
        return {"value": value} if draw.random() < 0.8 else {}
    values = {"city": words(draw), "days": draw.randint(0, 9), "share": draw.randint(0, 99) / 4, "sure": draw.random() < 0.5}
    return {key: value for key, value in values.items() if full or draw.random() < 0.5}


def content(draw, mixed):
    if mixed and draw.random() < 0.3:
        return [{"type": "text", "text": words(draw)} for _ in range(draw.randint(1, 3))]
    return words(draw)


def conversation(draw, at, mixed):
    """The first one has every key: columns have keys in one order."""
    full, turns = at == 0, []
    if full or draw.random() < 0.25:
        turns.append({"role": "system", "content": words(draw)})
    for turn in range(draw.randint(1, 3)):
        turns.append({"role": "user", "content": content(draw, mixed)})
        if full or draw.random() < 0.5:
            call_id = f"call-{at}-{turn}"
            call = {"role": "assistant"}
            if full or draw.random() < 0.7:
                call["content"] = words(draw) if full or draw.random() < 0.5 else None
            if full or draw.random() < 0.5:
                call["reasoning_content"] = words(draw)
            function = {"name": "weather", "arguments": arguments(draw, full, mixed)}
            call["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            turns += [call, {"role": "tool", "content": words(draw), "tool_call_id": call_id}]
        answer = {"role": "assistant", "content": words(draw)}
        if draw.random() < 0.5:
            answer["reasoning_content"] = words(draw)
        turns.append(answer)
    row = {"id": at, "messages": turns}
    if full or draw.random() < 0.3:
        properties = {"city": {"type": "string", "description": words(draw)}, "days": {"type": "integer"}}
        if not full and draw.random() < 0.5:
            del properties["days"]
        parameters = {"type": "object", "properties": properties}
        row["tools"] = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    if full or draw.random() < 0.2:
        row["chat_template_kwargs"] = {"shout": words(draw)}
    if full or draw.random() < 0.2:
        row["system"] = words(draw)
    return row


def write(folder, mixed):
    folder.mkdir()
    draw = random.Random(7)
    rows = [conversation(draw, at, mixed) for at in range(1000)]
    original = folder / "rows.jsonl"
    original.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    loaded = datasets.load_dataset("json", data_files=str(original), cache_dir=str(folder.parent / "cache"))["train"]
    loaded.to_parquet(folder / "loaded.parquet")
    loaded.save_to_disk(folder / "loaded")
    loaded.to_json(folder / "loaded.jsonl", force_ascii=False)
    loaded.map(lambda row: row).to_parquet(folder / "mapped.parquet")
    if not mixed:
        listed = datasets.Dataset.from_list(rows)
        listed.to_parquet(folder / "listed.parquet")
        listed.save_to_disk(folder / "listed")
        listed.to_json(folder / "listed.jsonl")
    # What is no text has to be JSON: `to_csv` writes lists as Python shows them.
    columns = ["messages", "tools", "chat_template_kwargs"]
    cells = {key: [json.dumps(row[key]) if key in row else None for row in rows] for key in columns}
    cells["system"] = [row.get("system") for row in rows]
    datasets.Dataset.from_dict(cells).to_csv(folder / "rows.csv")


def main():
    datasets.disable_progress_bars()
    datasets.disable_caching()
    folder = Path(sys.argv[1])
    write(folder / "plain", mixed=False)
    write(folder / "mixed", mixed=True)


if __name__ == "__main__":
    main()
