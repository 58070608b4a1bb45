"""Decoders in no table: what their class shows when it is opened is what the plan says of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats.runtimes.judge import runtimes
from compress.formats.runtimes.snippets import all_lines, why_not_opened
from compress.plan.unlisted import opened
from compress.quant.scheme import QuantScheme
from compress.verbs import Conversion, export, make_plan, run
from helpers import unlisted_models
from helpers.short_runs import GPTQ, SELF, W4, recipe
from helpers.unlisted_models import READING, RUNNING

# Groups of 16, which divide also the narrowest of these layers.
RTN16 = {"method": "rtn", **W4, "group_size": 16}
OWN_TEXT = {"texts": [{"kind": "self", "name": "own", "samples": 2, "length": 16}]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = unlisted_models.make(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return make


def refused(asked: Any, model: Path, out: Path) -> str:
    """The one line that plan and run end with; nothing is left of the run."""
    with pytest.raises(CheckpointError) as planned:
        make_plan(asked, model)
    with pytest.raises(CheckpointError) as ran:
        run(asked, model, out)
    line = str(planned.value)
    assert line == str(ran.value)
    assert "\n" not in line
    assert list(out.parent.iterdir()) == []
    return line


@pytest.mark.parametrize("family", READING)
def test_weights_that_the_class_reads_itself_are_named(
    made: Any, tmp_path: Path, family: str
) -> None:
    leaves = READING[family][1]
    line = refused(recipe(RTN16), made(family), tmp_path / "out")
    assert "reads the weight of" in line
    assert f"add {', '.join(leaves)} to ignore" in line
    plan = make_plan(recipe({**RTN16, "ignore": ["lm_head", "router", *leaves]}), made(family))
    assert plan.problems == ()
    assert {m.linear.name.rpartition(".")[2] for m in plan.modules}.isdisjoint(leaves)


def test_a_dense_result_takes_all_of_them(made: Any) -> None:
    plan = make_plan(recipe(RTN16, output={"format": "dense"}), made("mamba"))
    assert any(m.linear.name.endswith("dt_proj") for m in plan.modules)
    assert {v.verdict for v in plan.runtimes} == {"yes"}


def test_a_forward_that_reads_a_weight_needs_a_loader_that_decodes(made: Any) -> None:
    """compressed-tensors decodes before the first forward, GPTQ's kernels never do."""
    checkpoint = Checkpoint.open(made("jamba"))
    spec = describe(checkpoint.config, checkpoint.shapes)
    packed = [x for x in spec.linears() if x.role != "router"]
    assert opened(checkpoint.config, spec, packed, "compressed-tensors").unnamed is not None
    with pytest.raises(CheckpointError, match=r"weight of model\.layers\.0\.mamba\.dt_proj itself"):
        opened(checkpoint.config, spec, packed, "gptq")


@pytest.mark.parametrize("family", RUNNING)
def test_what_was_not_tried_is_not_expected(made: Any, family: str) -> None:
    plan = make_plan(recipe(RTN16), made(family))
    found = {v.runtime: v for v in plan.runtimes}
    assert found["transformers"].verdict == "expected"
    assert (
        "opened without weights, and a block of each kind was run" in found["transformers"].reason
    )
    for name in ("vLLM on CPU", "vLLM on GPU"):
        assert found[name].verdict in ("unknown", "no")
    gpu = found["vLLM on GPU"]
    assert gpu.verdict == "no" or gpu.reason == f"not tried with {family}, which is in no table"


