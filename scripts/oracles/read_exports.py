#!/usr/bin/env python3
"""Reads exported folders with independent reimplementations of their consumers' loaders.

    python3 scripts/oracles/read_exports.py TRAINED/heads.safetensors BACKBONE DTYPE FORMAT=FOLDER …

Needs numpy and safetensors. For every folder it checks the files, names, shapes and config keys that the loader of that format reads, and
the ones that confuse it; then it compares the heads' output on fixed hidden states with that of the trained heads rounded to DTYPE. Prints
`ok FORMAT: …` for each folder, or stops with an error. Written from the loaders' sources (text-generation-inference, vLLM, TensorRT-LLM,
ModelOpt, FasterDecoding), not from this program's.
"""

import json
import pathlib
import re
import struct
import sys

import numpy as np

FLOATS = {"F32": np.float32, "F16": np.float16}


def bfloat16(bits):
    """Decodes bfloat16: the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read(path):
    """Every tensor of a safetensors file as float32, or int64, with its dtype. Parsed by hand, since numpy has no bfloat16."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + at for at in info["data_offsets"])
        raw = data[start:end]
        if info["dtype"] == "BF16":
            numbers = bfloat16(np.frombuffer(raw, np.uint16))
        elif info["dtype"] == "I64":
            numbers = np.frombuffer(raw, np.int64)
        else:
            numbers = np.frombuffer(raw, FLOATS[info["dtype"]]).astype(np.float32)
        tensors[name] = (numbers.reshape(info["shape"]), info["dtype"])
    return tensors


def numbers(tensors):
    return {name: tensor for name, (tensor, _) in tensors.items()}


def read_with_the_library(path):
    """Checks that safetensors' own reader accepts the file; returns the tensor names."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return set(file.keys())


def rounded(tensor, dtype):
    """Rounds to DTYPE and back, ties to even, as every framework does."""
    if tensor.dtype == np.int64:
        return tensor
    if dtype == "float16":
        return tensor.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32).astype(np.uint64)
        return bfloat16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    return tensor


def logits(x, blocks, w2):
    """ResBlocks `x + SiLU(W1 x + b1)`, then W2."""
    for w1, b1 in blocks:
        y = x @ w1.T + b1
        x = x + y / (1 + np.exp(-y))
    return x @ w2.T


def check(holds, message):
    if not holds:
        sys.exit(f"wrong: {message}")


class Heads:
    """Heads in memory: (blocks, W2) of each, and the tokens of their outputs if they are not all tokens."""

    def __init__(self, heads, token_map=None):
        self.heads = heads
        self.token_map = token_map

    @classmethod
    def by_names(cls, tensors, count, layers, name, lm_head=None):
        """`name(head, layer, part)` names the tensors; a missing tensor is an error, as in load_state_dict(strict=True)."""
        heads = []
        for head in range(count):
            blocks = [(tensors.pop(name(head, l, "weight")), tensors.pop(name(head, l, "bias"))) for l in range(layers)]
            heads.append((blocks, tensors.pop(name(head, layers, "W2")) if lm_head is None else lm_head))
        return cls(heads)


def plain(prefix=""):
    def name(head, layer, part):
        return f"{prefix}{head}.{layer}.weight" if part == "W2" else f"{prefix}{head}.{layer}.linear.{part}"

    return name


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def heads_dir(folder):
    """Config and tensors of a folder with only heads."""
    file = folder / "medusa_lm_head.safetensors"
    check(file.exists(), f"{folder} has no medusa_lm_head.safetensors")
    config = config_of(folder)
    for key in ("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers"):
        check(key in config, f"{folder}/config.json has no {key}")
    return config, read(file), read_with_the_library(file)


def tgi(folder, lm_head):
    """MedusaHeadV1, and on any exception MedusaHeadV2: the K matrices become one, and the lm_head is the backbone's."""
    config, raw, _ = heads_dir(folder)
    # models/__init__.py silently drops the speculator if there are `architectures` other than
    # MLPSpeculator.
    check("architectures" not in config, "TGI ignores heads whose config.json has `architectures`")
    count, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    tensors = numbers(raw)
    try:
        heads = Heads.by_names(dict(tensors), count, layers, plain())
        version = 1
    except KeyError:
        check(layers == 1, "MedusaHeadV2 asserts medusa_num_layers == 1")
        stacked = np.concatenate([tensors[f"{head}.0.linear.weight"] for head in range(count)])
        biases = np.concatenate([tensors[f"{head}.0.linear.bias"] for head in range(count)])
        size = stacked.shape[1]
        part = [slice(head * size, (head + 1) * size) for head in range(count)]
        heads = Heads([([(stacked[at], biases[at])], lm_head) for at in part])
        version = 2
    check(config["version"] == str(version), f"version {config['version']!r} of heads that load as version {version}")
    return heads, raw


