"""The preloaded library that counts calls and makes them fail: builds it, sets its environment, reads its records."""

import dataclasses
import pathlib
import shutil
import subprocess

# Calls that change what is on the disk, or when it is there.
CHANGING = {"create", "truncate", "write", "fsync", "fdatasync", "rename", "exchange", "unlink", "rmdir", "mkdir", "link", "ftruncate"}


@dataclasses.dataclass
class Call:
    """A recorded call. `result` is negative: an error's number."""

    kind: str
    result: int
    offset: int
    path: str
    second: str
    data: bytes

    @property
    def shim_kind(self):
        """The kind by which the shim counts it."""
        return "open" if self.kind in ("create", "truncate") else self.kind


class Shim:
    """`scripts/faults/shim.c`, compiled into `folder`."""

    def __init__(self, folder):
        compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
        if compiler is None:
            raise SystemExit("scripts/campaign needs a C compiler (cc, gcc or clang), and found none")
        source = pathlib.Path(__file__).with_name("shim.c")
        self.library, self.state, self.log = (folder / name for name in ("shim.so", "shim.state", "shim.log"))
        command = [compiler, "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", self.library, source, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)

    def environment(self, root, *, call=None, does=None, records=False, keeps_data=False, clock_jumps=False):
        """Variables for a program. `call`: (kind, number, path) of the call that `does` something else; see shim.c."""
        self.state.write_bytes(bytes(8))
        self.log.unlink(missing_ok=True)
        variables = {"LD_PRELOAD": self.library, "FAULTS_ROOT": root, "FAULTS_STATE": self.state}
        if records:
            variables["FAULTS_LOG"] = self.log
        if keeps_data:
            variables["FAULTS_DATA"] = "1"
        if clock_jumps:
            variables["FAULTS_CLOCK"] = "1"
        if call:
            variables["FAULTS_CALL"] = "{} {} {}".format(*call)
            variables["FAULTS_DO"] = does
        return {name: str(value) for name, value in variables.items()}

    def matched(self):
        """How many calls the last program made of the kind and path that were asked for."""
        return int.from_bytes(self.state.read_bytes(), "little")

    def calls(self):
        """The recorded calls of the last program."""
        text, calls, at = self.log.read_bytes(), [], 0
        while at < len(text):
            end = text.index(b"\n", at)
            kind, result, offset, length, paths = text[at:end].decode().split(" ", 4)
            path, second = paths.split("\t")
            at = end + 1 + int(length)
            calls.append(Call(kind, int(result), int(offset), path, second, text[end + 1 : at]))
        return calls


def numbered(calls):
    """Each call as (kind, number, path): its number among the calls of this kind on this path, from 1."""
    seen, named = {}, []
    for call in calls:
        key = (call.shim_kind, call.path)
        seen[key] = seen.get(key, 0) + 1
        named.append((call.shim_kind, seen[key], call.path))
    return named
