#!/usr/bin/env python3
"""Prints, as JSON, what transformers makes of conversations with the chat templates of today's models.

    python3 scripts/real_chat_templates.py TEMPLATES    # needs transformers 5 with jinja2; torch is not used

TEMPLATES is a folder of .jinja files as the models' authors publish them (`chat_template` in tokenizer_config.json, or
chat_template.jinja); they are not part of this repository. tests/real_chat_templates.rs runs this script and compares.

For every template and row: the row as data files have it, the text, the text with the assistant's next turn opened, ids by
data/tiny/backbone's tokenizer and a mask, "1" for a token that is learned. `null` where the template refuses the row. A template with
`{% generation %}` has its mask from transformers. For the others an answer is learned from the generation prompt to the end of its
turn; where the template writes something in between, or earlier turns in another way once others follow, from its first character,
and calls are not learned.
"""

import json
import pathlib
import re
import sys

import jinja2
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
CALL = {"id": "abc123456", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2, "note": "<é> & x"}}}


def say(role, content, **more):
    return dict(role=role, content=content, **more)


HI = [say("user", "Hi there"), say("assistant", "Hello.")]
TALK = HI + [say("user", "  And who made you?\n"), say("assistant", "Some people who like tests. 日本")]
CALLS = [
    say("user", "What is the weather in Köln?"),
    say("assistant", "", tool_calls=[CALL]),
    say("tool", '{"sunny": true}', name="get_weather", tool_call_id="abc123456"),
    say("assistant", "It is sunny."),
]
THOUGHT = "<think>\nThey greet me.\n</think>\n\nGood evening."
ROWS = [
    dict(messages=HI),
    dict(messages=TALK),
    dict(messages=[say("system", "Be brief.")] + TALK),
    dict(messages=HI, tools=[TOOL, OTHER_TOOL]),
    dict(messages=CALLS, tools=[TOOL, OTHER_TOOL]),
    dict(messages=[say("system", "Be brief.")] + CALLS + [say("user", "Thanks!"), say("assistant", "You are welcome.")], tools=[TOOL]),
    dict(messages=CALLS),
    dict(messages=[CALLS[0], dict(CALLS[1], content=None)] + CALLS[2:], tools=[TOOL]),
    dict(messages=[say("user", "Hi"), say("assistant", THOUGHT)]),
    dict(messages=[say("user", "Hi"), say("assistant", THOUGHT), say("user", "And now?"), say("assistant", "Now I am done.")]),
    dict(messages=[say("user", "Hi"), say("assistant", "Good evening.", reasoning_content="They greet me.")]),
    dict(messages=HI, chat_template_kwargs=dict(enable_thinking=False)),
    dict(messages=TALK, chat_template_kwargs=dict(enable_thinking=True)),
]
ENDS = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>"]


def renderer(tokenizer, template, row):
    def render(messages, add_generation_prompt=False):
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tools=row.get("tools"), tokenize=False,
            add_generation_prompt=add_generation_prompt, **row.get("chat_template_kwargs", {}),
        )

    return render


def answers(render, messages, text, ends):
    """Spans of characters that are learned."""
    at_least = 0
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        said = (message["content"] or "").strip().split("</think>")[-1].strip()
        before, through = render(messages[:at], True), render(messages[: at + 1])
        turn = through[len(before):]
        if text.startswith(through) and through.startswith(before) and turn.lstrip().startswith((message["content"] or "").strip()):
            yield len(before), len(through.rstrip())
        elif said:
            start = text.index(message["content"].strip() if message["content"].strip() in text else said, at_least)
            behind = text.index(said, start) + len(said)
            at_least = min(text.index(end, behind) + len(end) for end in ends if end in text[behind:])
            yield start, at_least


def masked(tokenizer, template, row):
    messages, render = row["messages"], renderer(tokenizer, template, row)
    try:
        text, prompt = render(messages), render(messages, True)
    except (jinja2.TemplateError, TypeError):
        return None
    encoded = tokenizer(text, add_special_tokens=False)
    if any("tool_calls" in message for message in messages) and "<é> & x" not in text:
        return dict(text=text, prompt=prompt)  # the template leaves calls out; training reads them as text
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        by_template = tokenizer.apply_chat_template(
            messages, chat_template=template, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True,
            **row.get("chat_template_kwargs", {}),
        )
        mask = by_template["assistant_masks"]
    else:
        mask = [0] * len(encoded["input_ids"])
        for start, end in answers(render, messages, text, ENDS + [tokenizer.eos_token]):
            for token in range(encoded.char_to_token(start), encoded.char_to_token(end - 1) + 1):
                mask[token] = 1
    return dict(text=text, prompt=prompt, ids=encoded["input_ids"], mask="".join(map(str, mask)))


def main():
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "tiny" / "backbone")
    templates = {path.name: path.read_text() for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja"))}
    made = {name: [masked(tokenizer, template, row) for row in ROWS] for name, template in templates.items()}
    json.dump(dict(transformers=transformers.__version__, rows=ROWS, made=made), sys.stdout, ensure_ascii=False)


if __name__ == "__main__":
    main()
