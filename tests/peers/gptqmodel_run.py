"""Run by gptqmodel's own python: its torch kernels on a checkpoint, or a checkpoint of its own.

usage: gptqmodel_run.py load CHECKPOINT ROWS OUT
       gptqmodel_run.py transformers CHECKPOINT ROWS OUT
       gptqmodel_run.py quantize SOURCE ROWS OUT SETTINGS(json)
ROWS: safetensors with ids, int64 [rows, tokens]. OUT of the first two: safetensors with the logits
fp32 and the [N, K] weight that the kernel multiplies with, by module.
"""

import json
import os
import sys
from typing import Any

os.cpu_count = lambda: 4  # with fewer gptqmodel plans no threads at all and fails on import


def dequantized(module: Any) -> Any:
    """Weight [N, K] of a quantized linear, by its kernel's own arithmetic."""
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().t().contiguous()
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    parts = (module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
    return dequantize_gemm(*parts).t().contiguous()


def is_awq(checkpoint: str) -> bool:
    with open(os.path.join(checkpoint, "config.json")) as file:
        block = json.load(file)["quantization_config"]
    return block["quant_method"] == "awq" or block.get("format") == "gemm"


def save(model: Any, rows: str, out: str, *, single: bool) -> None:
    """single: in fp32 throughout, which AWQ's kernel is not able to."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = {n: dequantized(m) for n, m in model.named_modules() if hasattr(m, "qweight")}
    if single:
        torch.nn.Module.float(model)  # transformers' own refuses quantized models
    with torch.no_grad():
        logits = model(load_file(rows)["ids"]).logits.float()
    save_file({**weights, "logits": logits.contiguous()}, out)


def load(checkpoint: str, rows: str, out: str) -> None:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    awq = is_awq(checkpoint)
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    loaded = GPTQModel.load(checkpoint, backend=backend, device="cpu", dtype=torch.float16)
    save(loaded.model, rows, out, single=not awq)


def load_in_transformers(checkpoint: str, rows: str, out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig

    config: Any = GPTQConfig(bits=4, backend="gptq_torch")
    if is_awq(checkpoint):
        config = AwqConfig(backend="torch_awq")
    options = {"quantization_config": config, "dtype": torch.float16}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    save(model.eval(), rows, out, single=not is_awq(checkpoint))


def quantize(source: str, rows: str, out: str, settings: str) -> None:
    """AWQ's format takes plain rounding: its own method wants a GPU."""
    import torch
    from gptqmodel import GPTQModel
    from gptqmodel.quantization.config import QuantizeConfig, RTNConfig
    from safetensors.torch import load_file

    chosen = json.loads(settings)
    plain = chosen.get("format") == "gemm"
    config = (RTNConfig if plain else QuantizeConfig)(**chosen, offload_to_disk=False)
    model = GPTQModel.load(source, config, device="cpu", dtype=torch.float16)
    ids = load_file(rows)["ids"]
    calibration = [{"input_ids": r.tolist(), "attention_mask": [1] * len(r)} for r in ids]
    model.quantize(None if plain else calibration, batch_size=1)
    model.save(out)


if __name__ == "__main__":
    jobs = {"load": load, "transformers": load_in_transformers, "quantize": quantize}
    jobs[sys.argv[1]](*sys.argv[2:])
