"""What is done to a job, and what must hold afterwards. Every attack draws from a random stream of its own: seed, target and case."""

import dataclasses
import errno
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time

from . import contents, disk, programs
from .hub import SPOILS
from .shim import CHANGING, numbered

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass
class Outcome:
    """What a case came to: a word to count, what was done, and what is wrong."""

    word: str
    done: str
    problems: list
    times: int = 1  # kills, signals or faults


class Attack:
    """`limit`: the number of cases; None if they are endless."""

    name = ""
    limit = None

    def __init__(self, world, shim, job):
        self.world, self.shim, self.job = world, shim, job

    @staticmethod
    def fits(job):
        """Whether this job can be attacked so."""
        return True

    def run(self, number, random):
        raise NotImplementedError

    def judge(self, ended, done, *, sent=(), times=1, may_abort=False):
        """After a program ended: a clean end, no damaged file, nothing lost that was saved; then it goes on to the same result."""
        fault = None if may_abort and ended.status in (-signal.SIGABRT, -signal.SIGSEGV) else ended.fault(sent=sent)
        problems = ([fault] if fault else []) + self.job.damaged() + self.job.lost(ended)
        word = "refused" if ended.status in (programs.FAILED, programs.WRONG_USAGE) else "stopped"
        if ended.is_done:
            word = "done"
            problems += self.differences_now(ended)
        else:
            problems += self.job.go_on()
        return Outcome(word, f"{done}; status {ended.status}: {ended.last_words()}", problems, times)

    def differences_now(self, ended):
        """A program that says that all is well has written all."""
        found = {name: content for name, content in self.job.found().items() if not contents.is_partial(name)}
        different = self.job.differences_now(found) + self.job.told_otherwise(ended)
        if "metrics.jsonl has no lines of steps" in ended.stderr:
            different = [what for what in different if "run/metrics.jsonl" not in what and "run/tensorboard" not in what]
        return [f"exit status 0, and {what}" for what in different]


class Kill(Attack):
    """Ends the program one to three times, at a call on files or at any time, and goes on each time."""

    name = "kill"
    signals = (signal.SIGKILL,) * 3 + (signal.SIGTERM, signal.SIGHUP)

    def run(self, number, random):
        self.job.begin()
        done, problems, times, command = [], [], 0, self.job.command
        for _ in range(random.choice((1, 1, 2, 3))):
            sent = random.choice(self.signals)
            ended, where = self.killed(command, sent, random)
            done.append(f"{sent.name} {where}: status {ended.status}")
            fault = ended.fault(sent=(sent,))
            problems += ([fault] if fault else []) + self.job.damaged() + self.job.lost(ended)
            if ended.is_done:
                problems += self.job.differences(ended)
                break
            times += 1
            command = self.job.again
            if self.job.is_there():
                problems += self.job.go_on()
                break
        else:
            problems += self.job.go_on()
        return Outcome("killed" if times else "done", "; ".join(done), problems, times)

    def killed(self, command, sent, random):
        """Starts and kills; returns how it ended, and where the signal came."""
        changing = [call for call in numbered(self.job.calls) if call[0] in CHANGING or call[0] == "open"]
        if random.random() < 0.6 and changing:
            call = random.choice(changing)
            ended = self.world.run(command, self.shim.environment(self.world.folder, call=call, does=f"signal:{int(sent)}"))
            return ended, f"at {call[0]} {call[1]} of {call[2]}"
        moment = random.uniform(0.0, self.job.seconds)
        running = self.world.start(command)
        time.sleep(moment)
        running.send(sent)
        return running.ended(), f"after {moment:.2f} s"


class Power(Attack):
    """Takes the power away at any call of a run, with one of the losses of `disk.LOSSES`, and goes on from what the disk then holds."""

    name = "power"

    @staticmethod
    def fits(job):
        return job.is_on_disk

    def run(self, number, random):
        self.job.begin()
        calls = self.recorded()
        changing = [at for at, call in enumerate(calls) if call.kind in CHANGING or call.kind in ("stdout", "stderr")]
        end = len(calls) if random.random() < 0.15 else random.choice(changing) + 1
        model, told = disk.Disk("disk", self.world.disk), {"stdout": b"", "stderr": b""}
        for call in calls[:end]:
            model.apply(call)
            if call.kind in told:
                told[call.kind] += call.data
        loss = random.choice(list(disk.LOSSES))
        self.job.begin()
        disk.lay_out(model.left(loss, random), self.world.disk)
        said = {stream: text.decode(errors="replace") for stream, text in told.items()}
        ended = programs.Ended(programs.DONE if end == len(calls) else -9, said["stdout"], said["stderr"], 0.0)
        problems = self.job.damaged() + self.job.lost(ended)
        if ended.is_done:
            problems += self.differences_now(ended)
        last = calls[end - 1]
        done = f"power lost after call {end} of {len(calls)} ({last.kind} {last.path} {last.second}), {loss}"
        return Outcome(loss, done, problems + self.job.go_on())

    def recorded(self):
        return self.job.calls