def lorax(folder, lm_head):
    """An adapter and heads in one folder: V1 for several layers or with W2, else V2; `version` is compared as a number."""
    config, raw, _ = heads_dir(folder)
    check((folder / "adapter_config.json").exists() and (folder / "adapter_model.safetensors").exists(), "no adapter")
    count, layers, tensors = config["medusa_num_heads"], config["medusa_num_layers"], numbers(raw)
    has_w2 = layers > 1 or f"0.{layers}.weight" in tensors
    check(isinstance(config["version"], float) and (config["version"] >= 2) == (not has_w2), "another version")
    heads = Heads.by_names(tensors, count, layers, plain(), None if has_w2 else lm_head)
    check(not tensors, f"names of no module: {sorted(tensors)}")
    return heads, raw


def faster_decoding(folder, lm_head):
    """v0.1: a ModuleList's state dict. Without W2 it is train_legacy.py's format, whose heads use the backbone's lm_head."""
    config, raw, _ = heads_dir(folder)
    count, layers, tensors = config["medusa_num_heads"], config["medusa_num_layers"], numbers(raw)
    shared = config.get("version") == "2"
    heads = Heads.by_names(tensors, count, layers, plain(), lm_head if shared else None)
    check(not tensors, f"names of no module: {sorted(tensors)}")
    return heads, raw


def tensorrt_llm(folder, _):
    """convert_checkpoint's heads folder: every head needs W2 and biases."""
    config, raw, _ = heads_dir(folder)
    check(config["num_medusa_heads"] == config["medusa_num_heads"], "it reads the one key here and the other there")
    tensors = numbers(raw)
    return Heads.by_names(tensors, config["medusa_num_heads"], config["medusa_num_layers"], plain()), raw


