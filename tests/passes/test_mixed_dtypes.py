"""A source whose tensors are stored in several dtypes: every layer's scales have its own."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from compress.verbs import run
from helpers.short_runs import GPTQ, recipe, text_source

Q = "model.layers.0.self_attn.q_proj.weight"


def test_layers_of_one_input_in_two_dtypes(tiny, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny("llama"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors[Q] = tensors[Q].float() * 1.0001
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    asked = recipe(GPTQ, calibration=text_source(tmp_path))
    report = run(asked, source, tmp_path / "out")
    result = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {
        name.split(".")[-2]: tensor.dtype
        for name, tensor in result.items()
        if name.startswith("model.layers.0.self_attn") and name.endswith("weight_scale")
    }
    assert dtypes.pop("q_proj") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert all(layer.method in ("gptq", "rtn", "none") for layer in report.layers)