class Fault(Attack):
    """Lets one call fail, once, with one error: all calls one after another."""

    name = "fault"
    TWO = ("EIO", "ENOSPC")
    ERRORS = {
        "write": ("EIO", "ENOSPC", "EINTR", "short"),
        "read": ("EIO", "EINTR", "short"),
        "open": ("EIO", "EINTR", "EMFILE", "ENOSPC"),
        "fsync": TWO,
        "fdatasync": TWO,
        "rename": TWO,
        "exchange": TWO,
        "link": TWO,
        "mkdir": TWO,
        "unlink": ("EIO",),
        "rmdir": ("EIO",),
        "ftruncate": (*TWO, "EINTR"),
        "mmap": ("ENOMEM",),
        "close": ("EIO",),
        "stat": ("EIO",),
        "opendir": ("EIO", "EMFILE"),
        "readdir": ("EIO",),
    }

    def __init__(self, world, shim, job, only=""):
        super().__init__(world, shim, job)
        calls = [call for call in numbered(job.calls) if call[0] in self.ERRORS and only in "{} {} {}".format(*call)]
        # First one error of each call, another kind from call to call; then the other errors.
        rounds = range(max(map(len, self.ERRORS.values())))
        picked = lambda at, call, turn: self.ERRORS[call[0]][(at + turn) % len(self.ERRORS[call[0]])]
        turns = [(at, call, turn) for turn in rounds for at, call in enumerate(calls) if turn < len(self.ERRORS[call[0]])]
        self.cases = [(call, picked(at, call, turn)) for at, call, turn in turns]
        self.limit, self.calls = len(self.cases), len(calls)

    def run(self, number, random):
        call, error = self.cases[number]
        self.job.begin()
        does = "short" if error == "short" else f"fail:{getattr(errno, error)}"
        ended = self.world.run(self.job.command, self.shim.environment(self.world.folder, call=call, does=does))
        reached = self.shim.matched() >= call[1]
        outcome = self.judge(ended, f"{error} from {call[0]} {call[1]} of {call[2]}")
        outcome.word = {"done": "tolerated"}.get(outcome.word, outcome.word) if reached else "not reached"
        return outcome


class Vanish(Attack):
    """Removes or renames a folder or file of the run while it goes on."""

    name = "vanish"

    @staticmethod
    def fits(job):
        return bool(job.vanishing) and job.name not in ("tree", "latency")

    def run(self, number, random):
        self.job.begin()
        calls = [call for call in numbered(self.job.calls) if call[2].startswith("disk/")]
        last = max(at for at, call in enumerate(calls) if call[0] in CHANGING - {"unlink", "rmdir"})
        call = random.choice(calls[: last + 1])  # behind it, all has been written, and a lock or an empty folder may be removed
        path = self.world.disk / random.choice(self.job.vanishing)
        running = self.world.start(self.job.command, self.shim.environment(self.world.folder, call=call, does=f"signal:{int(signal.SIGSTOP)}"))
        what = "nothing was there"
        if running.has_stopped():
            what = self.take(path, random)
            running.send(signal.SIGCONT)
        ended = running.ended()
        away = self.world.disk / "away"
        if away.exists():
            shutil.rmtree(away) if away.is_dir() else away.unlink()
        return self.judge_vanished(ended, path, f"{path.name} at {call[0]} {call[1]} of {call[2]}: {what}")

    def take(self, path, random):
        if not path.exists():
            return "nothing was there"
        if random.random() < 0.5:
            path.rename(self.world.disk / "away")
            return "renamed"
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return "removed"

    def judge_vanished(self, ended, path, done):
        """What was taken away is lost, and may keep the run from going on: then it says so, and starts anew elsewhere."""
        fault = ended.fault()
        problems = ([fault] if fault else []) + self.job.damaged()
        if ended.is_done:
            problems += self.differences_now(ended)
        went_on = self.world.run(self.job.again)
        if not went_on.is_done:
            refused = went_on.fault()
            problems += [f"going on: {refused}"] if refused else []
            self.job.begin()
            problems += self.job.go_on()
        elif not self.job.is_there():
            lost = ("run/metrics.jsonl", "run/tensorboard") if path.name == "metrics.jsonl" else ()  # earlier lines are in no checkpoint
            problems += [what for what in self.job.differences(went_on) if not what.startswith(lost)]
        word = "done" if ended.is_done else "refused"
        return Outcome(word, f"{done}; status {ended.status}: {ended.last_words()}", problems)


