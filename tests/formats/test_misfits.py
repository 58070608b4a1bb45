"""Configs that do not fit the tensors, missing parts and unknown ones: found by headers alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers import compressed_models, tiny_models

SYM, ASYM = QuantScheme(group_size=32), QuantScheme(group_size=32, symmetric=False)
DOWN = "model.layers.0.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"
FP8_DYNAMIC = QuantScheme(
    8, True, "tensor", 0, ActivationScheme(type="float", granularity="token"), "float"
)
SCHEMES = {
    "compressed-tensors": SYM,
    "gptq": ASYM,
    "gptq_v2": ASYM,
    "awq": ASYM,
    "fp8": PRESETS["FP8"],
    "modelopt": SYM,
    "bitsandbytes": PRESETS["LLM_INT8"],
}
Edit = Callable[[Any], Any]
Get = Callable[..., Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Get:
    made: dict[Any, Path] = {}
    source = tiny_models.make(
        "llama", tmp_path_factory.mktemp("source"), tied=True, num_hidden_layers=1, dtype="fp16"
    )

    def get(fmt: str, scheme: QuantScheme | None = None, **options: Any) -> Path:
        scheme = scheme or SCHEMES[fmt]
        key = fmt, scheme, *options
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            written = compressed_models.write(source, folder, scheme, fmt=fmt, **options)
            made[key] = written.folder
        return made[key]

    return get


def refusal(
    folder: Path, into: Path, config: Edit | None = None, tensors: Edit | None = None
) -> str:
    """What opening says of a checkpoint whose config or tensors were changed."""
    into.mkdir()
    found = json.loads((folder / "config.json").read_text())
    if config is not None:
        config(found["quantization_config"])
    (into / "config.json").write_text(json.dumps(found))
    parts = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(parts)
    save_file(parts, into / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        open_weights(Checkpoint.open(into))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read

    def small(self: Checkpoint, name: str, **options: Any) -> torch.Tensor:
        assert name.endswith(".weight_shape"), f"{name} was read"
        return read(self, name, **options)

    monkeypatch.setattr(Checkpoint, "read", small)


def group(**weights: Any) -> Edit:
    """Changes of the weights of compressed-tensors' only group."""
    return lambda block: block["config_groups"]["group_0"]["weights"].update(weights)


def block(**values: Any) -> Edit:
    return lambda block: block.update(values)


