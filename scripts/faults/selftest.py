#!/usr/bin/env python3
"""Shows that the campaign sees what it is there to see: small programs that sync too little, or do not look at errors."""

import errno
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from faults import disk, programs  # noqa: E402
from faults.shim import Shim, numbered  # noqa: E402

PREPARED = """
import os
os.mkdir("disk/run")
file = os.open("disk/run/.new", os.O_WRONLY | os.O_CREAT, 0o600)
os.write(file, b"whole")
"""
SYNC_FILE, RENAME = "os.fsync(file)\n", 'os.rename("disk/run/.new", "disk/run/final")\n'
SYNC_FOLDERS = "".join(f'os.fsync(os.open("{name}", os.O_RDONLY))\n' for name in ("disk/run", "disk"))
CARELESS = PREPARED.replace('os.write(file, b"whole")', 'try: os.write(file, b"whole")\nexcept OSError: pass') + RENAME


class Shown:
    def __init__(self, folder):
        self.folder, self.shim = folder, Shim(folder)

    def run(self, program, **settings):
        subprocess.run(["rm", "-rf", "disk"], cwd=self.folder, check=True)
        (self.folder / "disk").mkdir()
        variables = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"} | self.shim.environment(self.folder, **settings)
        return subprocess.run([sys.executable, "-c", program], cwd=self.folder, env=variables, stderr=subprocess.DEVNULL, check=False).returncode

    def left(self, program, loss):
        """What the disk holds if power is lost after the program's end."""
        assert self.run(program, records=True, keeps_data=True) == 0
        model = disk.Disk("disk")
        for call in self.shim.calls():
            model.apply(call)
        return model.left(loss, random.Random(1))

    def final(self):
        path = self.folder / "disk/run/final"
        return path.read_bytes() if path.exists() else None


def main():
    with tempfile.TemporaryDirectory() as folder:
        shown = Shown(pathlib.Path(folder).resolve())
        whole = PREPARED + SYNC_FILE + RENAME + SYNC_FOLDERS
        for loss in disk.LOSSES:
            assert shown.left(whole, loss) == {"run": None, "run/final": b"whole"}, loss
        assert shown.left(PREPARED + RENAME + SYNC_FOLDERS, "only_synced") == {"run": None, "run/final": b""}, "a content that was not synced is lost"
        assert shown.left(PREPARED + SYNC_FILE + RENAME, "only_synced") == {}, "a name that was not synced is lost"
        write = next(call for call in numbered(shown.shim.calls()) if call[0] == "write")
        assert write == ("write", 1, "disk/run/.new"), write
        for does, expected in ((f"fail:{errno.EIO}", b""), ("short", b"wh")):
            assert shown.run(CARELESS, call=write, does=does) == 0
            assert shown.final() == expected, does
        assert shown.run(whole, call=write, does="signal:9") == -9
        assert (shown.folder / "disk/run/.new").read_bytes() == b"wh", "a write that is killed writes half"
        assert shown.run(whole, call=("rename", 1, "disk/run/.new"), does=f"fail:{errno.ENOSPC}") == 1
        assert shown.shim.matched() == 1
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    programs.give_hangups_back()
    asleep = programs.Running(["sleep", "60"], "/", None)
    asleep.send(signal.SIGHUP)
    assert asleep.ended(5).status == -signal.SIGHUP, "a hangup is heard under nohup"
    print("the campaign sees what is not synced, fails, is short, or is killed")


if __name__ == "__main__":
    main()
