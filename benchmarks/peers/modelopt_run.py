"""nvidia-modelopt as a whole process, run by that peer's own python; nothing of ours.

    python modelopt_run.py MODEL OUT --config INT4_AWQ_CFG [--group-size 64] [--cache]
        [--mlp W4A16_NVFP4_CFG]

OUT: folder for what export_hf_checkpoint writes. OUT.reference: safetensors file with what
ModelOpt itself computes of the same model, all in fp32: "logits" [2, 24, vocab] of the tokens 0 to
47; by a linear's name + ".fake" its weight as the fake-quantized forward multiplies with it, before
factors of inputs; by its name + ".real" what ModelOpt's own functions make of the exported tensors
(FP8 and INT8 with plain scales, FP4). FP4's fake quantization needs a GPU: it has no ".fake" and
no logits. Calibrated on random tokens.
--config: of modelopt.torch.quantization. --mlp: another one for the layers of the MLPs. --cache:
the key/value cache in FP8 as well.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import from_quantized_weight
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def recipe(options: argparse.Namespace) -> Any:
    """The config with other groups, another one for the MLPs and a cache where asked for."""
    found = copy.deepcopy(getattr(mtq, options.config))
    added = []
    if options.group_size:
        for entry in found["quant_cfg"]:
            if "weight_quantizer" in entry["quantizer_name"]:
                entry["cfg"]["block_sizes"][-1] = options.group_size
    if options.mlp:
        for entry in copy.deepcopy(getattr(mtq, options.mlp))["quant_cfg"]:
            if entry["quantizer_name"] in ("*weight_quantizer", "*input_quantizer"):
                added.append({**entry, "quantizer_name": f"*mlp.{entry['quantizer_name']}"})
        if not any("input" in entry["quantizer_name"] for entry in added):
            added.append({"quantizer_name": "*mlp.*input_quantizer", "enable": False})
    if options.cache:
        added += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    found["quant_cfg"] += added
    return found


def fake_quantized(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled or quantizer.num_bits == (2, 1):
            continue
        found[f"{name}.fake"] = quantizer(module.weight).float().contiguous()
    return found


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, codes in tensors.items():
        module = name.removesuffix(".weight")
        scale, second = tensors.get(f"{name}_scale"), tensors.get(f"{name}_scale_2")
        if scale is None:
            continue
        if second is not None:
            shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
            packed = NVFP4QTensor(shape, torch.float32, codes)
            sizes = {"scale": scale, "double_scale": second, "block_sizes": {-1: 16}}
            found[f"{module}.real"] = packed.dequantize(dtype=torch.float32, **sizes)
        elif codes.dtype == torch.int8 or (codes.dtype != torch.uint8 and scale.dim() == 0):
            kind = "int8_sq" if codes.dtype == torch.int8 else "fp8"
            found[f"{module}.real"] = from_quantized_weight(codes, scale, kind, torch.float32)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--mlp")
    parser.add_argument("--cache", action="store_true")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = torch.randint(0, model.config.vocab_size, (8, 32), generator=torch.manual_seed(0))

    def forward(model: torch.nn.Module) -> None:
        for row in rows:
            model(row[None])

    mtq.quantize(model, recipe(options), forward)
    with torch.inference_mode():
        # What exporting does first: linears with the same input get the same factors and scales.
        requantize_resmooth_fused_llm_layers(model)
        reference = fake_quantized(model)
        fp4 = "FP4" in options.config or "FP4" in (options.mlp or "")
        if not fp4:
            reference["logits"] = model(torch.arange(48).view(2, 24)).logits.float().contiguous()
        export_hf_checkpoint(model, export_dir=options.out)
    reference |= dequantized(options.out)
    save_file(reference, options.out.with_suffix(".reference"))


if __name__ == "__main__":
    main()
