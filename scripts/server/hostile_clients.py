#!/usr/bin/env python3
"""Attacks `medusa serve` on this machine with clients that misbehave, while a well-behaved one beside them compares its answers.

    medusa serve --backbone data/tiny/backbone --port 8000 &
    python3 scripts/server/hostile_clients.py http://127.0.0.1:8000 --pid $!
    python3 scripts/server/hostile_clients.py http://127.0.0.1:8000 --only slow,pipelined    # attacks whose names contain these words

Every attack must get one clear error, or lose its connection, within --limit seconds; the well-behaved client must see the same answers as
before, none of them slower than --bound seconds. A line per attack; ends with 1 if one of them failed. Give the server short limits
(its --help lists them), or attacks that wait for them take long. Only Python's standard library (3.11).
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import time

from http_by_hand import Closed, Connection, fetch, local_address, metrics, request, resident_mib

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CLOSED = "closed"  # an outcome beside statuses: the connection ended without an answer
ATTACKS = []


def attack(*expected, api_error=True):
    """Registers an attack: what its answers may be, and whether they carry the API's error object."""

    def register(function):
        ATTACKS.append((function.__name__, function, set(expected), api_error))
        return function

    return register


class Server:
    def __init__(self, arguments):
        self.address, self.limit, self.pid = local_address(arguments.url), arguments.limit, arguments.pid
        self.headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
        self.model, self.connections = None, arguments.connections

    def chat(self, **fields):
        return {"model": self.model, "messages": [{"role": "user", "content": "How do I make tea?"}], "max_tokens": 16} | fields

    def head(self, path=CHAT):
        """A POST's head without the length of its body."""
        headers = {"Host": "localhost", "Content-Type": "application/json"} | self.headers
        return f"POST {path} HTTP/1.1\r\n".encode() + b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())

    def completion(self, **fields):
        return {"model": self.model, "prompt": "Once upon a time", "max_tokens": 16} | fields

    def post(self, body, path=CHAT, **headers):
        return request("POST", path, body, self.headers | {name.replace("_", "-"): value for name, value in headers.items()})

    async def outcome(self, data, close_after=False):
        """Sends these bytes and waits for what comes: an answer, or the end of the connection."""
        connection = await Connection.open(self.address)
        try:
            async with asyncio.timeout(self.limit):
                return await self.answer_on(connection, data)
        except TimeoutError:
            return "neither an answer nor closed"
        finally:
            connection.close()

    @staticmethod
    async def answer_on(connection, data):
        try:
            await connection.send(data)
        except ConnectionError:
            pass  # the server may answer, and close, before it has read all
        try:
            return await connection.answer()
        except Closed:
            return CLOSED

    async def dripped(self, data, seconds_between=0.5):
        """Sends byte after byte."""
        connection = await Connection.open(self.address)

        async def drip():
            for i in range(len(data)):
                await connection.send(data[i : i + 1])
                await asyncio.sleep(seconds_between)

        sender = asyncio.create_task(drip())
        try:
            async with asyncio.timeout(self.limit):
                return await self.answer_on(connection, b"")
        except TimeoutError:
            return "neither an answer nor closed"
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            connection.close()


# Requests that are not HTTP, or only a part of it.


@attack(CLOSED, 408, api_error=False)
async def nothing_is_sent(server):
    return [await server.outcome(b"")]


@attack(CLOSED, 408, api_error=False)
async def half_a_request_line(server):
    return [await server.outcome(b"POST /v1/chat/comp")]


