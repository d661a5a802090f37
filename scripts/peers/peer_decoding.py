#!/usr/bin/env python3
"""Decodes prompts greedily with transformers, for comparisons of speed.

As in `medusa bench`, the time of the prompt's own pass does not count, nor does its token. A first run of the first prompts warms up. Prints the
tokens per second after the prompt.

    scripts/peers/peer_decoding.py BACKBONE prompts.jsonl --new-tokens 128 --cache static --compile
"""
import argparse
import json
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
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.backbone)
    model = AutoModelForCausalLM.from_pretrained(args.backbone, dtype=getattr(torch, args.dtype)).eval()
    if args.compile:
        model.forward = torch.compile(model.forward)
    with open(args.prompts, encoding="utf-8") as lines:
        prompts = [tokenizer(json.loads(line)["prompt"], return_tensors="pt") for line in lines]
    cache = {"cache_implementation": "static"} if args.cache == "static" else {}
    tokens, seconds = 0, 0.0
    for at, prompt in enumerate(prompts[:2] + prompts):
        clock = Clock()
        with torch.inference_mode():
            model.generate(
                **prompt, max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, do_sample=False, streamer=clock, **cache
            )
        if at >= 2:
            first, last = clock.times[1], clock.times[-1]
            tokens, seconds = tokens + len(clock.times) - 2, seconds + last - first
    print(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
