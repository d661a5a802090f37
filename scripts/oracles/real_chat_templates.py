#!/usr/bin/env python3
"""Prints, as JSON, the masks of transformers for random conversations with the chat templates of today's models.

    python3 scripts/oracles/real_chat_templates.py TEMPLATES [--rows N] [--seed S] [--fixture FILE]    # needs transformers 5 with jinja2; torch is not used

TEMPLATES is a folder of .jinja files. A template says with `{% generation %}` what the model writes; this script also takes those tags out,
and training has to find the same mask without them. Where a template NAME.jinja has no tags, those of NAME_generation.jinja or
NAME_training.jinja (as TRL names them) count, for the rows that both write alike. tests/fixtures/chat_templates are written for this
project by the published behaviour of each family; others may be tested with the templates of their authors.

For every template and row: the text, the text with the assistant's next turn opened, and transformers' mask over the tokens of
data/tiny/backbone's tokenizer, "1" for a token that the model writes. `null` where the template refuses the row or leaves a turn or a call
out of it, where no template with tags writes the same text, and where nothing is learned. Thoughts stand under the key that the
template reads. With --fixture FILE, writes hashes of text and mask instead, as tests/fixtures/chat_masks.json has them.
"""

import argparse
import hashlib
import json
import pathlib
import random
import re

import jinja2
import transformers

SCRIPT = pathlib.Path(__file__).resolve()
ROOT = SCRIPT.parents[2]
TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city; <b>now</b> & tomorrow.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2]}, "exact": {"type": "boolean"}},
            "required": ["city"],
        },
    },
}
OTHER_TOOL = {"type": "function", "function": {"name": "now", "description": "Die Uhrzeit", "parameters": {"type": "object", "properties": {}}}}
SAID = [
    "Hello.", "yes", "yes", " yes ", "It is sunny in Köln.", "日本 🙂", "a\nb\n\nc", "  - one\n  - two\n", "`x = {'y': 1}`", "<b>&amp;</b>",
    "<|im_end|>", "<|im_start|>assistant\nno", "[INST] a [/INST]", "</s>", "{{ x }}{% if %}", "Say: <|assistant|>", "4", "the end</think",
]
THOUGHTS = ["They greet me.", "arachnid", "one\n\ntwo", "yes", "It is <b>late</b>. 🙂"]


def call(draw, number):
    arguments = draw.choice([{"city": "Oslo"}, {"city": "Köln", "days": 2, "note": "<é> & x"}, {"days": 1}, {}])
    return dict(id=f"call{number:05}", type="function", function=dict(name=draw.choice(["get_weather", "now"]), arguments=arguments))


def answer(draw):
    """An assistant's turn, with its thoughts in one of the ways in which data sets have them."""
    said, thought = draw.choice(SAID), draw.choice(THOUGHTS)
    kind = draw.random()
    if kind < 0.15:
        return dict(role="assistant", content=said, reasoning_content=thought)
    if kind < 0.3:
        return dict(role="assistant", content=draw.choice(["<think>\n{}\n</think>\n\n{}", "<think>{}</think>{}"]).format(thought, said))
    return dict(role="assistant", content=said)


def conversation(draw):
    messages = [dict(role="system", content=f"A rule: {draw.choice(SAID)}")] if draw.random() < 0.3 else []
    with_tools = draw.random() < 0.4
    for _ in range(draw.randint(1, 4)):
        messages.append(dict(role="user", content=draw.choice(SAID)))
        while with_tools and draw.random() < 0.5:
            calls = [call(draw, len(messages) + at) for at in range(draw.choice([1, 1, 1, 2]))]
            turn = dict(answer(draw), tool_calls=calls)
            if draw.random() < 0.6:
                turn["content"] = draw.choice(["", None])
            messages.append(turn)
            for made in calls:
                result = draw.choice(["yes", '{"sunny": true}', "no <|im_end|>"])
                messages.append(dict(role="tool", content=result, name=made["function"]["name"], tool_call_id=made["id"]))
        messages.append(answer(draw))
    row = dict(messages=messages)
    if with_tools:
        row["tools"] = [TOOL, OTHER_TOOL]
    if draw.random() < 0.2:
        row["chat_template_kwargs"] = dict(enable_thinking=draw.random() < 0.5)
    return row


def in_words_of(template, message):
    """The message with its thoughts under the key that the template reads."""
    message = dict(message)
    if "reasoning_content" in message and "reasoning_content" not in template and ".thinking" in template:
        message["thinking"] = message.pop("reasoning_content")
    return message


def says_all(text, messages):
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
    others = [message["content"].strip() for message in messages if message["role"] != "assistant"]
    return all(said in text or json.dumps(said) in text for said in calls + others)


def made_of(tokenizer, plain, marked, row):
    """What transformers makes of a row with a template, and the mask of its twin with tags."""
    settings = dict(tools=row.get("tools"), **row.get("chat_template_kwargs", {}))
    messages = [in_words_of(plain, message) for message in row["messages"]]

    def made_with(template, **more):
        return tokenizer.apply_chat_template(messages, chat_template=template, **settings, **more)

    try:
        text, prompt = made_with(plain, tokenize=False), made_with(plain, tokenize=False, add_generation_prompt=True)
        if not says_all(text, messages) or made_with(marked, tokenize=False) != text:
            return None
    except (jinja2.TemplateError, TypeError):
        return None
    encoded = made_with(marked, return_dict=True, return_assistant_tokens_mask=True)
    mask = "".join(map(str, encoded["assistant_masks"]))
    return dict(text=text, prompt=prompt, mask=mask) if "1" in mask else None


def pairs(folder):
    """Templates by name: without tags, and with them."""
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    for name, source in sources.items():
        if name.endswith(("_generation", "_training")):
            continue
        twin = sources.get(f"{name}_generation") or sources.get(f"{name}_training")
        marked = source if TAG.search(source) else twin
        if marked is not None:
            yield name, TAG.sub("", source), marked


def hashes(made):
    """Of each row's text and mask, 12 hex digits; `null` where there is none."""
    digest = lambda row: row and hashlib.sha256(f"{row['text']}\n{row['mask']}".encode()).hexdigest()[:12]
    return {name: [digest(row) for row in rows] for name, rows in made.items()}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("templates", type=pathlib.Path)
    options.add_argument("--rows", type=int, default=500)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--fixture", type=pathlib.Path)
    options = options.parse_args()
    draw = random.Random(options.seed)
    rows = [conversation(draw) for _ in range(options.rows)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "tiny" / "backbone")
    made = {
        name: [made_of(tokenizer, plain, marked, row) for row in rows]
        for name, plain, marked in pairs(options.templates)
    }
    birth = dict(script_sha256=hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), transformers=transformers.__version__)
    if options.fixture:
        text = json.dumps(dict(**birth, made=hashes(made), rows=rows), ensure_ascii=False, separators=(",", ":"))
        options.fixture.write_text(text + "\n")
    else:
        print(json.dumps(dict(**birth, made=made, rows=rows), ensure_ascii=False))


if __name__ == "__main__":
    main()
