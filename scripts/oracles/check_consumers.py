#!/usr/bin/env python3
"""Checks exported folders with their consumers' own code, as far as that runs without a GPU.

    python3 scripts/oracles/check_consumers.py vllm FOLDER WHEEL          # vLLM 0.11's wheel (pip download --no-deps vllm==0.11.0)
    python3 scripts/oracles/check_consumers.py modelopt FOLDER            # pip install --no-deps nvidia-modelopt
    python3 scripts/oracles/check_consumers.py peft FOLDER BACKBONE MERGED  # pip install peft; MERGED in float32
    python3 scripts/oracles/check_consumers.py fasterdecoding FOLDER WHEEL  # of `medusa export --format heads --pickle`; pip download --no-deps medusa-llm==0.1
    python3 scripts/oracles/check_consumers.py tgi FOLDER BACKBONE MEDUSA_PY  # text-generation-inference's server/text_generation_server/layers/medusa.py
    python3 scripts/oracles/check_consumers.py transformers FOLDER        # a merged or modelopt folder as a plain model

Needs torch, transformers and safetensors. vLLM's package does not import without CUDA, so two of its files are taken from the wheel
and run unchanged: transformers_utils/configs/medusa.py and model_executor/models/medusa.py (the model, and load_weights with its naming
rules). ParallelLMHead, LogitsProcessor, default_weight_loader and VllmConfig are replaced by stand-ins with the same names and shapes of
weights. FasterDecoding's medusa_model.py is run the same way (MedusaModel.from_pretrained unchanged; transformers' Llama replaces its copy
of an old one), and so is TGI's layers/medusa.py (MedusaHeadV1.load and MedusaHeadV2 unchanged, in one process; stand-ins replace
FastLinear, the tensor-parallel layers and the index of weights, and read the same names from the same files).
"""

import importlib.util
import pathlib
import sys
import tempfile
import types
import zipfile

import torch
from safetensors.torch import load_file

DTYPE = torch.float32


def tensors_of(folder):
    found = {}
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found.update(load_file(file))
    return found


def by_hand(x, blocks, w2):
    for weight, bias in blocks:
        x = x + torch.nn.functional.silu(x @ weight.T + bias)
    return x @ w2.T


def report(what, largest):
    if not largest < 1e-5:
        sys.exit(f"wrong: {what}: logits differ by {largest}")
    print(f"ok {what}: logits differ by {largest:.1e} from the file's by hand")


def provide(names):
    """Creates modules with these names and members."""
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        sys.modules[name] = module


def stand_ins():
    """Stand-ins for the parts of vLLM that medusa.py imports."""

    class ParallelLMHead(torch.nn.Module):
        def __init__(self, num_embeddings, embedding_dim, **_):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((num_embeddings, embedding_dim), float("nan")))

    def logits_processor(*_):
        return lambda lm_head, hidden: hidden @ lm_head.weight.T

    def default_weight_loader(parameter, loaded):
        assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
        parameter.data.copy_(loaded)

    provide({
        "vllm": {},
        "vllm.config": {"VllmConfig": object},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": logits_processor},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "DEFAULT_VOCAB_PADDING_SIZE": 64,
            "ParallelLMHead": ParallelLMHead,
        },
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": default_weight_loader},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.utils": {"maybe_prefix": lambda prefix, name: f"{prefix}.{name}" if prefix else name},
    })


def module_of(file, name):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def from_wheel(wheel, path, name):
    with tempfile.TemporaryDirectory() as folder:
        return module_of(zipfile.ZipFile(wheel).extract(path, folder), name)


def plain_names(tensors, head, layers):
    t = {name: tensor.to(DTYPE) for name, tensor in tensors.items()}
    return [(t[f"{head}.{l}.linear.weight"], t[f"{head}.{l}.linear.bias"]) for l in range(layers)], t.get(f"{head}.{layers}.weight")