@attack(CLOSED, 408, api_error=False)
async def half_a_header(server):
    return [await server.outcome(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")]


@attack(CLOSED, 408)
async def half_a_body(server):
    return [await server.outcome(server.post(server.chat())[:-20])]


@attack(CLOSED, 400, api_error=False)
async def garbage(server):
    tls = bytes.fromhex("16030100a5010000a10303") + os.urandom(160)
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    zeros, noise = bytes(4096), os.urandom(4096) + b"\r\n\r\n"
    return [await server.outcome(data) for data in (tls, http2, zeros, noise, b"\r\n" * 2000, b"GET /health\r\n\r\n")]


@attack(CLOSED, 400, 414, 431, 404, api_error=False)
async def oversized_heads(server):
    path = b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    value = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(5000)) + b"\r\n"
    return [await server.outcome(data) for data in (path, value, many)]


@attack(CLOSED, 400, 411, 501, api_error=False)
async def wrong_lengths(server):
    wrong = [b"Content-Length: -1\r\n", b"Content-Length: two\r\n", b"Content-Length: 99999999999999999999\r\n",
             b"Content-Length: 2\r\nContent-Length: 3\r\n", b"Transfer-Encoding: unknown\r\n"]  # fmt: skip
    return [await server.outcome(server.head() + header + b"\r\n{}") for header in wrong]


@attack(400, 413)
async def length_too_small(server):
    return [await server.outcome(server.post(b"{}")[:-2] + json.dumps(server.chat()).encode())]


@attack(400, CLOSED, api_error=False)
async def length_and_chunks(server):
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return [await server.outcome(server.head() + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + smuggled)]


@attack(CLOSED, 400, api_error=True)
async def wrong_chunks(server):
    head = server.head() + b"Transfer-Encoding: chunked\r\n\r\n"
    bodies = [b"zz\r\n{}\r\n0\r\n\r\n", b"fffffffffffffffff\r\n{}", b"2\r\n{}garbage\r\n0\r\n\r\n"]
    return [await server.outcome(head + body) for body in bodies]


# Whole requests that are wrong.


@attack(400)
async def wrong_utf8(server):
    whole = json.dumps(server.chat())
    bodies = [whole.replace("tea", "\udcff\udcfe").encode(errors="surrogateescape"), whole.encode("utf-16"),
              whole.replace("tea", "\\ud800").encode()]  # fmt: skip
    return [await server.outcome(server.post(body)) for body in bodies]


@attack(400)
async def bodies_that_are_not_an_object(server):
    bodies = [b"", b"{", b"null", b"[]", b"3", b'"text"', b"{}{}", b"{}", b"\x00", b"<xml/>", b"model=tiny", b'{"model":}']
    return [await server.outcome(server.post(body, path)) for body in bodies for path in (CHAT, COMPLETIONS)]


@attack(400)
async def deep_json(server):
    nested = [b"[" * 100_000, b'{"a":' * 100_000, b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
    known = json.dumps(server.chat(tools=["NEST"])).replace('"NEST"', '{"a":' * 5_000 + "1" + "}" * 5_000).encode()
    return [await server.outcome(server.post(body)) for body in [*nested, known]]


@attack(400)
async def huge_numbers(server):
    fields = ("temperature", "top_p", "max_tokens", "n", "seed", "frequency_penalty", "top_logprobs", "top_k")
    numbers = ("1e999", "-1e999", "9" * 400, "-" + "9" * 30, "NaN", "Infinity", "1e308")
    bodies = [json.dumps(server.chat(**{field: "HERE"})).replace('"HERE"', number) for field in fields for number in numbers]
    return [await server.outcome(server.post(body.encode())) for body in bodies]


@attack(400)
async def wrong_types(server):
    fields = ("model", "messages", "temperature", "max_tokens", "n", "stop", "stream", "logprobs", "tools", "stream_options")
    wrong = ({"a": 1}, [[]], [1], [None], -1.5)
    answers = [await server.outcome(server.post(server.chat(**{field: value}))) for field in fields for value in wrong]
    prompts = ([], [[]], [1.5], ["a", 1], [-1], [10**9], [10**30], {}, 1, [None], True)
    return answers + [await server.outcome(server.post(server.completion(prompt=p), COMPLETIONS)) for p in prompts]


@attack(400)
async def unknown_fields(server):
    return [await server.outcome(server.post(server.chat(**{name: 1}))) for name in ("foo", "__proto__", "", "Temperature", "a" * 100_000)]


@attack(400, 413)
async def long_texts(server):
    bodies = [server.chat(messages=[{"role": "user", "content": "word " * 100_000}]), server.chat(top_p="x" * 500_000),
              server.chat(messages=[{"role": "user", "content": "a"}] * 20_000), server.chat(stop=["a"] * 100_000)]  # fmt: skip
    answers = [await server.outcome(server.post(body)) for body in bodies]
    many = [server.completion(prompt=["a"] * 100_000), server.completion(prompt=[1] * 100_000), server.completion(prompt=[[1]] * 100_000)]
    return answers + [await server.outcome(server.post(body, COMPLETIONS)) for body in many]


@attack(413)
async def a_body_of_100_mb(server):
    head = server.head()
    body = b'{"model":"' + b"a" * 100_000_000 + b'"}'
    told = await server.outcome(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    waits = await server.outcome(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
    chunks = b"".join(b"%x\r\n%s\r\n" % (1_000_000, body[:1_000_000]) for _ in range(100))
    return [told, waits, await server.outcome(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)]


@attack(415, 400)
async def other_content_types(server):
    kinds = ("text/plain", "multipart/form-data; boundary=a", "application/x-www-form-urlencoded", "a" * 5000)
    answers = [await server.outcome(server.post(server.chat(), Content_Type=kind)) for kind in kinds]
    return answers + [await server.outcome(server.post(b"\x1f\x8b\x08" + os.urandom(200), Content_Encoding="gzip"))]


@attack(404, 405, 400, 401)
async def unknown_paths_and_methods(server):
    asked = [("GET", "/"), ("GET", "/v1"), ("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/v1/models/x"),
             ("GET", "/../../etc/passwd"), ("GET", "/v1/models/%2e%2e%2f%2e%2e"), ("GET", "/v1/models/%ff%00"), ("POST", "/v1/embeddings"),
             ("PUT", "/health"), ("BREW", "/v1/chat/completions"), ("TRACE", "/health")]  # fmt: skip
    return [await server.outcome(request(method, path, headers=server.headers)) for method, path in asked]


@attack(200, 204, 404, 405, 400, 401, CLOSED, api_error=False)
async def head_and_options(server):
    answers = []
    for method, path in (("HEAD", "/health"), ("HEAD", CHAT), ("HEAD", "/nowhere"), ("OPTIONS", CHAT), ("OPTIONS", "*")):
        connection = await Connection.open(server.address)
        await connection.send(request(method, path, headers=server.headers))
        try:
            answers.append(await connection.answer(has_body=method != "HEAD"))
        except Closed:
            answers.append(CLOSED)
        connection.close()
    return answers


# Unusual requests that are right.


@attack(200)
async def unusual_but_right(server):
    chat, plain = server.post(server.chat()), json.dumps(server.chat()).encode()
    head = server.head()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(plain[i : i + 7]), plain[i : i + 7]) for i in range(0, len(plain), 7)) + b"0\r\n\r\n"
    http10 = chat.replace(b"HTTP/1.1", b"HTTP/1.0")
    spaces = server.post(b" \r\n\t" * 5000 + plain + b"\n" * 5000)
    unicode = server.post(server.chat(messages=[{"role": "user", "content": "\0 \u202e 🦀 e\u0301 <|end|>"}]))
    asked = [head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, http10, spaces, unicode, server.post(server.chat(), Connection="close")]
    return [await server.outcome(data) for data in asked]


@attack(200)
async def pipelined(server):
    """Three requests in one packet: three answers, in their order."""
    connection = await Connection.open(server.address)
    await connection.send(
        server.post(server.chat(max_tokens=1)) + server.post(server.chat(max_tokens=2)) + server.post(server.chat(max_tokens=3))
    )
    answers = [await connection.answer() for _ in range(3)]
    connection.close()
    tokens = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    return answers if tokens == [1, 2, 3] else [f"answers in another order: {tokens} tokens"]


@attack(200)
async def expects_100_continue(server):
    body = json.dumps(server.chat()).encode()
    connection = await Connection.open(server.address)
    await connection.send(server.post(body, Expect="100-continue")[: -len(body)])
    interim = await connection.head()
    await connection.send(body)
    answer = await connection.answer()
    connection.close()
    return [answer if interim.status == 100 else f"{interim.status} in place of 100"]


# Many, slow, and gone.


@attack(CLOSED, 408, 400, api_error=False)
async def slow_headers(server):
    """Slowloris: fifty clients whose headers never end."""
    line = b"GET /health HTTP/1.1\r\n" + b"X-Slow: 1\r\n" * 1000
    return await asyncio.gather(*(server.dripped(line) for _ in range(50)))


@attack(CLOSED, 408)
async def slow_bodies(server):
    """Small ones, and such that say that they are large."""
    return [*await many_slow(server, server.post(server.chat())), *await many_slow(server, server.post(b"[" * 4_000_000))]


async def many_slow(server, body):
    start = body.index(b"\r\n\r\n") + 4

    async def one():
        connection = await Connection.open(server.address)
        try:
            await connection.send(body[:start])
            async with asyncio.timeout(server.limit):
                reading = asyncio.create_task(server.answer_on(connection, b""))
                for i in range(start, min(len(body) - 1, start + 1000)):
                    if reading.done():
                        break
                    await connection.send(body[i : i + 1])
                    await asyncio.sleep(1)
                return await reading
        except TimeoutError:
            return "neither an answer nor closed"
        except ConnectionError:
            return CLOSED
        finally:
            connection.close()

    return await asyncio.gather(*(one() for _ in range(20)))


@attack("gone", api_error=False)
async def slow_readers(server):
    """Streams that nobody reads, more than the sockets hold: the requests end, their places are free again, and then the sockets."""
    await asyncio.sleep(0.5)  # the well-behaved client has connected
    before = open_files(server.pid)
    connections = [await Connection.open(server.address, receive_buffer=1024) for _ in range(2)]
    asked = server.post(server.chat(stream=True, n=12, temperature=1.9, max_tokens=480, logprobs=True, top_logprobs=20)) * 8
    for connection in connections:
        connection.writer.transport.pause_reading()
        await connection.send(asked)
    answers, end = [await all_gone(server)], time.monotonic() + server.limit
    while open_files(server.pid) > before and time.monotonic() < end:
        await asyncio.sleep(0.2)
    held = open_files(server.pid) - before
    for connection in connections:
        connection.close(abruptly=True)
    return answers if not held else [f"{held} sockets are still open"]


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd")) if pid else 0


@attack(400, 413, 429, 503, CLOSED)
async def many_large_bodies(server):
    """Two dozen bodies of 4 MB at once, which are much larger as values than as text."""
    body = (b'{"model":"x","messages":[' + b"[]," * 1_390_000)[:-1] + b"]}"
    before = resident_mib(server.pid, "VmHWM") if server.pid else 0
    answers = await asyncio.gather(*(server.outcome(server.post(body)) for _ in range(24)))
    grown = resident_mib(server.pid, "VmHWM") - before if server.pid else 0
    return answers if grown < 1024 else [f"the server took {grown:.0f} MiB more"]


@attack("gone", api_error=False)
async def clients_that_leave(server):
    """Two hundred requests whose clients are gone at once: after the request, in the middle of it, or at the first bytes of the answer."""
    for i in range(200):
        connection = await Connection.open(server.address)
        whole = server.post(server.chat(max_tokens=300, stream=i % 2 == 0))
        await connection.send(whole[: len(whole) // 2] if i % 5 == 4 else whole)
        if i % 5 == 3:
            await connection.reader.read(10)
        connection.close(abruptly=i % 3 == 0)
    return [await all_gone(server)]


async def all_gone(server):
    end = time.monotonic() + server.limit
    while time.monotonic() < end:
        now = await metrics(server.address, server.headers)
        busy = now["medusa_texts_running"] + now["medusa_texts_waiting"]
        if busy <= 2:  # the well-behaved client's own
            return "gone"
        await asyncio.sleep(0.2)
    return f"{busy:.0f} requests still hold their places"


@attack("answered", api_error=False)
async def thousands_of_connections(server):
    """Connections that say nothing: the well-behaved client keeps its own; how a new one fares is told."""
    connections, refused = [], 0
    for _ in range(server.connections):
        try:
            async with asyncio.timeout(1):
                connections.append(await Connection.open(server.address))
        except (OSError, TimeoutError):
            refused += 1
    start = time.perf_counter()
    answer = await server.outcome(request("GET", "/health"))
    fared = f"a new one got {getattr(answer, 'status', answer)} after {time.perf_counter() - start:.2f} s"
    print(f"    {len(connections)} connections opened, {refused} not accepted; {fared}")
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.5)
    after = await server.outcome(request("GET", "/health"))
    return ["answered" if getattr(after, "status", None) == 200 else f"afterwards /health gets {after}"]


@attack(200, 429)
async def more_than_fits(server):
    """Five hundred requests at once: each is answered, or told when to come again."""
    answers = await asyncio.gather(*(server.outcome(server.post(server.chat(max_tokens=8))) for _ in range(500)))
    hasty = [a for a in answers if getattr(a, "status", 0) == 429 and not a.headers.get("retry-after", "").isdigit()]
    return answers if not hasty else [f"{len(hasty)} answers with 429 do not say Retry-After"]


class Neighbour:
    """The well-behaved client: the same requests again and again, alternately on a kept connection and on a new one."""

    def __init__(self, server):
        self.server, self.worst, self.answers, self.faults, self.expected = server, 0.0, 0, [], None
        self.refused = 0

    async def ask(self, connection):
        start = time.perf_counter()
        await connection.send(self.server.post(self.server.chat(temperature=0, max_tokens=48)))
        answer = await connection.answer()
        seconds = time.perf_counter() - start
        if answer.status == 429:
            self.refused += 1
            return
        text = answer.json()["choices"][0]["message"]["content"] if answer.status == 200 else None
        self.expected = self.expected or text
        if text != self.expected or text is None:
            self.faults.append(f"status {answer.status}, body {answer.body[:200]!r}, expected {self.expected!r}")
        self.answers, self.worst = self.answers + 1, max(self.worst, seconds)

    async def run(self):
        kept = await Connection.open(self.server.address)
        while True:
            try:
                await self.ask(kept)
            except Exception as error:  # all that goes wrong for a well-behaved client is a finding
                self.faults.append(repr(error))
                kept = await Connection.open(self.server.address)
            await asyncio.sleep(0.02)


def shown(outcome):
    return f"{outcome.status} {outcome.body[:200].decode(errors='replace')}" if hasattr(outcome, "status") else outcome


def fault_of(outcome, expected, api_error):
    """What is wrong with an outcome, or None."""
    status = getattr(outcome, "status", outcome)
    if status not in expected:
        return f"got {shown(outcome)}"
    if status == CLOSED or not isinstance(status, int) or status < 400 or not api_error:
        return None
    try:
        error = outcome.json()["error"]
        missing = {"message", "type", "param", "code"} - error.keys()
        if missing or not error["message"]:
            return f"the error lacks {sorted(missing)}: {error}"
        return f"the error has {len(outcome.body)} bytes: it quotes too much" if len(outcome.body) > 4096 else None
    except (ValueError, KeyError, TypeError):
        return f"not an error object: {shown(outcome)}"


async def run_one(name, function, expected, api_error, server, bound):
    neighbour = Neighbour(server)
    first = await Connection.open(server.address)
    await neighbour.ask(first)
    first.close()
    beside, start = asyncio.create_task(neighbour.run()), time.perf_counter()
    try:
        outcomes = await function(server)
    except (Closed, OSError) as error:
        outcomes = [f"the attack broke off: {error!r}"]
    seconds = time.perf_counter() - start
    await asyncio.sleep(0.2)
    beside.cancel()
    faults = [fault for outcome in outcomes if (fault := fault_of(outcome, expected, api_error))]
    faults += [f"the well-behaved client: {fault}" for fault in neighbour.faults]
    faults += [f"the well-behaved client waited {neighbour.worst:.2f} s"] if neighbour.worst > bound else []
    statuses = sorted({str(getattr(outcome, "status", outcome))[:60] for outcome in outcomes})
    memory = f", {resident_mib(server.pid):.0f} MiB" if server.pid else ""
    print(
        f"{'wrong' if faults else 'ok   '} {name}: {len(outcomes)} × {'/'.join(statuses)} in {seconds:.1f} s; "
        f"beside it {neighbour.answers} answers, worst {neighbour.worst:.3f} s, refused {neighbour.refused}{memory}",
        flush=True,
    )
    for fault in faults[:8]:
        print(f"      {fault}")
    return not faults


async def main(arguments):
    server = Server(arguments)
    models = await fetch(server.address, "GET", "/v1/models", headers=server.headers)
    server.model = models.json()["data"][0]["id"]
    chosen = [a for a in ATTACKS if any(word in a[0] for word in arguments.only.split(","))]
    passed = [await run_one(*each, server, arguments.bound) for each in chosen]
    health = await fetch(server.address, "GET", "/health")
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed; /health {health.status}")
    return all(passed) and health.status == 200


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--only", default="", help="words, separated by commas")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds until an answer or the end of the connection")
    parser.add_argument("--bound", type=float, default=2.0, help="longest wait of the well-behaved client, in seconds")
    parser.add_argument("--connections", type=int, default=3000)
    parser.add_argument("--api-key", default=os.environ.get("MEDUSA_API_KEY"))
    parser.add_argument("--pid", type=int, help="process of the server, for its memory")
    return parser.parse_args()


if __name__ == "__main__":
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sys.exit(0 if asyncio.run(main(parsed())) else 1)
