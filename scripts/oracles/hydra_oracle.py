#!/usr/bin/env python3
"""Writes tests/fixtures/hydra: training steps, guesses and published files of Hydra and Hydra++ heads, computed by PyTorch.

    python3 scripts/oracles/hydra_oracle.py            # needs torch 2.11, transformers 5, safetensors
    python3 scripts/oracles/hydra_oracle.py --check    # computes again and compares with the files, writes nothing
    python3 scripts/oracles/hydra_oracle.py NAME…      # only these runs

The formulas follow the code of github.com/zankner/Hydra (architectures `mlp` and `prefix-mlp`, grounded heads). Head k (0-based) at
position t reads the hidden state h_t and the embeddings of tokens t+1 … t+k+1, and predicts token t+k+2. In Hydra++ the output of the
prefix, a Llama model of one layer over the backbone's hidden states, takes the place of h_t. Soft targets are the LM head's own
distribution at position t+k+1, and the loss is KL(LM head ‖ head). Runs of TRUNCATED have heads that guess among the most frequent labels
only: other labels are left out of the cross-entropy and count as misses, and the LM head's distribution is that of these tokens.

Training (`NAME.json`, `NAME.safetensors`): 20 steps on stories260K with 8 rows of reference/losses/rows.jsonl a step, in file order,
4 heads, decay 0.8, AdamW without weight decay, constant rate 5e-4, gradients clipped to a norm of 1, float32. The steps list each
head's loss (a mean over its targets, not weighted), the weighted sum and the gradient norm before clipping. The tensors are samples,
which keeps the files small: every 61st element of each parameter's gradient in step 0 before clipping (`gradient.`) and of its value
after training (`final.`), or all of up to 256. `norms` in the JSON file has the norms of the whole tensors, also before training
(`init`). Parameter names are those of our heads.safetensors. `guesses` are the three likeliest tokens of each head after training, along
a path that takes guess number k % 3 of head k.

The initial weights are not stored. `initial` computes them from their names, as tests/hydra_reference.rs does.

Published files (`published_mlp`, `published_prefix-mlp`): `hydra_lm_head.pt` and `config.json` as Hydra's trainer saves them, for the
random Llama in `backbone`, and `expected.safetensors` with logits [K, N, V] of the first N positions, on its hidden states [T, H]. As
in the published code, the blocks of a head after the first are one module, so that their names share one tensor, and the file also
holds the backbone's embedding and, with a prefix, an embedding that nothing reads.
"""

import hashlib
import json
import math
import pathlib
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.nn import functional as F

SCRIPT = pathlib.Path(__file__).resolve()
FIXTURES = SCRIPT.parents[2] / "tests" / "fixtures"
FOLDER = FIXTURES / "hydra"
HEADS, STEPS, ROWS_PER_STEP, DECAY, RATE = 4, 20, 8, 0.8, 5e-4
STRIDE, SMALL = 61, 256
LIMIT_BYTES = 600_000
GUESSED = [(2, 80), (5, 60), (2, 40), (0, 60)]  # rows and positions
# name: (tokens that heads can guess, whether all heads have one W2, steps)
TRUNCATED = {"medusa_truncated": (96, False, 5), "hydra_truncated": (96, True, 5)}
# name: (architecture, layers of a head, bias of W2, weight of the labels; the rest is that of the LM head's distribution)
RUNS = {
    "hydra": ("hydra", 2, False, 1.0),
    "hydra_w2_bias": ("hydra", 1, True, 1.0),
    "hydra++": ("hydra++", 2, False, 1.0),
    "hydra++_backbone": ("hydra++", 2, False, 0.0),
    "medusa_backbone": ("medusa", 1, False, 0.0),
    "medusa_half": ("medusa", 1, False, 0.5),
    "medusa_truncated": ("medusa", 1, False, 0.5),
    "hydra_truncated": ("hydra", 1, False, 1.0),
}


