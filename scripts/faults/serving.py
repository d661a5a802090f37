"""Attacks on `medusa serve`: what it answers is whole or no answer, and after a restart it answers the same."""

import concurrent.futures
import http.client
import json
import signal
import socket
import time

from . import programs
from .attacks import Outcome

LONGEST_START = 60.0
COMMAND = ["serve", "--backbone", "backbone", "--heads", "made/heads"]
QUESTIONS = 6


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(port, number):
    """The text of an answer; None where the connection broke or the server refused."""
    body = json.dumps({"model": "backbone", "prompt": f"Count to {number}", "max_tokens": 12, "temperature": 0})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=programs.LONGEST_RUN)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        return json.loads(text)["choices"][0]["text"] if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Serve:
    """Ends a server at any time while clients ask."""

    limit = None
    signals = (signal.SIGKILL,)

    def __init__(self, world):
        self.world = world
        self.golden = None

    def start(self, port):
        return self.world.start([self.world.medusa, *COMMAND, "--port", str(port)])

    def wait(self, running, port):
        end = time.monotonic() + LONGEST_START
        while time.monotonic() < end and running.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"the server did not start: {running.ended(0.1).last_words()}")

    def answers(self, port, pool):
        return [pool.submit(ask, port, number) for number in range(QUESTIONS)]

    def undisturbed(self):
        """All answers, and how long they take."""
        port = free_port()
        running = self.start(port)
        self.wait(running, port)
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(QUESTIONS) as pool:
            texts = [answer.result() for answer in self.answers(port, pool)]
        seconds = time.monotonic() - began
        running.send(signal.SIGTERM)
        ended = running.ended()
        fault = ended.fault(sent=(signal.SIGTERM,))
        return texts, seconds, [fault] if fault else []

    def run(self, number, random):
        if self.golden is None:
            self.golden, self.seconds, _ = self.undisturbed()
        sent = random.choice(self.signals)
        port = free_port()
        running = self.start(port)
        self.wait(running, port)
        moment = random.uniform(0.0, 1.2 * self.seconds)
        with concurrent.futures.ThreadPoolExecutor(QUESTIONS) as pool:
            asked = self.answers(port, pool)
            time.sleep(moment)
            running.send(sent)
            if sent == signal.SIGSTOP:
                time.sleep(0.1)
                running.send(signal.SIGCONT)
            texts = [answer.result() for answer in asked]
            if sent == signal.SIGSTOP:
                running.send(signal.SIGTERM)
        ended = running.ended()
        fault = ended.fault(sent=(sent, signal.SIGTERM))
        problems = [fault] if fault else []
        problems += [f"answer {at} is another: {text!r}" for at, text in enumerate(texts) if text not in (None, self.golden[at])]
        if sent == signal.SIGSTOP and None in texts:
            problems.append("an answer is missing after SIGSTOP and SIGCONT")
        again, _, more = self.undisturbed()
        problems += more + ([] if again == self.golden else [f"after a restart the answers are others: {again}"])
        word = "all answered" if None not in texts else "some answered"
        return Outcome(word, f"{sent.name} after {moment:.2f} s; status {ended.status}: {ended.last_words()}", problems)


class Kill(Serve):
    signals = (signal.SIGKILL,) * 3 + (signal.SIGTERM, signal.SIGHUP)


class Signals(Serve):
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP)


SERVING = {"kill": Kill, "signal": Signals}
