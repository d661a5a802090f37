#!/usr/bin/env python3
"""Compares the tokens of `tokenizer.model` files with those of sentencepiece, tiktoken and transformers.

    cargo build --example token_ids
    python3 scripts/oracles/check_tokenizers.py [--lines N] [MODEL …]      # needs sentencepiece, tiktoken, protobuf, transformers (4 or 5)
    python3 scripts/oracles/check_tokenizers.py --write-fixtures           # tests/fixtures/tokenizers: small models, lines and ids; transformers 4

MODEL is a tokenizer.model file, or a folder with one and its tokenizer_config.json; without any, those that the package
mistral-common ships (if it is installed). Models with odd options are trained here, each with two sizes of vocabulary.

The lines: the conversations of tests/fixtures/data, source code of this repository, and CJK, emoji, control characters, runs
of spaces, invalid UTF-8 replaced, and special tokens, written from a seed. What is compared:

- ids of each line against sentencepiece, or tiktoken (lines without special tokens: it does not look for them in a text);
- ids with what goes around a text against transformers' AutoTokenizer, `legacy` true and false; where transformers does not
  honour the options of the file (it takes every Llama file for one with an identity normaliser, a dummy prefix and all
  spaces kept), its differences are counted, not failed;
- the decoded text of the ids against transformers'.
"""

import argparse
import base64
import importlib.util
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as model_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target" / "debug" / "examples" / "token_ids"
DATA = ROOT / "tests" / "fixtures" / "data"
FIXTURES = ROOT / "tests" / "fixtures" / "tokenizers"
FIXTURE_LINES = 240
FIXTURE_LENGTH = 90
# Small enough to be kept: a map of characters as nmt_nfkc has would be 240 kB.
FIXTURE_MODELS = ["llama", "no-dummy-prefix", "suffix", "user-defined", "user-defined-unigram-identity", "rule", "rule-bpe", "unused"]
SHOWN = 3

# What each trained model is made with, beside the options of BASE.
BASE = {"hard_vocab_limit": False, "character_coverage": 0.99, "num_threads": 1, "max_sentence_length": 2000,
        "input_sentence_size": 3000, "shuffle_input_sentence": False, "minloglevel": 2}