def initial(name, shape, bound):
    """Numbers in [-bound, bound): splitmix64 of the element's index plus the name's FNV-1a hash, its upper 24 bits."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    count = math.prod(shape)
    z = (numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)) + numpy.uint64(seed)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    z = z ^ (z >> numpy.uint64(31))
    unit = (z >> numpy.uint64(40)).astype(numpy.float64) / 2**24
    return torch.from_numpy(((2 * unit - 1) * bound).astype(numpy.float32)).view(shape)


class Block(nn.Module):
    """`inputs` vectors of H numbers to H: a linear residual connection where the width changes, else the identity."""

    def __init__(self, hidden, inputs=1):
        super().__init__()
        self.linear = nn.Linear(inputs * hidden, hidden)
        if inputs > 1:
            self.res_connection = nn.Linear(inputs * hidden, hidden)

    def forward(self, x):
        skipped = self.res_connection(x) if hasattr(self, "res_connection") else x
        return skipped + F.silu(self.linear(x))


class Head(nn.Module):
    """Modules are numbered as in our heads.safetensors: the blocks, then W2."""

    def __init__(self, hidden, vocabulary, inputs, layers, bias, one_block=False):
        super().__init__()
        blocks = [Block(hidden, inputs)] + [Block(hidden) for _ in range(1 if one_block else layers - 1)]
        blocks = blocks[:1] + blocks[1:] * (layers - 1) if one_block else blocks
        self.layers = nn.ModuleList([*blocks, nn.Linear(hidden, vocabulary, bias=bias)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Drafter(nn.Module):
    def __init__(self, backbone, architecture, heads, layers, bias, one_block=False, tokens=None, one_w2=False):
        super().__init__()
        config = backbone.config
        self.embedding = [backbone.get_input_embeddings()]  # in a list: frozen, no parameter of ours
        self.sequential = architecture != "medusa"
        self.tokens, self.one_w2 = torch.arange(config.vocab_size) if tokens is None else tokens, one_w2
        self.heads = nn.ModuleList(
            Head(config.hidden_size, len(self.tokens), k + 2 if self.sequential else 1, layers, bias, one_block)
            for k in range(heads)
        )
        if one_w2:
            for head in self.heads:
                head.layers[-1] = self.heads[0].layers[-1]
        if architecture == "hydra++":
            settings = {**config.to_dict(), "num_hidden_layers": 1, "layer_types": None}
            prefix = type(config).from_dict(settings, attn_implementation="eager")
            self.prefix = transformers.LlamaModel(prefix).to(next(backbone.parameters()).dtype)
            self.prefix.embed_tokens = None

    def states(self, hidden):
        return self.prefix(inputs_embeds=hidden, use_cache=False).last_hidden_state if hasattr(self, "prefix") else hidden

    def logits(self, k, states, following):
        """`states` [..., H] of positions t, `following` [..., k + 1] the tokens after each."""
        inputs = [states]
        if self.sequential:
            inputs += [self.embedding[0](following[..., j]) for j in range(k + 1)]
        return self.heads[k](torch.cat(inputs, -1))

    def named(self):
        for name, parameter in self.named_parameters():
            if self.one_w2 and name == f"heads.0.layers.{len(self.heads[0].layers) - 1}.weight":
                yield "w2.weight", parameter
                continue
            yield name.replace("heads.", "", 1).replace(".layers.", ".", 1) if name.startswith("heads.") else name, parameter


@torch.no_grad()
def initialise(drafter, lm_head):
    for name, parameter in drafter.named():
        last = parameter.shape == (len(drafter.tokens), lm_head.shape[1]) and ".linear." not in name and "prefix" not in name
        if last:
            parameter.copy_(lm_head[drafter.tokens])
        elif not drafter.sequential:
            parameter.zero_()  # our Medusa heads start as the LM head
        elif "norm" in name:
            parameter.copy_(1 + initial(name, parameter.shape, 0.1))
        else:
            parameter.copy_(initial(name, parameter.shape, parameter.shape[-1] ** -0.5))


def load(kind):
    folder = FIXTURES / "models" / "stories260K"
    backbone = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="eager")
    return backbone.eval().requires_grad_(False)


def rows():
    text = (FIXTURES / "reference" / "losses" / "rows.jsonl").read_text()
    parsed = [json.loads(line) for line in text.splitlines()]
    return [torch.tensor([row[key] for row in parsed]) for key in ("input_ids", "labels")]


def frequent(labels, size):
    """The `size` most frequent labels, by id; of equal frequency the lower ids."""
    counts = torch.bincount(labels[labels != -100], minlength=512).tolist()
    return torch.tensor(sorted(sorted(range(512), key=lambda token: (-counts[token], token))[:size]))


def head_losses(drafter, backbone, ids, labels, label_weight):
    """Each head's loss and its accuracy."""
    with torch.no_grad():
        hidden = backbone.model(ids).last_hidden_state
        teacher = backbone.lm_head(hidden)[..., drafter.tokens].log_softmax(-1)
    outputs = torch.full([backbone.config.vocab_size], -1)
    outputs[drafter.tokens] = torch.arange(len(drafter.tokens))
    states, length = drafter.states(hidden), ids.shape[1]
    losses, hits = [], []
    for k in range(len(drafter.heads)):
        count = length - (k + 2)
        following = torch.stack([ids[:, j : j + count] for j in range(1, k + 2)], -1)
        targets = labels[:, k + 2 :]
        carries = targets != -100
        head = drafter.logits(k, states[:, :count], following)[carries].log_softmax(-1)
        soft = teacher[:, k + 1 : -1][carries]
        wanted = outputs[targets[carries]]
        by_label = -head[wanted >= 0].gather(1, wanted[wanted >= 0].unsqueeze(1)).mean()
        hits.append((head.argmax(-1) == wanted).double().mean().item())
        by_backbone = (soft.exp() * (soft - head)).sum(-1).mean()
        losses.append(label_weight * by_label + (1 - label_weight) * by_backbone)
    return losses, hits


