#!/usr/bin/env python3
"""Which lines of the readers the fuzzing corpus reaches: fuzz/corpus, or another folder with a corpus of each reader.

    scripts/fuzz_coverage.py                                  # a table of the readers and their files
    scripts/fuzz_coverage.py --corpus fuzz/target/grown       # of what scripts/fuzz found
    scripts/fuzz_coverage.py --missing src/model/weights/pickle.rs    # the lines of a file that no input reaches

Builds the test program with coverage of this package alone (cargo calls this script in place of rustc for it), and runs the test that reads
the corpus. Needs llvm-profdata and llvm-cov of at least rustc's LLVM: `rustup component add llvm-tools`, or a distribution's llvm-19.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARE = 0.9  # of each reader's lines

# The files of each reader, by the names of the targets.
READERS = {
    "recipe": ["src/recipe/checks.rs", "src/recipe/defaults.rs", "src/recipe/located.rs", "src/recipe/mistakes.rs", "src/recipe/optimizer.rs",
               "src/recipe/stage.rs", "src/recipe/typed.rs", "src/recipe/written.rs"],
    "config": ["src/model/config.rs", "src/model/config/family.rs", "src/model/config/keys.rs", "src/model/config/rotary.rs"],
    "safetensors": ["src/model/weights.rs", "src/model/weights/tensor_file.rs", "src/model/weights/bits.rs", "src/model/weights/finite.rs"],
    "weights_index": ["src/model/weights/listing.rs"],
    "captured_states": ["src/formats/captured_states.rs"],
    "gguf": ["src/gguf/config.rs", "src/gguf/file.rs", "src/gguf/folder.rs", "src/gguf/header.rs", "src/gguf/metadata.rs", "src/gguf/names.rs",
             "src/gguf/vocabulary.rs", "src/model/weights/gguf_file.rs"],
    "torch_file": ["src/model/weights/torch_file.rs"],
    "pickle": ["src/model/weights/pickle.rs"],
    "peft": ["src/model/peft.rs"],
    "heads": ["src/draft/heads/import.rs", "src/draft/heads/layout.rs"],
    "heads_config": ["src/formats/heads_config.rs"],
    "tokenizer_json": ["src/data/tokenize/mod.rs", "src/data/tokenize/growth.rs"],
    "tokenizer_model": ["src/data/tokenize/model_file.rs", "src/data/tokenize/tiktoken.rs", "src/data/tokenize/sentencepiece"],
    "tokenizer_config": ["src/data/tokenize/config.rs"],
    "chat_template": ["src/data/chat_template.rs", "src/data/jinja.rs"],
    "data_folder": ["src/data/described_folder.rs", "src/data/source.rs"],
    "rows_jsonl": ["src/data/jsonl.rs", "src/data/row_object.rs", "src/data/token_lists.rs", "src/data/conversation.rs", "src/data/raw_row.rs", "src/data/pair.rs", "src/data/rows.rs"],
    "rows_json_array": ["src/data/json_array.rs"],
    "rows_csv": ["src/data/csv_rows.rs", "src/data/documents.rs"],
    "rows_parquet": ["src/data/parquet.rs", "src/data/columns.rs"],
    "rows_arrow": ["src/data/arrow_ipc.rs", "src/data/arrow_ipc/claims.rs"],
    "rows_gzip, rows_zstd": ["src/data/opened.rs"],
    "prompts": ["src/data/prompts.rs"],
    "token_cache": ["src/data/token_file.rs"],
    "tree": ["src/formats/tree.rs", "src/tree/guess_tree.rs"],
    "calibration": ["src/formats/calibration.rs", "src/formats/hit_counts.rs", "src/tree/calibrated.rs"],
    "calibration_share": ["src/formats/calibration_share.rs", "src/tree/calibration_shares.rs"],
    "latency": ["src/formats/latency.rs"],
    "metrics": ["src/formats/metrics.rs"],
    "provenance": ["src/formats/provenance.rs"],
    "results": ["src/formats/bench.rs", "src/formats/load.rs"],
    "all of formats": ["src/formats/error.rs", "src/formats/sealed.rs"],
    "journal": ["src/distill/journal.rs", "src/distill/refused_file.rs"],
    "distill_folder": ["src/distill/folder.rs"],
    "checkpoint": ["src/train/checkpoint.rs"],
    "checksums": ["src/files/checksums.rs"],
    "hub": ["src/hub/listing.rs", "src/hub/client.rs", "src/hub/client/refusal.rs", "src/hub/wanted.rs"],
    "serve_request": ["src/serve/api/request.rs", "src/serve/api/fields.rs", "src/serve/api/messages.rs", "src/serve/api/prompt.rs",
                      "src/serve/prompting.rs"],
    "serve_http": ["src/serve/routes.rs", "src/serve/host_names.rs", "src/serve/auth.rs"],
}

# Functions in these files that read nothing that bytes decide, and why. They are left out of the shares.
LEFT_OUT = {
    "src/model/weights/torch_file.rs": {"save": "writes", "state_dict": "writes", "push_text": "writes", "push_int": "writes"},
    "src/draft/heads/import.rs": {"folder_of": "looks for a folder"},
    "src/draft/heads/layout.rs": {
        "noun": "words for messages", "title": "words for messages", "has_prefix": "of exports", "places_of": "of exports", "holds": "of exports",
        "at_full_rank": "of exports", "with_own_w2": "of exports"},
    "src/data/csv_rows.rs": {"unread": "of records beyond 100 MiB, and of disks that fail"},
    "src/gguf/names.rs": {"in_gguf": "of exports"},
    "src/gguf/vocabulary.rs": {"pre_tokenizer_name": "of exports", "without_offsets": "of exports"},
    "src/model/peft.rs": {"save_adapters": "writes", "check": "compares with a recipe", "check_against_recipe": "compares with a recipe"},
    "src/formats/heads_config.rs": {"save": "writes", "best_of_run": "reads a run's other files"},
    "src/formats/latency.rs": {"check": "compares with what a command measures"},
    "src/formats/calibration_share.rs": {"save": "writes"},
    "src/formats/metrics.rs": {"training_cost": "adds up lines"},
    "src/formats/captured_states.rs": {"check_unchanged": "another program's write in between"},
    "src/formats/tree.rs": {"save": "writes", "new": "writes", "chosen_at_each_step": "writes"},
    "src/formats/provenance.rs": {"as_map": "writes", "to_json": "writes"},
    "src/formats/bench.rs": {"headline": "chooses among results"},
    "src/distill/journal.rs": {"start": "writes", "append": "writes", "sync": "writes", "failed": "writes", "remove": "writes", "line": "writes"},
    "src/distill/refused_file.rs": {"of": "writes", "write": "writes"},
    "src/data/token_file.rs": {name: "writes" for name in [
        "write", "flush", "new", "push_pieces", "push", "finish", "write_batch", "column", "path", "footer_sha256"]},
    "src/train/checkpoint.rs": {name: "writes" for name in [
        "save_step", "write_step", "save_heads", "set_aside", "save_final", "save_best", "final_folder", "heads_config", "save_config", "remove_old", "save", "send_rest",
        "next", "of", "remove_partial", "holds_only"]},
    "src/files/checksums.rs": {"seal": "writes", "write_list": "writes", "of": "of data sets"},
    "src/hub/client.rs": {
        "post": "uploads", "read": "uploads", "page": "downloads", "is_connection": "a network that fails", "reason": "a network that fails"},
    "src/serve/routes.rs": {"cors": "set by a flag", "discard": "waits for a slow client"},
}


def wrapped_rustc():
    """cargo calls this script with rustc's path and arguments, for the crates of this package."""
    os.execvp(sys.argv[1], sys.argv[1:] + ["-C", "instrument-coverage"])


