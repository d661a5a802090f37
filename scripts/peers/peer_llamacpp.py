#!/usr/bin/env python3
"""Decodes prompts greedily with llama.cpp, for comparisons of speed.

As in `medusa bench`, the time of the prompt's own pass does not count, nor does its token. A first run of the first prompts warms up. Prints the
tokens per second after the prompt, the time to the first token of a prompt of --prompt-tokens tokens, and the process's peak memory.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python
    scripts/peers/peer_llamacpp.py MODEL.gguf prompts.jsonl --new-tokens 128
"""

import argparse
import json
import resource
import statistics
import time

import llama_cpp
import numpy as np


def likeliest(model):
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(model._ctx.ctx), shape=(model.n_vocab(),))
    return int(logits.argmax())


def decode(model, ids, new_tokens):
    """Seconds to the first token, and to each of the others."""
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    token = likeliest(model)
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        model.eval([token])
        token = likeliest(model)
    return first - start, time.perf_counter() - first


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", help='JSON lines with "prompt"')
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    context = max(2048, args.prompt_tokens + 8)
    model = llama_cpp.Llama(args.model, n_ctx=context, n_threads=args.threads, n_threads_batch=args.threads, verbose=False, logits_all=False)
    with open(args.prompts, encoding="utf-8") as lines:
        prompts = [model.tokenize(json.loads(line)["prompt"].encode(), add_bos=True, special=True) for line in lines]
    for ids in prompts[:2]:
        decode(model, ids, args.new_tokens)
    seconds = sum(decode(model, ids, args.new_tokens)[1] for ids in prompts)
    tokens = (args.new_tokens - 1) * len(prompts)
    long = list(range(100, 100 + args.prompt_tokens))
    to_first = statistics.median(decode(model, long, 1)[0] for _ in range(3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"time to first token of {args.prompt_tokens} tokens: {to_first:.3f} s, peak memory {peak:.0f} MiB")
    print(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