def sample(tensor):
    flat = tensor.detach().flatten().float().clone()
    return flat if flat.numel() <= SMALL else flat[::STRIDE].clone()


def norms(values):
    return {name: value.detach().double().norm().item() for name, value in values}


@torch.no_grad()
def guesses(drafter, backbone, ids):
    """Three likeliest tokens of each head after position t of a row, along a path; and how clearly they are ordered."""
    found, margin = [], math.inf
    for row, t in GUESSED:
        hidden = backbone.model(ids[row : row + 1]).last_hidden_state
        state = drafter.states(hidden)[0, t]
        path = [backbone.lm_head(hidden[0, t]).argmax().item()]
        levels = []
        for k in range(len(drafter.heads)):
            top = drafter.logits(k, state, torch.tensor(path)).topk(4)
            margin = min(margin, (top.values[:3] - top.values[1:]).min().item())
            levels.append(drafter.tokens[top.indices[:3]].tolist())
            path.append(levels[-1][k % 3])
        found.append({"row": row, "position": t, "path": path, "guesses": levels})
    return found, margin


def train(name, kind):
    architecture, layers, bias, label_weight = RUNS[name]
    backbone = load(kind)
    ids, labels = rows()
    size, one_w2, count = TRUNCATED.get(name, (None, False, STEPS))
    tokens = None if size is None else frequent(labels, size)
    drafter = Drafter(backbone, architecture, HEADS, layers, bias, tokens=tokens, one_w2=one_w2).to(kind)
    initialise(drafter, backbone.lm_head.weight)
    tensors, totals = {}, {"init": norms(drafter.named())}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=RATE, weight_decay=0.0)
    steps = []
    for step in range(count):
        part = slice(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)
        losses, hits = head_losses(drafter, backbone, ids[part], labels[part], label_weight)
        loss = sum(DECAY ** (k + 1) * of_head for k, of_head in enumerate(losses))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = [(n, p.grad) for n, p in drafter.named()]
            tensors |= {f"gradient.{n}": sample(g) for n, g in gradients}
            totals["gradient"] = norms(gradients)
        norm = nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        steps.append({
            "step": step, "head_losses": [of_head.item() for of_head in losses],
            "loss": loss.item(), "grad_norm": norm.item(), "head_top1": hits,
        })
    tensors |= {f"final.{n}": sample(p) for n, p in drafter.named()}
    totals["final"] = norms(drafter.named())
    found, margin = guesses(drafter, backbone, ids)
    settings = dict(
        architecture=architecture, heads=HEADS, layers=layers, w2_bias=bias, label_weight=label_weight, decay=DECAY, rate=RATE
    )
    if size is not None:
        settings |= dict(draft_vocab_size=size, shared_w2=one_w2)
    report = {"name": name, "settings": settings, "steps": steps, "norms": totals, "guesses": found, "guess_margin": margin}
    return report, tensors


