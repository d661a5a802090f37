"""The folder in which the programs run: a tiny backbone, rows, prompts and recipes; everything that they write goes to `disk/`."""

import json
import os
import pathlib
import shutil

from . import programs

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "data/tiny"
STORIES = REPOSITORY / "../shared/models/stories260K"

HEAD = """[backbone]
path = "{backbone}"
dtype = "float32"
[heads]
medusa_num_heads = 2
medusa_num_layers = 1
"""
TAIL = """[data]
train = ["train.jsonl"]
validation = ["validation.jsonl"]
max_length = 64
packing = false
[optimizer]
learning_rate = 1e-3
[schedule]
name = "cosine"
warmup_steps = 2
[train]
output_dir = "disk/run"
max_steps = {last}
micro_batch_size = 2
seed = 1
save_every = {saves}
eval_every = 2
keep_best = "loss"
keep_checkpoints = {keeps}
"""
MEDUSA1 = "[stage.medusa1]\n"
MEDUSA2 = "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8.0\n"
STATES = 'hidden_state_cache = "disk/states"\n'
RECIPES = {
    "medusa1": HEAD + MEDUSA1 + TAIL,
    "states": HEAD + MEDUSA1 + TAIL + STATES,
    "medusa2": HEAD + MEDUSA2 + TAIL,
}
KEPT = 1  # checkpoint
LAST = 4  # step
CONVERSATIONS = 260  # more than a shard holds, for a server; the backbone answers only a few
FEW = 20


class World:
    """Folder and programs. `disk` is emptied before every case."""

    def __init__(self, folder, bin_folder):
        self.folder, self.disk, self.bin = folder, folder / "disk", bin_folder
        self.medusa, self.trainer = bin_folder / "medusa", bin_folder / "medusa-train"
        self.environment = programs.environment(folder)
        for program in (self.medusa, self.trainer, bin_folder / "medusa-libtorch"):
            if not program.is_file():
                raise SystemExit(f"{program} is missing: build the programs (cargo build --release --bins), or name their folder with --programs")

    def write_inputs(self):
        shutil.copytree(TINY / "backbone", self.folder / "backbone")
        self.copy_lines(TINY / "train.jsonl", "train.jsonl", 8)
        self.copy_lines(TINY / "eval.jsonl", "validation.jsonl", 3)
        questions = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
        prompts = [questions[number % len(questions)] | {"id": f"q{number}"} for number in range(CONVERSATIONS)]
        self.write("prompts.jsonl", "".join(json.dumps(prompt) + "\n" for prompt in prompts))
        ids = [{"prompt_ids": [0, 300 + number, 400 + number % 7], "id": f"q{number}"} for number in range(FEW)]
        self.write("ids.jsonl", "".join(json.dumps(prompt) + "\n" for prompt in ids))
        backbones = {"": "backbone"}
        if STORIES.is_dir():
            shutil.copytree(STORIES, self.folder / "stories")
            backbones["-stories"] = "stories"
        for end, backbone in backbones.items():
            for name, text in RECIPES.items():
                self.write(f"{name}{end}.toml", text.format(saves=2, keeps=KEPT, last=LAST, backbone=backbone))
                self.write(f"{name}{end}-keeps.toml", text.format(saves=1, keeps=99, last=LAST, backbone=backbone))
        (self.folder / "made").mkdir()
        (self.folder / "home").mkdir()
        self.settle()

    def settle(self):
        """Makes the inputs old: hashes of files that changed in the last two seconds are not cached."""
        for path in self.folder.rglob("*"):
            os.utime(path, (1_700_000_000, 1_700_000_000), follow_symlinks=False)

    def copy_lines(self, path, name, count):
        with path.open(encoding="utf-8") as lines:
            self.write(name, "".join(line for line, _ in zip(lines, range(count))))

    def write(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8")

    def empty_disk(self):
        self.disk.mkdir(exist_ok=True)
        for path in self.disk.iterdir():  # the folder itself may be a mount
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def start(self, command, more=None, **settings):
        return programs.Running(command, self.folder, self.environment | (more or {}), **settings)

    def run(self, command, more=None, **settings):
        return self.start(command, more, **settings).ended()

    def must(self, command):
        """A command that prepares something."""
        ended = self.run(command)
        if not ended.is_done:
            raise SystemExit(f"could not prepare: {' '.join(map(str, command))}: status {ended.status}\n{ended.stderr}")
        return ended
