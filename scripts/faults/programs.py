"""Starts a program and judges how it ended."""

import dataclasses
import os
import re
import resource
import signal
import subprocess
import threading
import time

LONGEST_RUN = 120.0  # seconds; a run takes about one
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
ASKED_TO_STOP = {INTERRUPTED, 128 + signal.SIGHUP, 128 + signal.SIGTERM, 128 + signal.SIGPIPE}


@dataclasses.dataclass
class Ended:
    """How a program ended: `status` is negative where a signal ended it, and None where it hung and was killed."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def errors(self):
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    @property
    def is_done(self):
        return self.status == DONE

    def fault(self, *, sent=()):
        """Why this is no clean end; None if it is: done, refused with one error, or stopped by one of the signals that were `sent`."""
        said = self.stderr.lower()
        if self.status is None:
            return f"hung for {LONGEST_RUN:.0f} s"
        if "panicked" in said or "backtrace" in said:
            return f"panicked: {self.last_words()}"
        if self.status < 0 and -self.status not in sent:
            return f"ended by {signal.Signals(-self.status).name}: {self.last_words()}"
        if self.status in (FAILED, WRONG_USAGE) and len(self.errors) != 1:
            return f"status {self.status} with {len(self.errors)} errors: {self.last_words()}"
        if self.status > 0 and self.status not in (FAILED, WRONG_USAGE) and not (sent and self.status in ASKED_TO_STOP):
            return f"status {self.status}: {self.last_words()}"
        return None

    def last_words(self):
        return " | ".join(self.stderr.strip().splitlines()[-4:])


def give_hangups_back():
    """Programs that this one starts take SIGHUP as usual, also under nohup: a signal with a handler is reset in them, an ignored one is not."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


class Running:
    """A program that was started."""

    def __init__(self, command, folder, environment, limits=(), stdout=None, stdin=None):
        self.said = [b"", b""]
        self.began = time.monotonic()
        limit = lambda: [resource.setrlimit(*each) for each in limits]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env=environment,
            stdin=stdin or subprocess.DEVNULL,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=limit if limits else None,
        )
        streams = enumerate((self.process.stdout, self.process.stderr))
        self.readers = [threading.Thread(target=self.read, args=each, daemon=True) for each in streams if each[1]]
        for reader in self.readers:
            reader.start()

    def read(self, at, stream):
        """Into a pipe: a limit on the size of files would hold for a file."""
        with stream:
            self.said[at] = stream.read()

    def send(self, number):
        if self.process.poll() is None:
            self.process.send_signal(number)

    def ended(self, longest=LONGEST_RUN):
        """Waits for the end."""
        try:
            status = self.process.wait(longest)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = None
        seconds = time.monotonic() - self.began
        for reader in self.readers:
            reader.join(longest)
        stdout, stderr = (text.decode(errors="replace") for text in self.said)
        return Ended(status, stdout, re.sub(r"\x1b\[[0-9;]*m", "", stderr), seconds)

    def has_stopped(self, longest=LONGEST_RUN):
        """Waits until the program stops (SIGSTOP): False if it ended before."""
        end = time.monotonic() + longest
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as stat:
                    if stat.read().rsplit(")", 1)[1].split()[0] == "T":
                        return True
            except FileNotFoundError:
                return False
            time.sleep(0.002)
        return False


def environment(folder):
    """The variables that all programs of the campaign have: one thread, no GPU, a cache of their own."""
    own = {"OMP_NUM_THREADS": "1", "MEDUSA_CUDA": "off", "MEDUSA_CACHE": str(folder / "disk/cache"), "HOME": str(folder / "home")}
    kept = ("PATH", "LD_LIBRARY_PATH", "LIBTORCH", "LANG", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | own