def largest_difference(one, other):
    """Of losses and gradient norms, relative."""
    pairs = [(a[key], b[key]) for a, b in zip(one["steps"], other["steps"]) for key in ("loss", "grad_norm")]
    pairs += [pair for a, b in zip(one["steps"], other["steps"]) for pair in zip(a["head_losses"], b["head_losses"])]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def run_files(name):
    report, tensors = train(name, torch.float32)
    exact, _ = train(name, torch.float64)
    assert [g["guesses"] for g in report["guesses"]] == [g["guesses"] for g in exact["guesses"]], f"{name}: guesses are near ties"
    report["float64_difference"] = largest_difference(report, exact)
    assert report["guess_margin"] > 1e-3, f"{name}: {report['guess_margin']}"
    assert report["float64_difference"] < 3e-6, f"{name}: {report['float64_difference']}"
    return {f"{name}.json": (json.dumps(report, indent=1) + "\n").encode(), f"{name}.safetensors": stored(tensors)}


def stored(tensors):
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(tensors, {"script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "torch": torch.__version__})


TINY = dict(
    vocab_size=41, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
    max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)


@torch.no_grad()
def randomise(module):
    for name, parameter in module.named_parameters():
        offset = 1.0 if "norm" in name else 0.0
        parameter.copy_(offset + initial(name, parameter.shape, 0.1 if offset else parameter.shape[-1] ** -0.5))


def published_name(name, dropout):
    """Of a parameter of ours. The heads of `prefix-mlp` have a dropout module before each layer, which counts."""
    if name.startswith("prefix."):
        return name.replace("prefix.", "prefix_embeding_layer.", 1)
    head, layer, rest = name.split(".", 2)
    if rest in ("weight", "bias"):
        return f"hydra_lm_head.{head}.1.{rest}" if dropout else f"hydra_lm_head.{head}.{rest}"
    return f"hydra_mlp.{head}.{2 * int(layer) + 1 if dropout else layer}.{rest}"


def state_dict(drafter):
    """With an entry for every name of a shared block, as `state_dict` of the published modules."""
    entries = {}
    for k, head in enumerate(drafter.heads):
        for layer, module in enumerate(head.layers):
            entries |= {f"{k}.{layer}.{name}": tensor for name, tensor in module.state_dict().items()}
    if hasattr(drafter, "prefix"):
        entries |= {f"prefix.{name}": tensor for name, tensor in drafter.prefix.state_dict().items()}
    return entries


@torch.no_grad()
def published_files(arch, backbone, kind):
    ours = {"mlp": "hydra", "prefix-mlp": "hydra++"}[arch]
    drafter = Drafter(backbone, ours, 3, 3, True, one_block=True)
    randomise(drafter)
    drafter.to(kind)
    entries = {published_name(name, ours == "hydra++"): tensor for name, tensor in state_dict(drafter).items()}
    # The published modules hold the embedding, and the prefix is a whole LlamaModel.
    entries["input_embed_fn.weight"] = backbone.get_input_embeddings().weight.to(kind)
    if ours == "hydra++":
        entries["prefix_embeding_layer.embed_tokens.weight"] = initial("unused", (41, 16), 1.0).to(kind)
        entries["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = 10000.0 ** (-torch.arange(0, 4, 2) / 4)
    drafter.float()
    ids = torch.tensor([[1, 5, 9, 40, 3, 17, 22, 8, 30, 11, 2, 6, 13, 21, 34, 4]])
    hidden = backbone.model(ids).last_hidden_state
    states, count = drafter.states(hidden)[0], ids.shape[1] - 3
    following = torch.stack([ids[0, j : j + count] for j in (1, 2, 3)], -1)
    logits = torch.stack([drafter.logits(k, states[:count], following) for k in range(3)])
    config = dict(
        hydra_num_heads=3, hydra_num_layers=3, hydra_head_arch=arch, base_model_name_or_path="backbone",
        grounded_heads=True, hidden_state_offset=0, transformers_version="4.34.1",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "hydra_lm_head.pt"
        torch.save(entries, path)
        weights = path.read_bytes()
    expected = stored({"input_ids": ids[0], "hidden_states": hidden[0], "logits": logits})
    folder = f"published_{arch}"
    return {
        f"{folder}/hydra_lm_head.pt": weights, f"{folder}/config.json": (json.dumps(config, indent=2) + "\n").encode(),
        f"{folder}/expected.safetensors": expected,
    }


def all_published_files():
    backbone = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval().requires_grad_(False)
    randomise(backbone)
    config = {**backbone.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    config = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")} | {"rope_theta": 10000.0}
    files = {
        "backbone/config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "backbone/model.safetensors": stored(backbone.state_dict()),
    }
    files |= published_files("mlp", backbone, torch.float16)
    return files | published_files("prefix-mlp", backbone, torch.float32)


def same_report(old, new):
    """Whether losses, gradient norms and norms of tensors agree within 1e-5 and all else, such as accuracies, is equal."""
    if any(old[key] != new[key] for key in ("name", "settings", "guesses")) or len(old["steps"]) != len(new["steps"]):
        return False
    if [step.get("head_top1") for step in old["steps"]] != [step["head_top1"] for step in new["steps"]]:
        return False
    if largest_difference(old, new) >= 1e-5 or old["norms"].keys() != new["norms"].keys():
        return False
    pairs = [(old["norms"][stage], new["norms"][stage]) for stage in old["norms"]]
    return all(a.keys() == b.keys() and all(math.isclose(a[name], b[name], rel_tol=1e-5) for name in a) for a, b in pairs)


def same(path, new):
    """Tensors within 1e-6 and the same JSON up to that; other files hold the same tensors in another zip."""
    old = path.read_bytes()
    if path.suffix == ".safetensors":
        old, new = safetensors.torch.load(old), safetensors.torch.load(new)
        return old.keys() == new.keys() and all(torch.allclose(old[name], new[name], 1e-5, 1e-6) for name in old)
    if path.suffix == ".json":
        old, new = json.loads(old), json.loads(new)
        return same_report(old, new) if "steps" in old else old == new
    with tempfile.NamedTemporaryFile() as file:
        file.write(new)
        file.flush()
        old, new = torch.load(path, weights_only=True), torch.load(file.name, weights_only=True)
    return old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def main():
    torch.set_num_threads(1)
    files, only = {}, [name for name in sys.argv[1:] if name != "--check"]
    for name in only or RUNS:
        files |= run_files(name)
        print(name, "float32 against float64:", json.loads(files[f"{name}.json"])["float64_difference"])
    files |= {} if only else all_published_files()
    total = sum(map(len, files.values()))
    assert total < LIMIT_BYTES, f"{total} bytes"
    for name, data in files.items():
        path = FOLDER / name
        if "--check" in sys.argv[1:]:
            assert same(path, data), f"{path} differs"
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    print(f"{total} bytes in {len(files)} files")


if __name__ == "__main__":
    main()