def tool(name):
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    found = list(pathlib.Path(sysroot).glob(f"lib/rustlib/*/bin/{name}"))
    versioned = [f"{name}-{version}" for version in range(30, 18, -1)]
    found += [path for path in map(shutil.which, versioned) if path]
    if not found:
        sys.exit(f"error: no {name}; rustup component add llvm-tools, or install llvm-19 or later")
    return str(found[0])


def environment(scratch, corpus):
    env = dict(os.environ)
    torch = pathlib.Path(env.setdefault("LIBTORCH", str(ROOT / ".libtorch" / "torch")))
    env["LD_LIBRARY_PATH"] = f"{torch / 'lib'}:{env.get('LD_LIBRARY_PATH', '')}"
    env["RUSTC_WORKSPACE_WRAPPER"] = str(pathlib.Path(__file__).resolve())
    env["LLVM_PROFILE_FILE"] = f"{scratch}/%p-%m.profraw"
    env["MEDUSA_FUZZ_CORPUS"] = str(corpus.resolve())
    return env


def test_program(env):
    command = ["cargo", "test", "--test", "promises", "--no-run", "--message-format=json"]
    build = subprocess.run(command, cwd=ROOT, env={**env, "CARGO_INCREMENTAL": "0"}, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in build.stdout.splitlines() if line.startswith("{")]
    programs = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "promises"]
    return programs[-1]


