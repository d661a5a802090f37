#!/usr/bin/env python3
"""Writes tests/fixtures/families/*.safetensors: small random models of today's families with what transformers computes on them.

    python3 scripts/make_family_fixtures.py [NAME …]          # needs torch 2.11, transformers 5, safetensors
    python3 scripts/make_family_fixtures.py --check           # computes again and compares with the files, writes nothing
    python3 scripts/make_family_fixtures.py --read            # builds every file's model from its config; transformers 4 reads config_v4

The format is that of scripts/make_fixtures.py, and:
- `reference.greedy_ids` [50]: greedy tokens after the first `prompt_length` (metadata) of `reference.input_ids`; EOS does not end them.
  There are none where the frequencies change while the text grows.
- `context` (metadata): tokens of the longest text; a rotary embedding that depends on the length of the text is made for it.
- `reference.last_hidden_state` and `reference.logits` hold the last rows alone where the text is long (mistral_default_window).
- `config` is what transformers 5 saves, `config_v4` has the keys of the published repositories; both make the same model.
"""

import copy
import hashlib
import json
import pathlib
import sys

import safetensors
import safetensors.torch
import torch
import transformers
from make_fixtures import compare

SCRIPT = pathlib.Path(__file__).resolve()
FOLDER = SCRIPT.parents[1] / "tests" / "fixtures" / "families"
SEED = 20251122
SEEDS = 200
LIMIT_BYTES = 60_000
NEW_TOKENS = 50
# Between the two largest logits of every greedy step, so that other orders of summation choose the same token.
GAP = 5e-3
# Most that logits change where every weight changes by a millionth of itself: rounding is amplified as much.
STEEPEST = 2.5e-4
# Of greedy tokens, and of the last 20: a random model soon repeats itself.
DIFFERENT = 10
DIFFERENT_AT_LAST = 3
SHAPE = dict(
    vocab_size=41, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, intermediate_size=20,
    max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)
# Heads of 16, so that there are 8 frequencies.
WIDE = dict(head_dim=16, num_attention_heads=2)
CAPS = dict(attn_logit_softcapping=1.5, final_logit_softcapping=6.0)


def rope(rope_type="default", rope_theta=10000.0, **more):
    return dict(rope_type=rope_type, rope_theta=rope_theta, **more)


class Case:
    """One model: its settings beside SHAPE, settings that must change its logits, and keys of its published spelling."""

    def __init__(self, family, settings, without=(), *, prompt_length=8, greedy=True, published=None, length=24, rows=None, edit=None):
        self.family, self.settings, self.without = family, SHAPE | settings, without
        self.prompt_length, self.greedy, self.published = prompt_length, greedy, published or {}
        self.length, self.rows, self.edit = length, rows, edit


def attend_to_the_first_tokens(model, input_ids):
    """One token draws attention and occurs at the first ten places alone, where a window of 4096 loses it."""
    rare = model.config.vocab_size - 1
    input_ids[input_ids == rare] = 0
    input_ids[:10] = rare
    attention = model.model.layers[0].self_attn
    for projection in [attention.q_proj, attention.k_proj]:
        projection.weight.copy_((projection.weight * 3.0).to(torch.bfloat16))


GEMMA = dict(num_hidden_layers=3, tie_word_embeddings=True, pad_token_id=0, sliding_window=6)
CAPS = dict(attn_logit_softcapping=1.5, final_logit_softcapping=6.0)
GEMMA3_ROPE = dict(sliding_attention=rope(rope_theta=100.0), full_attention=rope("linear", 1000000.0, factor=4.0))
LONG = dict(short_factor=[1.0, 1.1, 1.4], long_factor=[1.3, 3.0, 7.5], partial_rotary_factor=0.75)
PARTIAL = rope(partial_rotary_factor=0.75)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=2.0, beta_slow=0.5)
MSCALES = dict(mscale=3.0, mscale_all_dim=0.5)

