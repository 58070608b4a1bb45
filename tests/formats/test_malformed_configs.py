"""config.json comes with the checkpoint: whatever it says is read or refused in one line."""

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError, CompressError
from compress.formats import FP8_CACHE, open_weights
from compress.formats.compressed_tensors.config_read import parse
from compress.inspect.inspect import inspect_checkpoint
from compress.quant.scheme import PRESETS, QuantScheme
from helpers import compressed_models, tiny_models

DOWN = "model.layers.0.mlp.down_proj"
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
}
PLACE = "quantization_config.config_groups"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    source = tiny_models.make("llama", folder / "source")
    scheme = QuantScheme(group_size=32)
    return compressed_models.write(source, folder / "result", scheme, act_order=True).folder


@pytest.fixture(scope="module")
def written_floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Static FP8, NVFP4, blocks and a quantized cache in one model."""
    folder = tmp_path_factory.mktemp("floats")
    source = tiny_models.make("llama", folder / "source")

    def choose(linear: Any) -> QuantScheme:
        return PRESETS[{"down": "NVFP4A16", "o": "FP8_BLOCK"}.get(linear.role, "FP8")]

    return compressed_models.write(source, folder / "result", choose, kv_cache=FP8_CACHE).folder


def block(**changes: Any) -> dict[str, Any]:
    groups = {"group_0": copy.deepcopy(GROUP)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **changes}


def weights(**changes: Any) -> dict[str, Any]:
    return block(config_groups={"g": {**GROUP, "weights": {**GROUP["weights"], **changes}}})


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (block(config_groups=[]), f"{PLACE} is []; it must be a mapping"),
        (block(config_groups={"g": None}), f"{PLACE}.g is None; it must be a mapping"),
        (
            block(config_groups={"g": {"weights": GROUP["weights"]}}),
            f"{PLACE}.g.targets is None; it must list the modules of the group, for",
        ),
        (
            block(config_groups={"g": {"targets": "Linear"}}),
            f"{PLACE}.g.targets is 'Linear'; it must be a list of module names",
        ),
        (
            block(config_groups={"g": {"targets": ["Linear"]}}),
            f"{PLACE}.g.weights is None; it must be a mapping",
        ),
        (weights(num_bits="4"), f"{PLACE}.g.weights.num_bits is '4'; it must be a whole number"),
        (
            weights(num_bits=1),
            f"{PLACE}.g.weights: bits is 1; weights take 2 to 8 bits",
        ),
        (weights(group_size=None), f"{PLACE}.g.weights.group_size is None; it must be a whole"),
        (weights(group_size=0), f"{PLACE}.g.weights: group_size is 0; a group holds 1 column"),
        (weights(symmetric="no"), f"{PLACE}.g.weights.symmetric is 'no'; it must be true or"),
        (block(ignore=["re:("]), "quantization_config.ignore: 're:(' is not a regular expression"),
        (block(ignore=5), "quantization_config.ignore is 5; it must be a list of module names"),
        (block(format=["x"]), "quantization_config.format is ['x']; this version reads"),
        (block(transposed={"a": 1}), "quantization_config.transposed is {'a': 1}; it must be"),
    ],
)
def test_the_key_is_named(config: dict[str, Any], line: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse({"quantization_config": config})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_target_of_two_groups_is_the_last_ones() -> None:
    eight = {**GROUP, "weights": {**GROUP["weights"], "num_bits": 8}}
    config = block(config_groups={"a": GROUP, "b": eight})
    scheme = parse({"quantization_config": config}).scheme(DOWN)
    assert scheme is not None
    assert scheme.bits == 8


def test_a_config_that_is_no_mapping(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "model"))
    change_config(folder, lambda config: config.update(quantization_config="w4"))
    with pytest.raises(CheckpointError, match=r"quantization_config is 'w4', but there are"):
        open_weights(Checkpoint.open(folder))


def test_a_config_of_the_text_decoder(written: Path, tmp_path: Path) -> None:
    config = json.loads((written / "config.json").read_text())
    found = config.pop("quantization_config")
    assert parse({"text_config": {"quantization_config": found}}).groups
    assert parse({"compression_config": found}).groups


@pytest.mark.parametrize(
    ("part", "value", "line"),
    [
        ("shape", torch.tensor([float("nan"), 96]), r"weight_shape is torch.float32 \[nan, 96"),
        ("shape", torch.tensor([-64, 96]), r"weight_shape is torch.int64 \[-64, 96\]; it must"),
        ("shape", torch.tensor([1, 2, 3]), r"\[1, 2, 3\]; it must hold two whole numbers"),
        ("packed", lambda t: t.long(), r"is int64 \[64, 12\] where .* needs int32"),
        ("scale", lambda t: t.int(), r"is int32 \[64, 3\] where .* needs float16 or"),
        ("g_idx", lambda t: t + 7, r"weight_g_idx holds groups 7 to 9; .* scales for 0 to 2"),
        ("g_idx", lambda t: t[1:].clone(), r"weight_g_idx is int32 \[95\] where .* \[96\];"),
    ],
)
def test_the_tensor_is_named(
    part: str, value: Any, line: str, written: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "model"))
    tensors, name = load_file(folder / "model.safetensors"), f"{DOWN}.weight_{part}"
    tensors[name] = value(tensors[name]) if callable(value) else value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=line):
        open_weights(Checkpoint.open(folder)).read(f"{DOWN}.weight")


def test_a_g_idx_that_says_nothing_is_no_order(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "model"))
    tensors, name = load_file(folder / "model.safetensors"), f"{DOWN}.weight_g_idx"
    blank = {**tensors, name: torch.full_like(tensors[name], -1)}
    save_file(blank, folder / "model.safetensors")
    unset = open_weights(Checkpoint.open(folder)).read(f"{DOWN}.weight")
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{DOWN}: int4 sym g32 needs tensor {name}, which"):
        open_weights(Checkpoint.open(folder))
    groups = "quantization_config", "config_groups", "group_0", "weights"
    change_config(folder, lambda config: within(config, *groups).update(actorder="weight"))
    assert torch.equal(unset, open_weights(Checkpoint.open(folder)).read(f"{DOWN}.weight"))


def within(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value[key]
    return value


def change_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all keys and positions of a JSON value."""
    inside = value.items() if isinstance(value, dict) else []
    inside = enumerate(value) if isinstance(value, list) else inside
    return [p for key, below in inside for p in [(*at, key), *places(below, (*at, key))]]


