#!/usr/bin/env python3
"""Decodes prompts greedily with transformers, for comparisons of speed.

As in `medusa bench`, the time of the prompt's own pass does not count, nor does its token. A first run of the first prompts warms up. Prints the
tokens per second after the prompt, the time to the first token of a prompt of --prompt-tokens tokens, and the process's peak memory. BACKBONE is
a folder or a GGUF file, whose weights transformers dequantises.

    scripts/peers/peer_decoding.py BACKBONE prompts.jsonl --new-tokens 128 --cache static --compile
"""
import argparse
import json
import pathlib
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """`generate` gives it the prompt, and then each new token."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone")
    parser.add_argument("prompts", help='JSON lines with "prompt"')
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prompt whose first token is timed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = pathlib.Path(args.backbone)
    folder, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (args.backbone, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype), **file).eval()
    if args.compile:
        model.forward = torch.compile(model.forward)
    with open(args.prompts, encoding="utf-8") as lines:
        prompts = [tokenizer(json.loads(line)["prompt"], return_tensors="pt") for line in lines]
    cache = {"cache_implementation": "static"} if args.cache == "static" else {}

    def times(prompt, new_tokens):
        clock = Clock()
        with torch.inference_mode():
            model.generate(**prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, streamer=clock, **cache)
        return clock.times

    tokens, seconds = 0, 0.0
    for at, prompt in enumerate(prompts[:2] + prompts):
        found = times(prompt, args.new_tokens)
        if at >= 2:
            tokens, seconds = tokens + len(found) - 2, seconds + found[-1] - found[1]
    ids = torch.arange(100, 100 + args.prompt_tokens)[None]
    long = [times({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 1) for _ in range(3)]
    to_first = statistics.median(found[1] - found[0] for found in long)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"time to first token of {args.prompt_tokens} tokens: {to_first:.3f} s, peak memory {peak:.0f} MiB")
    print(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
