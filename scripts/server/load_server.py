#!/usr/bin/env python3
"""Loads `medusa serve` on this machine with many clients, and compares every answer with the one that the request gets alone.

    medusa serve --backbone data/tiny/backbone --heads RUN/final --tree RUN/tree.json --dtype float32 --port 8000 &
    python3 scripts/server/load_server.py http://127.0.0.1:8000 --clients 64 --minutes 10 --pid $!
    python3 scripts/server/load_server.py http://127.0.0.1:8000 --minutes 1 --pid $! --sigterm    # ends it under load: no answer may be cut
    python3 scripts/server/load_server.py http://127.0.0.1:8000 --minutes 2 --restarts            # while you kill and start it again

First each request is sent alone: half of them at temperature 0, half at 0.8 with a seed; chat and completions, some with `n` or `stop`.
Then the clients send them in random order, streaming or not, and leave one stream in 20 unread. A line every ten seconds, and a
summary as JSON on stdout. Ends with 1 if an answer was wrong, lost or cut, or if the memory of --pid grew after the first minute by more
than --growth MiB. Only Python's standard library (3.11).
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import time

from http_by_hand import Closed, Connection, fetch, local_address, metrics, request, resident_mib

PROMPTS = pathlib.Path(__file__).resolve().parents[2] / "data/tiny/prompts.jsonl"
REPORT_EVERY = 10.0


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=1_000_000, help="end after this many")
    parser.add_argument("--prompts", type=pathlib.Path, default=PROMPTS, help="JSON lines with `messages` or `prompt`")
    parser.add_argument("--kinds", type=int, default=48, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--no-chat", action="store_true", help="completions only, for models without a chat template")
    parser.add_argument("--api-key", default=os.environ.get("MEDUSA_API_KEY"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="process of the server, for its memory")
    parser.add_argument("--growth", type=float, default=16.0, help="MiB that the memory may grow after the first minute")
    parser.add_argument("--sigterm", action="store_true", help="send SIGTERM to --pid at the end, under load")
    parser.add_argument("--restarts", action="store_true", help="the server may go away: send what it lost again")
    arguments = parser.parse_args()
    if arguments.sigterm and not arguments.pid:
        parser.error("--sigterm needs --pid")
    return arguments


def kinds(arguments, model):
    """The different requests, as path and body."""
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    made = []
    for i in range(arguments.kinds):
        row = rows[i % len(rows)]
        body = {"model": model, "max_tokens": arguments.max_tokens - i % 7}
        body |= {"temperature": 0} if i % 2 == 0 else {"temperature": 0.8, "seed": 1000 + i}
        body |= {"n": 3} if i % 12 == 7 else {}
        body |= {"stop": ["the", "\n\n"]} if i % 12 == 4 else {}
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        if arguments.no_chat or i % 4 == 3:
            made.append(("/v1/completions", body | {"prompt": row.get("prompt") or messages[-1]["content"]}))
        else:
            made.append(("/v1/chat/completions", body | {"messages": messages}))
    return made


def told(choices, usage):
    """What has to be equal, however the answer came."""
    return [(c["text"], c["finish_reason"]) for c in choices], usage["prompt_tokens"], usage["completion_tokens"]


def whole(path, body):
    """The same of an answer that did not stream."""
    texts = [c["message"]["content"] if path.startswith("/v1/chat") else c["text"] for c in body["choices"]]
    return told([c | {"text": text} for c, text in zip(body["choices"], texts)], body["usage"])


class Load:
    def __init__(self, arguments):
        self.arguments, self.address = arguments, local_address(arguments.url)
        self.headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
        self.random = random.Random(arguments.seed)
        self.expected, self.faults, self.memory = [], [], []
        self.counts = dict.fromkeys(("answers", "tokens", "left", "refused", "sent_again"), 0)
        self.first_token, self.latency, self.stopping, self.sent = [], [], None, 0

    async def prepare(self):
        """Asks each request alone, twice: an answer that differs then is no yardstick."""
        models = await fetch(self.address, "GET", "/v1/models", headers=self.headers)
        if models.status != 200:
            raise SystemExit(f"/v1/models: {models.status} {models.body[:300]!r}")
        for path, body in kinds(self.arguments, models.json()["data"][0]["id"]):
            alone = [await fetch(self.address, "POST", path, body, self.headers) for _ in range(2)]
            if any(answer.status != 200 for answer in alone):
                raise SystemExit(f"{path} {json.dumps(body)}: {alone[0].status} {alone[0].body[:300]!r}")
            first, second = (whole(path, answer.json()) for answer in alone)
            if first != second:
                raise SystemExit(f"{path} {json.dumps(body)}: two answers to it alone differ:\n{first}\n{second}")
            self.expected.append((path, body, first))

    async def client(self, deadline):
        connection = None
        while time.monotonic() < deadline and self.sent < self.arguments.requests and not self.stopping:
            self.sent += 1
            path, body, expected = self.random.choice(self.expected)
            streams, leaves = self.random.random() < 0.5, self.random.random() < 0.1
            sent = time.monotonic()
            try:
                connection = connection or await Connection.open(self.address)
                if not await self.exchange(connection, path, body, expected, streams, streams and leaves):
                    connection = self.closed(connection)
            except (Closed, OSError) as error:
                connection = self.closed(connection)
                await self.lost(path, body, sent, error)
        self.closed(connection)

    @staticmethod
    def closed(connection):
        if connection:
            connection.close()

    async def lost(self, path, body, sent, error):
        """A connection that ended: right if the server may restart, or for a request that was sent when it stopped already."""
        if self.arguments.restarts:
            self.counts["sent_again"] += 1
            await asyncio.sleep(0.2)
        elif self.stopping and sent > self.stopping - 0.05 and "cut" not in str(error):
            self.counts["refused"] += 1
        else:
            self.fault(f"lost: {path} {json.dumps(body)}: {error!r}")

    async def exchange(self, connection, path, body, expected, streams, leaves):
        """Sends one request and compares its answer; false if the connection cannot be used again."""
        start = time.perf_counter()
        asked = body | {"stream": True, "stream_options": {"include_usage": True}} if streams else body
        await connection.send(request("POST", path, asked, self.headers))
        answer = await connection.head()
        if answer.status in (429, 503):
            answer.body = b"".join([piece async for piece in connection.pieces(answer)])
            return await self.refused(answer)
        if answer.status != 200:
            answer.body = b"".join([piece async for piece in connection.pieces(answer)])
            self.fault(f"{path} {json.dumps(asked)}: {answer.status} {answer.body[:300]!r}")
            return False
        if leaves:
            async for _ in connection.events(answer):
                self.counts["left"] += 1
                return False
        got = await (self.streamed(connection, answer, start) if streams else self.read(connection, path, answer))
        self.counts["answers"] += 1
        self.latency.append(time.perf_counter() - start)
        self.counts["tokens"] += expected[2]
        if got != expected:
            self.fault(f"wrong: {path} {json.dumps(asked)}:\n  alone      {expected}\n  under load {got}")
        return answer.headers.get("connection", "").lower() != "close"

    async def refused(self, answer):
        self.counts["refused"] += 1
        if answer.status == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]) * (0.5 + self.random.random() / 2))
        elif not self.stopping:
            self.fault(f"503 before the server was stopped: {answer.body[:300]!r}")
        return answer.headers.get("connection", "").lower() != "close"

    async def read(self, connection, path, answer):
        return whole(path, json.loads(b"".join([piece async for piece in connection.pieces(answer)])))

    async def streamed(self, connection, answer, start):
        choices, usage, last = {}, None, None
        async for event in connection.events(answer):
            last = event
            if event == "[DONE]":
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise Closed(f"the answer was cut: {event}")
            usage = chunk.get("usage") or usage
            for c in chunk["choices"]:
                choice = choices.setdefault(c["index"], {"text": "", "finish_reason": None})
                piece = (c["delta"].get("content") if "delta" in c else c["text"]) or ""
                if piece and start is not None:
                    self.first_token.append(time.perf_counter() - start)
                    start = None
                choice["text"] += piece
                choice["finish_reason"] = c["finish_reason"] or choice["finish_reason"]
        if last != "[DONE]":
            raise Closed(f"the answer was cut after {last!r}")
        return told([choices[i] for i in sorted(choices)], usage)

    def fault(self, text):
        self.faults.append(text)
        if len(self.faults) <= 10:
            print(text, file=sys.stderr)

    async def report(self, begin):
        """A line every ten seconds, about those ten seconds."""
        before, latencies, firsts = dict(self.counts), 0, 0
        while True:
            await asyncio.sleep(REPORT_EVERY)
            if self.arguments.pid and os.path.exists(f"/proc/{self.arguments.pid}"):
                self.memory.append((time.monotonic() - begin, resident_mib(self.arguments.pid)))
            done = {name: count - before[name] for name, count in self.counts.items()}
            before, new, first = dict(self.counts), self.latency[latencies:], self.first_token[firsts:]
            latencies, firsts = len(self.latency), len(self.first_token)
            print(
                f"{time.monotonic() - begin:5.0f} s: {done['answers'] / REPORT_EVERY:6.1f} answers/s, "
                f"{done['tokens'] / REPORT_EVERY:7.0f} tokens/s, first text {quantiles(first)}, answer {quantiles(new)}, "
                f"left {done['left']}, refused {done['refused']}, faults {len(self.faults)}"
                + (f", {self.memory[-1][1]:.1f} MiB" if self.memory else ""),
                file=sys.stderr,
            )

    async def run(self):
        await self.prepare()
        print(f"{len(self.expected)} requests answered alone, each twice and equal", file=sys.stderr)
        begin = time.monotonic()
        deadline = begin + 60 * self.arguments.minutes
        reporter = asyncio.create_task(self.report(begin))
        clients = [
            asyncio.create_task(self.client(deadline + (60 if self.arguments.sigterm else 0))) for _ in range(self.arguments.clients)
        ]
        if self.arguments.sigterm:
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            self.stopping = time.monotonic()
            os.kill(self.arguments.pid, signal.SIGTERM)
        await asyncio.gather(*clients)
        seconds = time.monotonic() - begin
        reporter.cancel()
        return await self.summary(seconds)

    async def summary(self, seconds):
        settled = [mib for at, mib in self.memory if at >= 60]
        growth = settled[-1] - settled[0] if settled else None
        if growth is not None and growth > self.arguments.growth:
            self.fault(f"memory grew by {growth:.1f} MiB after the first minute")
        ended = await self.ended() if self.arguments.sigterm else await self.check_at_rest()
        return {
            **self.counts, "clients": self.arguments.clients, "seconds": round(seconds, 1), "faults": len(self.faults),
            "tokens_per_second": round(self.counts["tokens"] / seconds, 1),
            "first_text_seconds": summary_of(self.first_token), "latency_seconds": summary_of(self.latency),
            "memory_mib": [round(mib, 1) for _, mib in self.memory], "memory_growth_mib": growth and round(growth, 1),
            "ended_after_seconds": ended,
        }  # fmt: skip

    async def ended(self):
        """Seconds from the last answer until the process is gone."""
        begin = time.monotonic()
        while time.monotonic() - begin < 10:
            if not is_running(self.arguments.pid):
                return round(time.monotonic() - begin, 2)
            await asyncio.sleep(0.02)
        self.fault("ten seconds after the last answer the process is still there")

    async def check_at_rest(self):
        """When all clients are gone, nothing may be running any more."""
        for _ in range(50):
            now = await metrics(self.address, self.headers)
            busy = {name: now[name] for name in ("medusa_texts_running", "medusa_texts_waiting")}
            if not any(busy.values()):
                return
            await asyncio.sleep(0.1)
        self.fault(f"five seconds after the last answer: {busy}")


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def p95(values):
    return statistics.quantiles(values, n=20)[-1]


def quantiles(values):
    return f"{statistics.median(values):.3f} (p95 {p95(values):.3f}) s" if len(values) > 1 else "-"


def summary_of(values):
    return {"median": round(statistics.median(values), 4), "p95": round(p95(values), 4)} if len(values) > 1 else None


if __name__ == "__main__":
    load = Load(parsed())
    print(json.dumps(asyncio.run(load.run())))
    sys.exit(1 if load.faults else 0)
