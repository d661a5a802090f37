#!/usr/bin/env python3
"""Measures tokens per second of Python's `tokenizers` on the conversations of a data set, for comparison with `medusa-train --check`.

    python3 scripts/peers/peer_tokenizers.py BACKBONE CONVERSATIONS.jsonl

Renders every conversation (ShareGPT's format) with the backbone's chat template, then times only `encode_batch` on all cores; medusa-train's
figure also includes reading, rendering and masks. Needs tokenizers and jinja2.
"""

import json
import sys
import time
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

ROLES = {"human": "user", "gpt": "assistant"}
BATCH = 1000


def rendered(backbone, conversations):
    """The text of each conversation."""
    config = json.loads((backbone / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {name: config[name] for name in ("bos_token", "eos_token")}
    template = jinja2.Environment().from_string(config["chat_template"])
    with conversations.open(encoding="utf-8") as lines:
        for line in lines:
            turns = json.loads(line)["conversations"]
            messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
            yield template.render(messages=messages, **tokens)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    backbone = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(backbone / "tokenizer.json"))
    texts = list(rendered(backbone, Path(sys.argv[2])))
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(texts), BATCH):
        encodings = tokenizer.encode_batch(texts[first : first + BATCH], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in encodings)
    seconds = time.perf_counter() - start
    print(f"{len(texts)} conversations, {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