def vllm(folder, wheel):
    stand_ins()
    configs = from_wheel(wheel, "vllm/transformers_utils/configs/medusa.py", "vllm.transformers_utils.configs.medusa")
    models = from_wheel(wheel, "vllm/model_executor/models/medusa.py", "vllm.model_executor.models.medusa")
    config = configs.MedusaConfig.from_pretrained(folder)
    draft = types.SimpleNamespace(draft_model_config=types.SimpleNamespace(hf_config=config))
    model = models.Medusa(vllm_config=types.SimpleNamespace(speculative_config=draft)).to(DTYPE)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    tensors = tensors_of(folder)
    loaded = model.load_weights(tensors.items())
    missing = set(dict(model.named_parameters())) - loaded
    left_out = set(tensors) - loaded
    assert not missing and not left_out, (missing, left_out)
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = model.compute_logits(model(x))
    assert len(got) == config.num_heads
    t = {name: tensor.to(DTYPE) for name, tensor in tensors.items()}
    largest = 0.0
    for head, logits in enumerate(got):
        part = [(t[f"blocks.{head}.layers.{l}.weight"], t[f"blocks.{head}.layers.{l}.bias"]) for l in range(config.num_hidden_layers)]
        w2 = t["lm_head.weight"] if config.original_lm_head else t[f"lm_heads.{head}.weight"]
        largest = max(largest, (logits - by_hand(x, part, w2)).abs().max().item())
    report(f"vllm: MedusaConfig and Medusa.load_weights, {config.num_heads} heads, all {len(loaded)} tensors", largest)


def fasterdecoding(folder, wheel):
    from transformers import LlamaForCausalLM

    provide({
        "medusa": {},
        "medusa.model": {},
        "medusa.model.modeling_llama_kv": {"LlamaForCausalLM": LlamaForCausalLM},
        "medusa.model.utils": {},
        "medusa.model.kv_cache": {"initialize_past_key_values": None},
    })
    theirs = from_wheel(wheel, "medusa/model/medusa_model.py", "medusa.model.medusa_model")
    model = theirs.MedusaModel.from_pretrained(folder, dtype=DTYPE)
    tensors = torch.load(pathlib.Path(folder) / "medusa_lm_head.pt", weights_only=True)
    assert set(model.medusa_head.state_dict()) == set(tensors), "load_state_dict(strict=False) leaves others as they were"
    x = torch.randn(3, model.hidden_size, generator=torch.Generator().manual_seed(1))
    largest = 0.0
    for head in range(model.medusa):
        expected = by_hand(x, *plain_names(tensors, head, model.medusa_num_layers))
        with torch.no_grad():
            largest = max(largest, (model.medusa_head[head](x) - expected).abs().max().item())
    report(f"fasterdecoding: MedusaModel.from_pretrained, {model.medusa} heads", largest)


class Routed:
    """TGI's index of weights: maps a name to the file that has it."""

    def __init__(self, folder):
        self.process_group = torch.distributed.group.WORLD
        self.routing = {}
        for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
            self.routing.update(dict.fromkeys(load_file(file), str(file)))

    def tensor(self, name):
        return load_file(self.routing[name])[name].to(DTYPE)


def linear(weight, bias=None):
    return lambda x: torch.nn.functional.linear(x, weight, bias)


class Layers:
    """Products whose weights have the names that TGI's layers read."""

    @staticmethod
    def load(config, prefix, weights, bias=False):
        return linear(weights.tensor(f"{prefix}.weight"), weights.tensor(f"{prefix}.bias") if bias else None)

    @staticmethod
    def load_multi(config, prefixes, dim, weights, bias):
        both = [torch.cat([weights.tensor(f"{prefix}.{part}") for prefix in prefixes], dim) for part in ("weight", "bias")]
        return linear(*both)


