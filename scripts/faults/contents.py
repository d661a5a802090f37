"""What a folder holds, without what differs between two runs that are the same: times, speeds, the command line, the checksum of these."""

import hashlib
import json
import struct

VARYING = {"command", "started", "seconds", "milliseconds", "tokens_per_second", "memory_bytes", "tokenised", "cache", "checksum"}
OF_THIS_START = {"resumed", "tokens", "batch_size", "batch_size_at_end", "unchecked"}  # what medusa distill prints of a run that goes on
OF_JSON = ("metrics.jsonl", "provenance.json")
EVENTS = "tensorboard/events"


def is_partial(name):
    """Whether a path is a leftover of an interrupted write."""
    return name.endswith(".incomplete") or any(part.startswith(".") and part.endswith(".partial") for part in name.split("/"))


def of_folder(folder):
    """Each file's path below the folder, with its content: a hash, or what does not vary of it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    found = {}
    for path in files:
        name = str(path.relative_to(folder))
        if "tensorboard/" in name:
            name = name[: name.index("tensorboard/")] + EVENTS
        found[name] = of_file(path)
    return found


def of_file(path):
    """A file's content as a text to compare."""
    data = path.read_bytes()
    try:
        if path.parent.name == "tensorboard":
            return f"{events(data)} events"
        if path.name in OF_JSON:
            return of_json(data, path.name.endswith(".jsonl"), VARYING)
    except ValueError as error:  # of JSON, and of an event file
        return f"damaged: {error}"
    return hashlib.sha256(data).hexdigest()


def of_json(data, has_lines, varying):
    """JSON, or lines of it, without the keys that vary."""
    if not data.endswith(b"\n"):
        raise ValueError("it ends in the middle of a line")
    return json.dumps([without(varying, json.loads(part)) for part in (data.splitlines() if has_lines else [data])])


def without(varying, value):
    if isinstance(value, dict):
        return {key: without(varying, below) for key, below in value.items() if key not in varying}
    return [without(varying, below) for below in value] if isinstance(value, list) else value


def of_stdout(text):
    """What a program printed: JSON lines without the keys that vary, or the text as it is."""
    try:
        return of_json(text.encode(), True, VARYING | OF_THIS_START) if text else ""
    except ValueError:
        return text


def events(data):
    """How many records an event file has; an error if one is not whole."""
    count = at = 0
    while at < len(data):
        if at + 12 > len(data):
            raise ValueError("an event is cut off")
        (length,) = struct.unpack_from("<Q", data, at)
        at += 12 + length + 4
        if at > len(data):
            raise ValueError("an event is cut off")
        count += 1
    return count


def differences(expected, got, *, may_lack=()):
    """How `got` differs from `expected`, in words; files whose names begin with one of `may_lack` may be missing."""
    lacks = lambda name: any(name.startswith(begin) for begin in may_lack)
    missing = [f"{name} is missing" for name in expected if name not in got and not lacks(name)]
    more = [f"{name} should not be there" for name in got if name not in expected]
    other = [f"{name} is another" for name in got if name in expected and got[name] != expected[name]]
    return missing + more + other
