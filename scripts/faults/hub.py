"""A Hugging Face Hub for downloads and pushes, honest or hostile."""

import base64
import hashlib
import http.server
import json
import threading

from .endpoint import Quiet

SECONDS_TOO_LONG = 86_400
BYTES_TOO_MANY = 64 << 20
LARGE = (".safetensors", ".bin")


def of_git(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def stored_as(path, data):
    return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else of_git(data)


class Hub:
    """Repositories by id, each with the files of its one branch. A hostile one spoils every answer from a given request on."""

    def __init__(self):
        self.repos, self.objects, self.kept = {}, {}, set()
        self.spoil, self.honest_answers, self.one_at_a_time = None, 0, threading.Lock()
        self.server = Quiet(("127.0.0.1", 0), type("Answers", (Answers,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, repo, files):
        self.repos[repo] = dict(files)
        self.objects |= {stored_as(path, data): data for path, data in files.items() if path.endswith(LARGE)}
        self.kept |= set(self.objects)

    def forget(self, repo):
        """Removes a repository that was pushed, with what was uploaded."""
        self.repos.pop(repo, None)
        self.objects = {digest: data for digest, data in self.objects.items() if digest in self.kept}

    def commit_of(self, repo):
        return of_git(json.dumps(sorted((path, stored_as(path, data)) for path, data in self.repos[repo].items())).encode())

    def be_honest(self):
        self.spoil = None

    def be_hostile(self, spoil, honest_answers):
        """After so many honest answers."""
        self.spoil, self.honest_answers = spoil, honest_answers

    def spoil_now(self):
        """The way in which the next answer is spoiled, or None."""
        with self.one_at_a_time:
            self.honest_answers -= 1
            return self.spoil if self.honest_answers < 0 else None


class Answer:
    def __init__(self, status=200, body=b"", **headers):
        self.status, self.body, self.headers = status, body, {name.replace("_", "-"): value for name, value in headers.items()}
        self.length, self.more = None, b""


def of_json(value, **headers):
    return Answer(body=json.dumps(value).encode(), Content_Type="application/json", **headers)


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def do_GET(self):
        self.answer(self.asked_for)

    do_HEAD = do_GET

    def do_POST(self):
        self.answer(self.posted)

    def do_PUT(self):
        self.answer(self.put)

    def answer(self, honest):
        size = int(self.headers.get("Content-Length") or 0)
        body = self.chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(size)
        path = self.path.split("?")[0].strip("/").split("/")
        answer = honest(path, body) or Answer(404, b'{"error": "not found"}', X_Error_Code="RepoNotFound")
        spoil = self.hub.spoil_now()
        if spoil:
            answer = SPOILS[spoil](answer) or answer
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            for each in value if isinstance(value, list) else [value]:
                self.send_header(name, each)
        self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body + answer.more)
        self.close_connection = self.close_connection or answer.length is not None or bool(answer.more)

    def chunks(self):
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def asked_for(self, path, _):
        match path:
            case ["cdn", digest]:
                return self.ranged(self.hub.objects[digest])
            case ["api", "whoami-v2"]:
                return of_json({"name": "org", "type": "user"})
            case ["api", "models", owner, name, *rest] if f"{owner}/{name}" in self.hub.repos:
                return self.listed(f"{owner}/{name}", rest)
            case [owner, name, "resolve", _, *names] if "/".join(names) in self.hub.repos.get(f"{owner}/{name}", {}):
                return self.resolved(f"{owner}/{name}", "/".join(names))

    def listed(self, repo, rest):
        files = self.hub.repos[repo]
        if rest[:1] == ["tree"]:
            return of_json([self.entry(path, data) for path, data in sorted(files.items())])
        siblings = [{"rfilename": path} for path in sorted(files)]
        return of_json({"id": repo, "sha": self.hub.commit_of(repo), "private": False, "gated": False, "siblings": siblings})

    @staticmethod
    def entry(path, data):
        large = {"lfs": {"oid": stored_as(path, data), "size": len(data), "pointerSize": 134}} if path.endswith(LARGE) else {}
        return {"type": "file", "path": path, "size": len(data), "oid": of_git(data)} | large

    def resolved(self, repo, path):
        data = self.hub.repos[repo][path]
        common = {"X_Repo_Commit": self.hub.commit_of(repo), "ETag": f'"{stored_as(path, data)}"'}
        if not path.endswith(LARGE):
            return Answer(body=data, **common)
        linked = {"X_Linked_ETag": common["ETag"], "X_Linked_Size": str(len(data))}
        return Answer(302, Location=f"{self.hub.address}/cdn/{stored_as(path, data)}", **common, **linked)

    def ranged(self, data):
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if not 0 < start < len(data):
            return Answer(body=data, Accept_Ranges="bytes")
        return Answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")

    def posted(self, path, body):
        match path:
            case ["api", "repos", "create"]:
                repo = f"org/{json.loads(body)['name']}"
                known, url = repo in self.hub.repos, {"url": f"{self.hub.address}/{repo}", "id": repo, "name": repo}
                self.hub.repos.setdefault(repo, {})
                return Answer(409, json.dumps({"error": "You already created this repo"} | url).encode()) if known else of_json(url)
            case [_, _, "info", "lfs", "objects", "batch"]:
                return of_json({"transfer": "basic", "objects": [self.upload(each) for each in json.loads(body)["objects"]]})
            case ["verify"]:
                return of_json({})
            case ["api", "models", owner, name, "preupload", _]:
                return of_json({"files": [self.mode(f"{owner}/{name}", each) for each in json.loads(body)["files"]]})
            case ["api", "models", owner, name, "commit", _]:
                return self.committed(f"{owner}/{name}", body)

    def upload(self, asked):
        known = {"oid": asked["oid"], "size": asked["size"]}
        actions = {"upload": {"href": f"{self.hub.address}/store/{asked['oid']}"}, "verify": {"href": f"{self.hub.address}/verify"}}
        return known if asked["oid"] in self.hub.objects else known | {"actions": actions}

    def mode(self, repo, asked):
        there = self.hub.repos[repo].get(asked["path"])
        mode = "lfs" if asked["path"].endswith(LARGE) else "regular"
        return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": there and stored_as(asked["path"], there)}

    def put(self, path, body):
        if path[0] == "store" and hashlib.sha256(body).hexdigest() == path[1]:
            self.hub.objects[path[1]] = body
            return Answer()
        return Answer(400)

    def committed(self, repo, body):
        files = dict(self.hub.repos[repo])
        for key, value in ((line["key"], line["value"]) for line in map(json.loads, body.splitlines())):
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif value.get("parentCommit") not in (None, self.hub.commit_of(repo)):
                return Answer(412)
        self.hub.repos[repo] = files
        oid = self.hub.commit_of(repo)
        return of_json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.address}/{repo}/commit/{oid}", "hookOutput": ""})

    def log_message(self, *_):
        pass


def cut_off(answer):
    answer.length, answer.body = len(answer.body) + 1, answer.body[: len(answer.body) // 2]


def too_long(answer):
    answer.body += b"more"


def more_than_said(answer):
    answer.length, answer.more = len(answer.body), b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"


def flipped(answer):
    if answer.body:
        answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])


