"""What errors of columns weigh: mean squares of what they multiply, over a text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.artifacts.importance import importance_of_columns
from compress.checkpoint import Checkpoint
from compress.cli.main import main
from compress.errors import RecipeError
from compress.events import silent
from compress.formats import open_weights
from compress.text.tokenizer import load_tokenizer
from compress.verbs import ArtifactTarget, dry_artifact, export_artifact
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build
from compress_exporters.exporter import Options
from helpers import tiny_models

STORY = "the old cat sat by the door and looked at the rain for a long time\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("importance") / "model", dtype="fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "story.txt"
    file.write_text(STORY * 40)
    return file


def test_it_is_what_the_model_computes(model: Path, text: Path) -> None:
    weights = open_weights(Checkpoint.open(model))
    found = importance_of_columns(weights, str(text), silent)
    assert set(found) == {x.tensor for x in weights.spec.linears()}
    seen: dict[str, torch.Tensor] = {}
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def hook(name: str) -> Any:
        return lambda module, args: seen.__setitem__(name, args[0].flatten(0, -2))

    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        whole.get_submodule(name).register_forward_pre_hook(hook(name))
    config = CalibrationConfig((SourceConfig("text", str(text)),), 128, 128)
    tokenizer = load_tokenizer(weights.checkpoint.small)
    tokens = build(config, tokenizer, generate=None, vocab=weights.spec.vocab, fewest=1)
    with torch.no_grad():
        whole(tokens.ids)
    for name, x in seen.items():
        torch.testing.assert_close(found[f"{name}.weight"], x.square().mean(0))


def test_experts_have_their_own(text: Path, tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make("mixtral", tmp_path / "model")))
    found = importance_of_columns(weights, str(text), silent)
    first, second = (
        found[f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight"] for i in (0, 1)
    )
    assert not torch.equal(first, second)


def test_a_file_is_weighed_by_a_text(model: Path, text: Path, tmp_path: Path) -> None:
    target = ArtifactTarget("gguf", Options(type="Q4_0"), str(text))
    report = export_artifact(model, target, tmp_path / "out", verify=False)
    assert "errors of 14 of 16 rounded tensors weigh what their columns multiply" in report.notes
    plain = ArtifactTarget("gguf", Options(type="Q4_0"))
    export_artifact(model, plain, tmp_path / "plain", verify=False)
    one, other = ((tmp_path / x / "model.gguf").read_bytes() for x in ("out", "plain"))
    assert one != other


def test_a_text_is_for_types(model: Path, text: Path, capsys: Any) -> None:
    with pytest.raises(RecipeError) as problem:
        dry_artifact(model, ArtifactTarget("gguf", Options(), str(text)))
    assert str(problem.value) == (
        f"--text is {text}; it says what errors of --type weigh, as --imatrix does: give --type,"
        " and one of the two"
    )
    asked = ["export", str(model), "--to", "onnx", "--dry-run", "--text", str(text)]
    assert main(asked) == 2
    assert "--text is for gguf, and --to is onnx; leave it out" in capsys.readouterr().err