def vllm(folder, _):
    """MedusaConfig.from_pretrained, then Medusa.load_weights, which silently ignores unknown names."""
    config = config_of(folder)
    check(config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"], "not seen as a Medusa draft")
    for key in list(config):  # from_pretrained renames such keys, so none may have another value
        if "num" in key and "heads" in key and key != "num_heads":
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key and key != "num_hidden_layers":
            config["num_hidden_layers"] = config.pop(key)
    count, layers = config["num_heads"], config["num_hidden_layers"]
    file = folder / "model.safetensors"
    raw, names = read(file), read_with_the_library(file)
    loaded = {name.replace("medusa_heads.", ""): tensor for name, (tensor, _) in raw.items()}
    if not config.get("medusa_fc_bias", False):
        loaded = {name: tensor for name, tensor in loaded.items() if not re.fullmatch(r"blocks\..*\.bias", name)}
    vocab = config.get("truncated_vocab_size") or config["vocab_size"]
    token_map = loaded.pop("token_map", None)
    check((token_map is None) == (vocab == config["vocab_size"]), "a token_map goes with a truncated_vocab_size, and only with one")
    check(token_map is None or token_map.shape == (vocab,), "token_map is not [truncated_vocab_size]")
    shared = config.get("original_lm_head", False)
    if shared:
        lm_head = loaded.pop("lm_head.weight")
        check("lm_heads.0.weight" not in loaded, "both one lm_head and several")
    blocks = []
    for head in range(count):
        part = lambda l, what: loaded.pop(f"blocks.{head}.layers.{l}.{what}")
        blocks.append([(part(l, "weight"), part(l, "bias")) for l in range(layers)])
    w2 = [lm_head if shared else loaded.pop(f"lm_heads.{head}.weight") for head in range(count)]
    check(not loaded, f"vLLM would leave out {sorted(loaded)}")
    check(all(w.shape == (vocab, config["hidden_size"]) for w in w2), "W2 is not [vocab_size, hidden_size]")
    check(names == set(raw), "safetensors reads other names")
    return Heads(list(zip(blocks, w2)), token_map), raw


def backbone_files(folder):
    """All *.safetensors of a Hugging Face folder."""
    raw = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw.update(read(file))
    return raw


def merged_into(folder, prefix, counts, base):
    """Heads under `prefix` among the weights of a whole backbone."""
    config, raw = config_of(folder), backbone_files(folder)
    count, layers = counts(config)
    for key in ("architectures", "model_type", "hidden_size", "vocab_size"):
        check(key in config, f"{folder}/config.json has no {key}: it is no backbone's")
    rest = {name: tensor for name, tensor in raw.items() if not name.startswith(prefix)}
    check(set(rest) == set(backbone_files(base)), "not the backbone's tensors beside the heads")
    of_heads = {name: tensor for name, tensor in raw.items() if name.startswith(prefix)}
    tensors = numbers(of_heads)
    heads = Heads.by_names(tensors, count, layers, plain(prefix))
    check(not tensors, f"names of no module: {sorted(tensors)}")
    return heads, of_heads


def merged(folder, base):
    """FasterDecoding v1.0 (axolotl)."""
    return merged_into(folder, "medusa_head.", lambda c: (c["medusa_num_heads"], c["medusa_num_layers"]), base)


def modelopt(folder, base):
    """ModelOpt, and TensorRT-LLM's second format."""
    counts = lambda c: (c["medusa"]["num_medusa_heads"], c["medusa"]["num_medusa_layers"])
    return merged_into(folder, "medusa_heads.", counts, base)


ALONE = {"heads": faster_decoding, "tgi": tgi, "vllm": vllm, "tensorrt-llm": tensorrt_llm, "peft": lorax}
MERGED = {"merged": merged, "modelopt": modelopt}


def main(trained, backbone, dtype, folders):
    of_base = backbone_files(backbone)
    lm_head = of_base.get("lm_head.weight", of_base["model.embed_tokens.weight"])[0]
    tensors = {name: rounded(tensor, dtype) for name, (tensor, _) in read(trained).items()}
    token_map, one_w2 = tensors.pop("token_map", None), tensors.pop("w2.weight", None)
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if "linear" in name)
    has_w2 = f"0.{layers}.weight" in tensors
    shared = rounded(lm_head, dtype) if one_w2 is None else one_w2
    expected = Heads.by_names(tensors, count, layers, plain(), None if has_w2 else shared)
    hidden = expected.heads[0][0][0][0].shape[0]
    x = np.sin(np.arange(3 * hidden, dtype=np.float64)).reshape(3, hidden)
    for format, folder in folders:
        if format in MERGED:
            heads, raw = MERGED[format](folder, backbone)
        else:
            heads, raw = ALONE[format](folder, rounded(lm_head, dtype))
        dtypes = {dtype for _, dtype in raw.values()} - {"I64"}
        check(np.array_equal(heads.token_map, token_map), f"{format}: outputs of other tokens")
        check(dtypes == {{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]}, f"{format}: {dtypes}, not {dtype}")
        check(len(heads.heads) == count, f"{format}: {len(heads.heads)} heads, not {count}")
        for number, (got, want) in enumerate(zip(heads.heads, expected.heads)):
            one, other = (logits(x, [(w.astype(np.float64), b) for w, b in blocks], w2) for blocks, w2 in (got, want))
            check(np.array_equal(one, other), f"{format}: head {number} computes other logits by {np.abs(one - other).max()}")
        print(f"ok {format}: {count} heads of {layers} ResBlock(s), {len(raw)} tensors of {dtype}, logits equal")


if __name__ == "__main__":
    if len(sys.argv) < 5 or not all("=" in argument for argument in sys.argv[4:]):
        sys.exit(__doc__)
    pairs = [argument.split("=", 1) for argument in sys.argv[4:]]
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], [(f, pathlib.Path(p)) for f, p in pairs])