def counted_lines(corpus):
    """Of each source file the lines with code, and how often each ran."""
    with tempfile.TemporaryDirectory() as scratch:
        env = environment(scratch, corpus)
        program = test_program(env)
        del env["RUSTC_WORKSPACE_WRAPPER"]
        subprocess.run([program, "the_corpus_is_read_without_a_panic"], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        profile = f"{scratch}/all.profdata"
        raw = [str(path) for path in pathlib.Path(scratch).glob("*.profraw")]
        subprocess.run([tool("llvm-profdata"), "merge", "-sparse", "-o", profile, *raw], check=True)
        export = [tool("llvm-cov"), "export", "--format=lcov", f"--instr-profile={profile}", program]
        lcov = subprocess.run(export, capture_output=True, text=True, check=True).stdout
    files, lines = {}, {}
    for line in lcov.splitlines():
        if line.startswith("SF:"):
            path = pathlib.Path(line[3:])
            path = path if path.is_absolute() else ROOT / path
            lines = files.setdefault(str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path), {})
        elif line.startswith("DA:"):
            number, count = line[3:].split(",")[:2]
            lines[int(number)] = max(lines.get(int(number), 0), int(count))
    return files


def left_out(path):
    """The lines of functions that are left out."""
    names, lines = LEFT_OUT.get(path, {}), set()
    text = (ROOT / path).read_text().splitlines()
    for at, line in enumerate(text):
        found = re.match(r"(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?fn (\w+)", line)
        if found and found[2] in names:
            end = next(n for n in range(at, len(text)) if text[n].startswith(found[1] + "}"))
            lines.update(range(at + 1, end + 2))
    return lines


def sources(places):
    for place in places:
        path = ROOT / place
        yield from sorted(str(file.relative_to(ROOT)) for file in path.rglob("*.rs")) if path.is_dir() else [place]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT / "fuzz" / "corpus")
    parser.add_argument("--missing", action="append", default=[], metavar="FILE", help="print the lines of this file that nothing reaches")
    args = parser.parse_args()
    files = counted_lines(args.corpus)
    low = []
    print(f"{'reader':<22} {'lines':>6} {'reached':>8}   files")
    for reader, places in READERS.items():
        all_lines = reached = 0
        for path in sources(places):
            without = left_out(path)
            counts = {line: count for line, count in files.get(path, {}).items() if line not in without}
            all_lines += len(counts)
            reached += sum(count > 0 for count in counts.values())
        share = reached / max(all_lines, 1)
        low += [reader] if share < SHARE else []
        print(f"{reader:<22} {all_lines:>6} {share:>8.1%}   {' '.join(places)}")
    for path in args.missing:
        text, without = (ROOT / path).read_text().splitlines(), left_out(path)
        for line, count in sorted(files.get(path, {}).items()):
            if count == 0 and line not in without:
                print(f"{path}:{line}: {text[line - 1]}")
    if low:
        print(f"below {SHARE:.0%}: {', '.join(low)}", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and pathlib.Path(sys.argv[1]).name == "rustc":
        wrapped_rustc()
    sys.exit(main())
