#!/usr/bin/env python3
"""Writes what transformers does with the keys of config.json, into tests/fixtures/configs/.

    python3 scripts/make_config_fixtures.py            # needs torch 2.11, transformers 5.24, safetensors
    python3 scripts/make_config_fixtures.py --check    # compares with the files, writes nothing
    python3 scripts/make_config_fixtures.py --keys     # prints the keys of each family's class with their defaults, writes nothing

- `keys.json`: by family the fields of its configuration class with their defaults, and the other names that the class, its modelling code or the
  code for masks, caches and rotary embeddings looks up in a config. src/model/config/key_table.rs has to know each of them.
- `other_keys.json`: the keys of `GenerationConfig`, and those that the tokenizers' code looks up in tokenizer_config.json.
- `two_sources.json`: small folders in which two places state one fact, with the logits that transformers computes, or its error.

Weights are made from their names by `weight`, which tests/two_sources.rs repeats, so only configs and logits are stored.
"""

import dataclasses
import importlib
import inspect
import json
import math
import pathlib
import re
import sys
import tempfile

import safetensors.torch
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel, cache_utils, masking_utils, modeling_rope_utils

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "configs"
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "smollm3"]
LOOKED_UP = re.compile(r"""(?:\bconfig\.(?!json)|(?:get|has)attr\([\w.]*config, "|kwargs\.(?:get|pop)\("|getattr\(self, ")([a-z]\w*)""")
OF_CONFIG = re.compile(r"""(?:\bconfig\.(?!json)|(?:get|has)attr\([\w.]*config, ")([a-z]\w*)""")
# Where every family looks for keys. Other functions of these modules take arguments of the same form that are no keys.
SHARED = [PreTrainedConfig.__post_init__, PreTrainedConfig.convert_rope_params_to_dict, cache_utils, masking_utils, modeling_rope_utils]
SHARED_MODEL = [PreTrainedModel.from_pretrained, PreTrainedModel.get_expanded_tied_weights_keys]


# The keys.


def keys_of(family):
    config_class = transformers.CONFIG_MAPPING[family]
    folder = config_class.__module__.rpartition(".")[0]
    code = [config_class, importlib.import_module(f"{folder}.modeling_{folder.rpartition('.')[2]}")]
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    looked_up = {name for part in code + SHARED for name in LOOKED_UP.findall(inspect.getsource(part))}
    looked_up |= {name for part in SHARED_MODEL for name in OF_CONFIG.findall(inspect.getsource(part))}
    is_method = lambda name: callable(getattr(config_class, name, None))
    return {
        "fields": {name: None if default is dataclasses.MISSING else default for name, default in sorted(fields.items())},
        "looked_up": sorted(name for name in looked_up - set(fields) if not is_method(name)),
    }


# The folders.

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
ROWS = 6  # of logits, the last ones
PLAIN = dict(
    hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=19,
    max_position_embeddings=64, rms_norm_eps=1e-6, head_dim=16, pad_token_id=0, eos_token_id=2,
)
HEAD, EMBEDDING, SINGLE, SHARD = "lm_head.weight", "model.embed_tokens.weight", "model.safetensors", "model-00001-of-00001.safetensors"
ALTERNATING, FULL = ["sliding_attention", "full_attention"], ["full_attention"] * 2
SLIDING = ["sliding_attention"] * 2


def rope(rope_type="default", **more):
    return dict(rope_type=rope_type, **more)


LINEAR = rope("linear", factor=2.0)
YARN = rope("yarn", factor=4.0)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0], long_factor=[1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0])
GEMMA = dict(sliding_window=4)


class Case:
    """A folder, and the two keys that a refusal has to name."""

    def __init__(self, family, keys, /, *, more=(), without=(), copies=None, files=None, generation=None, tensors_of=None, **config):
        self.config, self.keys = dict(model_type=family) | PLAIN | config, keys.split(" ")
        # Tensors beside those of a model with the config (or with the keys `tensors_of` in it), those left out, and copies of others.
        self.more, self.without, self.copies, self.tensors_of = dict(more), list(without), copies or {}, tensors_of
        # File names and seeds of their weights; a shard gets an index.
        self.files, self.generation = files or {SINGLE: 0}, generation


