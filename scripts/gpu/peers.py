"""Parts that run in Python: versions, torch's own attention, weights, and the same work in PyTorch and in transformers."""

import ctypes
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import time

import carried
import wider_heads
from trained import ROW_TOKENS, ROWS, STEPS

SIZES = {"vocab_size": 32000, "max_position_embeddings": 4096, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
HEADS = 5
DEVICE = "cuda"
BACKBONE_DISK = 25e9  # bytes of the backbone, and of a checkpoint and the finished heads of a training run


def tell(line):
    print(json.dumps(line), flush=True)


def versions(folder, programs):
    """Driver, torch, cuDNN, transformers, tools and free disk; libraries that the program does not find. Tells all that it can find out."""
    told, faults = {"check": "versions", "python": sys.version.split()[0]}, []
    for find_out in (gpu, packages, libraries):
        try:
            told |= find_out(programs)
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            faults.append(f"{type(error).__name__}: {error}")
    told |= {tool: bool(shutil.which(tool)) for tool in ("ncu", "compute-sanitizer")}
    told["free_disk_gb"] = shutil.disk_usage(folder).free // 10**9
    tell(told)
    if faults:
        sys.exit("; ".join(faults))


def gpu(_):
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.memory", "--format=csv,noheader"]
    return {"gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()}


def packages(_):
    import torch

    told = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "transformers": None}
    if importlib.util.find_spec("transformers"):
        told["transformers"] = importlib.metadata.version("transformers")
    return told


def libraries(programs):
    linked = subprocess.run(["ldd", programs / carried.PROGRAM], capture_output=True, text=True, check=True).stdout
    return {"libraries_not_found": [line.split()[0] for line in linked.splitlines() if "not found" in line]}


def mask(*_):
    """Attention in torch with a mask that begins at each of 8 offsets: kernels that load 16 bytes at a time crash where the
    address is not aligned. A crash poisons the process, so each offset has one of its own; they run side by side."""
    started = [subprocess.Popen([sys.executable, "-c", MASK, str(offset)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for offset in range(8)]
    for offset, process in enumerate(started):
        errors = process.communicate()[1].strip().splitlines()
        tell({"check": "mask", "offset": offset, "crashed": bool(process.returncode), "error": errors[-1] if process.returncode and errors else None})


MASK = """
import sys, torch
q, k = torch.randn(1, 8, 64, 64, device="cuda"), torch.randn(1, 8, 128, 64, device="cuda")
room = torch.zeros(1, 1, 64, 256, device="cuda")
torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=room[..., int(sys.argv[1]):][..., :128])
torch.cuda.synchronize()
"""


def random_llama():
    """Llama 2 7B's shape with random weights, created on the device."""
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)


def without(*packages):
    """Tells that a package is missing, and whether one is."""
    for package in packages:
        try:
            __import__(package)
        except ImportError as error:
            tell({"skipped": str(error)})
            return True
    return False


def seconds_of(work):
    import torch

    torch.cuda.synchronize()
    start = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - start


def generate(model, ids, tokens, **more):
    import torch

    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **more)


def transformers_steps(*_):
    """transformers' generate, one text: milliseconds per token without the prefill."""
    if without("torch", "transformers"):
        return
    import torch

    model = random_llama()
    for context in (128, 1024):
        ids = torch.randint(3, SIZES["vocab_size"], (1, context), device=DEVICE)
        times = {}
        for tokens in (1, 33):
            generate(model, ids, tokens, do_sample=False)  # warms up
            times[tokens] = seconds_of(lambda: generate(model, ids, tokens, do_sample=False))
        tell({"check": "transformers", "context": context, "step_ms": (times[33] - times[1]) / 32 * 1e3})


def transformers_batch(*_):
    """transformers' generate, 64 texts at temperature 0.8: tokens per second with the prefill."""
    if without("torch", "transformers"):
        return
    import torch

    model = random_llama()
    ids = torch.randint(3, SIZES["vocab_size"], (64, 96), device=DEVICE)
    generate(model, ids, 4, do_sample=True, temperature=0.8)  # warms up
    seconds = seconds_of(lambda: generate(model, ids, 128, do_sample=True, temperature=0.8))
    tell({"check": "transformers_batch", "texts": 64, "tokens_per_second": 64 * 128 / seconds, "memory_bytes": torch.cuda.max_memory_allocated()})


def make_backbone(folder, _):
    """Writes a folder with random weights of Llama 2 7B's shape, created on the device and saved as safetensors, and training rows. The
    folder appears when it is complete."""
    if without("torch"):
        return
    free = shutil.disk_usage(folder).free
    if free < BACKBONE_DISK:
        return tell({"skipped": f"{folder.parent} has {free / 1e9:.0f} GB free, expected {BACKBONE_DISK / 1e9:.0f}; set TMPDIR to a folder of a larger disk"})
    partial = folder / "backbone.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": SIZES["num_attention_heads"], "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (partial / "config.json").write_text(json.dumps(config))
    write_weights(partial / "model.safetensors", shapes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(carried.ROOT / "data/tiny/backbone" / name, partial / name)
    with (folder / "rows.jsonl").open("w") as rows:
        for ids in training_rows():
            rows.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    partial.rename(folder / "backbone")


def make_wider_heads(folder, _):
    wider_heads.widen(carried.ROOT / "data/tiny/backbone", folder / "wider_heads")


def training_rows():
    """As many rows as the timed steps take, the same for medusa and for its peer."""
    return [[3 + (i * i * 31 + (7 + row) * i) % 1500 for i in range(ROW_TOKENS)] for row in range(ROWS * STEPS)]


def shapes():
    hidden, wide, vocabulary = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    all_of = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        all_of.update({f"{at}.{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")})
        all_of.update({f"{at}.self_attn.{name}_proj.weight": [hidden, hidden] for name in "qkvo"})
        all_of.update({f"{at}.mlp.{name}_proj.weight": [wide, hidden] for name in ("gate", "up")})
        all_of[f"{at}.mlp.down_proj.weight"] = [hidden, wide]
    return all_of


def write_weights(path, all_of):
    """Writes safetensors: the header's length, the header, the numbers. Norms are ones."""
    import torch

    device = DEVICE if torch.cuda.is_available() else "cpu"
    header, end = {}, 0
    for name, shape in all_of.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for shape in all_of.values():
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            made = made.normal_(0, 0.02) if len(shape) > 1 else made.fill_(1)
            numbers = made.cpu()
            file.write((ctypes.c_char * (2 * numbers.numel())).from_address(numbers.data_ptr()))


def train_peer(*_):
    """The trainer below with a backbone in PyTorch alone."""
    if without("torch"):
        return
    import torch

    import llama

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = llama.Llama(SIZES).eval().requires_grad_(False)
    time_trainer("PyTorch", model, model.lm_head.weight)


def train_peer_transformers(*_):
    """The same with transformers' backbone."""
    if without("torch", "transformers"):
        return
    model = random_llama()
    time_trainer("transformers", lambda ids: model.model(ids).last_hidden_state, model.lm_head.weight)


def time_trainer(name, hidden_states, lm_head):
    """Medusa-1 as published trainers do it: a frozen backbone, whole logits of each head, and fused AdamW, on the rows that medusa
    trains on. Everything is bfloat16."""
    import torch

    with torch.device(DEVICE):
        heads = torch.nn.ModuleList(make_head(torch, lm_head) for _ in range(HEADS)).requires_grad_(True)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    rows = torch.tensor(training_rows()).view(STEPS, ROWS, ROW_TOKENS)

    def step(of_step, micro):
        trainer_step(torch, hidden_states, heads, optimizer, of_step, micro)

    # Published trainers lower the micro batch until a step fits.
    micro = next((size for size in (8, 4, 2, 1) if fits(torch, step, optimizer, rows[0], size)), None)
    if micro is None:
        return tell({"skipped": "not one row fits into the GPU's memory"})
    torch.cuda.reset_peak_memory_stats()
    for of_step in rows[1:]:
        seconds = seconds_of(lambda: step(of_step, micro))
        tell({"check": "peer", "backbone": name, "micro_batch_size": micro, "tokens_per_second": ROWS * ROW_TOKENS / seconds, "memory_bytes": torch.cuda.max_memory_allocated()})


def make_head(torch, lm_head):
    class ResBlock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(SIZES["hidden_size"], SIZES["hidden_size"])
            torch.nn.init.zeros_(self.linear.weight)
            torch.nn.init.zeros_(self.linear.bias)

        def forward(self, hidden):
            return hidden + torch.nn.functional.silu(self.linear(hidden))

    head = torch.nn.Sequential(ResBlock(), torch.nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=False))
    head[1].weight.data.copy_(lm_head)
    return head


def fits(torch, step, optimizer, rows, micro):
    """Whether a step with this micro batch fits into memory; it also warms up."""
    try:
        step(rows, micro)
        return True
    except torch.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return False


def trainer_step(torch, hidden_states, heads, optimizer, rows, micro):
    passes = rows.split(micro)
    for ids in passes:
        ids = ids.to(DEVICE, non_blocking=True)
        with torch.no_grad():
            hidden = hidden_states(ids)
        loss = 0
        for k, head in enumerate(heads, 1):
            logits = head(hidden)[:, : -(1 + k)].reshape(-1, SIZES["vocab_size"]).float()
            loss = loss + 0.8**k * torch.nn.functional.cross_entropy(logits, ids[:, 1 + k :].reshape(-1))
        (loss / len(passes)).backward()
    torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


PARTS = {
    "versions": versions,
    "mask": mask,
    "transformers": transformers_steps,
    "transformers-batch": transformers_batch,
    "backbone": make_backbone,
    "wider-heads": make_wider_heads,
    "peer": train_peer,
    "peer-transformers": train_peer_transformers,
}
