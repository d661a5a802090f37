#!/usr/bin/env python3
"""Compares what `medusa serve` samples with the probabilities that transformers computes: a chi-square test of the whole program.

    medusa serve --backbone data/tiny/backbone --dtype float32 --port 8123 &
    python3 scripts/server/check_sampling.py http://127.0.0.1:8123 data/tiny/backbone
    python3 scripts/server/check_sampling.py http://127.0.0.1:8123 data/tiny/backbone --wrong 1.1    # the test must see this, and end with 1

    medusa serve --backbone data/tiny/backbone --heads RUN/final --tree RUN/tree.json --dtype float32 --port 8123 &    # lossless with guesses?

Draws the first three tokens of many texts for each of seven settings. Every second setting goes on from the beginning of an answer of the model,
at the place where it may end or go on, so that texts end early; the last one from a repeated token, so that penalties count. A setting fails
whose chi-square deviates by more than 4 standard normal deviations: that is one run in about 2,000 with a right server. The backbone must be that
of the server: not for heads that were trained with an adapter. Needs torch 2.11, transformers 5.
"""
import argparse
import asyncio
import collections
import itertools
import json
import math
import sys

import torch
from http_by_hand import fetch, local_address
from transformers import AutoModelForCausalLM, utils
from transformers.generation import logits_process

SETTINGS = [
    {"temperature": 1},
    {"temperature": 1.5},
    {"temperature": 0.7},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 1.6, "top_k": 40, "top_p": 0.8},
    # Penalties below 0 make a token come again, which is rare within three tokens otherwise.
    {"temperature": 1.3, "top_k": 100, "top_p": 0.98, "repetition_penalty": 1.2, "presence_penalty": -1.5, "frequency_penalty": -2},
]
LENGTH = 3
TEXTS = 16  # of one request
REQUESTS = 4  # at a time
LEAST = 5.0  # expected texts of a cell
MOST = 4.0  # standard normal deviations
REST = "rest"


class Oracle:
    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]

    @torch.inference_mode()
    def probabilities(self, prompt, texts, setting):
        """Of the token after each of some texts of one length, `[N, V]`. All tokens that end a text count as the first of them."""
        ids = torch.tensor([prompt + list(text) for text in texts])
        scores = torch.cat([self.model(part, logits_to_keep=1).logits[:, -1] for part in ids.split(256)]).double()
        scores = logits_process.RepetitionPenaltyLogitsProcessor(float(setting.get("repetition_penalty", 1)))(ids, scores)
        for row, text in zip(scores, texts):  # these two are not in transformers; as vLLM has them
            for token, count in collections.Counter(text).items():
                row[token] -= setting.get("presence_penalty", 0) + count * setting.get("frequency_penalty", 0)
        scores = logits_process.TemperatureLogitsWarper(float(setting["temperature"]))(ids, scores)
        if "top_k" in setting:
            scores = logits_process.TopKLogitsWarper(setting["top_k"])(ids, scores)
        if "top_p" in setting:
            scores = logits_process.TopPLogitsWarper(setting["top_p"])(ids, scores)
        p = scores.softmax(-1)
        ended = p[:, self.ends].sum(-1)
        p[:, self.ends] = 0
        p[:, self.ends[0]] = ended
        return p

    @torch.inference_mode()
    def before_an_end(self, texts):
        """Of all beginnings of some texts, the one after which it is the least certain whether the text ends."""
        ends = [self.model(torch.tensor([text])).logits[0].softmax(-1)[:, self.ends].sum(-1).tolist() for text in texts]
        _, text, length = min((abs(p - 0.5), text, at + 1) for text, of_text in zip(texts, ends) for at, p in enumerate(of_text))
        return text[:length]

    def expand(self, prompt, setting, samples):
        """How many of the samples are expected in each cell, and the probabilities after each prefix that was expanded.

        A cell is a text, or what all unlikely tokens after a prefix lead to.
        """
        cells, expanded, prefixes = {}, {}, {(): float(samples)}
        while prefixes:
            rows = self.probabilities(prompt, list(prefixes), setting)
            longer = {}
            for (prefix, expected), p in zip(prefixes.items(), rows):
                expanded[prefix] = p
                likely = (p * expected >= LEAST).nonzero().flatten().tolist()
                cells[*prefix, REST] = expected * (1 - sum(p[likely].tolist()))
                for token in likely:
                    is_whole = token in self.ends or len(prefix) + 1 == LENGTH
                    (cells if is_whole else longer)[*prefix, token] = expected * p[token].item()
            prefixes = longer
        return cells, expanded


