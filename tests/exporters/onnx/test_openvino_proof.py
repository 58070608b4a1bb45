"""What a proof asks OpenVINO, played here by ONNX Runtime; tests/interop has the real one."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.quant.scheme import PRESETS
from compress_exporters import reference
from compress_exporters.exporter import Options
from compress_exporters.onnx.proof import openvino
from compress_exporters.onnx.proof.checks import EXACT
from compress_exporters.onnx.proof.running import Array, Past, Runner
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """ONNX Runtime whose logits are off by a part of their norm."""

    runner: Runner
    off: float

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Array, Past]:
        logits, past = self.runner.step(ids, mask, past)
        return logits * np.float32(1 + self.off), past


Play = Callable[[float], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Installs an OpenVINO whose logits are off by so much."""

    def install(off: float) -> None:
        monkeypatch.setattr(openvino, "is_installed", lambda: True)
        monkeypatch.setattr(openvino, "name", lambda: "OpenVINO 7")

        def opened(path: Path) -> Played:
            return Played(Runner.open(path, EXACT), off)

        monkeypatch.setattr(openvino.Compiled, "open", opened)

    return install


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("openvino") / "model", dtype="fp32")


def exported(model: Path, out: Path, target: str = "onnx") -> tuple[Weights, Path]:
    source = open_weights(Checkpoint.open(model))
    out.mkdir()
    EXPORTERS[target].plan(source, Options()).write(out, lambda *_: None)
    return source, out


def proved(model: Path, out: Path, target: str = "onnx") -> str:
    """The last line of the proof."""
    source, folder = exported(model, out, target)
    proof = EXPORTERS[target].plan(source, Options()).verify(folder)
    assert proof.level == "tokens"  # whatever OpenVINO says
    return proof.detail[-1]


def coded(dense: Path, out: Path, preset: str) -> Path:
    return compressed_models.write(dense, out, PRESETS[preset]).folder


@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_agreement_is_told(target: str, dense: Path, play: Play, tmp_path: Path) -> None:
    play(0.0)
    line = proved(dense, tmp_path / "out", target)
    assert line.startswith("OpenVINO 7, in one step, in chunks and beside padding: logits within ")
    assert 0 < float(line.split()[-1]) < 1e-5


def test_a_missing_package_is_told(dense: Path, tmp_path: Path) -> None:
    line = proved(dense, tmp_path / "out")
    assert line == "OpenVINO is not installed (pip install openvino), so it was not asked"


def test_disagreement_is_an_error(dense: Path, play: Play, tmp_path: Path) -> None:
    play(0.01)
    reason = r"^the graph's logits are not those of the weights: in OpenVINO 7, 48 tokens in one "
    with pytest.raises(CheckpointError, match=reason + r"step, they differ by .* \(1.00%\)"):
        proved(dense, tmp_path / "out")


def test_rounded_inputs_may_fall_to_another_code(
    dense: Path, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ONNX Runtime within 2 %, as everywhere."""
    monkeypatch.setattr(openvino, "saturates", lambda: False)
    model = coded(dense, tmp_path / "model", "W8A8")
    play(0.08)
    assert proved(model, tmp_path / "out").endswith("% of their norm")
    play(0.12)
    with pytest.raises(CheckpointError, match=r"in OpenVINO 7, .*, and 10% of their norm is allow"):
        proved(model, tmp_path / "again")


def test_products_that_are_cut_at_16_bits_are_told(
    dense: Path, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "saturates", lambda: True)
    model = coded(dense, tmp_path / "model", "W8A8")
    play(0.12)
    line = proved(model, tmp_path / "out")
    assert line.startswith("OpenVINO 7: logits within ")
    assert line.endswith("on a processor without VNNI, like this one")
    play(1.2)
    with pytest.raises(CheckpointError, match="in OpenVINO 7"):
        proved(model, tmp_path / "again")


def test_fixed_e4m3_scales_are_rounded_in_another_way(
    dense: Path, play: Play, tmp_path: Path
) -> None:
    play(0.2)
    line = proved(coded(dense, tmp_path / "model", "FP8"), tmp_path / "out")
    assert line.startswith("OpenVINO 7: logits within ")
    assert "20.00% of their norm, as it rounds inputs with fixed E4M3 scales" in line


def test_little_memory_leaves_it_out(
    dense: Path, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(0.0)
    free = iter([10**9, 10**9, 0])  # for the graph, for the decoder, and for the graph again
    monkeypatch.setattr(reference, "available_bytes", lambda: next(free))
    assert proved(dense, tmp_path / "out") == (
        "too little memory is free to open the graph in OpenVINO"
    )


def test_a_graph_that_it_does_not_open_is_told(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is right all the same, as the rest of the proof has shown."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("Exception from a.cpp:7: Check 'x > 0' failed at c.cpp:9:\nno  such op")

    core = SimpleNamespace(compile_model=refuse)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=lambda: core))
    monkeypatch.setattr(openvino, "is_installed", lambda: True)
    monkeypatch.setattr(openvino, "version", lambda package: "7.1.2-22-abc")
    line = proved(dense, tmp_path / "out")
    assert line == "OpenVINO 7.1.2 does not open the graph: no such op"


def test_a_package_that_does_not_load_is_told(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setitem(sys.modules, "openvino", None)  # its import fails
    monkeypatch.setattr(openvino, "is_installed", lambda: True)
    monkeypatch.setattr(openvino, "version", nameless)
    assert proved(dense, tmp_path / "out").startswith("OpenVINO does not load: ")


TELEMETRY = "openvino_telemetry"
TELLING = """
try:
    import openvino_telemetry
    told = True
except ImportError:
    told = False
"""


def test_an_import_is_told_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO tells Google Analytics of every import, unless that package is not there."""
    for name, text in ((openvino.PACKAGE, TELLING), (TELEMETRY, "")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError):  # the played one has no Core
        openvino.Compiled.open(tmp_path / "graph.onnx")
    assert sys.modules.pop(openvino.PACKAGE).told is False
    assert TELEMETRY not in sys.modules
    __import__(openvino.PACKAGE)
    assert sys.modules.pop(openvino.PACKAGE).told is True
