"""The embedded model with heads of 64 numbers, for which the CUDA engine has kernels; its own have 32.

Number i of a head becomes number 2i, and zeros stand between. Rotary embedding turns number j of a head of D by θ^(-2j/D) and pairs it
with j + D/2, so 2i of 64 turns like i of 32, with the same partner. Scores are divided by √D, so queries are multiplied by √2: the
model computes the same, except for the rounding of these weights."""

import array
import json
import math
import shutil
import struct

HEAD_DIM = 64


def widen(source, target):
    """Writes the folder `target`; needs no package."""
    config = json.loads((source / "config.json").read_text())
    factor = HEAD_DIM // config["head_dim"]
    shutil.copytree(source, target)
    (target / "config.json").write_text(json.dumps({**config, "head_dim": HEAD_DIM}, indent=1))
    tensors = {name: widened(name, *tensor, factor) for name, tensor in read(source / "model.safetensors").items()}
    write(target / "model.safetensors", tensors)


def widened(name, shape, numbers, factor):
    """A tensor's new shape and numbers."""
    kind = name.removesuffix("_proj.weight")[-1] if ".self_attn." in name else ""
    if kind == "o":  # [H, heads·D]: columns
        wide = array.array("H", bytes(2 * factor * len(numbers)))
        wide[::factor] = numbers
        return [shape[0], factor * shape[1]], wide
    if kind and kind in "qkv":  # [heads·D, H]: rows
        numbers = array.array("H", map(scaled, numbers)) if kind == "q" and factor > 1 else numbers
        columns, wide = shape[1], array.array("H")
        for at in range(0, len(numbers), columns):
            wide.extend(numbers[at : at + columns])
            wide.extend([0] * ((factor - 1) * columns))
        return [factor * shape[0], columns], wide
    return shape, numbers


def scaled(bits):
    """A bfloat16 number times √2, rounded to the nearest even one."""
    (number,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    (bits,) = struct.unpack("<I", struct.pack("<f", number * math.sqrt(2)))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def read(path):
    """Shapes and numbers of a file of bfloat16 tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensors = {}
    for name, of in header.items():
        if name != "__metadata__":
            if of["dtype"] != "BF16":
                raise ValueError(f"{path}: {name} is {of['dtype']}, expected BF16")
            begin, end = of["data_offsets"]
            tensors[name] = of["shape"], array.array("H", numbers[begin:end])
    return tensors


def write(path, tensors):
    header, end = {}, 0
    for name, (shape, numbers) in tensors.items():
        begin, end = end, end + 2 * len(numbers)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        for _, numbers in tensors.values():
            file.write(numbers.tobytes())
