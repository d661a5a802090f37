#!/usr/bin/env python3
"""Runs `medusa distill --endpoint` against servers that mean harm, and prints its peak memory with each.

    scripts/server/hostile_servers.py [--medusa target/release/medusa] [--concurrency 64]

Each server answers every request in its own bad way. The program has to end by itself with an error, or with rows of well-formed answers, within
512 MiB more than it takes with an honest server. Fails otherwise. Everything stays on this machine.
"""
import argparse
import json
import os

import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_MIB = 512
SECONDS = 120
PROMPTS = 256

def completion(text="an answer", **fields):
    message = {"role": "assistant", "content": text}
    return {"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop", **fields}]}

def whole(body, status="200 OK", headers=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return [head.encode(), body]

def chunked(pieces):
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    for piece in pieces:
        yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    yield b"0\r\n\r\n"

def forever(piece):
    while True:
        yield piece

def ok():
    return whole(json.dumps(completion()).encode())

HONEST = {"honest": ok}
HOSTILE = {
    "63 MB of empty arrays": lambda: whole(b'{"choices":[' + b"[]," * (21 * 1000 * 1000) + b"[]]}"),
    "arrays without end": lambda: chunked(forever(b"[" * 65536)),
    "a text of 60 MB": lambda: whole(json.dumps(completion("x" * (60 * 1000 * 1000))).encode()),
    "a text without end": lambda: chunked([b'{"choices":[{"index":0,"message":{"role":"assistant","content":"', *[b"y" * 65536] * 4096]),
    "a million choices": lambda: whole(b'{"choices":[' + b",".join([json.dumps(completion()["choices"][0]).encode()] * 500_000) + b"]}"),
    "a million unknown fields": lambda: whole(b"{" + b",".join(b'"k%d":{"a":[1,2,3]}' % n for n in range(1_000_000)) + b',"choices":[]}'),
    "headers without end": lambda: [b"HTTP/1.1 200 OK\r\n", *forever_slice(b"X-Padding: " + b"z" * 1000 + b"\r\n")],
    "interim answers without end": lambda: forever(b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "usage of 2^63": lambda: whole(json.dumps({**completion(), "usage": {"completion_tokens": 2**63, "prompt_tokens": 2**63}}).encode()),
    "an error of 60 MB": lambda: whole(b'{"error":{"message":"' + b"e" * (60 * 1000 * 1000) + b'"}}', "500 Internal Server Error"),
    "an error with status 200": lambda: whole(b'{"error":{"message":"the model is not loaded"}}'),
    "a length of 2^63 and nothing": lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\n", *forever_slice(b" " * 65536)],
}

def forever_slice(piece):
    return [piece] * 4096

class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

def started(answer):
    once = answer()  # the same bytes for every request, unless they come without end

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            try:
                while self.one():
                    pass
            except OSError:
                pass  # the client left

        def one(self):
            length = 0
            first = self.rfile.readline()
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            if b"/models" in first:
                self.wfile.write(b"".join(whole(b'{"data":[{"id":"hostile"}]}')))
                return bool(first)
            for piece in () if not first else once if isinstance(once, list) else answer():
                self.wfile.write(piece)
            return bool(first)

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server

def peak_mib(pid):
    """The peak so far. The one that the kernel reports at the end begins with that of this script, of which the process is a copy."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def measured(args, folder, name, answer):
    """Seconds, peak MiB, exit status and last line."""
    server = started(answer)
    out = folder / name.replace(" ", "_").replace("^", "")
    command = [args.medusa, "distill", "--endpoint", f"http://127.0.0.1:{server.server_address[1]}", "--backbone", ROOT / "data/tiny/backbone"]
    command += ["--prompts", folder / "prompts.jsonl", "--out", out, "--concurrency", str(args.concurrency), "--max-new-tokens", "256"]
    command += ["--retries", "1", "--timeout", "20", "--max-refused", str(PROMPTS)]
    began = time.monotonic()
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env={**os.environ, "MEDUSA_API_KEY": ""})
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, peak_mib(process.pid))
            if time.monotonic() - began > SECONDS:
                process.kill()
            time.sleep(0.01)
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    server.shutdown()
    return time.monotonic() - began, peak, process.returncode, (lines or [""])[-1]

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--medusa", default=ROOT / "target/release/medusa", type=Path)
    parser.add_argument("--concurrency", default=64, type=int)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    questions = [json.dumps({"messages": [{"role": "user", "content": f"question {number}"}]}) for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(questions) + "\n")
    print(f"{'server':30} {'seconds':>8} {'peak MiB':>9} {'status':>6}  last line")
    usual, bad = None, []
    for name, answer in {**HONEST, **HOSTILE}.items():
        seconds, mib, code, line = measured(args, folder, name, answer)
        usual = mib if usual is None else usual
        if mib > usual + MOST_MIB or code < 0 or code == 101 or name in HONEST and code:
            bad.append(name)
        print(f"{name:30} {seconds:8.1f} {mib:9.0f} {code:6}  {line[:100]}", flush=True)
    print(f"{len(HOSTILE) + 1 - len(bad)} of {len(HOSTILE) + 1} within {MOST_MIB} MiB more than with an honest server" + (f"; not: {bad}" if bad else ""))
    sys.exit(bool(bad))

if __name__ == "__main__":
    main()