CASES = {
    # Rotary embeddings.
    "rope_scaling equals rope_parameters": Case("llama", "rope_scaling rope_parameters", rope_scaling=LINEAR, rope_parameters=LINEAR | dict(rope_theta=10000.0)),
    "rope_scaling of another type": Case("llama", "rope_scaling rope_parameters", rope_scaling=LINEAR, rope_parameters=rope(rope_theta=10000.0)),
    "rope_scaling with another factor": Case("qwen3", "rope_scaling rope_parameters", rope_scaling=LINEAR, rope_parameters=rope("linear", factor=4.0)),
    "rope_scaling loses the theta of rope_parameters": Case("mistral", "rope_scaling rope_parameters", rope_scaling=LINEAR, rope_parameters=LINEAR | dict(rope_theta=100.0)),
    "rope_scaling default beside rope_parameters": Case("olmo2", "rope_scaling rope_parameters", rope_scaling=rope(), rope_parameters=LINEAR),
    "empty rope_scaling": Case("llama", "rope_scaling rope_parameters", rope_scaling={}, rope_parameters=rope(rope_theta=100.0)),
    "null rope_scaling": Case("llama", "rope_scaling rope_parameters", rope_scaling=None, rope_parameters=rope(rope_theta=100.0)),
    "rope_theta beside that of rope_parameters": Case("llama", "rope_theta rope_parameters", rope_theta=100.0, rope_parameters=rope(rope_theta=1000.0)),
    "rope_theta beside that of rope_scaling": Case("qwen2", "rope_theta rope_scaling", rope_theta=100.0, rope_scaling=LINEAR | dict(rope_theta=1000.0)),
    "rope_theta beside rope_parameters without one": Case("granite", "rope_theta rope_parameters", rope_theta=100.0, rope_parameters=LINEAR),
    "rope_type beside type": Case("llama", "rope_type type", rope_scaling=LINEAR | dict(type="dynamic")),
    "original context of yarn": Case("llama", "original_max_position_embeddings rope_scaling", original_max_position_embeddings=8, rope_scaling=YARN | dict(original_max_position_embeddings=16)),
    "original context of llama3": Case("llama", "original_max_position_embeddings rope_scaling", original_max_position_embeddings=8, rope_scaling=LLAMA3 | dict(original_max_position_embeddings=32)),
    "original context of longrope": Case("llama", "original_max_position_embeddings rope_parameters", original_max_position_embeddings=4, rope_parameters=LONG | dict(original_max_position_embeddings=32)),
    "original context beside rope_scaling": Case("llama", "original_max_position_embeddings rope_scaling", original_max_position_embeddings=16, rope_scaling=YARN),
    "yarn from the whole context": Case("llama", "max_position_embeddings rope_scaling", rope_scaling=YARN),
    "llama3 from the whole context": Case("llama", "max_position_embeddings rope_scaling", rope_scaling=LLAMA3),
    "dynamic ignores the original context": Case("llama", "original_max_position_embeddings rope_scaling", max_position_embeddings=8, original_max_position_embeddings=4, rope_scaling=rope("dynamic", factor=2.0)),
    "rope_parameters by layer in Llama": Case("llama", "rope_parameters model_type", rope_parameters=dict(full_attention=rope(rope_theta=100.0))),
    "rope_parameters by layer in Qwen2": Case("qwen2", "rope_parameters model_type", rope_parameters=dict(full_attention=LINEAR)),
    "partial_rotary_factor in Llama": Case("llama", "partial_rotary_factor model_type", partial_rotary_factor=0.5),
    "partial_rotary_factor in a scaled Llama": Case("llama", "partial_rotary_factor model_type", partial_rotary_factor=0.5, rope_scaling=LINEAR),
    "partial_rotary_factor 1 in Llama": Case("llama", "partial_rotary_factor model_type", partial_rotary_factor=1.0, rope_scaling=LINEAR),
    "partial_rotary_factor in Qwen3's rope_parameters": Case("qwen3", "partial_rotary_factor model_type", rope_parameters=rope(partial_rotary_factor=0.5)),
    "partial_rotary_factor beside that of rope_parameters": Case("phi3", "partial_rotary_factor rope_parameters", partial_rotary_factor=0.5, rope_parameters=rope(partial_rotary_factor=0.75)),
    "partial_rotary_factor of Phi-3": Case("phi3", "partial_rotary_factor rope_parameters", partial_rotary_factor=0.5, rope_parameters=rope()),
    "original context of Phi-3": Case("phi3", "original_max_position_embeddings rope_scaling", original_max_position_embeddings=4, rope_scaling=LONG | dict(original_max_position_embeddings=32)),
    "original context of Phi-3 by default": Case("phi3", "original_max_position_embeddings rope_scaling", rope_scaling=LONG | dict(original_max_position_embeddings=4)),
    "linear scaling of Phi-3": Case("phi3", "rope_scaling model_type", rope_scaling=LINEAR),
    "yarn is longrope in Phi-3": Case("phi3", "rope_scaling model_type", rope_scaling=LONG | dict(rope_type="yarn", factor=2.0)),
    "rope_scaling beside rope_parameters in Phi-3": Case("phi3", "rope_scaling rope_parameters", original_max_position_embeddings=4, rope_scaling=LONG, rope_parameters=rope()),
    "rope_scaling changes rope_parameters of Gemma 3": Case("gemma3_text", "rope_scaling rope_parameters", **GEMMA, sliding_window_pattern=2, rope_scaling=LINEAR, rope_parameters=dict(full_attention=rope(rope_theta=1000.0))),
    "rope_scaling equals rope_parameters of Gemma 3": Case("gemma3_text", "rope_scaling rope_parameters", **GEMMA, sliding_window_pattern=2, rope_scaling=LINEAR, rope_parameters=dict(full_attention=LINEAR | dict(rope_theta=1000.0))),
    "thetas beside rope_parameters of Gemma 3": Case("gemma3_text", "rope_theta rope_parameters", **GEMMA, sliding_window_pattern=2, rope_theta=100.0, rope_local_base_freq=50.0, rope_parameters=dict(full_attention=rope(rope_theta=1000.0), sliding_attention=rope(rope_theta=200.0))),
    "thetas beside rope_scaling of Gemma 3": Case("gemma3_text", "rope_theta rope_scaling", **GEMMA, sliding_window_pattern=2, rope_theta=100.0, rope_local_base_freq=50.0, rope_scaling=LINEAR),
    "rope_parameters of one kind of layer in Gemma 3": Case("gemma3_text", "rope_parameters rope_local_base_freq", **GEMMA, sliding_window_pattern=2, rope_local_base_freq=50.0, rope_parameters=dict(full_attention=rope(rope_theta=1000.0))),
    "rope_parameters of no kind of layer in Gemma 3": Case("gemma3_text", "rope_parameters full_attention", **GEMMA, sliding_window_pattern=2, rope_parameters=LINEAR | dict(rope_theta=100.0)),
    # The LM head.
    "tied, with another lm_head": Case("llama", f"tie_word_embeddings {HEAD}", tie_word_embeddings=True, more={HEAD: [19, 32]}),
    "tied, with an equal lm_head": Case("llama", f"tie_word_embeddings {HEAD}", tie_word_embeddings=True, copies={HEAD: EMBEDDING}),
    "tied, with an lm_head alone": Case("llama", f"tie_word_embeddings {EMBEDDING}", tie_word_embeddings=True, more={HEAD: [19, 32]}, without=[EMBEDDING]),
    "untied, without lm_head": Case("llama", f"tie_word_embeddings {HEAD}", tie_word_embeddings=False, without=[HEAD]),
    "untied, with an equal lm_head": Case("llama", f"tie_word_embeddings {HEAD}", tie_word_embeddings=False, without=[HEAD], copies={HEAD: EMBEDDING}),
    "tied by default, with another lm_head": Case("gemma2", f"tie_word_embeddings {HEAD}", **GEMMA, more={HEAD: [19, 32]}),
    # Windows.
    "layer_types make a Mistral a Ministral": Case("mistral", "layer_types sliding_window", sliding_window=4, layer_types=ALTERNATING),
    "layer_types without a window in Mistral": Case("mistral", "layer_types sliding_window", sliding_window=4, layer_types=FULL),
    "layer_types beside no window in Mistral": Case("mistral", "layer_types sliding_window", sliding_window=None, layer_types=ALTERNATING),
    "null layer_types in Mistral": Case("mistral", "layer_types sliding_window", sliding_window=4, layer_types=None),
    "use_sliding_window false in Mistral": Case("mistral", "use_sliding_window model_type", sliding_window=4, use_sliding_window=False),
    "sliding_window in Llama": Case("llama", "sliding_window model_type", sliding_window=4),
    "layer_types in Llama": Case("llama", "layer_types model_type", layer_types=ALTERNATING),
    "full layer_types in Llama": Case("llama", "layer_types model_type", layer_types=FULL),
    "layer_types beside use_sliding_window false": Case("qwen2", "layer_types use_sliding_window", sliding_window=4, layer_types=ALTERNATING),
    "layer_types beside max_window_layers": Case("qwen2", "layer_types max_window_layers", sliding_window=4, use_sliding_window=True, max_window_layers=2, layer_types=SLIDING),
    "full layer_types beside use_sliding_window": Case("qwen3", "layer_types use_sliding_window", sliding_window=4, use_sliding_window=True, max_window_layers=0, layer_types=FULL),
    "use_sliding_window beside no window": Case("qwen2", "use_sliding_window sliding_window", sliding_window=None, use_sliding_window=True, max_window_layers=0),
    "layer_types beside use_sliding_window false in SmolLM3": Case("smollm3", "layer_types use_sliding_window", sliding_window=4, layer_types=ALTERNATING),
    "layer_types beside no_rope_layers": Case("smollm3", "layer_types no_rope_layers", sliding_window=4, use_sliding_window=True, no_rope_layers=[0, 1], layer_types=FULL),
    "no_rope_layers beside its interval": Case("smollm3", "no_rope_layers no_rope_layer_interval", no_rope_layers=[0, 1], no_rope_layer_interval=2),
    "sliding_window_pattern in Gemma 2": Case("gemma2", "sliding_window_pattern model_type", **GEMMA, sliding_window_pattern=1),
    "layer_types beside sliding_window_pattern": Case("gemma3_text", "layer_types sliding_window_pattern", **GEMMA, sliding_window_pattern=2, layer_types=["full_attention", "sliding_attention"]),
    "_sliding_window_pattern in Gemma 3": Case("gemma3_text", "layer_types _sliding_window_pattern", **GEMMA, _sliding_window_pattern=2),
    "no window in Gemma 3": Case("gemma3_text", "sliding_window model_type", sliding_window=None, layer_types=FULL),
    "layer_types in Phi-3": Case("phi3", "layer_types model_type", sliding_window=4, layer_types=FULL),
    # What sees what, and what is computed.
    "bidirectional Gemma 2": Case("gemma2", "use_bidirectional_attention model_type", **GEMMA, use_bidirectional_attention=True),
    "bidirectional Gemma 3": Case("gemma3_text", "use_bidirectional_attention model_type", **GEMMA, use_bidirectional_attention=True),
    "is_causal false": Case("llama", "is_causal model_type", is_causal=False),
    "hidden_act beside hidden_activation": Case("gemma2", "hidden_act hidden_activation", **GEMMA, hidden_act="silu", hidden_activation="gelu_pytorch_tanh"),
    "hidden_activation beside hidden_act": Case("llama", "hidden_act hidden_activation", hidden_act="silu", hidden_activation="gelu_pytorch_tanh"),
    "attention_bias in Mistral": Case("mistral", "attention_bias model_type", attention_bias=True),
    "attention_bias false in Qwen2": Case("qwen2", "attention_bias model_type", attention_bias=False),
    "attention_bias false beside biases": Case("llama", "attention_bias model.layers.0.self_attn.k_proj.bias", attention_bias=False, tensors_of=dict(attention_bias=True)),
    "attn_logit_softcapping in Qwen2": Case("qwen2", "attn_logit_softcapping model_type", attn_logit_softcapping=1.0),
    "another head_dim than hidden_size says": Case("qwen2", "head_dim hidden_size", head_dim=8),
    "per_layer_config": Case("llama", "per_layer_config model_type", per_layer_config={"0": {"intermediate_size": 24}}),
    "fewer layers than tensors": Case("llama", "num_hidden_layers weights", num_hidden_layers=1, tensors_of=dict(num_hidden_layers=2)),
    # Files.
    "a single file beside an index": Case("llama", "model.safetensors model.safetensors.index.json", files={SINGLE: 0, SHARD: 1}),
    "an index alone": Case("llama", "model.safetensors model.safetensors.index.json", files={SHARD: 1}),
    "transformers_weights": Case("llama", "transformers_weights model_type", transformers_weights=SHARD, files={SINGLE: 0, SHARD: 1}),
    "generation_config beside config": Case("llama", "eos_token_id generation_config.json", eos_token_id=2, generation=dict(eos_token_id=[4, 5], bos_token_id=7, pad_token_id=8)),
    "dtype beside torch_dtype": Case("llama", "dtype torch_dtype", dtype="float32", torch_dtype="bfloat16"),
    "quantization_config": Case("llama", "quantization_config gptq", quantization_config=dict(quant_method="gptq", bits=4)),
}


