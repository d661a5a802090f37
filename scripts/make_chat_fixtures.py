#!/usr/bin/env python3
"""Writes what transformers makes of conversations with published chat templates: the short conversations below go to
tests/fixtures/chat.json, hashes of 200 conversations of tests/fixtures/data to tests/fixtures/chat_200.json.

    python3 scripts/make_chat_fixtures.py PUBLISHED            # needs transformers 5 with jinja2; torch is not used
    python3 scripts/make_chat_fixtures.py PUBLISHED --check    # computes again and compares with the files, writes nothing

PUBLISHED is a folder with the templates as their authors publish them, which are not part of this repository: the value of
`chat_template` in tokenizer_config.json of each model of SOURCES, as zephyr.jinja and so on; or src/data/chat_templates, which write the
same texts (the fixture has the hash of each template). Vicuna publishes none; FastChat's
conversation template is reimplemented below.

For every template and conversation, the files have the text, its ids by data/tiny/backbone's tokenizer (without added tokens) and a mask,
"1" for a token that carries loss: the assistant's text and the end of its turn. For a template with `{% generation %}` the mask comes from
transformers; for the others this script renders the text turn by turn. `null` if the template refuses the roles. The 200 conversations are
tokenized by tests/fixtures/models/tokenizer-mistral-v1-32000. Tool calls are assistant turns; a tool's result is a turn of "tool" if the
template shows those, else of "user".
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
FIXTURE_200 = ROOT / "tests" / "fixtures" / "chat_200.json"
PUBLISHED_DATA = ROOT / "tests" / "fixtures"
FILES = {"sharegpt_500.json": 80, "sharegpt_toolcall_300.json": 60, "messages_1k.jsonl": 60}
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
LIMIT_BYTES = 300_000
SOURCES = {
    "zephyr": "HuggingFaceH4/zephyr-7b-beta",
    "llama-2": "meta-llama/Llama-2-7b-chat-hf",
    "llama-3": "meta-llama/Meta-Llama-3-8B-Instruct",
    "chatml": "ChatML, as the documentation of transformers has it",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.1",
}
# The end of an answer. {eos} is the tokenizer's.
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
    """A conversation whose turns alternate between user and assistant."""
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
    """FastChat's "vicuna_v1.1": two separators, a space after the user's turn and EOS after the assistant's; BOS is the tokenizer's."""
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
    """Spans of characters, from the start of the assistant's text to the end of its turn."""
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


def shows_tools(name, template, tokenizer):
    turns = [dict(role=role, content=role * 3) for role in ["user", "assistant", "tool", "assistant"]]
    if name == "vicuna":
        return False  # FastChat has only user and assistant
    try:
        return "tooltooltool" in renderer(name, template, tokenizer)(turns)
    except jinja2.TemplateError:
        return False


def talks():
    """200 conversations as lists of (role, content)."""
    for name, count in FILES.items():
        text = (PUBLISHED_DATA / "data" / name).read_text()
        rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        for row in rows[:count]:
            turns = row.get("messages") or row["conversations"]
            yield [(turn.get("role") or ROLES[turn["from"]], turn.get("content") or turn.get("value")) for turn in turns]


def hashed(name, template, tokenizer):
    tool = "tool" if shows_tools(name, template, tokenizer) else "user"
    for talk in talks():
        messages = [dict(role=tool if role == "tool" else role, content=content) for role, content in talk]
        case = masked(name, template, messages, tokenizer)
        digest = lambda text: hashlib.sha256(text.encode()).hexdigest()[:16]
        yield case and dict(text=digest(case["text"]), tokens=digest(case["ids"] + "\n" + case["mask"]))


def birth(templates):
    return dict(
        script_sha256=hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), transformers=transformers.__version__,
        templates={name: dict(source=SOURCES[name], sha256=hashlib.sha256(t.encode()).hexdigest()) for name, t in templates.items()},
    )


def make(published):
    templates = {name: (published / f"{name}.jinja").read_text() for name in SOURCES}
    every = {"vicuna": None, **templates, "generation": GENERATION}
    tiny = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "tiny" / "backbone")
    rendered = {name: [masked(name, template, messages, tiny) for messages in CONVERSATIONS] for name, template in every.items()}
    short = dict(born=birth(templates), generation_template=GENERATION, conversations=CONVERSATIONS, rendered=rendered)
    # Loads tokenizer.json as written, as transformers 4 and the servers do. The LlamaTokenizer of
    # transformers 5 builds its own pipeline and produces one token less for a text with a blank
    # after a special token ("<s> [INST]").
    mistral = transformers.PreTrainedTokenizerFast.from_pretrained(PUBLISHED_DATA / "models" / "tokenizer-mistral-v1-32000")
    tools = [name for name, template in every.items() if shows_tools(name, template, mistral)]
    rendered = {name: list(hashed(name, template, mistral)) for name, template in every.items()}
    return {FIXTURE: short, FIXTURE_200: dict(born=birth(templates), files=FILES, shows_tools=tools, rendered=rendered)}


def main():
    for path, fixture in make(pathlib.Path(sys.argv[1])).items():
        counts = {name: len(cases) - cases.count(None) for name, cases in fixture["rendered"].items()}
        if "--check" in sys.argv[2:]:
            stored = json.loads(path.read_text())
            for key in set(fixture) - {"born"}:
                assert stored[key] == json.loads(json.dumps(fixture[key])), f"{path.name}: {key} differs"
            print(f"{path.name}: equal; rendered {counts}")
            continue
        path.write_text(json.dumps(fixture, ensure_ascii=False, indent=0) + "\n")
        assert path.stat().st_size < LIMIT_BYTES, f"{path.name} has {path.stat().st_size} bytes"
        print(f"{path.name}: {path.stat().st_size} bytes, rendered {counts}")


if __name__ == "__main__":
    main()
