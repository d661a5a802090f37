"""What is attacked: a command, how to go on after it was cut short, and what it must leave then."""

import hashlib
import json
import re
import shutil

from . import contents
from .hub import Hub
from .world import KEPT, LAST, TINY

# Files that are written in place: they may be cut off at any time, and are checked once the run is whole.
GROWING = ("run/metrics.jsonl", "run/tensorboard/", "out/journal.jsonl", "states/", "cache/")
NOT_RESULTS = ("cache/",)


class Job:
    """A command that writes to the disk. `golden` is what it leaves when nothing happens, and `calls` what it does to files then."""

    has_resume = False
    vanishing = ()
    hub = None
    is_on_disk = True

    def __init__(self, world, name, command):
        self.world, self.name, self.command = world, name, [str(word) for word in command]
        self.golden, self.stdout, self.seconds, self.calls = {}, "", 0.0, []

    @property
    def again(self):
        """The command that goes on."""
        return self.command

    def begin(self):
        """Makes the disk as it is before the command."""
        self.world.empty_disk()

    def prepare(self, shim):
        """Runs undisturbed, twice: first the result, then the calls."""
        for variables in ({}, shim.environment(self.world.folder, records=True, keeps_data=True)):
            self.begin()
            ended = self.world.run(self.command, variables)
            if not ended.is_done or ended.errors:
                raise SystemExit(f"{self.name} fails when nothing disturbs it: status {ended.status}\n{ended.stderr}")
            found = self.found()
            different = contents.differences(self.golden or found, found)
            stdout = contents.of_stdout(ended.stdout)
            if different or (self.stdout or stdout) != stdout:
                raise SystemExit(f"{self.name} is not the same in two runs: {different}\n{self.stdout}\n{stdout}")
            self.golden, self.stdout = found, stdout
            self.seconds = self.seconds or ended.seconds
        self.calls = shim.calls()

    def found(self):
        """What is on the disk, without caches."""
        found = contents.of_folder(self.world.disk)
        return {name: content for name, content in found.items() if not name.startswith(NOT_RESULTS)}

    def whole_files(self):
        """Every file that may be seen during the run, with the contents that it may have."""
        return {name: {content} for name, content in self.golden.items()}

    def damaged(self):
        """Files under their final names that are not whole, in words."""
        allowed = self.whole_files()
        seen = [(name, content) for name, content in self.found().items() if not contents.is_partial(name) and not name.startswith(GROWING)]
        return [f"{name} is {'damaged' if name in allowed else 'unknown'}" for name, content in seen if content not in allowed.get(name, ())]

    def lost(self, ended):
        """What the program said that it saved, and is not there."""
        return []

    def is_there(self):
        """Whether the command refuses to run again because all is there."""
        return False

    def go_on(self):
        """Runs to the end; returns what is wrong with that."""
        ended = self.world.run(self.again)
        if not ended.is_done:
            return [f"cannot go on: {ended.fault() or ended.last_words()}"]
        return self.differences(ended)

    def differences_now(self, found):
        """How these files differ from those of an undisturbed run."""
        return contents.differences(self.golden, found)

    def differences(self, ended):
        """How the results of a run that ended well differ from those of an undisturbed one."""
        return contents.differences(self.golden, self.found()) + self.told_otherwise(ended)

    def told_otherwise(self, ended):
        same = contents.of_stdout(ended.stdout) == self.stdout
        return [] if same else [f"stdout is another: {ended.stdout[:300]!r}"]


