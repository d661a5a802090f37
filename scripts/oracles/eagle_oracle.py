#!/usr/bin/env python3
"""Writes tests/fixtures/eagle: training steps and guesses of EAGLE-3 drafters, computed by PyTorch.

    python3 scripts/oracles/eagle_oracle.py            # needs torch 2.11, transformers 5, safetensors
    python3 scripts/oracles/eagle_oracle.py --check    # computes again and compares with the files, writes nothing

The layer is that of EAGLE-3 (arXiv 2503.01840), with names of the files of its authors. Step i (0-based) of the training-time test at token t reads the
embedding of token t+i+1 and a feature: a projection of the backbone's hidden states before layers TAPS in step 0, the output of step i-1 at t later. It
predicts token t+i+2, and sees the keys of step 0 up to t and those of steps 1 … i at t. Here attention has all steps' keys in one matrix and a mask; the
program adds the scores of the chains one by one.

The files are as those of hydra_oracle.py: 20 steps on stories260K with 8 rows a step, decay 0.8, AdamW without weight decay, constant rate 5e-4,
gradients clipped to a norm of 1, float32; samples of gradients and final weights, and guesses. The initial weights are computed from their names.
"""

import json
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

import hydra_oracle as shared

FOLDER = shared.FIXTURES / "eagle"
TAPS = [1, 2, 4]
# name: (steps, tokens that can be guessed, weight of the labels; the rest is that of the LM head's distribution, optimizer steps)
RUNS = {"eagle3": (4, None, 0.0, 20), "eagle3_truncated": (3, 96, 0.5, 5)}


class Layer(nn.Module):
    """`midlayer`."""

    def __init__(self, config):
        super().__init__()
        hidden, d = config.hidden_size, config.head_dim
        self.heads, self.groups, self.d = config.num_attention_heads, config.num_key_value_heads, d
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        norm = lambda: nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.q_proj = linear(2 * hidden, self.heads * d)
        self.self_attn.k_proj = linear(2 * hidden, self.groups * d)
        self.self_attn.v_proj = linear(2 * hidden, self.groups * d)
        self.self_attn.o_proj = linear(self.heads * d, hidden)
        self.mlp.gate_proj = linear(hidden, config.intermediate_size)
        self.mlp.up_proj = linear(hidden, config.intermediate_size)
        self.mlp.down_proj = linear(config.intermediate_size, hidden)
        self.theta = config.rope_parameters["rope_theta"]

    def rotate(self, x, positions):
        """`x` [B, T, heads, D]."""
        frequencies = self.theta ** (-torch.arange(0, self.d, 2, dtype=torch.float32) / self.d)
        angles = (positions.float()[:, None] * frequencies).repeat(1, 2)[:, None]
        half = self.d // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)

    def forward(self, embedded, feature, step, keys):
        b, t, _ = embedded.shape
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        split = lambda x, heads: x.view(b, t, heads, self.d)
        positions = torch.arange(t) + step
        attn = self.self_attn
        q = self.rotate(split(attn.q_proj(x), self.heads), positions)
        k = self.rotate(split(attn.k_proj(x), self.groups), positions)
        keys.append((k, split(attn.v_proj(x), self.groups)))
        repeat = self.heads // self.groups
        k, v = (torch.cat(all_steps, 1).repeat_interleave(repeat, 2) for all_steps in zip(*keys))
        rows, columns = torch.arange(t)[:, None], torch.arange(t * (step + 1))[None]
        sees = torch.where(columns < t, columns <= rows, columns % t == rows)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.d**-0.5
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, -1)
        x = feature + attn.o_proj(out)
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))


class Eagle(nn.Module):
    def __init__(self, backbone, steps, tokens):
        super().__init__()
        config = backbone.config
        self.backbone, self.steps = [backbone], steps  # in a list: frozen, no parameters of ours
        self.tokens = torch.arange(config.vocab_size) if tokens is None else tokens
        self.fc = nn.Linear(len(TAPS) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(self.tokens), bias=False)

    def unroll(self, ids, taps, following):
        """Logits of each step; `following(i)` [B, T]: the tokens that step i reads."""
        feature, keys, logits = self.fc(taps), [], []
        for step in range(self.steps):
            feature = self.midlayer(self.backbone[0].get_input_embeddings()(following(step)), feature, step, keys)
            logits.append(self.lm_head(self.norm(feature)))
        return logits


@torch.no_grad()
def initialise(drafter, backbone):
    for name, parameter in drafter.named_parameters():
        if name == "lm_head.weight":
            parameter.copy_(backbone.lm_head.weight[drafter.tokens])
        elif "norm" in name:
            parameter.copy_(1 + shared.initial(name, parameter.shape, 0.1))
        else:
            parameter.copy_(shared.initial(name, parameter.shape, parameter.shape[-1] ** -0.5))


