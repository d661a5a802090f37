#!/usr/bin/env python3
"""Writes tests/fixtures/chat.json: short conversations, and what transformers makes of them with published chat templates.

    python3 scripts/make_chat_fixtures.py PUBLISHED            # needs transformers 5 with jinja2; torch is not used
    python3 scripts/make_chat_fixtures.py PUBLISHED --check    # computes again and compares with the file, writes nothing

PUBLISHED is a folder with the templates as their authors publish them, which are not part of this repository: the value of
`chat_template` in tokenizer_config.json of each model of SOURCES, as zephyr.jinja and so on. Vicuna publishes none: what
FastChat's conversation template does is written out below.

For every template and conversation: the text, its ids by data/tiny/backbone's tokenizer (nothing added around it) and a mask,
"1" for a token that the assistant has to learn: what it says and the end of its turn. A template with `{% generation %}` has
its mask from transformers; for the others the text is rendered turn by turn here. `null` where the template refuses the roles.
"""

import hashlib
import json
import pathlib
import sys

import jinja2
import transformers

SCRIPT = pathlib.Path(__file__).resolve()
ROOT = SCRIPT.parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "chat.json"
LIMIT_BYTES = 300_000
SOURCES = {
    "zephyr": "HuggingFaceH4/zephyr-7b-beta",
    "llama-2": "meta-llama/Llama-2-7b-chat-hf",
    "llama-3": "meta-llama/Meta-Llama-3-8B-Instruct",
    "chatml": "ChatML, as the documentation of transformers has it",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.1",
}
# How an answer ends. {eos} is the tokenizer's.
ENDS = {"vicuna": "{eos}", "zephyr": "{eos}", "llama-2": " {eos}", "llama-3": "<|eot_id|>", "chatml": "<|im_end|>", "mistral": "{eos}"}
GENERATION = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '[A] ' -}}
        {% generation %}
            {{- message.content + eos_token -}}
        {% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '[' + message.role + '] ' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[A] ' }}
{%- endif %}"""
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def turns(*contents, system=None):
    """Contents of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    first = [] if system is None else [("system", system)]
    return [dict(role=role, content=content) for role, content in first + list(zip(roles, contents))]


CONVERSATIONS = [
    turns("Hi", "Hello."),
    turns("Who are you?", "I am a small model.", "And who made you?", "People who like tests."),
    turns("Say yes.", "yes", "Say yes again.", "yes", "Once more: yes", "yes"),  # an answer that repeats an earlier one
    turns("Repeat: Hello.", "Hello.", "Hello.", "Hello."),
    turns("Hi", "Hello.", system="Be brief."),
    turns("What is 2 + 2?", "4", "And 3 + 3?", "6", system="You are a calculator.\nAnswer with a number."),
    turns("  Hi  ", "  Hello.  "),
    turns("Hi\n", "\nHello.\n\nBye.\n", "\n\tOk", "\tYes\t"),
    turns("Grüße aus Köln", "Schöne Grüße! Ça va, naïveté?"),
    turns("日本語で", "こんにちは、世界。", "もう一度", "こんにちは、世界。"),
    turns("👩‍👩‍👧 и 👍🏽?", "👍🏽 да", system="Ответь 🙂"),
    turns("Was the weather fine?"),  # no answer yet
    turns("One?", "1", "Two?"),
    turns("Say nothing.", "", "And now?", "Something."),
    turns("USER: is this a trap? ASSISTANT: yes", "ASSISTANT: no", "[INST] and this [/INST]", "[/INST] no <|assistant|>\nno"),
    turns("<b>&amp;</b> \"'{{ x }}{% if %}", "{{ bos_token }} {# no #} <br/>"),
    turns("Write code.", "```python\ndef f(x):\n    return x  # 1\n```\n", "Shorter.", "`lambda x: x`"),
    turns("a", "b", "c", "d", "e", "f", "g", "h"),
    turns("a", "b", system=""),
    [dict(role="user", content="One."), dict(role="user", content="Two."), dict(role="assistant", content="Three.")],
    [dict(role="user", content="One."), dict(role="assistant", content="Two."), dict(role="assistant", content="Three.")],
]


def vicuna(messages, tokenizer, add_generation_prompt):
    """FastChat's "vicuna_v1.1": two separators, a space behind the user and EOS behind the assistant; BOS is the tokenizer's."""
    system = VICUNA_SYSTEM
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    said = {"user": "USER: {} ", "assistant": "ASSISTANT: {}" + tokenizer.eos_token}
    text = tokenizer.bos_token + system + " " + "".join(said[m["role"]].replace("{}", m["content"]) for m in messages)
    return text + ("ASSISTANT:" if add_generation_prompt else "")


def renderer(name, template, tokenizer):
    def render(messages, add_generation_prompt=False):
        if name == "vicuna":
            return vicuna(messages, tokenizer, add_generation_prompt)
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    return render


def answers(name, render, messages, text, eos):
    """Spans of characters: from where the assistant begins to speak to the end of its turn."""
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(render(messages[:at], True)), len(render(messages[: at + 1]).rstrip())
            assert text[start:end].endswith(ENDS[name].format(eos=eos)), (name, text[start:end])
            assert message["content"].strip() in text[start:end], (name, text[start:end])
            yield start, end


def masked(name, template, messages, tokenizer):
    render = renderer(name, template, tokenizer)
    try:
        text = render(messages)
    except jinja2.TemplateError:
        return None
    encoded = tokenizer(text, add_special_tokens=False)
    if name == "generation":
        by_template = tokenizer.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        assert by_template["input_ids"] == encoded["input_ids"]
        mask = by_template["assistant_masks"]
    else:
        mask = [0] * len(encoded["input_ids"])
        for start, end in answers(name, render, messages, text, tokenizer.eos_token):
            for token in range(encoded.char_to_token(start), encoded.char_to_token(end - 1) + 1):
                mask[token] = 1
    ids = " ".join(map(str, encoded["input_ids"]))
    return dict(text=text, prompt=render(messages, True), ids=ids, mask="".join(map(str, mask)))


def make(published):
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "tiny" / "backbone")
    templates = {name: (published / f"{name}.jinja").read_text() for name in SOURCES}
    rendered = {
        name: [masked(name, template, messages, tokenizer) for messages in CONVERSATIONS]
        for name, template in {"vicuna": None, **templates, "generation": GENERATION}.items()
    }
    born = dict(
        script_sha256=hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), transformers=transformers.__version__,
        templates={name: dict(source=SOURCES[name], sha256=hashlib.sha256(t.encode()).hexdigest()) for name, t in templates.items()},
    )
    return dict(born=born, generation_template=GENERATION, conversations=CONVERSATIONS, rendered=rendered)


def main():
    fixture = make(pathlib.Path(sys.argv[1]))
    refused = {name: sum(case is None for case in cases) for name, cases in fixture["rendered"].items()}
    if "--check" in sys.argv[2:]:
        stored = json.loads(FIXTURE.read_text())
        for key in ["generation_template", "conversations", "rendered"]:
            assert stored[key] == fixture[key], f"{FIXTURE.name}: {key} differs"
        print(f"{FIXTURE.name}: equal; refused {refused}")
        return
    FIXTURE.write_text(json.dumps(fixture, ensure_ascii=False, indent=0) + "\n")
    assert FIXTURE.stat().st_size < LIMIT_BYTES, f"{FIXTURE.name} has {FIXTURE.stat().st_size} bytes"
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size} bytes, {len(CONVERSATIONS)} conversations, refused {refused}")


if __name__ == "__main__":
    main()
