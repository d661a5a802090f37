#!/usr/bin/env python3
"""Checks a running `medusa serve` with OpenAI's own Python client (pip install openai), and by hand where the client would not send it.

    medusa serve --backbone data/tiny/backbone --heads RUN/final --tree RUN/tree.json --dtype float32 --port 8000 &
    python3 scripts/server/check_server.py http://127.0.0.1:8000 --drafts
    python3 scripts/server/check_server.py http://127.0.0.1:8000 --api-key KEY             # the server has keys
    python3 scripts/server/check_server.py http://127.0.0.1:8000 --template-has-tools      # the chat template renders tools
    python3 scripts/server/check_server.py http://127.0.0.1:8000 --only stream,logprobs    # checks whose names contain these words

A line per check; ends with 1 if one of them failed. Nobody else may use the server meanwhile: some checks read its counters. The model needs
a chat template. `--drafts` says that the server has heads, so that answers of the model must contain accepted guesses.
"""

import argparse
import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request

import openai

CHECKS = []
QUESTION = [{"role": "user", "content": "How do I make omelette for 4 people?"}]
TOOLS = [{"type": "function", "function": {"name": "get_current_weather", "description": "The weather of a city",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip


def check(function):
    CHECKS.append(function)
    return function


class Skipped(Exception):
    """Why a check cannot be made with this server."""


def expect(what, got, expected):
    assert got == expected, f"{what}: got {got!r}, expected {expected!r}"


class Server:
    def __init__(self, arguments):
        self.url, self.arguments = arguments.url.rstrip("/"), arguments
        self.key = arguments.api_key or "none"
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=120)
        self.model = arguments.model or self.client.models.list().data[0].id

    def chat(self, **fields):
        return self.client.chat.completions.create(
            **{"model": self.model, "messages": QUESTION, "temperature": 0, "max_tokens": 64} | fields
        )

    def complete(self, **fields):
        return self.client.completions.create(
            **{"model": self.model, "prompt": "The old horse", "temperature": 0, "max_tokens": 32} | fields
        )

    def raw(self, path, body=None, method=None, **headers):
        """Status and body of a request that the client would not make."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, data, {k.replace("_", "-"): v for k, v in headers.items() if v}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self):
        status, text = self.raw("/metrics")
        expect("status of /metrics", status, 200)
        lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def refuses(self, error, *words, path="chat", **fields):
        """The API error that a request gets; its message has to contain these words."""
        try:
            answer = self.chat(**fields) if path == "chat" else self.complete(**fields)
        except error as refusal:
            self.is_error_object(refusal.body, *words)
            return refusal
        raise AssertionError(f"{fields} was answered: {answer!r:.300}")

    @staticmethod
    def is_error_object(body, *words):
        expect("keys of the error", sorted(body), ["code", "message", "param", "type"])
        missing = [word for word in words if word not in body["message"] and word != body["param"]]
        assert not missing, f"the message does not say {missing}: {body}"


def text_of(answer):
    return answer.choices[0].message.content


def streamed(chunks, chat=True):
    """Text, finish reason and usage of a stream, by choice; checks the order of its chunks."""
    texts, reasons, usage = {}, {}, None
    for chunk in chunks:
        assert usage is None, "a chunk after the one with the usage"
        usage = chunk.usage
        assert (usage is None) or not chunk.choices, "the usage comes in a chunk without choices"
        for choice in chunk.choices:
            assert choice.index not in reasons, f"choice {choice.index} goes on after its finish_reason"
            if chat:
                expect("delta.role", choice.delta.role, None if choice.index in texts else "assistant")
            piece = choice.delta.content if chat else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


# Models, health, counters


@check
def models(server):
    listed = server.client.models.list().data
    assert server.model in [model.id for model in listed]
    expect("object", listed[0].object, "model")
    expect("the model by its name", server.client.models.retrieve(server.model).id, server.model)
    try:
        server.client.models.retrieve("nobody")
    except openai.NotFoundError as error:
        expect("code", error.code, "model_not_found")
        return
    raise AssertionError("a model that is not served was found")


@check
def health_and_metrics(server):
    expect("/health", server.raw("/health", Authorization=None)[0], 200)
    names = {name.split("{")[0] for name in server.metrics()}
    wanted = {"prompt_tokens_total", "generation_tokens_total", "prefix_cached_tokens_total", "draft_tokens_total",
              "accepted_draft_tokens_total", "decode_steps_total", "texts_running", "texts_waiting", "time_to_first_token_seconds_count",
              "time_between_tokens_seconds_count", "request_seconds_count"}  # fmt: skip
    server.chat()
    names |= {name.split("{")[0] for name in server.metrics()}
    expect("missing metrics", sorted(f"medusa_{name}" for name in wanted | {"requests_total"} if f"medusa_{name}" not in names), [])


@check
def counters_count(server):
    before, answer = server.metrics(), server.chat(n=2)
    after, usage = server.metrics(), answer.usage
    grown = {name: after[f"medusa_{name}"] - before[f"medusa_{name}"] for name in
             ("generation_tokens_total", "accepted_draft_tokens_total", "draft_tokens_total", "time_to_first_token_seconds_count")}  # fmt: skip
    details = usage.completion_tokens_details
    expect("generation_tokens_total", grown["generation_tokens_total"], usage.completion_tokens)
    expect("accepted_draft_tokens_total", grown["accepted_draft_tokens_total"], details.accepted_prediction_tokens)
    proposed = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    expect("draft_tokens_total", grown["draft_tokens_total"], proposed)
    assert grown["time_to_first_token_seconds_count"] in (1, 2), grown


# Chat


@check
def chat(server):
    answer = server.chat()
    choice, usage = answer.choices[0], answer.usage
    assert choice.message.content and answer.id.startswith("chatcmpl-"), answer
    expect("object", answer.object, "chat.completion")
    expect("role", choice.message.role, "assistant")
    expect("refusal", choice.message.refusal, None)
    expect("model", answer.model, server.model)
    assert abs(answer.created - time.time()) < 60, answer.created
    assert choice.finish_reason in ("stop", "length"), choice.finish_reason
    expect("total_tokens", usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    assert 0 < usage.completion_tokens <= 64 and usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    expect("the same question again", text_of(server.chat()), choice.message.content)


@check
def drafts(server):
    details = server.chat().usage.completion_tokens_details
    if not server.arguments.drafts:
        expect("drafts of a server without heads", (details.accepted_prediction_tokens, details.rejected_prediction_tokens), (0, 0))
        return
    assert details.accepted_prediction_tokens > 0, details
    assert details.rejected_prediction_tokens > 0, details


@check
def content_parts(server):
    content = QUESTION[0]["content"]
    parts = [{"type": "text", "text": content[:7]}, {"type": "text", "text": content[7:]}]
    answer = server.chat(messages=[{"role": "user", "content": parts}])
    assert answer.usage.prompt_tokens >= server.chat().usage.prompt_tokens
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    server.refuses(openai.BadRequestError, "image_url", messages=[{"role": "user", "content": image}])


@check
def several_turns(server):
    first = text_of(server.chat())
    turns = [*QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "And for 2 people?"}]
    second = server.chat(messages=turns)
    assert second.usage.prompt_tokens > server.chat().usage.prompt_tokens


@check
def length(server):
    for field in ("max_tokens", "max_completion_tokens"):
        answer = server.chat(**{"max_tokens": openai.omit, field: 5})
        expect(field, (answer.usage.completion_tokens, answer.choices[0].finish_reason), (5, "length"))
    expect("both, equal", server.chat(max_tokens=3, max_completion_tokens=3).usage.completion_tokens, 3)
    server.refuses(openai.BadRequestError, "max_completion_tokens", max_tokens=3, max_completion_tokens=4)
    whole = server.chat(max_tokens=openai.omit)
    assert whole.choices[0].finish_reason in ("stop", "length")


@check
def streaming(server):
    whole = server.chat()
    texts, reasons, usage = streamed(server.chat(stream=True))
    expect("text", texts, {0: text_of(whole)})
    expect("finish_reason", reasons, {0: whole.choices[0].finish_reason})
    expect("usage that nobody asked for", usage, None)
    chunks = list(server.chat(stream=True, stream_options={"include_usage": True}))
    expect("usage", streamed(chunks)[2].completion_tokens, whole.usage.completion_tokens)
    expect("different ids", len({chunk.id for chunk in chunks}), 1)
    expect("object", {chunk.object for chunk in chunks}, {"chat.completion.chunk"})
    assert len(chunks) > 4, f"only {len(chunks)} chunks"


@check
def streamed_bytes(server):
    """As server-sent events, by hand: each event one line of data, and [DONE] at the end."""
    body = {"model": server.model, "messages": QUESTION, "stream": True, "max_tokens": 8}
    status, text = server.raw("/v1/chat/completions", body)
    expect("status", status, 200)
    events = text.decode().split("\n\n")
    expect("after the last event", events.pop(), "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    expect("last event", events[-1], "data: [DONE]")


@check
def curl(server):
    body = json.dumps({"model": server.model, "messages": QUESTION, "stream": True, "max_tokens": 8})
    command = ["curl", "-sS", "-N", "-i", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json",
               "-H", f"Authorization: Bearer {server.key}", "-d", body]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("HTTP/1.1 200") and "text/event-stream" in shown and shown.endswith("data: [DONE]\n\n"), shown


@check
def several_choices(server):
    fields = dict(n=3, temperature=0.9, seed=11)
    whole = server.chat(**fields)
    expect("indices", [choice.index for choice in whole.choices], [0, 1, 2])
    expect("the same seed again", [c.message.content for c in server.chat(**fields).choices], [c.message.content for c in whole.choices])
    texts, reasons, usage = streamed(server.chat(stream=True, stream_options={"include_usage": True}, **fields))
    expect("streamed", texts, {c.index: c.message.content for c in whole.choices})
    expect("reasons", reasons, {c.index: c.finish_reason for c in whole.choices})
    expect("usage", usage.completion_tokens, whole.usage.completion_tokens)
    long = server.chat(n=8, temperature=1.5, seed=1)
    assert len({c.message.content for c in long.choices}) > 1, "eight choices at temperature 1.5 are all the same"
    server.refuses(openai.BadRequestError, "n", n=0)
    server.refuses(openai.BadRequestError, "n", n=10_000)


@check
def seeds(server):
    fields = dict(temperature=1.2, max_tokens=48)
    same = {text_of(server.chat(seed=5, **fields)) for _ in range(3)}
    expect("texts of one seed", len(same), 1)
    assert len({text_of(server.chat(seed=seed, **fields)) for seed in range(8)}) > 1, "eight seeds draw the same text"
    assert len({text_of(server.chat(temperature=2, max_tokens=48)) for _ in range(8)}) > 1, "eight requests without a seed draw the same text"


@check
def streamed_characters_are_whole(server):
    """At temperature 2 tokens cut through characters; the stream's pieces are those of the whole text all the same."""
    for seed in range(12):
        fields = dict(temperature=2, seed=seed, max_tokens=64)
        expect(f"seed {seed}", streamed(server.chat(stream=True, **fields))[0][0], text_of(server.chat(**fields)))


@check
def narrow_sampling_is_greedy(server):
    greedy = text_of(server.chat())
    expect("top_k 1", text_of(server.chat(temperature=1, extra_body={"top_k": 1})), greedy)
    expect("top_p 1e-6", text_of(server.chat(temperature=1, top_p=1e-6)), greedy)
    for rule in ("rejection", "typical", "greedy"):
        if rule != "rejection" and not server.arguments.drafts:
            server.refuses(openai.BadRequestError, "acceptance", extra_body={"acceptance": rule})
            continue
        expect(f"acceptance {rule} at temperature 0", text_of(server.chat(extra_body={"acceptance": rule})), greedy)
        if rule != "rejection":
            server.refuses(openai.BadRequestError, "seed", temperature=1, seed=1, extra_body={"acceptance": rule})
    server.refuses(openai.BadRequestError, "acceptance", extra_body={"acceptance": "hopeful"})


@check
def stop_strings(server):
    greedy = text_of(server.chat())
    middle, later = greedy[len(greedy) // 2 :][:5], greedy[len(greedy) * 3 // 4 :][:4]
    expected = greedy[: greedy.index(middle)]
    for stop in (middle, [middle], ["never seen", later, middle]):
        cut = min(greedy.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in greedy)
        answer = server.chat(stop=stop)
        expect(f"stop {stop!r}", (text_of(answer), answer.choices[0].finish_reason), (greedy[:cut], "stop"))
        expect(f"stop {stop!r}, streamed", streamed(server.chat(stop=stop, stream=True))[:2], ({0: greedy[:cut]}, {0: "stop"}))
    assert len(expected) < len(greedy)
    server.refuses(openai.BadRequestError, "stop", stop="")
    server.refuses(openai.BadRequestError, "stop", stop=["a"] * 17)


@check
def penalties(server):
    asked = (
        "How do I make omelette for 4 people?",
        "Write a little story: Oscar is a rabbit and finds a lost letter by the sea.",
        "Count to 40.",
    )

    def texts(**fields):
        return [text_of(server.chat(messages=[{"role": "user", "content": content}], max_tokens=150, **fields)) for content in asked]

    plain = texts()
    for fields in (dict(frequency_penalty=2), dict(presence_penalty=2), dict(extra_body={"repetition_penalty": 1.8})):
        assert texts(**fields) != plain, f"{fields} changes nothing"
    for fields in (dict(frequency_penalty=2.5), dict(presence_penalty=-3), dict(extra_body={"repetition_penalty": 0})):
        server.refuses(openai.BadRequestError, next(iter(fields.get("extra_body", fields))), **fields)


# Log-probabilities


def check_top(top, chosen, count, greedy):
    expect("top_logprobs", len(top), count)
    values = [entry.logprob for entry in top]
    expect("order of top_logprobs", values, sorted(values, reverse=True))
    assert sum(map(math.exp, values)) < 1 + 1e-4, "the likeliest tokens have more than all of the probability"
    if greedy:
        expect("the likeliest token", top[0].token, chosen.token)
    if chosen.token in [entry.token for entry in top]:
        expect("its logprob", next(e.logprob for e in top if e.token == chosen.token), chosen.logprob)


@check
def logprobs(server):
    plain = server.chat()
    answer = server.chat(logprobs=True, top_logprobs=20)
    expect("text with logprobs", text_of(answer), text_of(plain))
    content = answer.choices[0].logprobs.content
    assert len(content) <= answer.usage.completion_tokens <= len(content) + 1, "as many as tokens, up to the one that ends the text"
    joined = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert joined.startswith(text_of(plain)), f"bytes of the tokens: {joined!r}, text {text_of(plain)!r}"
    for entry in content:
        assert entry.logprob <= 0, entry
        check_top(entry.top_logprobs, entry, 20, greedy=True)
    chunks = [c.choices[0].logprobs for c in server.chat(logprobs=True, top_logprobs=20, stream=True) if c.choices]
    in_stream = [entry.logprob for part in chunks if part for entry in part.content]
    assert len(in_stream) == len(content) and all(abs(a - b.logprob) < 1e-3 for a, b in zip(in_stream, content)), "streamed logprobs"
    expect("top_logprobs without asking", server.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs, [])
    server.refuses(openai.BadRequestError, "top_logprobs", top_logprobs=3)
    server.refuses(openai.BadRequestError, "top_logprobs", logprobs=True, top_logprobs=21)


@check
def bytes_of_tokens_make_the_text(server):
    """Tokens that are a part of a character have bytes of their own, as clients put them together."""
    for seed in range(12):
        answer = server.chat(logprobs=True, temperature=2, seed=seed).choices[0]
        joined = b"".join(bytes(entry.bytes) for entry in answer.logprobs.content).decode(errors="replace")
        assert joined.startswith(answer.message.content), f"seed {seed}: {joined!r}, text {answer.message.content!r}"


@check
def logprobs_are_before_temperature(server):
    """Drawn texts are scored with the model's own distribution: the first token's logprobs do not depend on the temperature."""
    first = [
        server.chat(logprobs=True, top_logprobs=5, max_tokens=1, temperature=t, seed=1).choices[0].logprobs.content[0]
        for t in (0, 0.5, 1.7)
    ]
    tops = [[(e.token, round(e.logprob, 3)) for e in entry.top_logprobs] for entry in first]
    expect("likeliest tokens", tops[1:], [tops[0]] * 2)


@check
def logprobs_of_completions(server):
    answer = server.complete(logprobs=3)
    told, text = answer.choices[0].logprobs, answer.choices[0].text
    expect("lengths", len({len(told.tokens), len(told.token_logprobs), len(told.top_logprobs), len(told.text_offset)}), 1)
    assert all(len(top) in (3, 4) for top in told.top_logprobs), told.top_logprobs
    for token, offset in zip(told.tokens, told.text_offset):
        if token.isascii():
            assert text[offset:].startswith(token) or offset >= len(text), f"{token!r} is not at {offset} of {text!r}"
    sums = [sum(math.exp(value) for value in top.values()) for top in told.top_logprobs]
    assert max(sums) < 1 + 1e-4, sums
    expect("logprobs that nobody asked for", server.complete().choices[0].logprobs, None)


# Tools and formats


@check
def tools(server):
    without = server.chat().usage.prompt_tokens
    expect("tool_choice none", server.chat(tools=TOOLS, tool_choice="none").usage.prompt_tokens, without)
    server.refuses(openai.BadRequestError, "tool_choice", tools=TOOLS, tool_choice="required")
    named = {"type": "function", "function": {"name": "get_current_weather"}}
    server.refuses(openai.BadRequestError, "tool_choice", tools=TOOLS, tool_choice=named)
    if not server.arguments.template_has_tools:
        server.refuses(openai.BadRequestError, "tools", "template", tools=TOOLS)
        return
    with_tools = server.chat(tools=TOOLS).usage.prompt_tokens
    assert with_tools > without, f"the template has tools, but the prompt has {with_tools} tokens with them and {without} without"
    expect("tool_choice auto", server.chat(tools=TOOLS, tool_choice="auto", parallel_tool_calls=True).usage.prompt_tokens, with_tools)


@check
def a_conversation_with_tool_calls(server):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_current_weather", "arguments": '{"city": "Paris"}'}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    if server.arguments.template_has_tools:
        assert server.chat(messages=turns, tools=TOOLS).usage.prompt_tokens > server.chat(tools=TOOLS).usage.prompt_tokens
    else:
        server.refuses(openai.BadRequestError, "template", messages=turns)


@check
def response_formats(server):
    expect("text", text_of(server.chat(response_format={"type": "text"})), text_of(server.chat()))
    server.refuses(openai.BadRequestError, "response_format", response_format={"type": "json_object"})
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    server.refuses(openai.BadRequestError, "response_format", response_format=schema)


# Completions


@check
def completions(server):
    one = server.complete()
    assert one.id.startswith("cmpl-") and one.object == "text_completion" and one.choices[0].text, one
    several = server.complete(prompt=["The old horse", "Translate into", "The old horse"])
    expect("indices", [c.index for c in several.choices], [0, 1, 2])
    expect("equal prompts", several.choices[0].text, several.choices[2].text)
    expect("as alone", several.choices[0].text, one.choices[0].text)
    expect(
        "max_tokens",
        server.client.completions.create(model=server.model, prompt="The old horse", temperature=0).usage.completion_tokens <= 16,
        True,
    )
    drawn = server.complete(prompt=["The old horse", "Translate into"], n=2, temperature=1, seed=3)
    expect("indices of two each", [c.index for c in drawn.choices], [0, 1, 2, 3])
    texts, reasons, usage = streamed(server.complete(stream=True, stream_options={"include_usage": True}), chat=False)
    expect(
        "streamed",
        (texts[0], reasons[0], usage.completion_tokens),
        (one.choices[0].text, one.choices[0].finish_reason, one.usage.completion_tokens),
    )


def check_count(choice, usage):
    """The usage has one token more than the text where an EOS ended it."""
    expect("tokens", usage.completion_tokens, len(choice.token_ids) + (choice.finish_reason == "stop"))


@check
def token_ids(server):
    asked = dict(extra_body={"return_token_ids": True})
    answer = server.complete(**asked)
    choice = answer.choices[0]
    ids = getattr(choice, "prompt_token_ids", None) or answer.prompt_token_ids
    expect("prompt tokens", len(ids), answer.usage.prompt_tokens)
    check_count(choice, answer.usage)
    expect("the same prompt as ids", server.complete(prompt=ids).choices[0].text, choice.text)
    several = server.complete(prompt=[ids, ids[:2]], **asked)
    expect("two prompts of ids", several.choices[0].token_ids, choice.token_ids)
    expect("a text without asking", getattr(server.complete().choices[0], "token_ids", None), None)
    chatted = server.chat(**asked)
    check_count(chatted.choices[0], chatted.usage)
    ends = server.complete(prompt=ids, stream=True, **asked)
    expect("streamed ids", [i for chunk in ends for c in chunk.choices for i in (getattr(c, "token_ids", None) or [])], choice.token_ids)


@check
def refused_fields_of_completions(server):
    for name, value in (
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 3),
        ("logit_bias", {"5": 1}),
        ("logprobs", 21),
        ("prompt", []),
        ("prompt", [-1]),
    ):
        server.refuses(openai.BadRequestError, name, path="completions", **{name: value})
    for name, value in (("echo", False), ("suffix", None), ("logit_bias", {}), ("user", "me"), ("best_of", 1)):
        server.complete(**{name: value})


# Errors


@check
def errors(server):
    bad = openai.BadRequestError
    expect("code", server.refuses(openai.NotFoundError, "nobody", model="nobody").code, "model_not_found")
    too_long = server.refuses(bad, "context", messages=[{"role": "user", "content": "word " * 20_000}])
    expect("type", too_long.type, "invalid_request_error")
    server.refuses(bad, "unknown field", "foo", extra_body={"foo": 1})
    for name, value in (("temperature", "hot"), ("temperature", 2.1), ("temperature", -1), ("top_p", 0), ("top_p", 1.1), ("seed", "x"),
                        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("stop", 3), ("stream", "yes"), ("messages", []),
                        ("messages", "hello"), ("logprobs", 3), ("tools", {}), ("logit_bias", {"5": 1}), ("store", True), ("n", "2")):  # fmt: skip
        server.refuses(bad, name, **{name: value})
    server.refuses(bad, "role", messages=[{"content": "no role"}])
    server.refuses(bad, "stream_options", stream_options={"include_usage": True})
    for name in ("stop", "seed", "n", "user", "tools", "response_format", "top_p", "temperature", "max_completion_tokens", "logit_bias"):
        server.chat(**{name: None})


@check
def errors_by_hand(server):
    body = json.dumps({"model": server.model, "messages": QUESTION, "max_tokens": 4}).encode()
    asked = [(400, "/v1/chat/completions", b"{", {}), (400, "/v1/chat/completions", b"", {}), (400, "/v1/chat/completions", b"[]", {}),
             (415, "/v1/chat/completions", body, {"Content_Type": "text/plain"}), (404, "/v1/nothing", body, {}),
             (405, "/v1/chat/completions", None, {}), (405, "/v1/models", body, {})]  # fmt: skip
    for expected, path, data, headers in asked:
        status, text = server.raw(path, data, **headers)
        expect(f"{path} {data!r} {headers}", status, expected)
        server.is_error_object(json.loads(text)["error"])
    expect("JSON with a charset", server.raw("/v1/chat/completions", body, Content_Type="application/json; charset=utf-8")[0], 200)


@check
def keys(server):
    if not server.arguments.api_key:
        raise Skipped("no --api-key")
    for wrong in (server.key + "x", server.key[:-1], "x", "ключ".encode().decode("latin-1")):
        for path in ("/v1/models", "/metrics"):
            status, text = server.raw(path, Authorization=f"Bearer {wrong}")
            expect(f"{path} with a wrong key", (status, json.loads(text)["error"]["type"]), (401, "authentication_error"))
            assert server.key not in text.decode()
    expect("no key", server.raw("/v1/models", Authorization=None)[0], 401)
    expect("another scheme", server.raw("/v1/models", Authorization=f"Basic {server.key}")[0], 401)
    try:
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was accepted")


# Many at once, and clients that leave


@check
def together_as_alone(server):
    """Thirty-two requests at once get what each gets alone."""
    questions = [
        "How do I make tea?",
        "Sort these numbers from smallest to largest: 24, 12, 1.",
        "I have 8 feet. What is that in inches?",
        "Tell me a story.",
    ]
    asked = [
        dict(messages=[{"role": "user", "content": questions[i % 4]}], temperature=0.8 * (i % 3 > 0), seed=i % 6, max_tokens=40 + i % 5)
        for i in range(32)
    ]
    alone = [text_of(server.chat(**fields)) for fields in asked]

    async def all_at_once():
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=server.key, timeout=120)
        answers = await asyncio.gather(*(client.chat.completions.create(model=server.model, **fields) for fields in asked))
        return [text_of(answer) for answer in answers]

    expect("texts", asyncio.run(all_at_once()), alone)


def idle_within(server, seconds):
    end = time.monotonic() + seconds
    while True:
        now = server.metrics()
        if now["medusa_texts_running"] == now["medusa_texts_waiting"] == 0:
            return now["medusa_generation_tokens_total"]
        assert time.monotonic() < end, f"after {seconds} s {now['medusa_texts_running']:.0f} requests are still running"
        time.sleep(0.02)


@check
def clients_that_leave(server):
    """A stream that is closed after its first text, and a request whose client goes away: both give their places back at once."""
    long = dict(messages=[{"role": "user", "content": "Tell me a long story."}], n=8, max_tokens=openai.omit, temperature=1.9, seed=4)
    whole = server.chat(**long).usage.completion_tokens
    before = idle_within(server, 5)
    stream = server.chat(stream=True, **long)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    stream.close()
    after = idle_within(server, 5)
    assert after - before < whole / 2, f"the stream was closed at its start, but {after - before:.0f} of {whole} tokens were made"
    address = urllib.parse.urlsplit(server.url)
    body = json.dumps({k: v for k, v in long.items() if v is not openai.omit} | {"model": server.model}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\nAuthorization: Bearer {server.key}\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while server.metrics()["medusa_generation_tokens_total"] == after:
            time.sleep(0.001)
    left = idle_within(server, 5)
    assert left - after < whole / 2, f"the client left at the start, but {left - after:.0f} of {whole} tokens were made"


@check
def pages_by_their_own_name(server):
    """A page that makes its name point to this machine is refused where nothing else would hold it back."""
    address = urllib.parse.urlsplit(server.url)
    if server.arguments.api_key or address.hostname not in ("127.0.0.1", "localhost"):
        raise Skipped("checked on a loopback address without --api-key")
    for host, expected in [("page.example", 403), (f"page.example:{address.port}", 403), (f"localhost:{address.port}", 200)]:
        request = urllib.request.Request(server.url + "/v1/models", headers={"Host": host})
        try:
            status = urllib.request.urlopen(request, timeout=10).status
        except urllib.error.HTTPError as error:
            status = error.code
            expect("code", json.load(error)["error"]["code"], "host_not_allowed")
        expect(f"Host: {host}", status, expected)


def run(function, server):
    try:
        function(server)
        print(f"ok      {function.__name__}", flush=True)
        return True
    except Skipped as reason:
        print(f"skipped {function.__name__}: {reason}", flush=True)
        return True
    except Exception as error:  # a check that breaks is a finding like one that fails
        where = traceback.extract_tb(error.__traceback__)
        line = next(frame.lineno for frame in where if frame.name == function.__name__)
        print(f"wrong   {function.__name__} (line {line}): {type(error).__name__}: {error}", flush=True)
        return False


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key", default=os.environ.get("MEDUSA_API_KEY"))
    parser.add_argument("--drafts", action="store_true", help="the server drafts: answers must contain accepted guesses")
    parser.add_argument("--template-has-tools", action="store_true", help="the chat template renders tools and their results")
    parser.add_argument("--only", default="", help="words, separated by commas")
    return parser.parse_args()


if __name__ == "__main__":
    server = Server(parsed())
    chosen = [c for c in CHECKS if any(word in c.__name__ for word in server.arguments.only.split(","))]
    passed = [run(function, server) for function in chosen]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed (openai {openai.__version__})")
    sys.exit(0 if all(passed) else 1)