class Twice(Attack):
    """Two of the same in one folder."""

    name = "twice"

    def run(self, number, random):
        self.job.begin()
        wait = random.choice((0.0, random.uniform(0.0, self.job.seconds)))
        first = self.world.start(self.job.command)
        time.sleep(wait)
        second = self.world.start(random.choice((self.job.command, self.job.again)))
        both = [first.ended(), second.ended()]
        problems = [fault for fault in (ended.fault() for ended in both) if fault] + self.job.damaged()
        done = [ended for ended in both if ended.is_done]
        if not done:
            problems.append("neither of the two ended well")
        problems += self.differences_now(done[0]) if done else []
        problems += self.job.go_on()
        says = " / ".join(f"{ended.status} {ended.last_words()}" for ended in both)
        return Outcome("both done" if len(done) == 2 else "one refused", f"the second {wait:.2f} s later: {says}", problems)


class Memory(Attack):
    """Limits the address space. Where memory runs out libtorch and the allocator may abort; files must not suffer."""

    name = "memory"

    def run(self, number, random):
        self.job.begin()
        mebibytes = random.randint(30, 1500)
        limits = [(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))]
        ended = self.world.run(self.job.command, limits=limits)
        is_loader = ended.status == 127  # no memory for the libraries themselves
        if is_loader:
            ended.status = -signal.SIGABRT
        outcome = self.judge(ended, f"{mebibytes} MiB of address space", may_abort=True)
        if outcome.word == "stopped":
            outcome.word = "not loaded" if is_loader else "aborted"
        return outcome


class FileSize(Attack):
    """Limits the size of files."""

    name = "file-size"

    def run(self, number, random):
        self.job.begin()
        size = random.choice((0, 1, 100, random.randint(0, 10_000), random.randint(0, 4_000_000)))
        ended = self.world.run(self.job.command, limits=[(resource.RLIMIT_FSIZE, (size, size))])
        return self.judge(ended, f"files of {size} bytes at most")


class Signals(Attack):
    """Signals that end, stop or continue, and streams that nobody reads."""

    name = "signal"

    def run(self, number, random):
        self.job.begin()
        what = random.choice((*ENDING, signal.SIGSTOP, signal.SIGPIPE))
        if what == signal.SIGPIPE:
            return self.closed_stdout()
        running = self.world.start(self.job.command)
        moment = random.uniform(0.0, self.job.seconds)
        time.sleep(moment)
        running.send(what)
        if what == signal.SIGSTOP:
            time.sleep(random.uniform(0.0, 0.2))
            running.send(signal.SIGCONT)
        ended = running.ended()
        outcome = self.judge(ended, f"{what.name} after {moment:.2f} s", sent=() if what == signal.SIGSTOP else (what,))
        if what == signal.SIGSTOP and not ended.is_done:
            outcome.problems.append("it did not go on")
        return outcome

    def closed_stdout(self):
        """A pipe that nobody reads; what goes to files is written all the same."""
        read, write = os.pipe()
        os.close(read)
        try:
            running = self.world.start(self.job.command, stdout=write)
        finally:
            os.close(write)
        ended = running.ended()
        ended.stdout = self.job.stdout
        return self.judge(ended, "closed stdout", sent=(signal.SIGPIPE,))


def can_mount():
    """Whether this process may mount file systems: in a namespace of its own (see scripts/campaign)."""
    return os.environ.get("CAMPAIGN_MOUNTS") == "1"