CASES = {
    "qwen2": Case(
        "qwen2", dict(tie_word_embeddings=True, rope_parameters=rope(rope_theta=1000000.0)),
        published=dict(use_sliding_window=False, sliding_window=128, max_window_layers=2),
    ),
    "qwen2_sliding_window": Case(
        "qwen2",
        dict(num_hidden_layers=3, intermediate_size=16, use_sliding_window=True, sliding_window=8, max_window_layers=1, rope_parameters=rope()),
        [dict(use_sliding_window=False), dict(max_window_layers=2), dict(max_window_layers=0)],
    ),
    "qwen2_yarn": Case(
        "qwen2",
        dict(
            num_attention_heads=2, max_position_embeddings=64,
            rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16),
        ),
        [dict(rope_parameters=rope()), dict(rope_parameters=rope("linear", factor=4.0))],
        published=dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=16)),
    ),
    "qwen3": Case(
        "qwen3", dict(head_dim=12, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope(rope_theta=1000000.0)),
        published=dict(use_sliding_window=False, sliding_window=None, max_window_layers=2, rope_scaling=None),
    ),
    "qwen3_tied_yarn": Case(
        "qwen3",
        WIDE | dict(tie_word_embeddings=True, rope_parameters=rope("yarn", 1000000.0, factor=4.0, original_max_position_embeddings=32)),
        [dict(rope_parameters=rope(rope_theta=1000000.0))],
    ),
    "gemma2": Case(
        "gemma2", GEMMA | CAPS | dict(head_dim=12, query_pre_attn_scalar=20, rope_parameters=rope()),
        [
            dict(attn_logit_softcapping=None), dict(final_logit_softcapping=None), dict(sliding_window=64), dict(query_pre_attn_scalar=12),
            dict(layer_types=["sliding_attention"] * 3), dict(hidden_activation="silu"),
        ],
        published=dict(hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid"),
    ),
    "gemma3": Case(
        "gemma3_text",
        GEMMA | dict(
            head_dim=16, num_attention_heads=2, query_pre_attn_scalar=10, rope_parameters=GEMMA3_ROPE,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        [
            dict(sliding_window=64), dict(query_pre_attn_scalar=16), dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
            dict(rope_parameters=GEMMA3_ROPE | dict(sliding_attention=rope(rope_theta=1000000.0))),
            dict(rope_parameters=GEMMA3_ROPE | dict(full_attention=rope(rope_theta=1000000.0))),
        ],
        published=dict(_sliding_window_pattern=6),
    ),
    "gemma3_pattern": Case(
        "gemma3_text",
        GEMMA | dict(
            hidden_size=16, intermediate_size=16, head_dim=12, num_attention_heads=2, query_pre_attn_scalar=40, num_hidden_layers=6,
            rope_parameters=dict(sliding_attention=rope(), full_attention=rope(rope_theta=1000000.0)),
        ),
        [dict(layer_types=["sliding_attention"] * 6), dict(layer_types=["full_attention"] * 6)],
        published=dict(sliding_window_pattern=6, cache_implementation="hybrid"),
    ),
    "phi3": Case(
        "phi3", dict(sliding_window=6, rope_parameters=PARTIAL), [dict(sliding_window=None), dict(rope_parameters=rope())],
        published=dict(rope_scaling=None, partial_rotary_factor=0.75),
    ),
    "phi3_longrope_short_text": Case(
        "phi3", dict(max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=rope("longrope", **LONG)),
        [dict(rope_parameters=PARTIAL), dict(max_position_embeddings=64)],
    ),
    "phi3_longrope_long_text": Case(
        "phi3", dict(original_max_position_embeddings=16, rope_parameters=rope("longrope", **LONG)),
        [dict(rope_parameters=PARTIAL), dict(rope_parameters=rope("longrope", **(LONG | dict(long_factor=LONG["short_factor"]))))],
        prompt_length=17,
    ),
    "granite": Case(
        "granite",
        dict(
            embedding_multiplier=2.0, attention_multiplier=0.5, residual_multiplier=0.7, logits_scaling=0.5,
            tie_word_embeddings=True, rope_parameters=rope(),
        ),
        [dict(embedding_multiplier=1.0), dict(attention_multiplier=8**-0.5), dict(residual_multiplier=1.0), dict(logits_scaling=1.0)],
    ),
    "olmo2": Case("olmo2", dict(rope_parameters=rope(rope_theta=500000.0))),
    "smollm3": Case(
        "smollm3",
        dict(num_hidden_layers=4, intermediate_size=16, no_rope_layers=[1, 0, 1, 1], tie_word_embeddings=True, rope_parameters=rope(rope_theta=5000000.0)),
        [dict(no_rope_layers=[1, 1, 1, 1]), dict(no_rope_layers=[1, 1, 1, 0])],
        published=dict(use_sliding_window=False, layer_types=["full_attention"] * 4),
    ),
    "mistral_nemo": Case("mistral", dict(head_dim=12, sliding_window=None, rope_parameters=rope(rope_theta=1000000.0))),
    "mistral_default_window": Case(
        "mistral",
        dict(
            vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=8192,
            rope_parameters=rope(rope_theta=1e9),
        ),
        [dict(sliding_window=None)], greedy=False, length=4102, rows=8, edit=attend_to_the_first_tokens,
    ),
    "llama_yarn_attention_factor": Case(
        "llama", WIDE | dict(rope_parameters=YARN | dict(attention_factor=1.5)),
        [dict(rope_parameters=YARN), dict(rope_parameters=YARN | dict(attention_factor=1.5, beta_fast=32.0, beta_slow=1.0))],
    ),
    "llama_yarn_mscale": Case(
        "llama", WIDE | dict(num_hidden_layers=1, rope_parameters=YARN | MSCALES | dict(truncate=False)),
        [dict(rope_parameters=YARN | dict(truncate=False)), dict(rope_parameters=YARN | MSCALES)],
    ),
    "llama_dynamic_short_text": Case("llama", WIDE | dict(num_hidden_layers=1, rope_parameters=rope("dynamic", factor=2.0))),
    "llama_dynamic_long_text": Case(
        "llama", WIDE | dict(num_hidden_layers=1, max_position_embeddings=12, rope_parameters=rope("dynamic", factor=2.0)),
        [dict(rope_parameters=rope())], greedy=False,
    ),
}
MODELS = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi3": "Phi3",
    "granite": "Granite", "olmo2": "Olmo2", "smollm3": "SmolLM3",
}


