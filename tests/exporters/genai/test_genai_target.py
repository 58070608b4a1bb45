"""The target onnx-genai: its files, what its proof finds, and what it says."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compress.errors import CheckpointError, DependencyError
from compress.quant.scheme import QuantScheme
from compress_exporters.exporter import Options, Proof
from compress_exporters.genai import proof as proving
from compress_exporters.genai.config import LENGTH, NAME
from compress_exporters.genai.lowering import TOKENIZER
from compress_exporters.onnx.saving import DATA, MODEL
from helpers import compressed_models, tiny_models
from helpers.exporters.genai_graphs import GENAI, source, written
from helpers.forward_cases import LONGROPE

G32 = QuantScheme(group_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained one would be; a random one whose inputs, rounded, still give its logits."""
    folder = tmp_path_factory.mktemp("models")
    made = tiny_models.make("llama", folder / "source", dtype="fp32")
    return compressed_models.write(made, folder / "model", G32, head=G32).folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    written(model, tmp_path / "out", Options())
    return tmp_path / "out"


@pytest.fixture
def no_genai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "installed", lambda name: False)


def verify(model: Path, out: Path, options: Options | None = None) -> Proof:
    return GENAI.plan(source(model), options or Options()).verify(out)


def test_what_is_written_is_told(model: Path, tmp_path: Path) -> None:
    made = written(model, tmp_path / "out", Options())
    assert set(made.files) == {path.name for path in (tmp_path / "out").iterdir()}
    assert {MODEL, DATA, NAME, "config.json", "tokenizer.json"} <= set(made.files)
    assert made.fused == {
        "GroupQueryAttention": 2,
        "MatMulNBits": 11,
        "SkipSimplifiedLayerNormalization": 4,
        "SimplifiedLayerNormalization": 1,
    }
    assert made.notes == GENAI.plan(source(model), Options()).notes
    assert any("padded on the right" in line for line in made.notes)
    size = GENAI.plan(source(model), Options()).size
    assert (tmp_path / "out" / DATA).stat().st_size <= size < 10_000 + size


def test_two_exports_are_equal(model: Path, folder: Path, tmp_path: Path) -> None:
    written(model, tmp_path / "again", Options())
    for name in (MODEL, DATA, NAME):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.usefixtures("no_genai")
def test_proof_of_a_good_folder(model: Path, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    found = verify(model, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert found.level == "logits"  # of the graph as it is, whose inputs are rounded
    exact = [line for line in found.detail if line.startswith("accuracy level 0, ")]
    assert len(exact) == 4
    assert found.max_logit_error is not None
    assert 1e-4 < found.max_logit_error < 0.1
    assert found.detail[-2] == "ONNX Runtime runs all 18 fused operators as they are"
    assert found.detail[-1] == "onnxruntime-genai is not installed, so it generated nothing"


@pytest.mark.usefixtures("no_genai")
def test_inputs_as_they_are_give_the_logits_themselves(model: Path, tmp_path: Path) -> None:
    options = Options(accuracy_level=0)
    written(model, tmp_path / "out", options)
    found = verify(model, tmp_path / "out", options)
    assert found.level == "tokens"
    assert found.max_logit_error is not None
    assert found.max_logit_error < 1e-5


@pytest.mark.usefixtures("no_genai")
@pytest.mark.parametrize(
    ("family", "options", "more", "tokens"),
    [
        ("llama", Options(max_context=9), {}, 9),
        ("llama", Options(max_context=1), {}, 1),
        ("gpt2", Options(), {"n_positions": 5}, 5),
        ("phi3", Options(), LONGROPE | {"original_max_position_embeddings": 16}, 16),
    ],
    ids=["9 positions", "one position", "learned", "longrope"],
)
def test_proofs_of_folders_stay_within_the_positions(
    family: str, options: Options, more: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **more)
    written(folder, tmp_path / "out", options)
    found = verify(folder, tmp_path / "out", options)
    assert found.level == "tokens"
    assert found.detail[0].startswith(f"{tokens} tokens in one step: ")


def spoil_code(folder: Path) -> None:
    graph = onnx.load(folder / MODEL, load_external_data=False).graph
    (weight,) = (x for x in graph.initializer if x.name == "model.layers.1.mlp.down_proj.codes")
    at = next(int(entry.value) for entry in weight.external_data if entry.key == "offset")
    data = np.fromfile(folder / DATA, np.uint8)
    data[at : at + 200] ^= 0x77
    data.tofile(folder / DATA)


def change(folder: Path, kind: str, name: str, value: Any) -> None:
    graph = onnx.load(folder / MODEL, load_external_data=False)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if node.op_type == kind and attribute.name == name:
                attribute.CopyFrom(onnx.helper.make_attribute(name, value))
    (folder / MODEL).write_bytes(graph.SerializeToString())


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_code,
        lambda folder: change(folder, "GroupQueryAttention", "scale", 0.5),
        lambda folder: change(folder, "GroupQueryAttention", "local_window_size", 3),
        lambda folder: change(folder, "SkipSimplifiedLayerNormalization", "epsilon", 0.5),
    ],
    ids=["codes", "scale", "window", "epsilon"],
)
@pytest.mark.usefixtures("no_genai")
def test_a_graph_that_computes_something_else_is_refused(
    spoil: Callable[[Path], None], model: Path, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=r"^the graph's logits are not those of the weights"):
        verify(model, folder)
    assert not (folder / proving.EXACT).exists()


