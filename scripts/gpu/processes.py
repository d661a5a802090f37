"""Running a part in a process of its own, within its time."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time

CACHE = pathlib.Path(__file__).resolve().parents[2] / "target/cache"
# Of every part, unless the caller's environment has it: cuDNN builds a plan of attention for each length.
ENVIRONMENT = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
SECONDS_TO_DIE = 10
MOST_WORDS = 2000  # the last characters of a part's messages


class Trouble(Exception):
    """An expected failure, with a message for the user."""


def skipped(why):
    return {"lines": [], "failed": None, "skipped": why, "seconds": 0}


def run(command, seconds, **more):
    """Runs a command with `more` in its environment; returns its JSON lines, and why it failed or was skipped, if it did."""
    env = {**ENVIRONMENT, **os.environ, "MEDUSA_CACHE": str(CACHE), **more}
    began = time.monotonic()
    # In a session of its own, so that its child processes can be killed with it.
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=env, start_new_session=True)
    try:
        output, errors, ended = outcome(process, seconds)
    except BaseException:
        kill(process)
        raise
    lines, words = sorted_out(output)
    said = [text.strip()[-MOST_WORDS:] for text in (words, errors) if text.strip()]
    result = {"lines": lines, "failed": ended and ": ".join([ended, *said]), "seconds": round(time.monotonic() - began, 1), "output": words, "errors": errors[-MOST_WORDS:]}
    if process.poll() is None:
        result["stuck"] = True
    whys = [line["skipped"] for line in lines if "skipped" in line]
    return {**result, "lines": [], "skipped": whys[0]} if whys else result


def outcome(process, seconds):
    """What the process printed on stdout and stderr, and why it failed, if it did. It is killed when its time is over."""
    try:
        output, errors = process.communicate(timeout=seconds)
        return output, errors, f"exit status {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        kill(process)
    late = f"not done after {seconds:.0f} s"
    try:
        output, errors = process.communicate(timeout=SECONDS_TO_DIE)
    except subprocess.TimeoutExpired as still:
        # A process of another session holds the pipes, or the driver does not let this one die.
        output, errors = ((text or b"").decode(errors="replace") for text in (still.output, still.stderr))
        late += ", and it could not be killed" if process.poll() is None else ", and a process that it started goes on"
    return output, errors, late


def kill(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself


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
        self.watcher = threading.Thread(target=self.watch, daemon=True)
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