def build(config_keys):
    """A model in float32 whose attention is computed as written, as soft caps need it."""
    keys = dict(config_keys)
    family = keys.pop("model_type")
    config = transformers.AutoConfig.for_model(family, **keys)
    config._attn_implementation = "eager"
    config.architectures = [f"{MODELS[family]}ForCausalLM"]
    return getattr(transformers, config.architectures[0])(config).to(torch.float32).eval()


def build_case(case, without=None):
    return build({"model_type": case.family} | json.loads(json.dumps(case.settings | (without or {}))))


@torch.no_grad()
def fill(model, generator):
    """Random norms and biases, and weights large enough that greedy text wanders; rounded to bfloat16."""
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.2 * noise
        elif name.endswith("bias"):
            values = 0.3 * noise
        elif "embed_tokens" in name:
            values = 0.25 * noise
        else:
            values = 1.5 * noise / parameter.shape[1] ** 0.5
        parameter.copy_(values.to(torch.bfloat16))


@torch.no_grad()
def run(model, input_ids):
    hidden = model.model(input_ids=input_ids[None], use_cache=False).last_hidden_state
    return hidden[0], model(input_ids=input_ids[None], use_cache=False).logits[0]


@torch.no_grad()
def greedy(model, prompt):
    """New tokens, and the smallest distance between the two largest logits of a step."""
    ids, gaps = prompt, []
    while len(ids) < len(prompt) + NEW_TOKENS:
        best = run(model, ids)[1][-1].topk(2)
        gaps.append((best.values[0] - best.values[1]).item())
        ids = torch.cat([ids, best.indices[:1]])
    return ids[len(prompt):], min(gaps)


def saved_config(model, dtype):
    config = json.loads(model.config.to_json_string())
    unused = ["transformers_version", "attention_dropout", "initializer_range", "use_cache", "resid_pdrop", "embd_pdrop"]
    return {key: value for key, value in config.items() if key not in unused} | {"dtype": str(dtype).removeprefix("torch.")}


def published_config(config, case):
    """The same model with the keys of the published repositories."""
    config = dict(config)
    rotary = config.pop("rope_parameters")
    if case.family == "gemma3_text":
        config["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
        rotary = rotary["full_attention"]
    rotary = dict(rotary)
    config["rope_theta"] = rotary.pop("rope_theta")
    if "partial_rotary_factor" in rotary:
        config["partial_rotary_factor"] = rotary.pop("partial_rotary_factor")
    if case.family == "phi3":
        rotary.pop("original_max_position_embeddings", None)
        rotary = {"type": rotary.pop("rope_type")} | rotary
    plain = "default" in [rotary.get("rope_type"), rotary.get("type")]
    config["rope_scaling"] = None if plain else rotary
    config["torch_dtype"] = config.pop("dtype")
    derived = {"qwen2", "qwen3", "gemma2", "mistral"}
    if case.family in derived or "sliding_window_pattern" in case.published:
        config.pop("layer_types", None)
    if "sliding_window" not in case.settings and case.family == "mistral":
        del config["sliding_window"]
    if "head_dim" not in case.settings:
        config.pop("head_dim", None)
    return config | case.published


@torch.no_grad()
def steepness(model, input_ids, logits, generator):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))
    return (run(other, input_ids)[1] - logits).abs().max().item()