class Training(Job):
    """A run of two checkpoints, of which the first is removed at the end."""

    has_resume = True
    vanishing = ("run", "run/step-000002", "run/metrics.jsonl", "run/tensorboard", "cache")

    def __init__(self, world, name, recipe):
        super().__init__(world, name, [world.trainer, f"{recipe}.toml"])
        self.keeping = [world.trainer, f"{recipe}-keeps.toml"]
        self.all_steps, self.states = {}, {}

    @property
    def again(self):
        return [*self.command, "--resume"]

    def prepare(self, shim):
        super().prepare(shim)
        self.world.empty_disk()
        self.world.must(self.keeping)
        self.all_steps, self.states = self.found(), self.states_found()
        self.world.empty_disk()

    def whole_files(self):
        """All checkpoints, and for best/ what each of them has."""
        files = {name: {content} for name, content in (self.all_steps | self.golden).items()}
        for name in list(files):
            if name.startswith("run/step-"):
                files.setdefault("run/best/" + name.split("/")[2], set()).update(files[name])
        return files

    def damaged(self):
        """The config.json of best/ has an evaluation, which no checkpoint has; its checksums are those of the files beside them."""
        best = self.world.disk / "run/best"
        own = [f"run/best/{name}" for name in ("config.json", "medusa.sha256")]
        found = [problem for problem in super().damaged() if not any(name in problem for name in own)]
        config, sums = best / "config.json", best / "medusa.sha256"
        try:
            if config.is_file():
                json.loads(config.read_bytes())
        except ValueError:
            found.append("run/best/config.json is damaged")
        for line in sums.read_text().splitlines() if sums.is_file() else []:
            expected, name = line.split("  ", 1)
            if hashlib.sha256((best / name).read_bytes()).hexdigest() != expected:
                found.append(f"run/best/{name} is damaged")
        return found

    def differences_now(self, found):
        without = lambda files: {name: content for name, content in files.items() if not name.startswith("states/")}
        return contents.differences(without(self.golden), without(found)) + self.differences_of_states()

    def differences(self, ended):
        """The last checkpoints: those of a run that was interrupted and saved may be of other steps."""
        expected = {name: content for name, content in self.golden.items() if not name.startswith(("run/step-", "states/"))}
        found = {name: content for name, content in self.found().items() if not name.startswith("states/")}
        steps = sorted({name.split("/")[1] for name in found if name.startswith("run/step-")})
        for step in steps:
            expected |= {name: content for name, content in self.all_steps.items() if name.startswith(f"run/{step}/")}
        last = f"step-{LAST:06}"
        bad = [] if len(steps) == KEPT and steps[-1] == last else [f"the checkpoints are {steps}"]
        return bad + contents.differences(expected, found) + self.differences_of_states() + self.told_otherwise(ended)

    def states_found(self):
        return {path.name: path.read_bytes() for path in (self.world.disk / "states").glob("*.hidden_states")}

    def differences_of_states(self):
        """A row whose mark was lost is computed again only if a later step reads it: each byte is that of an undisturbed run, or 0."""
        is_whole = lambda found, golden: len(found) == len(golden) and all(got in (0, kept) for got, kept in zip(found, golden))
        found = self.states_found()
        whole = [name for name, golden in self.states.items() if name in found and is_whole(found[name], golden)]
        return [f"states/{name} is another" for name in {*found, *self.states} if name not in whole]

    def lost(self, ended):
        run = self.world.disk / "run"
        steps = [int(path.name[5:]) for path in run.glob("step-*")] + [0]
        told = [int(step) for step in re.findall(r"saved disk/run/step-(\d+)", ended.stderr)] + [0]
        lost = [f"step {max(told)} was saved, and the newest checkpoint is of step {max(steps)}"] if max(told) > max(steps) else []
        if "disk/run/final" in ended.stdout and not (run / "final/heads.safetensors").is_file():
            lost.append("final/ was told, and is not there")
        is_between = (run / ".best.old.partial").is_dir() and (ended.status or 0) < 0  # killed between two renames: --resume takes it back
        if "saved disk/run/best" in ended.stderr and not (run / "best/heads.safetensors").is_file() and not is_between:
            lost.append("best/ was saved, and is not there")
        return lost


