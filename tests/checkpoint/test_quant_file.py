"""Old GPTQ and AWQ checkpoints, whose config.json does not say that they are quantized."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.checkpoint import Checkpoint
from compress.checkpoint.quant_file import with_quant_file
from compress.errors import CheckpointError
from compress.formats import open_coded
from compress.formats.oddities import oddities
from compress.quant.scheme import QuantScheme
from helpers import compressed_models, tiny_models

PACKED = ("model.layers.0.self_attn.q_proj.qweight",)
GPTQ: dict[str, Any] = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


def old(folder: Path, fmt: str, name: str, content: dict[str, Any]) -> Path:
    """A checkpoint as the tool's first versions left it."""
    source = tiny_models.make("llama", folder / "source", tied=False, dtype="fp16")
    scheme = QuantScheme(group_size=32, symmetric=fmt == "gptq")
    out = compressed_models.write(source, folder / fmt, scheme, fmt=fmt).folder
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    (out / name).write_text(json.dumps(content))
    return out


@pytest.mark.parametrize(
    ("fmt", "name", "content"),
    [("gptq", "quantize_config.json", GPTQ), ("awq", "quant_config.json", AWQ)],
)
def test_they_are_read_by_their_own_file(
    tmp_path: Path, fmt: str, name: str, content: dict[str, Any]
) -> None:
    weights = open_coded(Checkpoint.open(old(tmp_path, fmt, name, content)))
    assert weights is not None
    assert weights.format.name == fmt
    original = Checkpoint.open(tmp_path / "source")
    for linear in weights.spec.linears():
        x, y = original.read(linear.tensor).float(), weights.read(linear.tensor).float()
        assert (x - y).norm() < 0.2 * x.norm()
    assert any("taken from a file beside it" in line for line in oddities(weights))


def test_a_method_that_the_file_names_counts(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"quant_method": "awq", **AWQ}))
    config = with_quant_file(tmp_path, {}, PACKED)
    assert config["quantization_config"]["quant_method"] == "awq"


def test_the_file_says_nothing_of_dense_weights_nor_against_config_json(tmp_path: Path) -> None:
    path = tmp_path / "quantize_config.json"
    path.write_text(json.dumps(GPTQ))
    assert with_quant_file(tmp_path, {"a": 1}, ("model.embed_tokens.weight",)) == {"a": 1}
    said = {"quantization_config": {"quant_method": "awq"}}
    assert with_quant_file(tmp_path, said, PACKED) == said
    path.write_text("[]")
    assert with_quant_file(tmp_path, said, PACKED) == said
    with pytest.raises(CheckpointError, match=r"config\.json holds a list, not an object"):
        with_quant_file(tmp_path, {}, PACKED)
