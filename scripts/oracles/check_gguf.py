#!/usr/bin/env python3
"""Compares a GGUF file here with transformers on its dequantised weights: token ids, the chat template, hidden states, greedy tokens and log-probabilities.

    cargo build --release && cargo build --release --example token_ids
    python3 scripts/oracles/check_gguf.py MODEL.gguf [--lines N] [--prompts N] [--tokens N] [--programs FOLDER]
                                                                     # needs torch, transformers, gguf, sentencepiece

Lines are those of check_tokenizers.py. transformers leaves out parts of the published tokenizer.json of some models, which are set here, so its
own ids of these files are others. Of a SentencePiece file it merges long runs of spaces otherwise than SentencePiece does, whose ids are compared
instead. Lines with U+2581 or a BOS in them are not compared where they differ: transformers and SentencePiece read U+2581 as a space, this program
and llama.cpp do not (check_gguf_export.py compares those), and this program leaves out a second BOS. Greedy tokens are float32's on both sides; a
difference between two tokens whose logits are closer than 1e-4 is a near-tie, which is counted."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import sentencepiece
import torch
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers, pre_tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "oracles"))
NEAR = 1e-4
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "To make a cake, first", "In 1969, the", "The most important rule of",
           "import numpy as np\n", "Dear Sir or Madam,", "A prime number is", "The human heart", "fn main() {", "Water boils at", "My favourite book",
           "SELECT name FROM", "The theory of relativity", "Q: What is 12 times 12?\nA:", "The quick brown fox", "In the beginning", "Roses are red,",
           "Monday, Tuesday,"]  # fmt: skip
# Parts of the published tokenizer.json that transformers leaves out, by tokenizer.ggml.pre. Qwen's normalizer is that of transformers' Qwen2Tokenizer.
DIGITS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
PUBLISHED = {"smollm": {"pre_tokenizer": pre_tokenizers.Sequence(DIGITS)}, "qwen2": {"normalizer": normalizers.NFC()}}


def load_tokenizer(file):
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    pre = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
    for part, published in PUBLISHED.get(pre and pre.contents(), {}).items():
        print(f"ids: with the published {part} of {pre.contents()}")
        setattr(tokenizer.backend_tokenizer, part, published)
    return tokenizer


def load_sentencepiece(file):
    """The pieces of a SentencePiece file as a processor of their own; `None` for other files."""
    field = lambda name: gguf.GGUFReader(file).get_field(f"tokenizer.ggml.{name}").contents()
    if field("model") != "llama":
        return None
    proto = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in zip(field("tokens"), field("scores"), field("token_type"), strict=True):
        proto.pieces.add(piece=text.replace(" ", "\u2581"), score=score, type=kind)
    names = {name: field(f"{key}_token_id") for name, key in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]}
    for name, token in names.items():
        setattr(proto.trainer_spec, f"{name}_id", token)
        setattr(proto.trainer_spec, f"{name}_piece", proto.pieces[token].piece)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    normalizer = proto.normalizer_spec
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def compare_ids(options, tokenizer):
    """Ids of each line, with what goes around a text."""
    from check_tokenizers import lines

    texts = lines(options.lines, tokenizer.all_special_tokens)
    program = options.programs / "examples" / "token_ids"
    written = "".join(json.dumps(text) + "\n" for text in texts)
    out = subprocess.run([program, options.model], input=written, capture_output=True, text=True, check=True).stdout
    pairs = [(json.loads(line)["around"], tokenizer(text).input_ids) for line, text in zip(out.rstrip("\n").split("\n"), texts, strict=True)]
    wrong = [(text, *pair) for text, pair in zip(texts, pairs, strict=True) if pair[0] != pair[1]]
    pieces = load_sentencepiece(options.model)
    uncompared = [text for text, *_ in wrong if pieces and ("\u2581" in text or tokenizer.bos_token in text)]
    by_pieces = lambda text: [tokenizer.bos_token_id, *pieces.encode(text)]
    left = set(uncompared)
    differ = [(text, ours, theirs) for text, ours, theirs in wrong if text not in left and not (pieces and ours == by_pieces(text))]
    for text, ours, theirs in differ[:3]:
        print(f"  {text!r}: {ours} here, {theirs} there")
    equal = len(texts) - len(wrong)
    print(f"ids: {equal} of {len(texts)} lines equal, {len(wrong) - len(uncompared) - len(differ)} equal SentencePiece's, "
          f"{len(uncompared)} with U+2581 or BOS not compared")
    return not differ


def generate(options, prompts, tokens):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        file.flush()
        command = [options.programs / "medusa", "generate", "--backbone", options.model, "--prompts", file.name, "--engine", "tch", "--dtype", "float32",
                   "--temperature", "0", "--max-new-tokens", str(tokens), "--logprobs", "5", "--json"]  # fmt: skip
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.rstrip("\n").split("\n")]


def compare_tokens(options, model, tokenizer):
    equal, ties, largest = 0, 0, 0.0
    for prompt, ours in zip(PROMPTS[: options.prompts], generate(options, PROMPTS[: options.prompts], options.tokens), strict=True):
        before, new = tokenizer(prompt).input_ids, ours["new_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([before + new])).logits[0, len(before) - 1 : -1]
        best = logits.argmax(-1).tolist()
        probabilities = logits.log_softmax(-1)
        for at, entry in enumerate(ours["logprobs"]):
            chosen = entry["logprob"] if isinstance(entry, dict) else entry
            largest = max(largest, abs(chosen - probabilities[at, new[at]].item()))
        apart = [at for at in range(len(new)) if best[at] != new[at]]
        near = [at for at in apart if (logits[at, best[at]] - logits[at, new[at]]).item() < NEAR]
        equal += not apart
        ties += bool(apart) and near == apart
        if near != apart:
            print(f"  {prompt!r}: token {apart[0]} is {new[apart[0]]} here, {best[apart[0]]} there")
    print(f"greedy: {equal} of {options.prompts} prompts equal over {options.tokens} tokens, {ties} but for near-ties; log-probabilities within {largest:.1e}")
    return equal + ties == options.prompts and largest < NEAR


def compare_hidden_states(options, model, tokenizer):
    """Those that training caches: one head reads all positions but the last two of a row."""
    rows = [tokenizer(prompt + " " + PROMPTS[at - 1]).input_ids for at, prompt in enumerate(PROMPTS[: options.prompts])]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
        (folder / "run.toml").write_text(
            f"backbone = {{ path = {json.dumps(str(options.model.resolve()))}, dtype = \"float32\" }}\n"
            "heads = { medusa_num_heads = 1, shared_lm_head = true }\nstage.medusa1 = {}\n"
            "data = { train = [\"rows.jsonl\"], packing = false, shuffle = false }\n"
            "train = { epochs = 1, gradient_accumulation_steps = 1, hidden_state_cache = \"states\" }\n"
        )
        subprocess.run([options.programs / "medusa-train", "run.toml"], cwd=folder, capture_output=True, text=True, check=True)
        (file,) = (folder / "states").iterdir()
        read = sum(len(ids) - 2 for ids in rows) * model.config.hidden_size
        ours = torch.frombuffer(bytearray(file.read_bytes()[: 4 * read]), dtype=torch.float32).view(-1, model.config.hidden_size)
    with torch.no_grad():
        theirs = torch.cat([model.model(torch.tensor([ids])).last_hidden_state[0, :-2] for ids in rows])
    apart = ((ours - theirs).abs() / theirs.abs().clamp(min=1)).max().item()
    print(f"hidden states: {len(ours)} positions of {model.config.hidden_size} values within {apart:.1e} (relative above 1), largest {theirs.abs().max():.0f}")
    return apart < NEAR


def compare_template(options, tokenizer):
    if tokenizer.chat_template is None:
        print("template: none")
        return True
    messages = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Again."}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
        file.flush()
        command = [options.programs / "medusa", "generate", "--backbone", options.model, "--prompts", file.name, "--max-new-tokens", "1", "--json"]
        ours = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    same = ours["prompt_ids"] == tokenizer(theirs, add_special_tokens=False).input_ids
    print(f"template: {'equal' if same else 'DIFFERENT'}")
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), choices=range(1, len(PROMPTS) + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target" / "release")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    passed = [compare_ids(options, tokenizer), compare_template(options, tokenizer)]
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model.parent, gguf_file=options.model.name, dtype=torch.float32).eval()
    passed.append(compare_hidden_states(options, model, tokenizer))
    passed.append(compare_tokens(options, model, tokenizer))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
