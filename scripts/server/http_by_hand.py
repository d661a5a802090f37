"""HTTP/1.1 on plain sockets, for scripts that load and attack a server on this machine: what is sent is exactly what they say."""

import asyncio
import dataclasses
import json
import socket
import urllib.parse


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict
    body: bytes = b""

    def json(self):
        return json.loads(self.body)


class Closed(Exception):
    """The server closed the connection before the answer was complete."""


def local_address(url):
    """Host and port of a URL; refuses machines other than this one."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost"):
        raise SystemExit(f"{url}: expected http://127.0.0.1:PORT; this script sends only to this machine")
    return "127.0.0.1", parts.port or 80


def request(method, path, body=None, headers=()):
    """The bytes of a request; `body` is bytes, or something for JSON."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in dict(headers).items())]
    if body is not None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {name.lower() for name in dict(headers)}
        lines += [f"Content-Length: {len(body)}"]
        lines += [] if "content-type" in given else ["Content-Type: application/json"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class Connection:
    """One connection: `send` any bytes, then read answers."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, address, receive_buffer=None):
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
            return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))
        except BaseException:
            sock.close()
            raise

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def head(self):
        """Status and headers of the next answer; an informational one (100 Continue) is an answer of its own."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed(f"no answer: {error}") from error
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        return Answer(int(first.split(" ")[1]), headers)

    async def pieces(self, answer, has_body=True):
        """The body of an answer, as it comes."""
        try:
            if not has_body or answer.status in (204, 304) or answer.status < 200:
                return
            if answer.headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readline()
            elif "content-length" in answer.headers:
                yield await self.reader.readexactly(int(answer.headers["content-length"]))
            else:
                yield await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise Closed(f"the answer was cut: {error}") from error

    async def answer(self, has_body=True):
        answer = await self.head()
        answer.body = b"".join([piece async for piece in self.pieces(answer, has_body)])
        return answer

    async def events(self, answer):
        """The `data:` lines of a stream of server-sent events."""
        rest = b""
        async for piece in self.pieces(answer):
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                yield event.removeprefix(b"data:").strip().decode()
        if rest.strip():
            raise Closed(f"the answer was cut within an event: {rest[:80]!r}")

    async def is_closed(self, seconds):
        """Whether the server closes within this time; what it sends first is thrown away."""
        try:
            async with asyncio.timeout(seconds):
                while await self.reader.read(1 << 16):
                    pass
            return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def close(self, abruptly=False):
        if abruptly:
            self.writer.transport.abort()
        self.writer.close()


async def fetch(address, method, path, body=None, headers=()):
    """One request on a connection of its own."""
    connection = await Connection.open(address)
    try:
        await connection.send(request(method, path, body, headers))
        return await connection.answer(has_body=method != "HEAD")
    finally:
        connection.close()


async def metrics(address, headers=()):
    """The samples of /metrics, by name with labels."""
    text = (await fetch(address, "GET", "/metrics", headers=headers)).body.decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def resident_mib(pid, field="VmRSS"):
    """Memory of a process in MiB; VmHWM is its peak."""
    with open(f"/proc/{pid}/status") as status:
        return int(next(line for line in status if line.startswith(field)).split()[1]) / 1024