def test_rounding_that_moves_logits_is_refused(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "ROUNDED", 1e-4)
    with pytest.raises(CheckpointError, match=r"\(accuracy level 4\) logits differ by .*-level 0$"):
        verify(model, folder)


@pytest.mark.usefixtures("no_genai")
def test_operators_that_onnx_runtime_takes_apart_are_refused(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(path: Path, ids: list[int]) -> Counter[str]:
        return Counter({"GroupQueryAttention": 2, "MatMulNBits": 10})

    monkeypatch.setattr(proving, "kernels", few)
    with pytest.raises(CheckpointError, match=r"^ONNX Runtime runs 10 of the graph's 11 MatMulNBi"):
        verify(model, folder)


def test_tokens_that_onnxruntime_genai_chooses_otherwise_are_refused(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "installed", lambda name: True)
    monkeypatch.setattr(proving, "generated", lambda folder, prompt, count: [1, 2, 3, 4])
    with pytest.raises(CheckpointError, match=r"^onnxruntime-genai chooses other tokens than the"):
        verify(model, folder)


def test_a_missing_package_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress_exporters import exporter

    monkeypatch.setattr(exporter, "installed", lambda name: name != "onnx_ir")
    with pytest.raises(DependencyError, match=r"^onnx-genai needs onnx_ir; install it with"):
        GENAI.plan(source(model), Options())


def config(out: Path) -> dict[str, Any]:
    return json.loads((out / NAME).read_text())


def test_genai_config_names_what_the_graph_has(folder: Path) -> None:
    told = config(folder)
    decoder, graph = told["model"]["decoder"], onnx.load(folder / MODEL, load_external_data=False)
    for side, values in (("inputs", graph.graph.input), ("outputs", graph.graph.output)):
        names = set()
        for name in decoder[side].values():
            names |= {name % layer for layer in range(2)} if "%d" in name else {name}
        assert names == {value.name for value in values}
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"]) == (4, 2)
    assert (decoder["head_size"], decoder["hidden_size"]) == (16, 64)
    assert told["model"]["vocab_size"] == tiny_models.VOCAB
    assert told["model"]["context_length"] == 128
    assert told["search"]["past_present_share_buffer"] is True
    assert told["search"]["max_length"] == 128
    assert [told["model"][x] for x in ("bos_token_id", "eos_token_id", "pad_token_id")] == [0, 0, 0]


def test_generation_settings_of_the_source_are_kept(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", max_position_embeddings=10_000)
    settings = {"eos_token_id": [7, 9], "do_sample": True, "top_p": 0.9, "top_k": None}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    made = written(folder, tmp_path / "out")
    told = config(tmp_path / "out")
    assert told["model"]["eos_token_id"] == [7, 9]
    search = told["search"]
    assert (search["do_sample"], search["top_p"], search["top_k"]) == (True, 0.9, 50)
    assert search["max_length"] == LENGTH
    assert told["model"]["context_length"] == 10_000
    (line,) = (x for x in made.notes if x.startswith("max_length"))
    assert line.endswith("up to 10000 tokens")


@pytest.mark.parametrize("lacks", [(), ("tokenizer_config.json",), TOKENIZER], ids=len)
def test_a_source_without_a_tokenizer_is_told(lacks: tuple[str, ...], tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model")
    for name in TOKENIZER:
        (folder / name).touch()
    for name in lacks:
        (folder / name).unlink()
    told = [x for x in GENAI.plan(source(folder), Options()).notes if "tokenizer" in x]
    assert len(told) == bool(lacks)
    for line in told:
        assert line.startswith(f"the source has no {' and no '.join(lacks)}, and onnxruntime-genai")


def test_settings_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"generation_config.json:1:\d+ is not valid JSON"):
        GENAI.plan(source(folder), Options())


def test_contexts_of_learned_positions_and_as_asked(tmp_path: Path) -> None:
    for family, rows in (("gpt2", 128), ("opt", 128)):
        folder = tiny_models.make(family, tmp_path / family)
        written(folder, tmp_path / f"{family}.out")
        assert config(tmp_path / f"{family}.out")["model"]["context_length"] == rows
    written(tmp_path / "gpt2", tmp_path / "short", Options(max_context=40))
    assert config(tmp_path / "short")["model"]["context_length"] == 40


def test_ends_that_nothing_names_are_left_out(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in settings.items() if not k.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(kept | {"eos_token_id": 5}))
    written(folder, tmp_path / "out")
    told = config(tmp_path / "out")["model"]
    assert "bos_token_id" not in told
    assert (told["eos_token_id"], told["pad_token_id"]) == (5, 5)
