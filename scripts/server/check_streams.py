#!/usr/bin/env python3
"""Sends random requests to `medusa serve` on this machine, each once whole and once streamed, and compares the two answers.

    medusa serve --backbone data/tiny/backbone --heads RUN/final --tree RUN/tree.json --dtype float32 --port 8123 &
    python3 scripts/server/check_streams.py http://127.0.0.1:8123
    python3 scripts/server/check_streams.py http://127.0.0.1:8123 --no-typical     # a tree for each load, on which typical acceptance depends
    python3 scripts/server/check_streams.py http://127.0.0.1:8123 --again FILE     # the requests that it printed before, a line each

Compares texts, token ids, log-probabilities, text offsets, finish reasons and usage, all exactly, so the server needs the CPU's kernels: libtorch
rounds by what else is in the batch. A third of the requests ask an earlier one again with a stop string from its answer: the text must be the
earlier one up to there. Meanwhile other clients leave their streams, or ask with the same prompts for something else. Prints a summary as JSON.
Ends with 1 after a difference; the first 20 are on stderr with their requests. Only Python's standard library (3.11).
"""
import argparse
import asyncio
import collections
import json
import pathlib
import random
import sys

from http_by_hand import Closed, Connection, fetch, local_address, request

PROMPTS = pathlib.Path(__file__).resolve().parents[2] / "data/tiny/prompts.jsonl"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHOWN = 20  # differences
COUNTS = "prompt_tokens", "completion_tokens", "total_tokens"  # of the usage: the others depend on the cache and the load


class Requests:
    """Random requests, made of texts and tokens of earlier answers."""

    def __init__(self, model, prompts, rules, chats):
        self.model, self.rules, self.paths = model, rules, [CHAT, COMPLETIONS] if chats else [COMPLETIONS]
        self.texts, self.ids, self.plain = (collections.deque(first, maxlen=200) for first in (prompts, [[1]], []))

    def any(self, rng):
        """Path, body, and the texts that must come, if they are known."""
        if self.plain and rng.random() < 1 / 3:
            path, body, texts = rng.choice(self.plain)
            stop = self.piece(rng, [text for text in texts if text] or self.texts)
            return path, body | {"stop": stop}, [text.split(stop)[0] for text in texts]
        path = rng.choice(self.paths)
        chances = {"stop": (0.3, [self.piece(rng, self.texts) for _ in range(rng.randint(1, 4))]), "return_token_ids": (0.7, True),
                   "repetition_penalty": (0.2, rng.uniform(0.5, 2)), "presence_penalty": (0.2, rng.uniform(-2, 2)),
                   "frequency_penalty": (0.2, rng.uniform(-2, 2)), "logprobs": (0.5, path == CHAT or rng.randint(0, 6))}  # fmt: skip
        fields = {"model": self.model, "max_tokens": rng.choice([1, 2, 3, 10, 20, 40])} | self.prompt(rng, path) | self.drawing(rng)
        fields |= some(rng, chances)
        return path, fields | ({"top_logprobs": rng.randint(0, 6)} if fields.get("logprobs") is True else {}), None

    @staticmethod
    def piece(rng, texts):
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        return text[at : at + rng.randint(1, 7)]

    def prompt(self, rng, path):
        """Begins as an earlier one, as often as not."""
        first, second, more = (rng.choice(self.texts)[: rng.randint(1, 150)] for _ in range(3))
        if path == COMPLETIONS:
            ids = rng.choice(self.ids)[: rng.randint(1, 120)]
            return {"prompt": rng.choice([first, first + more, [first, second], ids, [ids, ids[:1]]])}
        turns = [("user", first), ("assistant", second), ("user", more)][: rng.choice([1, 3])]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    def drawing(self, rng):
        temperature, rule = rng.choice([0, 0.3, 1, 2, rng.uniform(0, 2)]), rng.choice(self.rules)
        fields = {"temperature": temperature} | ({"acceptance": rule} if rule else {})
        if rule in ("typical", "greedy") and temperature > 0:  # they draw nothing, and refuse what says how
            return fields | ({"temperature": 1} if rule == "greedy" else {})
        fields["seed"] = rng.choice([rng.randrange(100), rng.randrange(-(2**63), 0), rng.randrange(2**63, 2**64)])
        return fields | some(rng, {"n": (0.5, rng.randint(1, 5)), "top_k": (0.3, rng.choice([-1, 1, 2, 5, 40, 10**6])),
                                   "top_p": (0.3, rng.choice([1, 0.9, 1e-6, rng.uniform(0.01, 1)]))})  # fmt: skip

    def learn(self, path, body, told):
        choices = [told[index] for index in sorted(key for key in told if isinstance(key, int))]
        texts = [choice["text"] for choice in choices]
        self.texts.extend(text for text in texts if text.strip())
        self.ids.extend(c["prompt_token_ids"] + c["token_ids"] for c in choices if c["prompt_token_ids"])
        if choices and "stop" not in body:
            self.plain.append((path, body, texts))