RULE = "A\t61\n41 42\t63 64 65\nFB01\t66 69\nD A\tA\n3000\t20\n200B\t\n9\t20\n65 301\tE9\nE9\t65 65\n"
LLAMA = {"model_type": "bpe", "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity",
         "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
ODD = {
    "llama": {**LLAMA, "control_symbols": ["[INST]", "[/INST]"]},
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram-llama": {**LLAMA, "model_type": "unigram"},
    "no-dummy-prefix": {**LLAMA, "add_dummy_prefix": False},
    "suffix": {"model_type": "bpe", "treat_whitespace_as_suffix": True, "normalization_rule_name": "identity"},
    "suffix-unigram": {"model_type": "unigram", "treat_whitespace_as_suffix": True, "byte_fallback": True},
    "case-folded": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
    "case-folded-bpe": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf", "byte_fallback": True},
    "nfkc-spaces": {"model_type": "bpe", "normalization_rule_name": "nfkc", "remove_extra_whitespaces": False},
    "user-defined": {**LLAMA, "user_defined_symbols": ["<sep>", "\u2581\u2581", "the", "\n", "\u2581of", "你好", "a"]},
    "user-defined-unigram": {"model_type": "unigram", "byte_fallback": True,
                             "user_defined_symbols": ["<sep>", "\u2581\u2581", "the", "\n", "你好", "(", "ing"]},
    "user-defined-unigram-identity": {"model_type": "unigram", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                                      "user_defined_symbols": ["<sep>", "\u2581\u2581", "the", "\u2581t", "ing", "ti", "tion", "on"]},
    "control": {**LLAMA, "control_symbols": ["[INST]", "[/INST]", "<ctl>"], "bos_id": 3, "eos_id": 4, "unk_id": 5,
                "pad_id": 0, "bos_piece": "<bos>", "eos_piece": "<eos>", "unk_piece": "[UNK]"},
    "rule": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_tsv": RULE},
    "rule-bpe": {"model_type": "bpe", "normalization_rule_tsv": RULE, "remove_extra_whitespaces": False,
                 "user_defined_symbols": ["AB", "<sep>"]},
    "unescaped": {**LLAMA, "model_type": "bpe"},
    "unused": {**LLAMA},
    "unused-unigram": {"model_type": "unigram"},
}
SIZES = (400, 2000)


def conversations():
    """Every text of the published conversations."""
    def strings(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for item in value:
                yield from strings(item)
        elif isinstance(value, dict):
            for item in value.values():
                yield from strings(item)

    for path in sorted(DATA.iterdir()):
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
        for string in strings(rows):
            yield from (line for line in [string[:1000], *string.split("\n")[:4]] if line)


def code():
    paths = sorted((ROOT / "src").rglob("*.rs")) + sorted((ROOT / "scripts").rglob("*.py"))
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")
        yield from ("\n".join(lines[at : at + 3]) for at in range(0, len(lines), 3))


def odd(rng):
    """One line of what tokenizers trip over."""
    spans = [(0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x600, 0x6FF), (0x900, 0x97F),
             (0x0, 0x20), (0x7F, 0xA0), (0x300, 0x36F), (0x2000, 0x206F), (0xFF00, 0xFFEF), (0xFB00, 0xFB06),
             (0x2460, 0x24FF), (0xE000, 0xE010), (0x10000, 0x10100), (0xC0, 0x17F)]
    words = ["the", "of", "AB", "你好", "ﬁ", "é", "e\u0301", "<sep>", "\u2581", "\u2581\u2581", "\r\n", "\n", "\t", " ", "  ",
             "   ", "\u3000", "\u200b", "\u00a0", "👩‍👩‍👧", "🇩🇪", "1234567", "3.14", "http://a.b/c?d=e", "��", "İ", "ß", "ing", "<0x41>",
             "aaaa", "    if x:", "\u2029", "ﷺ", "x" * 40, "=" * 30]
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60))).decode("utf-8", "replace")
    if kind == 1:
        return " " * rng.randrange(0, 40) + rng.choice(words) + " " * rng.randrange(0, 40) + rng.choice(words)
    if kind == 2:
        low, high = rng.choice(spans)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(1, 40)))
    return "".join(rng.choice(words) + rng.choice(["", "", " ", "  ", "\n"]) for _ in range(rng.randrange(1, 20)))


def special(rng, names):
    parts = [*names, "a", " b", "c ", "  ", "\n", "the end. ", "你", ""]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))


def lines(count, names):
    rng = random.Random(15)
    published = list(dict.fromkeys(conversations()))
    rng.shuffle(published)
    written = list(code())
    rng.shuffle(written)
    picked = published[: count // 2] + written[: count * 15 // 100] + [special(rng, names) for _ in range(count // 20)]
    while len(picked) < count:
        picked.append(odd(rng))
    return picked


def train(name, size, folder):
    """A tokenizer.model with the options of ODD."""
    options = dict(ODD[name])
    rule = options.pop("normalization_rule_tsv", None)
    if rule:
        path = folder / "rule.tsv"
        path.write_text(rule, encoding="utf-8")
        options["normalization_rule_tsv"] = str(path)
    texts = [line for line in list(dict.fromkeys(conversations()))[:3000] if len(line) < 500]
    symbols = options.pop("user_defined_symbols", [])
    prefix = folder / "m"
    vocab = size + (256 if options.get("byte_fallback") else 0)
    spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(prefix), vocab_size=vocab,
                                   user_defined_symbols=symbols, **{**BASE, **options})
    model = model_pb2.ModelProto.FromString(prefix.with_suffix(".model").read_bytes())
    if name == "unescaped":
        model.normalizer_spec.escape_whitespaces = False
        for piece in model.pieces:
            piece.piece = piece.piece.replace("\u2581", " ")
    if name.startswith("unused"):
        for piece in list(model.pieces)[300::7]:
            if piece.type == 1 and len(piece.piece) > 1:
                piece.type = 5
    model.trainer_spec.ClearField("input")
    model.trainer_spec.model_prefix = ""
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    return folder / "tokenizer.model"


