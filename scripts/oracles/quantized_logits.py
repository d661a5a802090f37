#!/usr/bin/env python3
"""Prints, as JSON, the logits that transformers computes on weights that bitsandbytes quantised and dequantised.

    python3 scripts/oracles/quantized_logits.py FOLDER nf4|int8 ID…    # needs torch, transformers and bitsandbytes; runs on the CPU

As bitsandbytes' loaders do, it is the linear layers of the decoder that are quantised: nf4 with double quantisation, int8 with a scale a
row. tests/served.rs runs this script and compares.
"""

import json
import sys

import bitsandbytes.functional as F
import torch
import transformers


def nf4(weight):
    quantized, state = F.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    return F.dequantize_4bit(quantized, state)


def int8(weight):
    codes, absmax, _ = F.int8_vectorwise_quant(weight.half())
    return F.int8_vectorwise_dequant(codes, absmax).to(weight.dtype)


def main():
    folder, quantization, ids = sys.argv[1], sys.argv[2], [int(token) for token in sys.argv[3:]]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_({"nf4": nf4, "int8": int8}[quantization](module.weight.clone()))
        json.dump(model(torch.tensor([ids])).logits[0].tolist(), sys.stdout)


if __name__ == "__main__":
    main()
