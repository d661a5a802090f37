#!/usr/bin/env python3
"""Files that torch.save writes, for the reader of pickles (tests/export.rs): python3 scripts/make_pickle_fixtures.py

Needs torch 2.11 and safetensors. Writes tests/fixtures/pickled/: heads of FasterDecoding v0.1 (2 heads, hidden size 4, vocabulary 6) as
`{zip,legacy}_{float32,bfloat16,float16}.pt`; the same numbers as `expected.safetensors` (float32), whose metadata says what made them;
`tied.pt`, where two ResBlocks are one module; `strided.pt`, of views; `parameters.pt`, of nn.Parameters; and what must be refused:
`calls_system.pt` (zip) and `calls_system_legacy.pt`, whose pickles call a function when Python loads them, and `whole_module.pt`.
"""

import collections
import hashlib
import os
import pathlib

import safetensors.torch
import torch

SCRIPT = pathlib.Path(__file__).resolve()
FOLDER = SCRIPT.parents[1] / "tests" / "fixtures" / "pickled"
HEADS, HIDDEN, VOCAB = 2, 4, 6


class ResBlock(torch.nn.Module):
    """As FasterDecoding writes it, so that the names are theirs."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)


class Calls:
    """Pickled, it is a call that Python makes when it loads the file."""

    def __reduce__(self):
        return os.system, ("touch it_was_run",)


def heads(layers, tied):
    def blocks():
        return [ResBlock()] * layers if tied else [ResBlock() for _ in range(layers)]

    return torch.nn.ModuleList(
        torch.nn.Sequential(*blocks(), torch.nn.Linear(HIDDEN, VOCAB, bias=False)) for _ in range(HEADS)
    )


def save(state, name, **options):
    torch.save(state, FOLDER / name, **options)


def main():
    torch.manual_seed(20240119)
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Numbers that every dtype holds: eighths.
    model = heads(1, tied=False)
    for parameter in model.parameters():
        parameter.data = (parameter.data * 8).round() / 8 + 0.25
    state = model.state_dict()
    metadata = {"script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "torch": torch.__version__}
    safetensors.torch.save_file(dict(state), FOLDER / "expected.safetensors", metadata=metadata)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        cast = model.to(dtype).state_dict()
        save(cast, f"zip_{name}.pt")
        save(cast, f"legacy_{name}.pt", _use_new_zipfile_serialization=False)
    save(heads(2, tied=True).state_dict(), "tied.pt")
    both = torch.stack([state["0.0.linear.weight"].float(), state["1.0.linear.weight"].float()], dim=2)
    views = collections.OrderedDict(state, **{"0.0.linear.weight": both[..., 0], "1.0.linear.weight": both[..., 1]})
    save(views, "strided.pt")
    save(dict(model.float().named_parameters()), "parameters.pt")
    spoilt = collections.OrderedDict(state, spoilt=Calls())
    save(spoilt, "calls_system.pt")
    save(spoilt, "calls_system_legacy.pt", _use_new_zipfile_serialization=False)
    save(model, "whole_module.pt")


if __name__ == "__main__":
    main()