@torch.no_grad()
def states(backbone, ids):
    """The taps side by side, and the LM head's logits."""
    out = backbone(ids, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer] for layer in TAPS], -1), out.logits


def step_losses(drafter, backbone, ids, labels, label_weight):
    """Each step's loss and its accuracy."""
    taps, teacher = states(backbone, ids)
    teacher = teacher[..., drafter.tokens].log_softmax(-1)
    outputs = torch.full([backbone.config.vocab_size], -1)
    outputs[drafter.tokens] = torch.arange(len(drafter.tokens))
    losses, hits = [], []
    for i, logits in enumerate(drafter.unroll(ids, taps, lambda i: ids.roll(-1 - i, 1))):
        targets = labels[:, i + 2 :]
        carries = targets != -100
        student = logits[:, : -(i + 2)][carries].log_softmax(-1)
        soft = teacher[:, i + 1 : -1][carries]
        wanted = outputs[targets[carries]]
        by_label = -student[wanted >= 0].gather(1, wanted[wanted >= 0].unsqueeze(1)).mean()
        hits.append((student.argmax(-1) == wanted).double().mean().item())
        by_backbone = (soft.exp() * (soft - student)).sum(-1).mean()
        losses.append(label_weight * by_label + (1 - label_weight) * by_backbone)
    return losses, hits


@torch.no_grad()
def guesses(drafter, backbone, ids):
    """Three likeliest tokens of each step after position t of a row, along a path that takes guess number i % 3 of step i."""
    found, margin = [], math.inf
    for row, t in shared.GUESSED:
        text = ids[row, : t + 1]
        taps, logits = states(backbone, text[None])
        path, levels = [logits[0, t].argmax().item()], []
        for i in range(drafter.steps):
            # Row t of step i reads the i-th token of the path.
            known = torch.cat([text, torch.tensor(path + [0] * (drafter.steps - len(path)))])
            step_logits = drafter.unroll(text[None], taps, lambda step: known[None, step + 1 : step + t + 2])[i][0, t]
            top = step_logits.topk(4)
            margin = min(margin, (top.values[:3] - top.values[1:]).min().item())
            levels.append(drafter.tokens[top.indices[:3]].tolist())
            path.append(levels[-1][i % 3])
        found.append({"row": row, "position": t, "path": path, "guesses": levels})
    return found, margin


def train(name, kind):
    steps, size, label_weight, count = RUNS[name]
    backbone = shared.load(kind)
    ids, labels = shared.rows()
    drafter = Eagle(backbone, steps, None if size is None else shared.frequent(labels, size)).to(kind)
    initialise(drafter, backbone)
    named = list(drafter.named_parameters())
    tensors, totals = {}, {"init": shared.norms(named)}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=shared.RATE, weight_decay=0.0)
    report = []
    for step in range(count):
        part = slice(step * shared.ROWS_PER_STEP, (step + 1) * shared.ROWS_PER_STEP)
        losses, hits = step_losses(drafter, backbone, ids[part], labels[part], label_weight)
        loss = sum(shared.DECAY ** (i + 1) * of_step for i, of_step in enumerate(losses))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = [(n, p.grad) for n, p in named]
            tensors |= {f"gradient.{n}": shared.sample(g) for n, g in gradients}
            totals["gradient"] = shared.norms(gradients)
        norm = nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        report.append({
            "step": step, "head_losses": [of_step.item() for of_step in losses],
            "loss": loss.item(), "grad_norm": norm.item(), "head_top1": hits,
        })
    tensors |= {f"final.{n}": shared.sample(p) for n, p in named}
    totals["final"] = shared.norms(named)
    found, margin = guesses(drafter, backbone, ids)
    settings = dict(ttt_steps=steps, tap_layers=TAPS, draft_vocab_size=size, label_weight=label_weight)
    return {"name": name, "settings": settings, "steps": report, "norms": totals, "guesses": found, "guess_margin": margin}, tensors


def main():
    torch.set_num_threads(1)
    for name in RUNS:
        report, tensors = train(name, torch.float32)
        exact, _ = train(name, torch.float64)
        report["float64_difference"] = shared.largest_difference(report, exact)
        assert [g["guesses"] for g in report["guesses"]] == [g["guesses"] for g in exact["guesses"]], f"{name}: near ties"
        assert report["float64_difference"] < 3e-6, f"{name}: {report['float64_difference']}"
        print(name, "float32 against float64:", report["float64_difference"], "margin of guesses:", report["guess_margin"])
        files = {f"{name}.json": (json.dumps(report, indent=1) + "\n").encode(), f"{name}.safetensors": shared.stored(tensors)}
        for file, data in files.items():
            path = FOLDER / file
            if "--check" in sys.argv[1:]:
                assert shared.same(path, data), f"{path} differs"
                continue
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    main()