def attempt(name, case, seed):
    """Tensors and the model, or the reason why this seed makes no good fixture."""
    generator = torch.Generator().manual_seed(seed)
    model = build_case(case)
    fill(model, generator)
    input_ids = torch.randint(0, case.settings["vocab_size"], (case.length,), generator=generator)
    if case.edit:
        with torch.no_grad():
            case.edit(model, input_ids)
    hidden, logits = run(model, input_ids)
    for without in case.without:
        other = build_case(case, without)
        other.load_state_dict(model.state_dict())
        change = (run(other, input_ids)[1] - logits).abs().max().item()
        if change <= 0.05:
            return None, f"{without} changes the logits by {change} only"
    steep = steepness(model, input_ids, logits, generator)
    if steep > STEEPEST:
        return None, f"a millionth of the weights changes the logits by {steep}"
    rows = case.rows or case.length
    tensors = {"reference.input_ids": input_ids, "reference.last_hidden_state": hidden[-rows:], "reference.logits": logits[-rows:]}
    if case.greedy:
        new_ids, gap = greedy(model, input_ids[:case.prompt_length])
        if gap < GAP or len(new_ids.unique()) < DIFFERENT or len(new_ids[-20:].unique()) < DIFFERENT_AT_LAST:
            return None, f"greedy tokens {new_ids.tolist()}, gap {gap}"
        tensors["reference.greedy_ids"] = new_ids
    return (model, tensors), None


def make(name, case):
    for seed in range(SEED, SEED + SEEDS):
        made, reason = attempt(name, case, seed)
        if made:
            break
    else:
        sys.exit(f"{name}: no seed of {SEEDS} will do; the last: {reason}")
    model, tensors = made
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
    if case.settings["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    config = saved_config(model, torch.bfloat16)
    metadata = {
        "format": "pt", "script_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "seed": str(seed),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "prompt_length": str(case.prompt_length), "context": str(max(case.length, case.prompt_length + NEW_TOKENS if case.greedy else 0)),
        "config": json.dumps(config), "config_v4": json.dumps(published_config(config, case)),
    }
    return {key: value.contiguous() for key, value in (weights | tensors).items()}, metadata


def read(path):
    """How far the models that the stored configs describe are from the stored results."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    weights = {key: value.float() for key, value in tensors.items() if not key.startswith("reference.")}
    spellings = ["config", "config_v4"] if transformers.__version__.startswith("5") else ["config_v4"]
    for spelling in spellings:
        model = build(json.loads(metadata[spelling]))
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and missing in ([], ["lm_head.weight"]), f"{path.name}: {missing} {unexpected}"
        if missing:
            model.tie_weights()
        hidden, logits = run(model, tensors["reference.input_ids"])
        rows = len(tensors["reference.logits"])
        worst = max((hidden[-rows:] - tensors["reference.last_hidden_state"]).abs().max(), (logits[-rows:] - tensors["reference.logits"]).abs().max())
        print(f"{path.name}: transformers {transformers.__version__} reads {spelling} and differs by {worst:.1e}")
        if worst > 1e-5:
            print(f"    {metadata[spelling]}")


def main():
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or list(CASES)
    for name in names:
        path = FOLDER / f"{name}.safetensors"
        if options == ["--read"]:
            read(path)
            continue
        tensors, metadata = make(name, CASES[name])
        if options == ["--check"]:
            print(f"{path.name}: equal within {compare(path, tensors):.1e}")
            continue
        safetensors.torch.save_file(tensors, path, metadata)
        size = path.stat().st_size
        assert size < LIMIT_BYTES, f"{path.name} has {size} bytes"
        print(f"{path.name}: {size} bytes, seed {metadata['seed']}, largest logit {tensors['reference.logits'].abs().max():.2f}")


if __name__ == "__main__":
    main()
