#!/usr/bin/env python3
"""Trains Medusa heads in PyTorch, transformers and PEFT the way the published trainers do, for comparisons of speed and memory.

Stage 1 trains the heads on the frozen backbone; stage 2 adds LoRA adapters on all linear layers and the combined loss. Each head makes the
logits of all tokens at once. Rows are `input_ids` in JSON lines, joined and cut into `--batch` × `--length` tokens per step. Prints the loss of each
step, the tokens per second of the steps after the second, and the peak memory of the process.

    scripts/peers/peer_training.py BACKBONE rows.jsonl --stage 1 --length 512 --batch 2 --steps 8
"""
import argparse
import json
import resource
import time

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

WARM_UP = 2
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class Head(nn.Module):
    """A residual block that starts as the identity, and an output matrix that starts as the LM head."""

    def __init__(self, lm_head_vd):
        super().__init__()
        vocabulary, hidden = lm_head_vd.shape
        self.linear, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, vocabulary, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.out.weight.data.copy_(lm_head_vd)

    def forward(self, hidden_btd):
        return self.out(hidden_btd + functional.silu(self.linear(hidden_btd)))


def cross_entropy(logits_btv, ids_bt, ahead):
    return functional.cross_entropy(logits_btv[:, :-ahead].flatten(0, 1).float(), ids_bt[:, ahead:].flatten())


def with_adapters(model, lm_head_vd):
    from peft import LoraConfig, get_peft_model

    vocabulary, hidden = lm_head_vd.shape
    model.config.tie_word_embeddings = False
    model.lm_head = nn.Linear(hidden, vocabulary, bias=False, dtype=lm_head_vd.dtype).requires_grad_(False)
    model.lm_head.weight.data.copy_(lm_head_vd)
    lora = LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM", target_modules=LORA_TARGETS)
    return get_peft_model(model, lora).base_model.model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone")
    parser.add_argument("rows")
    parser.add_argument("--stage", type=int, choices=[1, 2], required=True)
    for name, default in [("length", 512), ("batch", 2), ("steps", 8), ("heads", 5), ("threads", 2)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="compile backbone and heads with torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.backbone, dtype=torch.float32).requires_grad_(False)
    lm_head_vd = model.get_output_embeddings().weight.detach().clone()
    if args.stage == 2:
        model = with_adapters(model, lm_head_vd)
    heads = nn.ModuleList(Head(lm_head_vd) for _ in range(args.heads))
    groups = [{"params": list(heads.parameters()), "lr": 1e-3}]
    if args.stage == 2:
        groups.append({"params": [weight for weight in model.parameters() if weight.requires_grad], "lr": 2.5e-4})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)

    def loss_of(ids_bt):
        with torch.set_grad_enabled(args.stage == 2):
            hidden_btd = model.model(ids_bt).last_hidden_state
        of_heads = sum(0.8**k * cross_entropy(head(hidden_btd), ids_bt, k + 1) for k, head in enumerate(heads, 1))
        return of_heads if args.stage == 1 else cross_entropy(model.lm_head(hidden_btd), ids_bt, 1) + 0.2 * of_heads

    if args.compile:
        loss_of = torch.compile(loss_of)
    with open(args.rows, encoding="utf-8") as rows:
        ids = torch.tensor([token for row in rows for token in json.loads(row)["input_ids"]])
    per_step = args.batch * args.length
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            began = time.perf_counter()
        ids_bt = ids[step * per_step : (step + 1) * per_step].view(args.batch, args.length)
        loss = loss_of(ids_bt)
        loss.backward()
        nn.utils.clip_grad_norm_([weight for group in groups for weight in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1}, loss {loss.item():.4f}", flush=True)
    speed = args.steps * per_step / (time.perf_counter() - began)
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, {speed:.1f} tokens/s")


if __name__ == "__main__":
    main()