class Resumed(Training):
    """The same run, from its first checkpoint."""

    def prepare(self, shim):
        made = self.world.folder / "made/begun"
        self.world.empty_disk()
        self.world.must(self.keeping)
        for name in ("final", *(f"step-{step:06}" for step in range(3, LAST + 1))):
            shutil.rmtree(self.world.disk / "run" / name)
        self.world.empty_disk() if made.exists() else shutil.copytree(self.world.disk, made)
        self.command = self.again
        super().prepare(shim)

    @property
    def again(self):
        return [word for word in self.command if word != "--resume"] + ["--resume"]

    def whole_files(self):
        """recipe.toml and provenance.json are also those that the run began with."""
        files = super().whole_files()
        for name in ("recipe.toml", "provenance.json"):
            files[f"run/{name}"].add(contents.of_file(self.world.folder / "made/begun/run" / name))
        return files

    def begin(self):
        super().begin()
        shutil.copytree(self.world.folder / "made/begun", self.world.disk, dirs_exist_ok=True)


class Distillation(Job):
    has_resume = True
    vanishing = ("out", "out/journal.jsonl")

    @property
    def again(self):
        return [*self.command, "--resume"]

    def damaged(self):
        """The checksums are those of the first shards: that of the next one is written before it."""
        sums = self.world.disk / "out/medusa.sha256"
        lines = sums.read_text().splitlines() if sums.is_file() else []
        own = [line for line in lines if self.golden.get("out/" + line.split("  ", 1)[-1]) != line.split("  ", 1)[0]]
        rest = [problem for problem in super().damaged() if not problem.startswith("out/medusa.sha256")]
        return rest + [f"out/medusa.sha256 is damaged: {line}" for line in own]

    def lost(self, ended):
        told = [int(kept) for kept in re.findall(r"(\d+) of \d+ conversations are saved", ended.stderr)]
        return self.fewer_kept(told[0]) if told else []

    def fewer_kept(self, told):
        out = self.world.disk / "out"
        journal = out / "journal.jsonl"
        lines = journal.read_bytes().count(b"\n") if journal.is_file() else 0
        kept = lines + 256 * len(list(out.glob("shard-*.parquet")))
        return [f"{told} conversations were saved, and {kept} are there"] if kept < told else []


class Export(Job):
    vanishing = ("exported", ".exported.partial")

    def is_there(self):
        exported = self.world.disk / "exported"
        return exported.is_dir() and any(exported.iterdir())

    def go_on(self):
        """An export that is there is whole, and is not written again."""
        if self.is_there():
            return contents.differences(self.golden, {name: what for name, what in self.found().items() if not contents.is_partial(name)})
        return super().go_on()

    def lost(self, ended):
        return ["the export was told, and is not there"] if ended.is_done and not (self.world.disk / "exported/config.json").is_file() else []


class OneFile(Job):
    """A command that writes one file, or prints."""

    vanishing = ("cache",)


class Measured(Job):
    """Times differ from run to run: the files must be there and whole."""

    def found(self):
        found = super().found()
        for name in found:
            try:
                keys = set(json.loads((self.world.disk / name).read_bytes())) - {"busy_cores"}  # there if other programs ran
                keys = {"choices" if key == "dynamic" else key for key in keys}  # whichever tree is the faster one
                found[name] = " ".join(sorted(keys))
            except ValueError:
                found[name] = "damaged"
        return found

    def damaged(self):
        """A file is there with all its keys, or not at all."""
        found = {name: content for name, content in self.found().items() if not contents.is_partial(name)}
        return [f"{name} is damaged" for name, content in found.items() if content != self.golden[name]]


class Download(Job):
    """A backbone comes from a Hub into the cache that all programs share."""

    vanishing = ("hub", "hub/hub", "cache")

    def __init__(self, world, name, command, hub):
        super().__init__(world, name, command)
        self.hub = hub

    def found(self):
        """Without the locks, which stay as in Python's cache."""
        return {name: content for name, content in super().found().items() if "/.locks/" not in name}


class Push(Download):
    """A folder goes to a Hub: what counts is what is there then."""

    vanishing = ()
    is_on_disk = False

    def begin(self):
        super().begin()
        self.hub.forget("org/heads")

    def found(self):
        files = self.hub.repos.get("org/heads", {})
        return super().found() | {f"org/heads/{path}": hashlib.sha256(data).hexdigest() for path, data in files.items()}

    def damaged(self):
        found = {path: content for path, content in self.found().items() if path.startswith("org/heads/")}
        return super().damaged() + [f"{path} is damaged" for path, content in found.items() if self.golden.get(path) != content]

    def told_otherwise(self, ended):
        """A second push of the same files makes no commit, and says so."""
        return []