def ours(folder, texts):
    """What the program makes of them."""
    with tempfile.TemporaryFile() as given:
        given.write("".join(json.dumps(text) + "\n" for text in texts).encode())
        given.seek(0)
        done = subprocess.run([PROGRAM, folder], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{folder}: {done.stderr.decode()}")
    return [json.loads(line) for line in done.stdout.decode().split("\n")[:-1]], done.stderr.decode().strip()


def compare(what, texts, got, expected, failing=True):
    """Prints how many are equal and the first that are not; the number of those that count."""
    wrong = [at for at in range(len(texts)) if got[at] != expected[at]]
    print(f"  {what}: {len(texts) - len(wrong)} of {len(texts)} equal" + ("" if failing or not wrong else " (differences are expected)"))
    for at in wrong[:SHOWN] if failing else []:
        print(f"    {texts[at]!r}\n      got      {got[at]}\n      expected {expected[at]}")
    return len(wrong) if failing else 0


def is_like_llama(model):
    """Whether transformers, which takes every file for one of Llama's, honours this one's options."""
    spec = model.normalizer_spec
    kinds = {piece.type for piece in model.pieces}
    return (spec.add_dummy_prefix and not spec.remove_extra_whitespaces and spec.escape_whitespaces
            and not spec.precompiled_charsmap and not model.trainer_spec.treat_whitespace_as_suffix
            and model.trainer_spec.byte_fallback and model.trainer_spec.unk_id == 0 and not kinds & {4, 5}
            and model.trainer_spec.model_type == 2)


def configured(folder, path, **keys):
    """A folder with the file and a tokenizer_config.json."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(path.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **keys}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def check_sentencepiece(title, path, count, work):
    proto = model_pb2.ModelProto.FromString(path.read_bytes())
    oracle = spm.SentencePieceProcessor(model_proto=path.read_bytes())
    named = [piece.piece for piece in proto.pieces if piece.type in (2, 3)]
    texts = lines(count, named[:12])
    print(f"{title}: {len(proto.pieces)} pieces, {path.stat().st_size} bytes")
    plain = [text for text in texts if not any(name in text for name in named)]
    got, loaded = ours(configured(work / "plain", path), plain)
    print(f"  {loaded}")
    expected = oracle.encode(plain)
    failures = compare("sentencepiece", plain, [row["ids"] for row in got], expected)
    bos = [oracle.piece_to_id(proto.trainer_spec.bos_piece)] if oracle.bos_id() >= 0 else []
    failures += compare("with BOS", plain, [row["around"] for row in got], [bos + ids for ids in expected])
    for legacy in (True, False):
        failures += check_transformers(proto, path, texts, legacy, work)
    return failures


def check_transformers(proto, path, texts, legacy, work):
    import transformers

    trainer = proto.trainer_spec
    kinds = {piece.piece: piece.type for piece in proto.pieces}
    tokens = {"bos_token": trainer.bos_piece, "eos_token": trainer.eos_piece, "unk_token": trainer.unk_piece}
    tokens = {name: token for name, token in tokens.items() if token in kinds}
    folder = configured(work / f"legacy-{legacy}", path, legacy=legacy, add_bos_token=True, add_eos_token=False, **tokens)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    like_llama = is_like_llama(proto)
    if transformers.__version__ >= "5":
        # It joins runs of spaces in another order than sentencepiece and transformers 4, and puts no second space before a text
        # that starts with one, whatever `legacy` says.
        special = "|".join(re.escape(name) for name, kind in kinds.items() if kind in (2, 3))
        texts = [text for text in texts if not re.search(f"[ \u2581]{{2}}|(^|{special})[ \u2581]", text)]
    got, _ = ours(folder, texts)
    expected = [list(ids) for ids in oracle(texts)["input_ids"]]
    what = f"transformers {transformers.__version__}, legacy {legacy}"
    failures = compare(what, texts, [row["around"] for row in got], expected, like_llama)
    decoded = [oracle.decode(row["ids"], skip_special_tokens=True) for row in got]
    return failures + compare(f"{what}, text", texts, [row["text"] for row in got], decoded, like_llama)


def check_tiktoken(title, path, count, work):
    import tiktoken

    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    rows = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    oracle = tiktoken.Encoding("checked", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    texts = lines(count, [])
    print(f"{title}: {len(ranks)} ranks")
    got, loaded = ours(configured(work / "tiktoken", path), texts)
    print(f"  {loaded}")
    failures = compare("tiktoken", texts, [row["ids"] for row in got], [oracle.encode_ordinary(text) for text in texts])
    return failures + compare("tiktoken, text", texts, [row["text"] for row in got], texts)


def as_tiktoken(tekken, work):
    """Mistral's byte-level vocabulary as a file of tiktoken: as many tokens as Llama 3's."""
    vocab = sorted(json.loads(tekken.read_text(encoding="utf-8"))["vocab"], key=lambda token: token["rank"])[:128_000]
    path = work / "tokenizer.model"
    path.write_text("".join(f"{token['token_bytes']} {token['rank']}\n" for token in vocab))
    return path


def check(title, path, count):
    with tempfile.TemporaryDirectory() as work:
        first = path.read_bytes().split(b"\n")[0].split()
        is_tiktoken = len(first) == 2 and first[1].isdigit()
        return (check_tiktoken if is_tiktoken else check_sentencepiece)(title, path, count, pathlib.Path(work))


def write_fixtures():
    """Models, lines without special tokens and with, and the ids of sentencepiece and transformers."""
    import transformers

    FIXTURES.mkdir(exist_ok=True)
    names = ["<s>", "</s>", "<unk>", "[INST]", "[/INST]"]
    short = [line for line in dict.fromkeys(lines(6_000, names)) if len(line) <= FIXTURE_LENGTH]
    random.Random(1).shuffle(short)
    plain = [line for line in short if not any(name in line for name in names)][:FIXTURE_LINES]
    marked = [line for line in short if any(name in line for name in names)][: FIXTURE_LINES // 4]
    ids = {}
    for name in FIXTURE_MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = train(name, SIZES[0], pathlib.Path(folder))
            (FIXTURES / f"{name}.model").write_bytes(path.read_bytes())
            ids[name] = spm.SentencePieceProcessor(model_proto=path.read_bytes()).encode(plain)
    fixture = {"lines": plain, "ids": ids, "marked": marked, "transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as work:
        for legacy in (True, False):
            folder = configured(pathlib.Path(work) / str(legacy), FIXTURES / "llama.model", legacy=legacy)
            oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
            oracle.backend_tokenizer.save(str(FIXTURES / f"llama-legacy-{legacy}.json".lower()), pretty=False)
            fixture[f"legacy {legacy}".lower()] = [list(oracle(line)["input_ids"]) for line in marked]
    text = json.dumps(fixture, ensure_ascii=True, indent=None, separators=(",", ":"))
    (FIXTURES / "ids.json").write_text(text + "\n", encoding="utf-8")


def shipped(pattern):
    """Files of mistral-common."""
    found = importlib.util.find_spec("mistral_common")
    return sorted((pathlib.Path(found.origin).parent / "data").glob(pattern)) if found else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--trained-lines", type=int, default=5_000, help="lines for each of the trained models")
    parser.add_argument("--only", help="the trained model of this name alone")
    parser.add_argument("models", nargs="*", type=pathlib.Path)
    parser.add_argument("--write-fixtures", action="store_true")
    args = parser.parse_args()
    if args.write_fixtures:
        return write_fixtures()
    failures = 0
    models = [path / "tokenizer.model" if path.is_dir() else path for path in args.models]
    for path in [] if args.only else models or shipped("*.model.v*"):
        failures += check(str(path), path, args.lines)
    for path in [] if args.only else shipped("tekken_240718.json"):
        with tempfile.TemporaryDirectory() as folder:
            failures += check(f"{path} as tiktoken", as_tiktoken(path, pathlib.Path(folder)), args.lines)
    for name in [args.only] if args.only else ODD:
        for size in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                failures += check(f"{name} {size}", train(name, size, pathlib.Path(folder)), args.trained_lines)
    sys.exit(f"{failures} lines differ" if failures else 0)


if __name__ == "__main__":
    main()