@pytest.mark.parametrize(
    ("fmt", "scheme", "config", "message"),
    [
        ("compressed-tensors", SYM, group(num_bits=8), "[64, 12] where int8 sym g32 needs int32"),
        ("compressed-tensors", SYM, group(group_size=16), "[64, 3] where int4 sym g16 needs"),
        ("compressed-tensors", SYM, group(strategy="channel"), "[64, 3] where int4 sym channel n"),
        (
            "compressed-tensors",
            SYM,
            group(symmetric=False),
            f"{DOWN}.weight_zero_point, which is mi",
        ),
        (
            "compressed-tensors",
            SYM,
            group(type="float", num_bits=8, strategy="channel"),
            f"fp8 channel needs tensor {DOWN}.weight, which is missing",
        ),
        (
            "compressed-tensors",
            SYM,
            group(actorder="group"),
            f"{DOWN}.weight_g_idx, which is missing",
        ),
        ("gptq", ASYM, block(bits=8), "qweight has 12 rows, which 8-bit codes of 96 columns do"),
        ("gptq", ASYM, block(group_size=16), "[3, 64] where int4 asym g16 needs"),
        ("gptq", ASYM, block(group_size=-1), "[3, 64] where int4 asym channel needs"),
        ("gptq_v2", SYM, block(bits=2), "qweight has 12 rows, which 2-bit codes of 96 columns do"),
        ("awq", ASYM, block(group_size=96), "[3, 64] where int4 asym g96 needs"),
        ("fp8", FP8_DYNAMIC, block(weight_block_size=[32, 32]), f"{DOWN}.weight_scale_inv, which"),
        (
            "fp8",
            PRESETS["FP8"],
            block(activation_scheme="dynamic"),
            f"tensor {DOWN}.input_scale lies beside the codes of {DOWN}, and fp8 tensor a-fp8",
        ),
        (
            "fp8",
            PRESETS["FP8_BLOCK"],
            block(weight_block_size=[32, 32]),
            "[1, 1] where fp8 block32 a-fp8 g32 needs float16 or bfloat16 or float32 or",
        ),
        ("modelopt", SYM, block(quant_algo="W8A16"), "uint8 [32, 96] where int8 sym"),
        ("modelopt", PRESETS["W8A16"], block(quant_algo="FP8"), "int8 [64, 96] where fp8 tensor"),
        (
            "modelopt",
            PRESETS["W8A16"],
            block(quant_algo="W8A8_SQ_PER_CHANNEL"),
            f"{DOWN}.input_scale, which is missing",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_tensors(
    fmt: str,
    scheme: QuantScheme,
    config: Edit,
    message: str,
    written: Get,
    tmp_path: Path,
    no_weights: None,
) -> None:
    line = refusal(written(fmt, scheme), tmp_path / "bad", config)
    assert message in line
    assert f"{DOWN}." in line
    assert line.endswith("(and 6 more modules do not fit)")


@pytest.mark.parametrize("fmt", SCHEMES)
def test_every_part_is_needed(fmt: str, written: Get, tmp_path: Path, no_weights: None) -> None:
    """Without one of a module's tensors the checkpoint is refused, whatever is lost."""
    folder = written(fmt)
    parts = [x for x in Checkpoint.open(folder).tensors if x.startswith(f"{DOWN}.")]
    optional = f"{DOWN}.weight_format", f"{DOWN}.g_idx"
    for i, name in enumerate(x for x in parts if x not in optional):
        line = refusal(folder, tmp_path / str(i), tensors=lambda t, name=name: t.pop(name))
        assert name in line
        assert "missing" in line


@pytest.mark.parametrize("fmt", SCHEMES)
@pytest.mark.parametrize("part", ["input_factor", "pre_quant_scale_2", "R4.weight", "weight_x"])
def test_what_lies_beside_codes_and_is_unknown(
    fmt: str, part: str, written: Get, tmp_path: Path, no_weights: None
) -> None:
    name, scheme = f"{DOWN}.{part}", SCHEMES[fmt].describe()
    line = refusal(written(fmt), tmp_path / "bad", tensors=block(**{name: torch.ones(96)}))
    assert line == (
        f"tensor {name} lies beside the codes of {DOWN}, and {scheme} has no such part; the weight"
        " without it may be another one, so take the original or a checkpoint whose tensors and"
        " quantization_config belong together"
    )


def test_biases_and_scales_of_a_cache_belong_there(written: Get, tmp_path: Path) -> None:
    tensors = load_file(written("compressed-tensors") / "model.safetensors")
    attention = "model.layers.0.self_attn"
    tensors |= {f"{attention}.{x}_proj.{x}_scale": torch.ones(1) for x in "kv"}
    tensors |= {f"{attention}.k_scale": torch.ones(1), f"{Q}.bias": torch.ones(64).half()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (written("compressed-tensors") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    open_weights(Checkpoint.open(tmp_path))


@pytest.mark.parametrize(("fmt", "scale"), [("bitsandbytes", "SCB"), ("fp8", "weight_scale_inv")])
def test_codes_without_scales(fmt: str, scale: str, written: Get, tmp_path: Path) -> None:
    """They are no weights, though their tensor is called as one."""
    folder = written(fmt)

    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in [x for x in tensors if x.startswith(f"{DOWN}.") and x != f"{DOWN}.weight"]:
            del tensors[name]

    line = refusal(folder, tmp_path / "bad", tensors=bare)
    code = {"bitsandbytes": "I8", "fp8": "F8_E4M3"}[fmt]
    assert line.startswith(
        f"tensor {DOWN}.weight holds {code} codes, and tensor {DOWN}.{scale} is missing;"
    )


def test_an_order_that_the_config_promises(written: Get, tmp_path: Path) -> None:
    folder = written("gptq", act_order=True)
    assert f"needs tensor {DOWN}.g_idx, which is missing" in refusal(
        folder, tmp_path / "bad", tensors=lambda t: t.pop(f"{DOWN}.g_idx")
    )


def test_zero_points_out_of_range(written: Get, tmp_path: Path) -> None:
    """Whole numbers that int8 would wrap."""
    scheme = QuantScheme(bits=8, granularity="tensor", group_size=0, symmetric=False)
    folder = written("compressed-tensors", scheme)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.weight_zero_point"] = torch.tensor([300])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"zero_point holds 300 to 300 where .* -128 to 127"):
        open_weights(Checkpoint.open(tmp_path)).read(f"{DOWN}.weight")


def test_codes_out_of_range(written: Get, tmp_path: Path) -> None:
    folder = written("compressed-tensors", PRESETS["W8A8"])
    config = json.loads((folder / "config.json").read_text())
    group(num_bits=4)(config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds -1\d\d to 1\d\d where int4 .* has -8 to 7;"):
        open_weights(Checkpoint.open(tmp_path)).read(f"{DOWN}.weight")