def some(rng, chances):
    return {name: value for name, (chance, value) in chances.items() if rng.random() < chance}


def add(told, chunk):
    """Adds a chunk of an answer; a whole answer is one."""
    if "error" in chunk:
        raise Closed(f"the answer was cut: {chunk['error']}")
    for c in chunk["choices"]:
        choice = told.setdefault(c["index"], {"text": "", "finish_reason": None, "token_ids": [], "prompt_token_ids": []})
        if choice["finish_reason"]:
            raise Closed(f"choice {c['index']} goes on after its end")
        choice["text"] += c.get("text") or (c.get("message") or c.get("delta") or {}).get("content") or ""
        choice["finish_reason"] = c["finish_reason"]
        for name, column in [*(c["logprobs"] or {}).items(), ("token_ids", c.get("token_ids")),
                             ("prompt_token_ids", c.get("prompt_token_ids") or chunk.get("prompt_token_ids"))]:  # fmt: skip
            if column:
                choice.setdefault(name, []).extend(column)
    if chunk.get("usage"):
        told["usage"] = {name: chunk["usage"][name] for name in COUNTS}


def shown(value, other):
    """A value; of a list, the first element that differs."""
    if not (isinstance(value, list) and isinstance(other, list)):
        return repr(value)
    at = next((at for at, (a, b) in enumerate(zip(value, other)) if a != b), min(len(value), len(other)))
    return f"[{at}] = {value[at]!r}" if at < len(value) else f"{at} of them"