class Disks(Attack):
    """A disk that is full, or becomes read-only."""

    name = "disk"

    @staticmethod
    def fits(job):
        return can_mount()

    def run(self, number, random):
        self.job.world.empty_disk()
        if random.random() < 0.7:
            kibibytes = random.choice((4, 8, 16, random.randint(4, 100), random.randint(4, 9_000), random.randint(4, 40_000)))
            return self.mounted(["-t", "tmpfs", "-o", f"size={kibibytes}k"], f"a disk of {kibibytes} KiB", lambda: None, ["size=512m"])
        moment = random.choice((None, random.uniform(0.0, self.job.seconds)))
        done = "a disk that is read-only" + ("" if moment is None else f" after {moment:.2f} s")
        return self.mounted(["--bind"], done, self.make_read_only, ["bind", "rw"], moment)

    def make_read_only(self):
        """As soon as no file on it is open for writing."""
        for _ in range(500):
            if subprocess.run(["mount", "-o", "remount,bind,ro", self.world.disk], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return
            time.sleep(0.01)
        raise TimeoutError("a file is open for writing all the time: the disk did not become read-only")

    def mount(self, arguments):
        subprocess.run(["mount", *arguments], check=True)

    def mounted(self, how, done, change, then, moment=None):
        source = self.world.disk if how == ["--bind"] else "none"
        self.mount([*how, source, self.world.disk])
        try:
            if moment is None:
                self.begin_if_it_fits()
                change()
                ended = self.world.run(self.job.command)
            else:
                self.begin_if_it_fits()
                running = self.world.start(self.job.command)
                time.sleep(moment)
                change()
                ended = running.ended()
            self.mount(["-o", ",".join(["remount", *then]), self.world.disk])
            outcome = self.judge(ended, done)
            self.world.empty_disk()
            return outcome
        finally:
            subprocess.run(["umount", "-l", self.world.disk], check=False)

    def begin_if_it_fits(self):
        try:
            self.job.begin()
        except (OSError, shutil.Error):  # what the job begins with does not fit
            self.mount(["-o", "remount,size=64m", self.world.disk])
            self.job.begin()


class Hostile(Attack):
    """A Hub that spoils its answers in one way, after 0 to 7 honest ones; then an honest Hub."""

    name = "hub"
    HONEST = 8

    @staticmethod
    def fits(job):
        return job.hub is not None

    def run(self, number, random):
        self.job.begin()
        spoil, honest = list(SPOILS)[number % len(SPOILS)], number // len(SPOILS) % self.HONEST
        self.job.hub.be_hostile(spoil, honest)
        try:
            ended = self.world.run(self.job.command)
        finally:
            self.job.hub.be_honest()
        outcome = self.judge(ended, f"after {honest} honest answers: {spoil}")
        outside = [*self.world.folder.rglob("*evil*"), *self.world.folder.parent.glob("evil*"), *pathlib.Path("/tmp").glob("evil*")]
        outcome.problems += [f"{path} was written" for path in outside]
        return outcome


class Pipes(Attack):
    """An input is a named pipe that nobody writes to: one after another."""

    name = "pipe"

    def __init__(self, world, shim, job):
        super().__init__(world, shim, job)
        opened = sorted({call.path for call in job.calls if call.shim_kind == "open" and not call.path.startswith(("disk/", "home/"))})
        self.inputs = [path for path in opened if (world.folder / path).is_file()]
        self.limit = len(self.inputs)

    def run(self, number, random):
        self.job.begin()
        path = self.world.folder / self.inputs[number]
        kept = path.with_name(f".{path.name}.kept")
        path.rename(kept)
        os.mkfifo(path)
        try:
            ended = self.world.run(self.job.command)
        finally:
            kept.replace(path)
        return self.judge(ended, f"{self.inputs[number]} is a named pipe")


class Clock(Attack):
    """The time of day jumps by years while the program runs, which then goes on with the right time."""

    name = "clock"

    def run(self, number, random):
        self.job.begin()
        jumps = self.shim.environment(self.world.folder, clock_jumps=True)
        if random.random() < 0.5:
            return self.judge(self.world.run(self.job.command, jumps), "the clock jumps")
        running = self.world.start(self.job.command, jumps)
        moment = random.uniform(0.0, self.job.seconds)
        time.sleep(moment)
        running.send(signal.SIGKILL)
        return self.judge(running.ended(), f"the clock jumps; SIGKILL after {moment:.2f} s", sent=(signal.SIGKILL,))


ATTACKS = {each.name: each for each in (Kill, Power, Fault, Disks, Vanish, Twice, Memory, FileSize, Signals, Hostile, Pipes, Clock)}
