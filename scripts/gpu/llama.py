"""Llama in PyTorch alone, for machines without transformers: the frozen backbone of the trainer in peers.py."""

# B rows, T tokens, H hidden, Q heads, D head size
import torch
from torch.nn import functional


class Attention(torch.nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_bth, rotary):
        b, t, h = x_bth.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x_bth).split(h, dim=2))
        mixed = functional.scaled_dot_product_attention(rotated(q, rotary), rotated(k, rotary), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, h))


class Layer(torch.nn.Module):
    def __init__(self, hidden, wide, heads):
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.gate_up = torch.nn.Linear(hidden, 2 * wide, bias=False)
        self.down = torch.nn.Linear(wide, hidden, bias=False)

    def forward(self, x_bth, rotary):
        x_bth = x_bth + self.attention(self.norms[0](x_bth), rotary)
        gate, up = self.gate_up(self.norms[1](x_bth)).chunk(2, dim=2)
        return x_bth + self.down(functional.silu(gate) * up)


class Llama(torch.nn.Module):
    """With the sizes of a config.json; Llama 2 7B's blocks: as many key/value heads as query heads, no biases."""

    def __init__(self, sizes):
        super().__init__()
        hidden, self.heads = sizes["hidden_size"], sizes["num_attention_heads"]
        self.embedding = torch.nn.Embedding(sizes["vocab_size"], hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden, sizes["intermediate_size"], self.heads) for _ in range(sizes["num_hidden_layers"]))
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5)
        self.lm_head = torch.nn.Linear(hidden, sizes["vocab_size"], bias=False)

    def forward(self, ids_bt):
        """The hidden states `[B, T, H]` that the heads read."""
        x_bth = self.embedding(ids_bt)
        rotary = angles(ids_bt.shape[1], x_bth.shape[2] // self.heads, x_bth)
        for layer in self.layers:
            x_bth = layer(x_bth, rotary)
        return self.norm(x_bth)


def angles(t, d, like):
    """Cosines and sines `[T, D]`."""
    frequencies = 10_000.0 ** (-torch.arange(0, d, 2, device=like.device, dtype=torch.float32) / d)
    turns = torch.outer(torch.arange(t, device=like.device, dtype=torch.float32), frequencies).repeat(1, 2)
    return turns.cos().to(like.dtype), turns.sin().to(like.dtype)


def rotated(x_bqtd, rotary):
    cos, sin = rotary
    first, second = x_bqtd.chunk(2, dim=3)
    return x_bqtd * cos + torch.cat((-second, first), dim=3) * sin
