"""An export is planned once, and what is planned is written and proved as often as one likes."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.quant.tensor import QuantizedTensor
from compress.verbs import ArtifactTarget, dry_artifact, export_artifact
from compress_exporters.exporter import Options, Proof, Written
from compress_exporters.genai import lowering
from compress_exporters.gguf import target as gguf
from compress_exporters.onnx.graph import decoder
from compress_exporters.table import EXPORTERS
from conftest import tree_hashes
from helpers import compressed_models, tiny_models
from helpers.exporters.tensorrt_graphs import G64, WIDE

EXACT = Options(accuracy_level=0)  # inputs of products stay as they are
BUILDERS = ((decoder, "build_decoder"), (lowering, "build_decoder"), (gguf, "make_plan"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planning")
    dense = tiny_models.make("llama", folder / "dense", tied=True, **WIDE)
    # Scales have both signs, so a plan for tensorrt reads codes.
    return compressed_models.write(dense, folder / "coded", G64).folder


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a whole graph, or all tensors of a GGUF file, are worked out."""
    times = Counter[str]()

    def counting(build: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            times["built"] += 1
            return build(*args, **options)

        return counted

    for module, name in BUILDERS:
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return times


@pytest.mark.parametrize("target", EXPORTERS)
def test_an_export_is_planned_once(
    target: str, model: Path, tmp_path: Path, built: Counter[str]
) -> None:
    """Checked, sized, written and proved."""
    export_artifact(model, ArtifactTarget(target, EXACT), tmp_path / "out")
    assert built["built"] == 1
    dry_artifact(model, ArtifactTarget(target))
    assert built["built"] == 2


def test_an_export_in_place_is_planned_once(tmp_path: Path, built: Counter[str]) -> None:
    model = tiny_models.make("llama", tmp_path / "model", tied=True)
    export_artifact(model, ArtifactTarget("onnx", Options(in_place=True)))
    assert built["built"] == 1


def opened(model: Path) -> Weights:
    return open_weights(Checkpoint.open(model))


@pytest.mark.parametrize("target", EXPORTERS)
def test_a_plan_is_written_again_to_the_same_bytes(
    target: str, model: Path, tmp_path: Path
) -> None:
    planned = EXPORTERS[target].plan(opened(model), EXACT)
    results: list[Written | Proof] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        results.append(planned.write(tmp_path / name, lambda *_: None))
        results.append(planned.verify(tmp_path / name))
    assert results[:2] == results[2:]
    assert tree_hashes(tmp_path / "one") == tree_hashes(tmp_path / "two")


@pytest.fixture
def _only_new() -> Iterator[None]:
    """The collector sees what a test makes, not the million objects that were imported before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held() -> int:
    """Bytes of codes in memory, of what was made since the test began."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) is QuantizedTensor]
    return sum(x.codes.nbytes for x in found if x.codes.device != torch.device("meta"))


@pytest.mark.usefixtures("_only_new")
@pytest.mark.parametrize("target", EXPORTERS)
def test_a_plan_holds_no_codes(target: str, model: Path, tmp_path: Path) -> None:
    """Neither before it is written nor until its proof, which needs the memory."""
    before = held()
    planned = EXPORTERS[target].plan(opened(model), EXACT)
    assert held() == before
    planned.write(tmp_path, lambda *_: None)
    assert held() == before