def tgi(folder, backbone, medusa_py):
    import json

    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    assert "architectures" not in config, "models/__init__.py would drop the speculator"
    count, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    module = {"FastLinear": Layers, "TensorParallelHead": Layers, "TensorParallelColumnLinear": Layers}
    provide({
        "text_generation_server": {},
        "text_generation_server.utils": {},
        "text_generation_server.utils.speculate": {"get_speculate": lambda: count},
        "text_generation_server.layers": {},
        "text_generation_server.layers.linear": {"FastLinear": Layers},
        "text_generation_server.layers.tensor_parallel": module,
    })
    theirs = module_of(medusa_py, "text_generation_server.layers.medusa")
    with tempfile.TemporaryDirectory() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        asked = types.SimpleNamespace(speculator={"path": folder, "model_paths": ["medusa_lm_head.safetensors"]})
        prefix = "lm_head" if "lm_head.weight" in tensors_of(backbone) else "model.embed_tokens"
        try:  # the order in layers/speculative.py
            version, model = 1, theirs.MedusaHeadV1.load(asked, prefix, Routed(backbone))
        except Exception:
            version, model = 2, theirs.MedusaHeadV2(asked, prefix, Routed(backbone))
        tensors, lm_head = tensors_of(folder), Routed(backbone).tensor(f"{prefix}.weight")
        x = torch.randn(3, lm_head.shape[1], generator=torch.Generator().manual_seed(1))
        _, got = model(x)
        torch.distributed.destroy_process_group()
    largest = 0.0
    for head in range(count):
        blocks, w2 = plain_names(tensors, head, layers)
        largest = max(largest, (got[:, head] - by_hand(x, blocks, lm_head if w2 is None else w2)).abs().max().item())
    report(f"tgi: MedusaHeadV{version}, config.json says version {config['version']}, {count} heads", largest)


def modelopt(folder):
    import modelopt
    import modelopt.torch.speculative as mtsp
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    asked = config.medusa
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    mode = {"medusa_num_heads": asked["num_medusa_heads"], "medusa_num_layers": asked["num_medusa_layers"]}
    mtsp.convert(model, [("medusa", mode)])
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    tensors = {name: tensor.to(DTYPE) for name, tensor in tensors_of(folder).items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    print(model.load_state_dict(tensors, strict=True))
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
    largest = 0.0
    for head in range(asked["num_medusa_heads"]):
        name = f"medusa_heads.{head}"
        layers = range(asked["num_medusa_layers"])
        part = [(tensors[f"{name}.{l}.linear.weight"], tensors[f"{name}.{l}.linear.bias"]) for l in layers]
        expected = by_hand(x, part, tensors[f"{name}.{len(layers)}.weight"])
        with torch.no_grad():
            largest = max(largest, (model.medusa_heads[head](x) - expected).abs().max().item())
    report(f"modelopt {modelopt.__version__}: mtsp.convert, load_state_dict(strict=True)", largest)


def peft(folder, backbone, merged):
    import peft as library
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12)[None]
    load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE).eval()
    with torch.no_grad():
        before = load(backbone)(input_ids=ids).logits
        # Not merge_and_unload: if lm_head is tied to the embedding, PEFT's merge changes both.
        after = library.PeftModel.from_pretrained(load(backbone), folder).eval()(input_ids=ids).logits
        of_merged = load(merged)(input_ids=ids).logits
    changed, same = (after - before).abs().max().item(), (after - of_merged).abs().max().item()
    if not (changed > 0 and same < 1e-4):
        sys.exit(f"wrong: the adapter changes logits by {changed}, the merged folder's differ by {same}")
    print(f"ok peft {library.__version__}: the adapter changes logits by {changed:.1e}, the merged folder's differ by {same:.1e}")


def transformers(folder):
    import transformers as library

    model, info = library.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, output_loading_info=True)
    others = [name for name in info["unexpected_keys"] if not name.startswith("medusa_head")]
    assert not info["missing_keys"] and not others, info
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12)[None]).logits
    assert logits.isfinite().all()
    print(f"ok transformers {library.__version__}: {type(model).__name__}, {len(info['unexpected_keys'])} tensors of heads left alone")


if __name__ == "__main__":
    verbs = {"vllm": vllm, "fasterdecoding": fasterdecoding, "tgi": tgi}
    verbs |= {"modelopt": modelopt, "peft": peft, "transformers": transformers}
    if len(sys.argv) < 3 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])