def weight(name, shape, seed):
    """Numbers that are exact in bfloat16, from a hash of the name."""
    start = 2166136261 ^ seed
    for byte in name.encode():
        start = (start ^ byte) * 16777619 % 2**32
    x = (start + torch.arange(math.prod(shape)) * 2654435761) % 2**32
    x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
    values = ((x >> 24).float() - 127.5) / 256
    return (values if len(shape) == 2 else 1 + values / 2).reshape(shape)


def shapes_of(case):
    """Names and shapes of the tensors of a model with the case's config, or of its family where transformers makes no model of it."""
    try:
        model = model_of(case.config | (case.tensors_of or {}))
    except Exception:
        model = model_of(dict(model_type=case.config["model_type"]) | PLAIN | GEMMA)
    tensors = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors[HEAD]
    return {name: shape for name, shape in (tensors | case.more).items() if name not in case.without}


def model_of(keys):
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(keys | {"dtype": "float32"}))
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def write(folder, case, shapes):
    (folder / "config.json").write_text(json.dumps(case.config))
    if case.generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(case.generation))
    for file, seed in case.files.items():
        tensors = {name: weight(name, shape, seed) for name, shape in shapes.items()}
        tensors |= {copy: tensors[of].clone() for copy, of in case.copies.items()}
        safetensors.torch.save_file(tensors, folder / file, {"format": "pt"})
        if file == SHARD:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@torch.no_grad()
