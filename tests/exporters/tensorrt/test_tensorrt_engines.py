"""What a proof asks TensorRT, played here by ONNX Runtime; tests/interop has a real one."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.quant.scheme import PRESETS
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.decoder import build_decoder
from compress_exporters.onnx.proof.checks import Asked
from compress_exporters.table import EXPORTERS
from compress_exporters.tensorrt import engine_proof
from compress_exporters.tensorrt.engine import NONE
from compress_exporters.tensorrt.lowering import TENSORRT as TENSORRT_LOWERING
from helpers import tiny_models
from helpers.exporters import played_tensorrt
from helpers.exporters.played_tensorrt import Played
from helpers.exporters.tensorrt_graphs import WIDE, positive

TENSORRT = EXPORTERS["tensorrt"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("engines") / "model"
    return tiny_models.make("llama", place, dtype="fp32", **WIDE)


def exported(model: Path, out: Path, **options: Any) -> tuple[Weights, Options]:
    source, chosen = open_weights(Checkpoint.open(model)), Options(**options)
    out.mkdir()
    TENSORRT.plan(source, chosen).write(out, lambda *_: None)
    return source, chosen


def told(model: Path, out: Path, **options: Any) -> tuple[str, ...]:
    """What TensorRT adds to a proof."""
    source, chosen = exported(model, out, **options)
    asked = Asked.of(build_decoder(source, chosen, TENSORRT_LOWERING))
    return engine_proof.proved(source, out, asked)


def test_the_proof_asks_tensorrt(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_tensorrt.install(monkeypatch, {"tensorrt": Played()})
    source, options = exported(dense, tmp_path / "out")
    proof = TENSORRT.plan(source, options).verify(tmp_path / "out")
    assert proof.level == "tokens"
    assert proof.detail[1].startswith("TensorRT 10.15.1.29 parses the graph")
    assert proof.detail[2].startswith("TensorRT 10.15.1.29 on a device, in one step")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_an_engine_is_built_and_run(
    dtype: Any, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played()
    played_tensorrt.install(monkeypatch, {"tensorrt": played})
    built, ran = told(dense, tmp_path / "out", dtype=dtype)
    assert built == (
        "TensorRT 10.15.1.29 parses the graph and builds an engine of it (1.5 MB) for the profiles"
        " prefill and decode"
    )
    start = "TensorRT 10.15.1.29 on a device, in one step, in chunks and beside padding: logits "
    assert ran.startswith(start)
    assert float(re.findall(r"within ([\d.e-]+)", ran)[0]) < (1e-4 if dtype == "fp32" else 2e-2)
    # One step; chunks of 7, 1, 1 and the rest; a text padded on either side.
    assert played.used == [0, 0, 1, 1, 0, 0, 0]


def test_a_short_context_shortens_the_text(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is longer than its profile."""
    played_tensorrt.install(monkeypatch, {"tensorrt": Played()})
    assert len(told(dense, tmp_path / "out", max_context=20)) == 2


def test_other_logits_are_an_error(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_tensorrt.install(monkeypatch, {"tensorrt": Played(off=0.01)})
    says = r"in TensorRT 10.15.1.29 on a device, 48 tokens in one step, they differ by .*\(1.00%\)"
    with pytest.raises(CheckpointError, match=says):
        told(dense, tmp_path / "out")


REFUSED: dict[str, tuple[Played, str]] = {
    "not parsed": (
        Played(parses=False),
        r"^TensorRT 10.15.1.29 does not parse \S+: mask/Or \(Or\): no such thing \(and 1 more\);",
    ),
    "not built": (
        Played(builds=False),
        r"^TensorRT 10.15.1.29 builds no engine of \S+/model.onnx: no kernel for this; please rep",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_an_error_in_its_own_words(
    case: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, says = REFUSED[case]
    played_tensorrt.install(monkeypatch, {"tensorrt": played})
    with pytest.raises(CheckpointError, match=says):
        told(dense, tmp_path / "out")


NO_DEVICE = Played(device=None, starts=False)
STARTED = "TensorRT 10.15.1.29 builds nothing here: CUDA initialization failure with error: 35"
OLD = "is older than {}, which reads these graphs"
ROOMLESS = "TensorRT 10.15.1.29 has too little memory on the device"
# Packages that are there, and what is said.
WITHOUT: dict[str, tuple[dict[str, Played], str]] = {
    "none": ({}, f"no engine was built: {NONE}"),
    "no device": ({"tensorrt": NO_DEVICE}, f"no engine was built: {STARTED}"),
    "an old one": (
        {"tensorrt": Played("10.9.0.34")},
        f"no engine was built: TensorRT 10.9.0.34 {OLD.format('10.15')}",
    ),
    "two that do not do": (
        {"tensorrt": NO_DEVICE, "tensorrt_rtx": Played("1.4.0.76", device=None)},
        f"no engine was built: {STARTED}; TensorRT for RTX 1.4.0.76 {OLD.format('1.7')}",
    ),
    "a builder without a device": (
        {"tensorrt": NO_DEVICE, "tensorrt_rtx": Played("1.7.1.116", device=None)},
        "the engine was not run: torch finds no CUDA device",
    ),
    "too little room to build": (
        {"tensorrt": Played(builds=False, why="Error Code 2: OutOfMemory (no more)")},
        f"no engine was built: {ROOMLESS}: Error Code 2: OutOfMemory (no more)",
    ),
    "an engine that does not load": (
        {"tensorrt": Played(loads=False)},
        "the engine was not run: TensorRT 10.15.1.29 does not load it: it gives no reason",
    ),
    "too little room on the device": (
        {"tensorrt": Played(fits=False)},
        "the engine was not run: TensorRT 10.15.1.29 does not start it: it gives no reason",
    ),
}


def test_too_little_room_for_a_step_is_told(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    played_tensorrt.install(monkeypatch, {"tensorrt": Played()})
    monkeypatch.setattr("compress_exporters.tensorrt.engine_steps._room", full)
    assert told(dense, tmp_path / "out")[-1] == (
        "the engine was not run: CUDA out of memory. Tried to allocate 2.00 GiB"
    )


@pytest.mark.parametrize("case", WITHOUT)
def test_what_is_missing_is_told(
    case: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, says = WITHOUT[case]
    played_tensorrt.install(monkeypatch, packages)
    assert told(dense, tmp_path / "out")[-1] == says


def test_a_package_that_does_not_load_is_told(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise ImportError("libnvinfer.so.10:\n cannot open")

    played_tensorrt.install(monkeypatch, {"tensorrt": Played()})
    monkeypatch.setattr("compress_exporters.tensorrt.engine.import_module", fail)
    assert told(dense, tmp_path / "out") == (
        "no engine was built: tensorrt cannot be loaded: libnvinfer.so.10: cannot open",
    )


WEAK = "its types need compute capability 8.9, and the device here has 8.6"


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("tensorrt", f"no engine was built: {WEAK}"),
        ("tensorrt_rtx", f"the engine was not run: {WEAK}"),
    ],
)
def test_a_device_too_old_for_a_type_is_told(
    package: str, says: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = positive(dense, tmp_path / "model", PRESETS["FP8_DYNAMIC"])
    played_tensorrt.install(monkeypatch, {package: Played(device=(8, 6))})
    assert told(model, tmp_path / "out")[-1] == says


def test_little_memory_leaves_it_out(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_tensorrt.install(monkeypatch, {"tensorrt": Played()})
    monkeypatch.setattr(engine_proof, "fits", lambda needed: needed < 1 << 30)
    assert told(dense, tmp_path / "out") == (
        "too little memory is free to build an engine with TensorRT 10.15.1.29",
    )