def endless(answer):
    answer.length, answer.body = 1 << 62, bytes(BYTES_TOO_MANY)


def page(_):
    return Answer(200, b"<html><body>Log in</body></html>", Content_Type="text/html")


def told(text):
    """Every path, hash and size of an answer is this one."""

    def spoil(answer):
        for name in ("ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Linked-Size"):
            if name in answer.headers:
                answer.headers[name] = text
        if answer.headers.get("Content-Type") == "application/json":
            answer.body = json.dumps(climbing(json.loads(answer.body), text)).encode()

    return spoil


def climbing(value, text):
    if isinstance(value, dict):
        named = ("path", "rfilename", "sha", "oid", "href", "commitOid", "commitUrl")
        return {key: text if key in named else climbing(below, text) for key, below in value.items()}
    return [climbing(below, text) for below in value] if isinstance(value, list) else value


def one_more_file(path):
    """A listing with a file of this name."""

    def spoil(answer):
        listed = json.loads(answer.body) if answer.headers.get("Content-Type") == "application/json" else None
        more = {"type": "file", "path": path, "rfilename": path, "size": 4, "oid": of_git(b"evil")}
        if isinstance(listed, list):
            answer.body = json.dumps([*listed, more]).encode()
        elif listed and "siblings" in listed:
            listed["siblings"].append(more)
            answer.body = json.dumps(listed).encode()

    return spoil


def to(location):
    return lambda answer: Answer(302, Location=location, **{name: value for name, value in answer.headers.items() if name != "Location"})


def status(code, **headers):
    return lambda _: Answer(code, b'{"error": "no"}', **headers)


def nested(_):
    return Answer(200, b"[" * 1_000_000, Content_Type="application/json")


def another_range(answer):
    if answer.status in (200, 206) and "Content-Type" not in answer.headers:
        return Answer(206, answer.body[1:], Content_Range=f"bytes 1-{len(answer.body)}/{1 << 62}")


def many_headers(answer):
    answer.headers["X-More"] = ["x" * 100] * 5000


SPOILS = {
    "cut off": cut_off,
    "too long": too_long,
    "more than said": more_than_said,
    "a bit flipped": flipped,
    "endless": endless,
    "a page": page,
    "nested": nested,
    "many headers": many_headers,
    "another range": another_range,
    "climbs": told("../../../../evil"),
    "is absolute": told("/tmp/evil"),
    "is empty": told(""),
    "is huge": told("9" * 400),
    "one file above": one_more_file("../../../evil.json"),
    "one absolute file": one_more_file("/tmp/evil.safetensors"),
    "one file of two lines": one_more_file("tokenizer.json\nevil"),
    "one file as a folder": one_more_file("config.json/evil.json"),
    "one file twice": one_more_file("config.json"),
    "to a file": to("file:///etc/passwd"),
    "to itself": to("/"),
    "to nowhere": to("http://127.0.0.1:9/"),
    "to no address": to("http://[::"),
    "status 500": status(500),
    "status 429": status(429, Retry_After=str(SECONDS_TOO_LONG)),
    "status 401": status(401),
    "status 304": status(304),
    "status 204": status(204),
}
