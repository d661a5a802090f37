"""Running a part in a process of its own, within its time."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time

CACHE = pathlib.Path(__file__).resolve().parents[2] / "target/cache"


class Trouble(Exception):
    """An expected failure, with a message for the user."""


def skipped(why):
    return {"lines": [], "failed": None, "skipped": why, "seconds": 0}


def run(command, seconds, **more):
    """Runs a command with `more` in its environment; returns its JSON lines, and why it failed or was skipped, if it did."""
    env = {**os.environ, "MEDUSA_CACHE": str(CACHE), **more}
    began = time.monotonic()
    # In a session of its own, so that its child processes can be killed with it.
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=seconds)
        ended = f"exit status {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        ended = f"not done after {seconds:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    lines, words = sorted_out(output)
    said = [text.strip()[-2000:] for text in (words, errors) if text.strip()]
    result = {"lines": lines, "failed": ended and ": ".join([ended, *said]), "seconds": round(time.monotonic() - began, 1), "output": words}
    whys = [line["skipped"] for line in lines if "skipped" in line]
    return {**result, "lines": [], "skipped": whys[0]} if whys else result


def sorted_out(output):
    """Separates JSON objects from other text: messages of a wrapping tool, or a line truncated by a kill."""
    lines, words = [], []
    for line in output.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if isinstance(told, dict):
            lines.append(told)
        else:
            words.append(line)
    return lines, "\n".join(words)


class PeakMemory:
    """The largest memory in use on the first GPU while the block runs, as nvidia-smi reports it; 0 without nvidia-smi."""

    def __enter__(self):
        self.bytes, self.done = 0, threading.Event()
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.watcher.join()

    def watch(self):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.done.wait(0.5):
            try:
                told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
                self.bytes = max(self.bytes, int(told.stdout.split()[0]) << 20)
            except (OSError, ValueError, IndexError, subprocess.SubprocessError):
                return
