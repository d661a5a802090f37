#!/usr/bin/env python3
"""Loads what `medusa export --format gguf` writes in llama.cpp and compares token ids and greedy text.

    cargo build --release && cargo build --release --example token_ids
    python3 scripts/oracles/check_gguf_export.py FILE.gguf [--lines N] [--prompts N] [--tokens N] [--programs FOLDER]
                                                          # needs llama-cpp-python and what check_gguf.py needs

Both programs decode the same file with a KV cache in float32; a difference is a near-tie where llama.cpp's own logits of the two tokens are closer
than 0.05. On a file in blocks llama.cpp rounds activations to eight bits, so that its texts differ sooner: they are reported, and the texts that
must be equal are those of the same numbers, which `medusa export` writes as F32."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import check_gguf

NEAR = 0.05
NUMBERS = {gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")}


def is_in_blocks(file):
    return any(tensor.tensor_type not in NUMBERS for tensor in gguf.GGUFReader(file).tensors)


def load(file):
    return llama_cpp.Llama(str(file), n_ctx=512, verbose=False, logits_all=False, type_k=0, type_v=0)


def compare_numbers(options, texts):
    """The texts of a file in blocks with those of llama.cpp on the same numbers."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "float32"
        command = [options.programs / "medusa", "export", "--backbone", options.model, "--format", "gguf", "--gguf-type", "F32", "--out", out]
        subprocess.run(command, capture_output=True, check=True)
        (file,) = out.glob("*.gguf")
        return compare_text(options, load(file), texts, "the same numbers in F32")


def compare_ids(options, model):
    """As check_gguf.py does with transformers. llama.cpp ends a text at its first NUL, so lines with one are left out."""
    from check_tokenizers import lines

    texts = [text for text in lines(options.lines, []) if "\0" not in text]
    program = options.programs / "examples" / "token_ids"
    written = "".join(json.dumps(text) + "\n" for text in texts)
    out = subprocess.run([program, options.model], input=written, capture_output=True, text=True, check=True).stdout
    theirs = [model.tokenize(text.encode("utf-8", "surrogatepass"), add_bos=True, special=True) for text in texts]
    ours = [json.loads(line)["around"] for line in out.rstrip("\n").split("\n")]
    wrong = [(text, *pair) for text, *pair in zip(texts, ours, theirs, strict=True) if pair[0] != pair[1]]
    for text, mine, other in wrong[:3]:
        print(f"  {text!r}: {mine} here, {other} in llama.cpp")
    print(f"ids: {len(texts) - len(wrong)} of {len(texts)} lines equal")
    return not wrong


def is_end(model, token):
    return llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(model._model.model), token)


def ends(model):
    return [token for token in range(model.n_vocab()) if is_end(model, token)]


def greedy(model, ids, tokens, expected):
    """The first place where llama.cpp's greedy token is another, and by how much its logit is larger; `None` is the end of a text."""
    model.reset()
    model.eval(ids)
    ended = [None] if not expected or not is_end(model, expected[-1]) else []
    for at, token in enumerate((expected + ended)[:tokens]):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(model._ctx.ctx), shape=(model.n_vocab(),))
        best = int(logits.argmax())
        if token is None:
            return None if is_end(model, best) else (at, float(logits[best] - logits[ends(model)].max()))
        if best != token:
            return at, float(logits[best] - logits[token])
        model.eval([token])
    return None


def compare_text(options, model, texts, what):
    equal, ties = 0, 0
    for prompt, ours in texts:
        ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
        difference = greedy(model, ids, options.tokens, ours["new_ids"])
        equal += difference is None
        if difference is not None:
            at, margin = difference
            ties += margin < NEAR
            print(f"  {prompt!r}: differs at token {at}, where llama.cpp's logits are {margin:.4f} apart")
    print(f"greedy, {what}: {equal} of {len(texts)} prompts equal for {options.tokens} tokens, {ties} others from a near-tie on")
    return equal + ties == len(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--programs", type=pathlib.Path, default=check_gguf.ROOT / "target" / "release")
    options = parser.parse_args()
    model = load(options.model)
    same = compare_ids(options, model) if options.lines else True
    prompts = check_gguf.PROMPTS[: options.prompts]
    texts = list(zip(prompts, check_gguf.generate(options, prompts, options.tokens), strict=True))
    same_text = compare_text(options, model, texts, "this file")
    if is_in_blocks(options.model):
        same_text = compare_numbers(options, texts)
    sys.exit(not (same and same_text))


if __name__ == "__main__":
    main()