ODD = st.one_of(
    st.sampled_from([None, True, 0, 1, -1, 5, 10**12, 0.5, float("nan"), "", "x", "4", "re:(", []]),
    st.sampled_from([["re:("], [5], {}, {"x": 1}, [[]], "int", "group", "re:.*", "gptq"]),
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), floats=st.booleans())
def test_any_change_is_read_or_refused(
    data: st.DataObject, floats: bool, written: Path, written_floats: Path
) -> None:
    written = written_floats if floats else written
    original = (written / "config.json").read_text()
    config = json.loads(original)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(config)))
        holder = config
        for key in path:
            holder = holder[key]
        if data.draw(st.booleans()) and isinstance(holder, dict):
            del holder[last]
        else:
            holder[last] = copy.deepcopy(data.draw(ODD))
        if not places(config):
            break
    try:
        (written / "config.json").write_text(json.dumps(config))
        for use in (inspect_checkpoint, read_one):
            with suppress(CompressError):
                use(written)
    finally:
        (written / "config.json").write_text(original)


def read_one(folder: Path) -> None:
    opened = open_weights(Checkpoint.open(folder))
    for linear in opened.spec.blocks[0].linears:
        opened.read(linear.tensor)
        opened.activation(linear.name)
    opened.cache(opened.spec.blocks[0])
