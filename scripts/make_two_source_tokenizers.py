#!/usr/bin/env python3
"""Writes which ids transformers gives where tokenizer.json and the files beside it name different tokens: tests/fixtures/tokenizers/two_sources.json.

    python3 scripts/make_two_source_tokenizers.py            # needs transformers 5; torch is not used
    python3 scripts/make_two_source_tokenizers.py --check    # computes again and compares with the file, writes nothing

A case is a set of changes (JSON merge patches, RFC 7386) of the tiny tokenizer in data/tiny/backbone: of tokenizer.json, of tokenizer_config.json,
and of the files added_tokens.json and special_tokens_map.json, which it lacks. For each case the file has, by AutoTokenizer: the ids of
TEXTS with what goes around a text, their text without special tokens, the number of tokens, and the ids of BOS and EOS; `null` if transformers
cannot load the files.
"""

import hashlib
import json
import os
import pathlib
import sys
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"

import tokenizers
import transformers

SCRIPT = pathlib.Path(__file__).resolve()
ROOT = SCRIPT.parents[1]
BASE = ROOT / "data" / "tiny" / "backbone"
FIXTURE = ROOT / "tests" / "fixtures" / "tokenizers" / "two_sources.json"
OWN = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "Hi <|end|> there<|bos|>",
    "a <|assistant|> b",
    "x<|user|>y",
    "u <|x|> v<|y|><|z|>w<|X|>",
    "the EXPERIMENT <|ASSISTANT|>",
    "xx x",
    "",
]


def token(content, special=True, **flags):
    """A token as save_pretrained writes it; flags that are not given are off."""
    every = {name: flags.get(name, False) for name in ("lstrip", "normalized", "rstrip", "single_word")}
    return {"content": content, **every, "special": special}


def declared(**tokens):
    """A change of `added_tokens_decoder`; the keys are `id_` and the id."""
    return {"config": {"added_tokens_decoder": {key.removeprefix("id_"): value for key, value in tokens.items()}}}


def own_with(**flags):
    """tokenizer.json's tokens, the last with other flags."""
    tokens = [{"id": at, **token(content, **(flags if at == 3 else {}))} for at, content in enumerate(OWN)]
    return {"tokenizer": {"added_tokens": tokens}}


def without_decoder(config=None, **files):
    """Files of a transformers before 4.34: no `added_tokens_decoder`."""
    return {"config": {"added_tokens_decoder": None, **(config or {})}, **files}