def hub_of_the_campaign(world):
    """A Hub with the tiny backbone, which the programs ask from now on."""
    hub = Hub()
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    hub.add("org/tiny", {name: (TINY / "backbone" / name).read_bytes() for name in names})
    world.environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(world.disk / "hub"), "HF_TOKEN": "hf_campaign"}
    return hub


def all_jobs(world, endpoint):
    """Every job by its name; the programs write what some of them need first."""
    medusa, with_heads = world.medusa, ["--backbone", "backbone", "--heads", "made/heads"]
    distill = [medusa, "distill", "--out", "disk/out", "--max-new-tokens", "2", "--json", "--quiet"]
    local, asked = [*distill, "--prompts", "ids.jsonl"], [*distill, "--prompts", "prompts.jsonl"]
    calibrate = [medusa, "calibrate", *with_heads, "--data", "validation.jsonl"]
    generate = [medusa, "generate", "--backbone", "org/tiny", "--prompt", "The", "--max-new-tokens", "2", "--dtype", "float32", "--quiet"]
    hub = hub_of_the_campaign(world)
    jobs = [
        Training(world, "medusa1", "medusa1"),
        Training(world, "medusa2", "medusa2"),
        Training(world, "states", "states"),
        Resumed(world, "resumed", "medusa1"),
        Distillation(world, "distill", [*local, "--backbone", "backbone"]),
        Distillation(world, "distill-heads", [*local, *with_heads, "--temperature", "0"]),
        Distillation(world, "distill-endpoint", [*asked, "--backbone", "backbone", "--endpoint", endpoint, "--concurrency", "8"]),
        Export(world, "export", [medusa, "export", "--heads", "made/heads", "--format", "vllm", "--out", "disk/exported"]),
        Export(world, "export-merged", [medusa, "export", "--heads", "made/adapted", "--format", "merged", "--out", "disk/exported"]),
        OneFile(world, "calibrate", [*calibrate, "--out", "disk/calibration.json"]),
        OneFile(world, "data", [medusa, "data", "train.jsonl", "--backbone", "backbone", "--json"]),
        OneFile(world, "tree", [medusa, "tree", "--calibration", "made/calibration.json", "--nodes", "5", "--out", "disk/tree.json"]),
        Download(world, "download", generate, hub),
        Push(world, "push", [medusa, "push", "made/heads", "--repo", "org/heads", "--quiet"], hub),
        Measured(
            world,
            "latency",
            [medusa, "tree", "--calibration", "made/calibration.json", *with_heads, "--latency", "disk/latency.json", "--out", "disk/tree.json"]
            + ["--max-nodes", "2", "--context", "8", "--quiet"],
        ),
    ]
    if (world.folder / "stories").is_dir():
        jobs.append(Training(world, "stories", "medusa1-stories"))
    return {job.name: job for job in jobs}


def make_parts(world, commands):
    """Heads with and without adapters, and a calibration, as far as these commands read them."""
    made = world.folder / "made"
    needs = lambda name: any(f"made/{name}" in word for command in commands for word in command)
    needs_heads = needs("heads") or needs("calibration.json")
    for name, recipe, is_needed in (("heads", "medusa1", needs_heads), ("adapted", "medusa2", needs("adapted"))):
        if is_needed:
            world.empty_disk()
            world.must([world.trainer, f"{recipe}.toml"])
            shutil.copytree(world.disk / "run/final", made / name)
    if needs("calibration.json"):
        calibrate = [world.medusa, "calibrate", "--backbone", "backbone", "--heads", "made/heads", "--data", "validation.jsonl"]
        world.must([*calibrate, "--out", "made/calibration.json"])
    world.empty_disk()
    world.settle()
