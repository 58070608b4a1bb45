"""Mixtures of types: llama.cpp's choices by role and layer, importance, what files hold."""

import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize

from compress.errors import DataError, RecipeError
from compress.quant.ggml_kinds import KINDS
from compress.quant.ggml_mixtures import (
    FALLBACKS,
    MIXTURES,
    PURE,
    TensorPlace,
    fitting,
    mixture_of,
)
from compress_exporters.gguf.readback import read_back
from helpers.exporters.exports import SYM
from helpers.exporters.gguf_files import coded, planned, tiny, written

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}


def types(plan: Any) -> dict[str, str]:
    return dict(zip((x.name for x in plan.pieces), plan.kinds, strict=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory.mktemp("mixtures") / "model", dtype="bf16", **WIDE)


def test_the_layers_that_get_more_bits() -> None:
    """As llama-quantize chooses of 8, 6 and 32 layers."""

    def outer(layers: int) -> list[int]:
        return [i for i in range(layers) if TensorPlace("attn_v", i, layers, 0, 1).outer]

    assert outer(8) == [0, 3, 6, 7]
    assert outer(6) == [2, 5]
    assert outer(32) == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


# Types of attn_v, ffn_down, attn_output and everything else in 8 layers, as llama-quantize chooses
# them without importance (tests/peers/test_llama_quantize.py asks it).
OF_LAYERS = {
    "Q2_K": ("33333333", "33333333", "33333333", "22222222"),
    "Q3_K_S": ("33333333", "33333333", "33333333", "33333333"),
    "Q3_K_M": ("55444444", "44444444", "44444444", "33333333"),
    "Q3_K_L": ("55555555", "55555555", "55555555", "33333333"),
    "Q4_K_S": ("55554444", "54444444", "44444444", "44444444"),
    "Q4_K_M": ("64464466", "64464466", "44444444", "44444444"),
    "Q5_K_S": ("55555555", "55555555", "55555555", "55555555"),
    "Q5_K_M": ("65565566", "65565566", "55555555", "55555555"),
    "Q6_K": ("66666666", "66666666", "66666666", "66666666"),
}


@pytest.mark.parametrize("name", OF_LAYERS)
def test_types_by_role_and_layer(name: str, wide: Any) -> None:
    plan = planned(wide, dtype=None, type=name)
    found = types(plan)
    for part, want in zip(
        ("attn_v", "ffn_down", "attn_output", "ffn_up"), OF_LAYERS[name], strict=True
    ):
        assert [found[f"blk.{i}.{part}.weight"] for i in range(8)] == [f"Q{x}_K" for x in want]
    assert found["output.weight"] == "Q6_K"
    assert found["token_embd.weight"] == MIXTURES[name].base
    assert dict(plan.fields)["general.file_type"] == MIXTURES[name].file_type


def test_mixtures_of_iq4_without_importance_spend_more_on_the_first_layers(wide: Any) -> None:
    down = MIXTURES["IQ4_XS"].down
    assert down(TensorPlace("ffn_down", 0, 8, 0, 1)) == "Q5_K"
    assert down(TensorPlace("ffn_down", 0, 8, 0, 1, weighed=True)) is None
    assert types(planned(wide, type="IQ4_XS"))["blk.0.ffn_down.weight"] == "Q5_K"


def test_eight_experts_share_few_values() -> None:
    at = TensorPlace("attn_v", 3, 32, 8, 4)
    assert MIXTURES["Q4_K_M"].kind(at) == "Q8_0"
    assert MIXTURES["Q4_K_M"].kind(TensorPlace("attn_output", 3, 32, 8, 4)) == "Q5_K"
    assert MIXTURES["Q5_K_M"].kind(TensorPlace("attn_output", 3, 32, 8, 4)) == "Q5_K"
    assert MIXTURES["Q4_K_M"].kind(TensorPlace("ffn_down_exps", 0, 32, 8, 4)) == "Q6_K"


def test_large_models_have_few_values() -> None:
    assert MIXTURES["Q4_K_S"].kind(TensorPlace("attn_v", 40, 80, 0, 8, large=True)) == "Q5_K"


def test_types_that_no_row_fills() -> None:
    for kind, fallback in FALLBACKS.items():
        assert (fitting(kind, 512), fitting(kind, 96), fitting(kind, 40)) == (kind, fallback, "F16")
    assert fitting("Q8_0", 96) == "Q8_0"


def test_a_narrow_model_is_told_its_types(tmp_path: Path) -> None:
    plan, path = written(tiny(tmp_path / "model"), tmp_path, type="Q4_K_M")
    assert Counter(x for x in plan.kinds if x != "F32") == {"Q5_0": 13, "Q8_0": 3}
    told = [x for x in plan.notes if "in place of Q4_K, as rows of 64 numbers" in x]
    assert len(told) == 1
    read_back(plan, path)


def test_names_are_llamacpps(wide: Any) -> None:
    assert mixture_of("q4_k") == mixture_of("Q4_K_M")
    with pytest.raises(RecipeError) as problem:
        planned(wide, type="Q4_K_X")
    alone = ", ".join(f"{x}:pure" for x in PURE)
    assert str(problem.value) == (
        f"--type is 'Q4_K_X'; known are {', '.join(MIXTURES)}; {alone} give every matrix one type"
    )
    for name in ("Q3_K_S:pure", "F16:pure", "Q4_K:alone"):
        with pytest.raises(RecipeError, match=f"--type is '{name}'; known are"):
            mixture_of(name)


def test_a_type_alone_is_that_of_every_matrix(wide: Any) -> None:
    plan = planned(wide, type="q4_k:pure")
    kinds = {x.name: k for x, k in zip(plan.pieces, plan.kinds, strict=True) if x.matrix}
    assert set(kinds.values()) == {"Q4_K"}
    assert {"token_embd.weight", "output.weight"} <= kinds.keys()
    assert dict(plan.fields)["general.file_type"] == KINDS["Q4_K"].file_type
    assert plan.notes[0] == f"Q4_K:pure: {len(kinds)} in Q4_K"


def test_codes_are_not_rounded_again(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as problem:
        planned(coded(tmp_path, SYM), type="Q8_0")
    assert str(problem.value) == (
        "14 tensors are codes already, blk.0.attn_q.weight for one, and Q8_0 rounds dense weights;"
        " export the dense checkpoint, or leave --type out"
    )


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K_M", "IQ4_XS"])
def test_files_hold_what_they_are_for(name: str, wide: Any, tmp_path: Path) -> None:
    plan, path = written(wide, tmp_path, dtype=None, type=name)
    read_back(plan, path)
    stored = {x.name: x for x in GGUFReader(path).tensors}
    for piece, kind in zip(plan.pieces, plan.kinds, strict=True):
        assert stored[piece.name].tensor_type == GGMLQuantizationType(KINDS[kind].number)
    assert path.stat().st_size < 0.5 * wide.checkpoint.file_bytes


def weighed(path: Path, tensors: dict[str, torch.Tensor], *, dat: bool = False) -> Path:
    """An importance matrix as llama-imatrix writes it, from means of squares."""
    if dat:
        entries = [
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, x.numel())
            + (4 * x).numpy().astype("<f4").tobytes()
            for name, x in tensors.items()
        ]  # fmt: skip
        path.write_bytes(struct.pack("<i", len(entries)) + b"".join(entries))
        return path
    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, x in tensors.items():
        writer.add_tensor(f"{name}.in_sum2", (x.view(1, -1) * 512).numpy())
        writer.add_tensor(f"{name}.counts", np.full((1, 1), 512, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dat", [False, True])
def test_errors_are_weighed_by_importance(dat: bool, wide: Any, tmp_path: Path) -> None:
    """Columns that count lose less than without."""
    name = "blk.1.ffn_up.weight"
    counts = torch.where(torch.arange(256) % 4 == 0, 100.0, 0.01)
    matrix = weighed(tmp_path / "m", {name: counts}, dat=dat)
    plan, path = written(wide, tmp_path / "a", type="Q3_K_S", imatrix=str(matrix))
    assert "errors of 1 of 58 rounded tensors weigh what their columns multiply" in plan.notes
    plain, other = written(wide, tmp_path / "b", type="Q3_K_S")
    assert any(x.startswith("errors of all columns weigh alike") for x in plain.notes)
    want = wide.read("model.layers.1.mlp.up_proj.weight").float().numpy()

    def lost(file: Path) -> float:
        (x,) = (x for x in GGUFReader(file).tensors if x.name == name)
        error = np.square(dequantize(x.data, x.tensor_type) - want)
        return float(error[:, ::4].sum())

    assert lost(path) < 0.9 * lost(other)


def test_importance_of_another_model(wide: Any, tmp_path: Path) -> None:
    ones = torch.ones(8)
    for tensors, said in (
        ({"blk.77.ffn_up.weight": ones}, "knows no tensor of this model; it is of another"),
        (
            {"blk.0.ffn_up.weight": ones},
            "has 8 numbers for blk.0.ffn_up.weight, whose rows have 256; it is of another model",
        ),
    ):
        path = weighed(tmp_path / "m.dat", tensors, dat=True)
        with pytest.raises(DataError) as problem:
            planned(wide, type="Q4_0", imatrix=str(path))
        assert str(problem.value) == f"--imatrix {path} {said}"


@pytest.mark.parametrize("content", [b"", b"GGUF\3\0\0\0", b"\1\0\0\0\3\0\0\0abc", b"words " * 9])
def test_what_is_no_importance(content: bytes, wide: Any, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(content)
    with pytest.raises(DataError) as problem:
        planned(wide, type="Q4_0", imatrix=str(path))
    assert str(problem.value) == (
        f"--imatrix {path} is no importance matrix; give a file that llama-imatrix wrote"
    )
    with pytest.raises(DataError, match="cannot be read: No such file or directory"):
        planned(wide, type="Q4_0", imatrix=str(tmp_path / "gone"))
    with pytest.raises(RecipeError, match="give --type too"):
        planned(wide, imatrix=str(path))