LOWER = {"tokenizer": {"normalizer": {"type": "Lowercase"}}}
ADDED_TOKEN = {"__type": "AddedToken", **token("<|x|>", lstrip=True)}
CASES = {
    # Tokens that both files have, with other flags.
    "no change": {},
    "lstrip in the config": declared(id_3=token(OWN[3], lstrip=True)),
    "rstrip in the config": declared(id_3=token(OWN[3], rstrip=True)),
    "single_word in the config": declared(id_2=token(OWN[2], single_word=True)),
    "normalized in the config": {**declared(id_3=token(OWN[3], normalized=True)), **LOWER},
    "special off in the config": declared(id_3=token(OWN[3], special=False)),
    "special off in the config for EOS": declared(id_1=token(OWN[1], special=False)),
    "no flags in the config": declared(id_3={"content": OWN[3]} | dict.fromkeys(["lstrip", "normalized", "rstrip", "single_word", "special"])),
    "lstrip in tokenizer.json": own_with(lstrip=True),
    "special off in tokenizer.json": own_with(special=False),
    "the config lacks a token": declared(id_3=None),
    "flags without added_tokens_decoder": without_decoder({"eos_token": {"__type": "AddedToken", **token(OWN[1], lstrip=True)}}),
    # New tokens.
    "a new token": declared(id_1536=token("<|x|>")),
    "a new token that is text": declared(id_1536=token("<|x|>", special=False, normalized=True)),
    "a new token that is text, normalized": {**declared(id_1536=token("<|x|>", special=False, normalized=True)), **LOWER},
    "a new token without flags": declared(id_1536={"content": "<|x|>"}),
    "new tokens in another order": declared(id_1538=token("<|x|>"), id_1536=token("<|y|>", rstrip=True), id_1537=token("<|z|>", special=False)),
    "a token of the vocabulary": declared(id_91=token("x", single_word=True)),
    "a new EOS": {"config": {"added_tokens_decoder": {"1536": token("<|x|>", special=False)}, "eos_token": "<|x|>"}},
    "additional_special_tokens": {"config": {"additional_special_tokens": ["<|x|>", "<|user|>", "<|y|>"]}},
    "extra_special_tokens": {"config": {"extra_special_tokens": ["<|y|>", "<|x|>"]}},
    "extra_special_tokens by name": {"config": {"extra_special_tokens": {"image_token": "<|x|>"}}},
    "both lists": {"config": {"extra_special_tokens": ["<|x|>"], "additional_special_tokens": ["<|y|>"]}},
    "a list with flags": {"config": {"additional_special_tokens": [ADDED_TOKEN]}},
    "a list with flags, untyped": {"config": {"additional_special_tokens": [token("<|x|>", lstrip=True)]}},
    "a declared token in the list": {
        "config": {"added_tokens_decoder": {"1536": token("<|x|>", special=False)}, "extra_special_tokens": ["<|x|>"]}
    },
    "a named token of its own": {"config": {"image_token": "<|x|>", "pad_token": "<|y|>", "extra_special_tokens": ["<|z|>"]}},
    "a pad_token of the vocabulary": {"config": {"pad_token": "x"}},
    # The files of older versions.
    "added_tokens.json beside added_tokens_decoder": {"added_tokens.json": {"<|x|>": 1536}},
    "added_tokens.json alone": without_decoder(**{"added_tokens.json": {"<|x|>": 1536, "<|user|>": 2}}),
    "added_tokens.json and a list": without_decoder(
        {"additional_special_tokens": ["<|x|>"]}, **{"added_tokens.json": {"<|y|>": 1537, "<|x|>": 1536}}
    ),
    "special_tokens_map.json beside added_tokens_decoder": {
        "special_tokens_map.json": {"additional_special_tokens": ["<|x|>"], "eos_token": "<|user|>"}
    },
    "special_tokens_map.json alone": without_decoder(
        **{"special_tokens_map.json": {"additional_special_tokens": ["<|x|>"], "eos_token": "<|user|>"}}
    ),
    "special_tokens_map.json and a list": without_decoder(
        {"additional_special_tokens": ["<|x|>"]},
        **{"special_tokens_map.json": {"additional_special_tokens": ["<|y|>"], "extra_special_tokens": ["<|z|>"]}},
    ),
    "flags in special_tokens_map.json": without_decoder(**{"special_tokens_map.json": {"pad_token": token("<|x|>", lstrip=True)}}),
    # Switches.
    "split_special_tokens": {"config": {"split_special_tokens": True, "added_tokens_decoder": {"1536": token("<|x|>", special=False)}}},
    "add_bos_token false, add_eos_token true": {"config": {"add_bos_token": False, "add_eos_token": True}},
    "add_bos_token without a post-processor": {"config": {"add_bos_token": True}, "tokenizer": {"post_processor": None}},
    "a BOS that is not the post-processor's": {"config": {"bos_token": "<|user|>"}},
    "dropout 0": {"tokenizer": {"model": {"dropout": 0.0}}},
    # What the Rust side refuses.
    "dropout": {"tokenizer": {"model": {"dropout": 1.0}}},
    "another token at an id": declared(id_3=token("<|x|>")),
    "two tokens with each other's ids": declared(id_2=token(OWN[3]), id_3=token(OWN[2])),
    "an id beyond the next": declared(id_1600=token("<|x|>")),
    "an id of the vocabulary": declared(id_700=token("<|x|>")),
    "a token of the vocabulary with another id": declared(id_92=token("x")),
    "added_tokens.json with an id of tokenizer.json": without_decoder(**{"added_tokens.json": {"<|x|>": 3}}),
    "an unknown EOS": {"config": {"eos_token": "<|x|>"}},
    "an unknown EOS in special_tokens_map.json": without_decoder(**{"special_tokens_map.json": {"eos_token": "<|x|>"}}),
}


def merged(value, change):
    """A JSON merge patch."""
    if not isinstance(change, dict):
        return change
    value = dict(value) if isinstance(value, dict) else {}
    for key, part in change.items():
        if part is None:
            value.pop(key, None)
        else:
            value[key] = merged(value.get(key), part)
    return value


def files_of(case):
    """The files of a case by name."""
    changes = {"tokenizer.json": "tokenizer", "tokenizer_config.json": "config"}
    own = {name: merged(json.loads((BASE / name).read_text(encoding="utf-8")), case.get(key, {})) for name, key in changes.items()}
    return own | {name: case[name] for name in ("added_tokens.json", "special_tokens_map.json") if name in case}


def result_of(case):
    """What transformers makes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files_of(case).items():
            pathlib.Path(folder, name).write_text(json.dumps(content), encoding="utf-8")
        (pathlib.Path(folder) / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except TypeError:
            return None
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    return {"ids": ids, "decoded": texts, "tokens": len(tokenizer), "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}


def main():
    cases = [{"name": name, **case, "transformers": result_of(case)} for name, case in CASES.items()]
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    script = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    head = json.dumps({"script_sha256": script, "versions": versions, "texts": TEXTS}, ensure_ascii=False)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    text = f'{head[:-1]}, "cases": [\n{lines}\n]}}\n'
    if "--check" not in sys.argv[1:]:
        FIXTURE.write_text(text, encoding="utf-8")
    elif json.loads(FIXTURE.read_text(encoding="utf-8"))["cases"] != json.loads(text)["cases"]:
        sys.exit(f"{FIXTURE} has other results")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
