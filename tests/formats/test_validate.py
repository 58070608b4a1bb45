import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint.reader import Checkpoint
from compress.formats.validate import Expected, validate
from compress.quant.scheme import PRESETS, QuantScheme
from helpers import compressed_models, tiny_models

G4 = QuantScheme(group_size=32)
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Expected]:
    source = tiny_models.make("llama", tmp_path / "source", tied=True)
    result = compressed_models.write(source, tmp_path / "out", G4)
    schemes = {name: t.scheme for name, t in result.quantized.items()}
    original = Checkpoint.open(source)
    expected = Expected(original.tensors, result.spec, schemes, "compressed-tensors")
    return result.folder, expected


def problems(folder: Path, expected: Expected) -> list[str]:
    return validate(Checkpoint.open(folder), expected)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = f"{Q}.{name}"
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "phi3"])
@pytest.mark.parametrize("fmt", ["compressed-tensors", "dense"])
def test_a_right_checkpoint_has_no_problems(family: str, fmt: str, tmp_path: Path) -> None:
    source = tiny_models.make(family, tmp_path / "source")
    result = compressed_models.write(source, tmp_path / "out", G4, fmt=fmt)
    schemes = {name: t.scheme for name, t in result.quantized.items()}
    expected = Expected(Checkpoint.open(source).tensors, result.spec, schemes, fmt)
    assert problems(result.folder, expected) == []


def test_act_order_has_no_problems(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    result = compressed_models.write(source, tmp_path / "out", G4, act_order=True)
    schemes = {name: t.scheme for name, t in result.quantized.items()}
    tensors = Checkpoint.open(source).tensors
    names = frozenset(schemes)
    expected = Expected(tensors, result.spec, schemes, "compressed-tensors", names)
    assert problems(result.folder, expected) == []
    edit_tensors(result.folder, weight_g_idx=torch.full((64,), 2, dtype=torch.int32))
    assert problems(result.folder, expected) == [
        f"tensor {Q}.weight_g_idx names a group that has no scale"
    ]


def test_lost_and_foreign_tensors(written: tuple[Path, Expected]) -> None:
    folder, expected = written
    edit_tensors(folder, weight_scale=None, weight_zero_point=torch.zeros(8, 2).int())
    assert problems(folder, expected) == [
        f"tensor {Q}.weight_zero_point was written but belongs to nothing",
        f"tensor {Q}.weight_scale is missing",
    ]


def test_wrong_dtype_or_shape(written: tuple[Path, Expected]) -> None:
    folder, expected = written
    edit_tensors(folder, weight_scale=torch.ones(64, 2))
    assert problems(folder, expected) == [
        f"tensor {Q}.weight_scale is F32 [64, 2] instead of BF16 [64, 2]"
    ]


def test_wrong_values(written: tuple[Path, Expected]) -> None:
    folder, expected = written
    scale = torch.ones(64, 2).bfloat16()
    scale[3, 1], scale[4, 0], scale[5, 0] = float("inf"), 0, -1  # the last is a turned grid
    edit_tensors(folder, weight_scale=scale, weight_shape=torch.tensor([64, 63]))
    assert problems(folder, expected) == [
        f"tensor {Q}.weight_scale has scales that are 0 or not finite",
        f"tensor {Q}.weight reads back as [64, 63], not [64, 64]",
    ]


def test_config_that_says_something_else(written: tuple[Path, Expected]) -> None:
    folder, expected = written
    edit_config(folder, ignore=[Q])
    assert problems(folder, expected) == [
        f"{Q}: quantization_config says not quantized, stored is int4 sym g32",
        "lm_head: quantization_config does not ignore it, but it is tied to the embedding",
    ]
    edit_config(folder, quant_method="gptq")
    assert problems(folder, expected) == [
        "config.json names the quantization 'gptq', not 'compressed-tensors'"
    ]


def test_fused_linears_must_agree(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    result = compressed_models.write(
        source, tmp_path / "out", lambda x: None if x.role == "k" else G4
    )
    schemes = {name: t.scheme for name, t in result.quantized.items()}
    tensors = Checkpoint.open(source).tensors
    found = problems(result.folder, Expected(tensors, result.spec, schemes, "compressed-tensors"))
    assert len(found) == 2
    assert found[0].startswith("model.layers.0.self_attn.k_proj is not quantized while another")


def of_presets(tmp_path: Path, **names: str) -> tuple[Path, Expected]:
    """A llama whose roles have the given presets, FP8 where none is given."""
    source = tiny_models.make("llama", tmp_path / "source")
    result = compressed_models.write(
        source, tmp_path / "out", lambda x: PRESETS[names.get(x.role, "FP8")]
    )
    schemes = {name: t.scheme for name, t in result.quantized.items()}
    return result.folder, Expected(
        Checkpoint.open(source).tensors, result.spec, schemes, "compressed-tensors"
    )


def test_floats_and_static_inputs(tmp_path: Path) -> None:
    qkv = dict.fromkeys("qkv", "NVFP4A16")
    folder, expected = of_presets(tmp_path, **qkv, o="FP8_BLOCK", down="W8A8_STATIC")
    assert problems(folder, expected) == []
    edit_tensors(folder, weight_global_scale=torch.tensor([5.0]))
    name = "model.layers.0.self_attn.k_proj.weight_global_scale"
    assert problems(folder, expected)[0] == (
        f"tensor {name} is not that of the linears which runtimes fuse it with"
    )
    edit_tensors(folder, weight_global_scale=torch.tensor([0.0]))
    assert problems(folder, expected)[0] == (
        f"tensor {Q}.weight_global_scale has scales that are not finite and positive"
    )


def test_an_input_scale_of_nothing(tmp_path: Path) -> None:
    folder, expected = of_presets(tmp_path)
    edit_tensors(folder, input_scale=torch.tensor([torch.nan]).bfloat16())
    assert problems(folder, expected) == [
        f"tensor {Q}.input_scale has scales that are not finite and positive"
    ]