class Streams:
    def __init__(self, args):
        self.args, self.address, self.done = args, local_address(args.url), False
        self.counts, self.compared, self.wrong = collections.Counter(), collections.Counter(), collections.Counter()

    async def whole(self, path, body):
        answer = await fetch(self.address, "POST", path, body)
        if answer.status != 200:
            return {"refused": {"status": answer.status, "error": answer.json()["error"]}}
        told = {}
        add(told, answer.json())
        return told

    async def streamed(self, path, body, events=None):
        """What a stream told, up to so many events; None reads it to its end."""
        connection = await Connection.open(self.address)
        try:
            await connection.send(request("POST", path, body | {"stream": True, "stream_options": {"include_usage": True}}))
            answer, told, last = await connection.head(), {}, None
            if answer.status != 200:
                text = b"".join([piece async for piece in connection.pieces(answer)])
                return {"refused": {"status": answer.status, "error": json.loads(text)["error"]}}
            async for last in connection.events(answer):
                if events == 0:
                    return told
                events = events and events - 1
                if last != "[DONE]":
                    add(told, json.loads(last))
            if last != "[DONE]" or "usage" not in told:
                raise Closed(f"the answer ends with {last!r}")
            return told
        finally:
            connection.close(abruptly=events == 0)

    async def both(self, path, body, texts, together):
        """Compares both answers, and the texts with those that must come; returns the whole one."""
        if together:
            whole, streamed = await asyncio.gather(self.whole(path, body), self.streamed(path, body))
        else:
            whole, streamed = await self.whole(path, body), await self.streamed(path, body)
        self.counts["refused"] += "refused" in whole
        pairs = [(key, name, whole.get(key, {}).get(name), streamed.get(key, {}).get(name))
                 for key in whole | streamed for name in whole.get(key, {}) | streamed.get(key, {})]  # fmt: skip
        pairs += [(index, "text before the stop string", whole.get(index, {}).get("text"), text) for index, text in enumerate(texts or [])]
        for key, name, one, other in pairs:
            self.compared[name] += len(one) if isinstance(one, list) else 1
            if one != other:
                self.fault(path, body, name, f"choice {key}: whole {shown(one, other)}, expected or streamed {shown(other, one)}")
        return whole

    def fault(self, path, body, name, what):
        self.wrong[name] += 1
        if self.wrong.total() <= SHOWN:
            print(json.dumps({"path": path, "body": body}), f"    {name}: {what}", sep="\n", file=sys.stderr)

    async def compare(self, requests):
        rng = random.Random(self.args.seed)
        lines = [json.loads(line) for line in open(self.args.again) if line.startswith('{"path"')] if self.args.again else []
        for number in range(len(lines) or self.args.requests):
            path, body, texts = (lines[number]["path"], lines[number]["body"], None) if lines else requests.any(rng)
            self.now = path, body
            try:
                requests.learn(path, body, await self.both(path, body, texts, together=rng.random() < 0.5))
            except (Closed, OSError) as error:
                self.fault(path, body, "answer", repr(error))
            self.counts["requests"] += 1
        self.done = True

    async def beside(self, requests, rng):
        """A client that leaves most of its streams, and asks for something else after the prompt that is compared."""
        while not self.done:
            path, body, _ = requests.any(rng)
            if rng.random() < 0.5 and self.now[0] == path:
                body |= {name: self.now[1][name] for name in ("prompt", "messages") if name in body}
            leaves = rng.choice([None, 0, 1, 3, 9])
            try:
                await self.streamed(path, body, leaves)
            except (Closed, OSError) as error:
                self.fault(path, body, "answer beside", repr(error))
            self.counts["beside"] += 1

    async def run(self):
        model = (await fetch(self.address, "GET", "/v1/models")).json()["data"][0]["id"]
        rows = [json.loads(line) for line in self.args.prompts.read_text().splitlines()]
        prompts = [row.get("prompt") or row["messages"][-1]["content"] for row in rows]
        body = {"model": model, "prompt": "a", "max_tokens": 1, "acceptance": "greedy", "temperature": 0}
        drafts = "refused" not in await self.whole(COMPLETIONS, body)
        rules = [None, "rejection"] + ["greedy"] * drafts + ["typical"] * (drafts and not self.args.no_typical)
        requests, self.now = Requests(model, prompts, rules, not self.args.no_chat), (COMPLETIONS, body)
        beside = [self.beside(requests, random.Random(f"{self.args.seed} {at}")) for at in range(self.args.beside)]
        await asyncio.gather(self.compare(requests), *beside)
        return {**self.counts, "drafts": drafts, "compared": self.compared, "differences": self.wrong}


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0, help="of the random requests")
    parser.add_argument("--beside", type=int, default=4, help="other clients")
    parser.add_argument("--prompts", type=pathlib.Path, default=PROMPTS, help="JSON lines with `messages` or `prompt`")
    parser.add_argument("--no-chat", action="store_true", help="completions only, for models without a chat template")
    parser.add_argument("--no-typical", action="store_true", help="not with typical acceptance")
    parser.add_argument("--again", type=pathlib.Path, help="file of requests to send instead of random ones")
    return parser.parse_args()


if __name__ == "__main__":
    streams = Streams(parsed())
    print(json.dumps(asyncio.run(streams.run())))
    sys.exit(1 if streams.wrong else 0)