def deviation(texts, cells, expanded):
    """Number of cells, chi-square and its deviation as a standard normal one (Wilson and Hilferty 1931)."""
    counts = collections.Counter()
    for text in texts:
        before = next(text[:k] for k in reversed(range(len(text))) if text[:k] in expanded)
        if expanded[before][text[len(before)]] == 0:
            return len(cells), math.inf, math.inf  # a token that cannot come
        counts[text if text in cells else (*before, REST)] += 1
    pairs = [(counts[cell], expected) for cell, expected in cells.items()]
    merged = [sum(column) for column in zip(*(pair for pair in pairs if pair[1] < LEAST))]
    pairs = [pair for pair in pairs if pair[1] >= LEAST]
    if merged and merged[1] > 0:
        pairs.append(merged if merged[1] >= LEAST else [a + b for a, b in zip(merged, pairs.pop())])
    chi_square, free = sum((count - expected) ** 2 / expected for count, expected in pairs), max(1, len(pairs) - 1)
    spread = 2 / (9 * free)
    return len(pairs), chi_square, ((chi_square / free) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


class Server:
    def __init__(self, url, seed):
        self.address, self.seeds = local_address(url), itertools.count(seed)
        self.accepted = 0  # guesses

    async def complete(self, **fields):
        body = {"model": self.model, "return_token_ids": True, "acceptance": "rejection"} | fields
        answer = await fetch(self.address, "POST", "/v1/completions", body)
        if answer.status != 200:
            raise RuntimeError(f"{json.dumps(body)}: {answer.status} {answer.body[:300]!r}")
        self.accepted += answer.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        return answer.json()["choices"]

    async def answers(self, text):
        """Token ids of a text, and the same with each of sixteen answers of the model."""
        self.model = (await fetch(self.address, "GET", "/v1/models")).json()["data"][0]["id"]
        choices = await self.complete(prompt=text, n=TEXTS, seed=next(self.seeds), max_tokens=100)
        prompt = choices[0]["prompt_token_ids"]
        return prompt, [prompt + choice["token_ids"] for choice in choices]

    async def draw(self, prompt, setting, samples, end):
        """Texts of three tokens, or fewer before `end`."""
        self.accepted = 0
        texts, fields = [], dict(prompt=prompt, n=TEXTS, max_tokens=LENGTH, **setting)
        while len(texts) < samples:
            answers = await asyncio.gather(*(self.complete(seed=next(self.seeds), **fields) for _ in range(REQUESTS)))
            texts += [(*c["token_ids"], *([end] if c["finish_reason"] == "stop" else [])) for choices in answers for c in choices]
        return texts


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("backbone", help="folder of the server's backbone")
    parser.add_argument("--samples", type=int, default=6000, help="texts for each setting")
    parser.add_argument("--seed", type=int, default=1, help="of the first request; each has its own")
    parser.add_argument("--prompt", default="<|user|>Tell me a story.<|end|><|assistant|>Once")
    parser.add_argument("--wrong", type=float, default=1.0, help="multiply the temperature of the expected probabilities by this")
    args = parser.parse_args()
    utils.logging.disable_progress_bar()
    server, oracle, deviations = Server(args.url, args.seed), Oracle(args.backbone), []
    prompt, answers = await server.answers(args.prompt)
    prompts = [prompt, oracle.before_an_end(answers)] * 3 + [prompt + prompt[-1:] * 8]  # after a repetition, one more is likelier
    print(f"{'samples':>7} {'ended':>6} {'accepted':>8} {'cells':>6} {'chi-square':>11} {'deviation':>10}")
    for setting, prompt in zip(SETTINGS, prompts):
        texts = await server.draw(prompt, setting, args.samples, oracle.ends[0])
        expected = oracle.expand(prompt, setting | {"temperature": setting["temperature"] * args.wrong}, len(texts))
        cells, chi_square, off = deviation(texts, *expected)
        deviations.append(off)
        ended = sum(text[-1] == oracle.ends[0] for text in texts)
        print(f"{len(texts):7} {ended:6} {server.accepted:8} {cells:6} {chi_square:11.1f} {off:+10.2f}  {json.dumps(setting)}", flush=True)
    sys.exit(any(abs(off) > MOST for off in deviations))


if __name__ == "__main__":
    asyncio.run(main())