def test_a_class_that_was_not_opened_promises_nothing(made: Any) -> None:
    checkpoint = Checkpoint.open(made("stablelm"))
    spec = describe(checkpoint.config, checkpoint.shapes)
    schemes = {x.tensor: QuantScheme(group_size=16) for x in spec.linears()}
    found = runtimes("compressed-tensors", schemes, spec)
    assert {v.verdict for v in found} <= {"unknown", "no"}
    assert all_lines("compressed-tensors", found, "small") == ()
    reason = why_not_opened("compressed-tensors", found, "--to dense")
    assert reason is not None
    assert "transformers: not tried with stablelm" in reason


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("biogpt", ["output_projection"]),
        ("phimoe", ["model.layers.0.mlp.router", "model.layers.1.mlp.router"]),
    ],
)
def test_linears_without_a_tensor_of_their_name_are_left_alone(
    made: Any, tmp_path: Path, family: str, names: list[str]
) -> None:
    run(recipe(RTN16), made(family), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(names) <= set(config["quantization_config"]["ignore"])


def test_conversions_keep_both(made: Any, tmp_path: Path) -> None:
    """Of an exported result, too, the class is asked."""
    run(recipe(RTN16), made("biogpt"), tmp_path / "out")
    report = export(
        tmp_path / "out", "gptq", tmp_path / "gptq", options=Conversion(round_scales=True)
    )
    assert {v.runtime: v.verdict for v in report.runtimes}["transformers"] == "expected"


def test_a_model_without_attention_is_calibrated_and_measured(made: Any, tmp_path: Path) -> None:
    """Its cache has no size to divide by, and takes its state under another name."""
    asked = recipe(
        {**GPTQ, "group_size": 16, "ignore": ["lm_head", "dt_proj", "out_proj"]},
        calibration=SELF,
        evaluation=OWN_TEXT,
    )
    report = run(asked, made("mamba"), tmp_path / "out")
    assert report.quality is not None
    assert report.quality.texts[0].kl is not None
    assert report.result.kv_bytes_per_token is None
    assert "head" not in report.source.architecture.removesuffix("tied head")


def test_convolutions_are_filled_too(made: Any, tmp_path: Path) -> None:
    report = run(recipe({**GPTQ, "group_size": 16}, calibration=SELF), made("lfm2"), tmp_path / "o")
    assert "model.layers.0.conv.conv.weight" in report.copied_tensors
    assert sum(layer.method == "gptq" for layer in report.stages[0].layers) > 0


def test_what_has_other_names_in_the_class_is_not_calibrated(made: Any, tmp_path: Path) -> None:
    """Found in the plan: it showed when the first block was read, or the result was measured."""
    line = refused(
        recipe({**GPTQ, "group_size": 16}, calibration=SELF), made("laguna"), tmp_path / "out"
    )
    assert "e_score_correction_bias has no place in transformers' module" in line
    line = refused(recipe(RTN16, evaluation=OWN_TEXT), made("phimoe"), tmp_path / "out")
    assert line == (
        "transformers' PhimoeForCausalLM has no experts at block_sparse_moe.experts in"
        " model.layers.0, where the checkpoint has; use a recipe without calibration and evaluation"
    )


def test_the_bias_of_a_tied_head_is_filled(tmp_path: Path) -> None:
    """ctrl has one: without it the model could not write its own text."""
    sizes = {"n_embd": 64, "dff": 96, "n_layer": 1, "n_head": 4, "n_positions": 128}
    source = unlisted_models.make("ctrl", tmp_path / "model", **sizes)
    spec = make_plan(recipe({**GPTQ, "group_size": 16}, calibration=SELF), source).spec
    assert spec.tied
    assert ("lm_head.bias", "lm_head.bias") in spec.outside


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bert", "tokens of a 'bert' model read later ones where is_decoder is false"),
        ("t5", "a 't5' model has an encoder, too (is_encoder_decoder is true)"),
        ("whisper", "a 'whisper' model has an encoder, too (is_encoder_decoder is true)"),
        ("clip", "transformers has no causal language model of type 'clip'"),
    ],
)
@pytest.mark.parametrize("output", ["compressed-tensors", "dense"])
def test_configs_of_no_decoder(
    tiny: Any, tmp_path: Path, family: str, why: str, output: str
) -> None:
    source = Path(shutil.copytree(tiny("llama"), tmp_path / "source" / "model"))
    config = json.loads((source / "config.json").read_text())
    config["model_type"] = family
    (source / "config.json").write_text(json.dumps(config))
    (tmp_path / "results").mkdir()
    line = refused(recipe(RTN16, output={"format": output}), source, tmp_path / "results" / "out")
    assert line.startswith(f"config.json describes no decoder: {why}; ")


def test_a_class_whose_tokens_read_later_ones(tmp_path: Path) -> None:
    """Found by running a block: no key of the config says so."""
    source = unlisted_models.make("bert-generation", tmp_path / "model")
    (tmp_path / "results").mkdir()
    line = refused(recipe(RTN16), source, tmp_path / "results" / "out")
    assert line == (
        "transformers' BertGenerationDecoder is no decoder: its tokens read later ones; only"
        " decoders are compressed"
    )


def test_an_embedding_is_not_looked_for_in_a_block() -> None:
    config = {
        "model_type": "unheard_of",
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "hidden_size": 8,
    }
    shapes = {"h.0.mlp.up.weight": (96, 8), "tokens.weight": (96, 8), "h.0.norm.weight": (8,)}
    assert describe(config, shapes).embedding == "tokens.weight"
