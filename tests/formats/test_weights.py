import json
import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.arch.spec import LinearSpec
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import Weights, open_weights
from compress.formats.stored import Beside
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress_exporters.decoded import Decoded
from helpers import compressed_models, tiny_models

G4 = QuantScheme(group_size=32)
W8A8 = QuantScheme(bits=8, granularity="channel", group_size=0, activation=ActivationScheme())
WIDE = {"hidden_size": 128, "intermediate_size": 256}
FAMILIES = ("llama", "gpt2", "phi3", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "scheme",
    [
        G4,
        QuantScheme(bits=3, symmetric=False),
        W8A8,
        *(PRESETS[name] for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")),
        PRESETS["W8A8_STATIC"],
    ],
    ids=QuantScheme.describe,
)
def test_compressed_reads_as_the_original(family: str, scheme: QuantScheme, tmp_path: Path) -> None:
    source = tiny_models.make(family, tmp_path / "source", tied=family == "llama")
    written = compressed_models.write(source, tmp_path / "out", scheme)
    original, result = Checkpoint.open(source), Checkpoint.open(written.folder)
    weights, dense = open_weights(result), open_weights(original)
    assert weights.shapes == dense.shapes == original.shapes
    assert weights.spec == dense.spec == written.spec
    reference = written.reference()
    for name, info in original.tensors.items():
        tensor = weights.read(name)
        assert tuple(tensor.shape) == info.shape
        assert torch.equal(tensor, reference[name].bfloat16())
    for linear in written.spec.linears():
        want = scheme.activation if linear.role != "router" else None
        inputs = weights.activation(linear.name)
        assert (inputs.scheme if inputs else None) == want
        scale = written.quantized[linear.tensor].input_scale if want else None
        assert (inputs.scale if inputs else None) == scale


def test_dense_passes_through(tmp_path: Path) -> None:
    source = tiny_models.make("qwen3", tmp_path)
    weights = open_weights(Checkpoint.open(source))
    name = weights.spec.embedding
    assert torch.equal(weights.read(name), weights.checkpoint.read(name))
    assert torch.equal(weights.read_rows(name, 3, 9), weights.read(name)[3:9])
    assert (weights.format.name, weights.plain_dtype) == ("dense", torch.bfloat16)
    assert weights.checkpoints == (weights.checkpoint,)
    assert weights.kv_cache is None
    assert [weights.cache(block) for block in weights.spec.blocks] == [None, None]
    for linear in weights.spec.all_linears():
        assert not weights.is_quantized(linear.name)
        assert weights.beside(linear.name) == Beside()
        assert _asked(weights, linear) == [None] * 6


def _asked(weights: Weights, linear: LinearSpec) -> list[object]:
    return [
        weights.scheme(linear.name),
        weights.quantized(linear.tensor),
        weights.outlined(linear.tensor),
        weights.outliers(linear.tensor),
        weights.outlier_columns(linear.name),
        weights.activation(linear.name),
    ]


@pytest.mark.parametrize("scheme", [None, G4], ids=["dense", "coded"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_and_order_are_the_originals(
    family: str, scheme: QuantScheme | None, tmp_path: Path
) -> None:
    """Whatever a weight is stored as; GPT-2's are [K, N]."""
    folder = tiny_models.make(family, tmp_path / "source")
    if scheme is not None:
        folder = compressed_models.write(folder, tmp_path / "out", scheme).folder
    opened = open_weights(Checkpoint.open(folder))
    for weights in (opened, Decoded.of(opened)):
        for linear in weights.spec.all_linears():
            assert weights.transposed(linear.name) == linear.transposed
            whole = weights.read(linear.tensor)
            assert tuple(whole.shape) == weights.shapes[linear.tensor]
            assert torch.equal(weights.read_rows(linear.tensor, 5, 11), whole[5:11])


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    """By all three, whole and in rows: what codes mean as well as what is stored."""
    source = tiny_models.make("llama", tmp_path / "source")
    written = compressed_models.write(source, tmp_path / "out", G4)
    name, norm = "model.layers.0.mlp.up_proj", "model.norm.weight"
    damage(written.folder, f"{name}.weight_scale", math.inf)
    damage(written.folder, norm, math.nan)
    opened = open_weights(Checkpoint.open(written.folder))
    for weights in (opened, Decoded.of(opened)):
        for tensor in (f"{name}.weight", norm):
            for read in (weights.read, partial(weights.read_rows, start=0, stop=1)):
                with pytest.raises(CheckpointError, match=rf"tensor '{tensor}' .*has .*(inf|NaN)"):
                    read(tensor, check_finite=True)


def damage(folder: Path, tensor: str, value: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor].view(-1)[0] = value
    save_file(tensors, path)


def test_another_config_is_the_same_otherwise(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    opened = open_weights(Checkpoint.open(source))
    other = replace(opened.checkpoint, config={**opened.checkpoint.config, "note": 1})
    for weights in (opened, Decoded.of(opened)):
        changed = weights.with_checkpoint(other)
        assert changed.checkpoint.config["note"] == 1
        assert changed.spec == weights.spec
        name = weights.spec.embedding
        assert torch.equal(changed.read(name), weights.read(name))


def test_codes_and_groups_come_back(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    written = compressed_models.write(source, tmp_path / "out", G4, act_order=True)
    weights = open_weights(Checkpoint.open(written.folder))
    for name, tensor in written.quantized.items():
        back = weights.quantized(name)
        assert back is not None
        assert back.scheme == G4
        assert back.g_idx is not None
        assert tensor.g_idx is not None
        assert torch.equal(back.g_idx, tensor.g_idx)
        assert torch.equal(back.codes, tensor.codes)
    assert weights.quantized("model.norm.weight") is None


ASYM = QuantScheme(group_size=32, symmetric=False)
STORED = [
    ("compressed-tensors", ASYM, True),
    ("compressed-tensors", QuantScheme(bits=3, granularity="tensor", group_size=0), False),
    ("compressed-tensors", W8A8, False),
    ("compressed-tensors", PRESETS["NVFP4A16"], False),
    ("gptq", G4, True),
    ("gptq_v2", replace(ASYM, bits=3), True),
    ("awq", ASYM, False),
    ("fp8", PRESETS["FP8_BLOCK"], False),
    ("modelopt", G4, False),
    ("modelopt", PRESETS["NVFP4A16"], False),
    ("bitsandbytes", PRESETS["LLM_INT8"], False),
]


@pytest.mark.parametrize(
    ("fmt", "scheme", "act_order"), STORED, ids=lambda x: getattr(x, "describe", lambda: str(x))()
)
def test_an_outline_has_all_but_codes(
    fmt: str, scheme: QuantScheme, act_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp16", **WIDE)
    written = compressed_models.write(
        source, tmp_path / "out", scheme, fmt=fmt, act_order=act_order
    )
    weights = open_weights(Checkpoint.open(written.folder))
    read, seen = Checkpoint.read, set()
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: seen.add(name) or read(self, name))
    for name in written.quantized:
        outline = weights.outlined(name)
        codes = {
            f"{name.removesuffix('weight')}{x}" for x in ("weight", "weight_packed", "qweight")
        }
        assert not seen & codes
        whole = weights.quantized(name)
        assert seen & codes
        assert whole is not None
        assert outline is not None
        assert outline.codes.is_meta
        assert (outline.codes.shape, outline.codes.dtype) == (whole.codes.shape, whole.codes.dtype)
        assert outline.scheme == whole.scheme
        seen.clear()
        for field in fields(whole):
            a, b = getattr(whole, field.name), getattr(outline, field.name)
            if field.name != "codes" and isinstance(a, torch.Tensor):
                assert torch.equal(a, b), field.name
            elif field.name not in ("codes", "scheme"):
                assert a is b is None, field.name
        assert torch.equal(outline.column_groups(), whole.column_groups())
    assert weights.outlined("model.norm.weight") is None


def edited(folder: Path, change: dict[str, object]) -> Checkpoint:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    return Checkpoint.open(folder)


def test_a_square_weight_said_to_be_turned(tmp_path: Path) -> None:
    """Its shape fits either way."""
    source = tiny_models.make("llama", tmp_path / "source")
    folder = compressed_models.write(source, tmp_path / "out", G4).folder
    square = "model.layers.0.self_attn.q_proj"
    with pytest.raises(CheckpointError) as caught:
        open_weights(edited(folder, {"transposed": [square]}))
    assert str(caught.value) == (
        f"config.json: quantization_config.transposed has {square}, which is no Conv1D in a llama"
        " model; take it out of the list"
    )


def test_a_square_weight_not_said_to_be_turned(tmp_path: Path) -> None:
    """Without any list it is another tool's, which keeps all of them in their own order."""
    source = tiny_models.make("gpt2", tmp_path / "source")
    square = [f"transformer.h.{i}.attn.c_proj" for i in range(2)]
    written = compressed_models.write(
        source, tmp_path / "out", lambda x: G4 if x.name in square else None
    )
    with pytest.raises(CheckpointError) as caught:
        open_weights(edited(written.folder, {"transposed": square[:1]}))
    assert str(caught.value) == (
        f"config.json: quantization_config.transposed lacks {square[1]}, which is a Conv1D as those"
        " that it has; add it to the list"
    )
    name = f"{square[0]}.weight"
    turned = open_weights(edited(written.folder, {"transposed": square})).read(name)
    assert torch.equal(
        open_weights(edited(written.folder, {"transposed": []})).read(name), turned.t()
    )


def test_refusals(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    folder = compressed_models.write(source, tmp_path / "out", G4).folder
    with pytest.raises(CheckpointError, match=r"in the format 'hqq'; dense, compressed"):
        open_weights(edited(folder, {"quant_method": "hqq"}))
    ignored = {"quant_method": "compressed-tensors", "ignore": ["re:.*q_proj"]}
    weights = open_weights(edited(folder, ignored))
    with pytest.raises(CheckpointError, match=r"q_proj has quantized tensors but no config group"):
        weights.read("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(CheckpointError, match=r"format is 'marlin-24'; this version reads"):
        open_weights(edited(folder, {"format": "marlin-24"}))