def outcome(case, shapes):
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), case, shapes)
        torch.manual_seed(0)  # of tensors that transformers makes up
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            logits = model(input_ids=torch.tensor([IDS])).logits[0, -ROWS:]
        except Exception as error:
            return {"error": type(error).__name__}
    eos = model.generation_config.eos_token_id
    return {"eos": eos if isinstance(eos, list) else [eos], "logits": [[float(f"{x:.8g}") for x in row] for row in logits.tolist()]}


def two_sources():
    models, cases = [], {}
    for name, case in CASES.items():
        shapes = shapes_of(case)
        if shapes not in models:
            models.append(shapes)
        cases[name] = {
            "config": case.config, "generation_config": case.generation, "keys": case.keys, "tensors": models.index(shapes),
            "copies": case.copies, "files": case.files,
        } | outcome(case, shapes)
    return {"transformers": transformers.__version__, "ids": IDS, "tensors": models, "cases": cases}


def other_keys():
    from transformers import tokenization_utils_base as base, tokenization_utils_tokenizers as backend

    of = base.PreTrainedTokenizerBase
    code = [of.__init__, of._from_pretrained, of.save_pretrained, backend.TokenizersBackend.__init__]
    looked_up = re.compile(r"""(?:kwargs|config)(?:\.(?:pop|get)\(\s*|\[)"(\w+)\"""")
    tokenizer = {key for function in code for key in looked_up.findall(inspect.getsource(function))}
    return {"transformers": transformers.__version__, "generation": sorted(GenerationConfig().to_dict()), "tokenizer": sorted(tokenizer)}


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    keys = {"transformers": transformers.__version__, "families": {family: keys_of(family) for family in FAMILIES}}
    if sys.argv[1:] == ["--keys"]:
        for family, found in keys["families"].items():
            print(family, *(f"    {name} = {json.dumps(default)}" for name, default in found["fields"].items()), sep="\n")
            print("    looked up:", ", ".join(found["looked_up"]))
        return
    for file, made in [("keys.json", keys), ("other_keys.json", other_keys()), ("two_sources.json", two_sources())]:
        text = lines(made) + "\n"
        if sys.argv[1:] == ["--check"]:
            compare(file, json.loads((FOLDER / file).read_text()), json.loads(text))
            print(f"{file}: equal")
            continue
        (FOLDER / file).write_text(text)
        print(f"{file}: {len(text)} bytes")


def compare(place, stored, made):
    """Numbers may differ by the rounding of another machine."""
    if isinstance(stored, dict) and isinstance(made, dict):
        assert stored.keys() == made.keys(), f"{place}: {stored.keys() ^ made.keys()}"
        for key, value in stored.items():
            compare(f"{place}: {key}", value, made[key])
    elif isinstance(stored, list) and isinstance(made, list) and len(stored) == len(made):
        for at, (one, other) in enumerate(zip(stored, made)):
            compare(f"{place}[{at}]", one, other)
    else:
        close = isinstance(stored, float) and abs(stored - made) < 2e-6
        assert stored == made or close, f"{place}: {stored} there, {made} now"


def lines(made):
    """JSON with a line for each entry of its two upper levels, so that a new key is a line of a diff."""
    entry = lambda value: json.dumps(value, separators=(",", ":"))
    level = lambda of: "{\n" + ",\n".join(f"  {json.dumps(key)}: {entry(value)}" for key, value in of.items()) + "\n }"
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {level(value) if isinstance(value, dict) else entry(value)}" for key, value in made.items()) + "\n}"


if __name__ == "__main__":
    main()
