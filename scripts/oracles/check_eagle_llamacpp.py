#!/usr/bin/env python3
"""Decodes with an exported EAGLE-3 drafter in llama.cpp, and compares with llama.cpp alone and with this program.

    scripts/oracles/check_eagle_llamacpp.py --target T.gguf --folder T --drafter EXPORT --heads RUN/final --llama BIN --convert convert_hf_to_gguf.py

EXPORT is what `medusa export --format eagle3` writes, T.gguf the backbone as a GGUF file and T its Hugging Face folder, BIN the folder of llama.cpp's programs,
and convert_hf_to_gguf.py its converter (with its own Python packages). Prints how many of the answers to MT-bench's first questions are those of llama.cpp
without a drafter, and the tokens per step of chains of --tokens guesses, there and here. Exit status 1 if a text differs or the tokens per step differ by
more than 5 %.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORT = 8119


@contextlib.contextmanager
def server(options, *flags):
    command = [options.llama / "llama-server", "-m", options.target, "--no-repack", "-t", "2", "-tb", "2", "-c", "4096", "--port", PORT, *flags]
    libraries = os.environ | {"LD_LIBRARY_PATH": str(options.llama)}
    process = subprocess.Popen(list(map(str, command)), env=libraries, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1).read()
                break
            if process.poll() is not None:
                sys.exit(f"error: llama-server ended with {process.returncode}\n{process.stderr.read()[-3000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def answer(prompt, tokens):
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--target", "--folder", "--drafter", "--heads", "--llama", "--convert"):
        parser.add_argument(flag, type=lambda path: pathlib.Path(path).absolute(), required=True)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    questions = [json.loads(line)["turns"][0] for line in (ROOT / "data/chat/mt_bench.jsonl").read_text().splitlines()]
    prompts = questions[:: max(1, len(questions) // options.questions)]
    with tempfile.TemporaryDirectory() as folder:
        drafter = pathlib.Path(folder) / "drafter.gguf"
        convert = [sys.executable, options.convert, options.drafter, "--target-model-dir", options.folder, "--outfile", drafter, "--outtype", "f32"]
        subprocess.run(list(map(str, convert)), check=True, stdout=subprocess.DEVNULL)
        with server(options):
            plain = [answer(prompt, options.new_tokens) for prompt in prompts]
        flags = ("--spec-type", "draft-eagle3", "-md", drafter, "--spec-draft-n-max", options.tokens)
        with server(options, *flags):
            drafted = [answer(prompt, options.new_tokens) for prompt in prompts]
        texts = pathlib.Path(folder) / "prompts.jsonl"
        texts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        tree = pathlib.Path(folder) / "chain.json"
        tree.write_text(json.dumps({"choices": [[0] * depth for depth in range(1, options.tokens + 1)]}))
        bench = [ROOT / "target/release/medusa", "bench", "--backbone", options.target, "--heads", options.heads, "--tree", tree, "--prompts", texts]
        bench += ["--max-new-tokens", options.new_tokens, "--repeats", 1, "--json"]
        ours = json.loads(subprocess.run(list(map(str, bench)), check=True, stdout=subprocess.PIPE, text=True).stdout)
    same = sum(one["content"] == other["content"] for one, other in zip(plain, drafted))
    print(f"texts: {same} of {len(prompts)} equal llama.cpp's without a drafter")
    timings = [one["timings"] for one in drafted]
    new, accepted = (sum(timing.get(key, 0) for timing in timings) for key in ("predicted_n", "draft_n_accepted"))
    theirs = new / max(new - accepted, 1)
    speeds = [sum(one["timings"]["predicted_n"] for one in all) / sum(one["timings"]["predicted_ms"] for one in all) * 1e3 for all in (plain, drafted)]
    print(f"tokens per step with chains of {options.tokens}: llama.cpp {theirs:.3f}, here {ours['acceleration_rate']:.3f}")
    print(f"llama.cpp: {speeds[0]:.1f} tokens/s without, {speeds[1]:.1f} with the drafter")
    sys.exit(same < len(prompts) or abs(theirs / ours["acceleration_rate"] - 1) > 0.05)


if __name__ == "__main__":
    main()
