"""Windows in all but the most sensitive layers, as a user asks for them: no tensor changes, the
choice is the best, and kills cost nothing."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from compress.edits.select.windows import choose_alone, choose_by_loss
from compress.errors import CheckpointError, RecipeError
from compress.recipe import dump, load
from compress.recipe.reading.parse import parse
from compress.report.terminal.table import render_table
from compress.verbs import make_plan, run
from helpers.in_transformers import said
from helpers.short_runs import (
    GPTQ,
    RTN,
    WORDS,
    kill_at_each_fifth,
    killed_at,
    recipe,
    result_of,
    text_source,
)

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
LAYERS = 4
DISTILL = {"method": "distill", "tokens": 128, "scope": "model"}


def hybrid(**options: Any) -> dict[str, Any]:
    return {"method": "hybrid", "window": 4, **options}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "MinistralForCausalLM"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("mistral", "MinistralForCausalLM"),
                ("qwen2", "Qwen2ForCausalLM"),
                ("qwen3", "Qwen3ForCausalLM"),
                ("smollm3", "SmolLM3ForCausalLM"),
            )
        ),
    ],
)
def test_layers_get_windows_and_no_tensor_changes(
    tiny, tmp_path: Path, family: str, kind: str
) -> None:
    rotates = {"no_rope_layers": [1, 1, 1, 0]} if family == "smollm3" else {}
    source = tiny(family, num_hidden_layers=LAYERS, **rotates)
    asked = recipe(hybrid(keep=[1, 2]))
    plan = make_plan(asked, source)
    refused = {x.runtime for x in plan.runtimes if x.verdict == "no"}
    assert refused == ({"vLLM on GPU", "vLLM on CPU"} if "qwen" in family else set())
    report = run(asked, source, tmp_path / "out")
    assert report.result.bytes == plan.shards.total_bytes
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["layer_types"]) == (4, types)
    assert config["architectures"] == [kind]
    assert report.loads is not None
    assert (report.loads.proof, report.loads.model_class) == ("logits", kind)
    assert "2 layers of 4 see 4 tokens" in " ".join(render_table(report).split())


@pytest.fixture
def sensitive(tiny, tmp_path: Path) -> Path:
    """A model of which layers 0 and 2 hardly look at what lies before a token."""
    folder = tmp_path / "source"
    source = tiny("llama", num_hidden_layers=LAYERS, dtype="fp32")
    tensors = load_file(source / "model.safetensors")
    for layer in (0, 2):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 1e-2
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("by", ["loss", pytest.param("alone", marks=pytest.mark.long)])
def test_the_layers_that_stay_global_are_those_that_need_it(
    sensitive: Path, tmp_path: Path, by: str
) -> None:
    """The recipe in the result says which, and gives the same bytes where that is known."""
    data = text_source(tmp_path, samples=8)
    asked = recipe(hybrid(**{"global": 0.5}, by=by), RTN, calibration=data)
    assert make_plan(asked, sensitive).shards.total_bytes
    report = run(asked, sensitive, tmp_path / "open")
    assert "layers 1 and 3 see every position" in report.notes
    again = load(tmp_path / "open" / "recipe.yaml")
    assert again.edits[0].config.keep == (1, 3)
    assert again.edits[0].config.global_ is None
    assert again.calibration is not None
    run(again, sensitive, tmp_path / "again")
    run(recipe(hybrid(keep=[1, 3]), RTN), sensitive, tmp_path / "known")
    found = [result_of(tmp_path / name) for name in ("open", "again", "known")]
    for name in ("model.safetensors", "config.json"):
        assert len({each[name] for each in found}) == 1


def greedy(losses: dict[tuple[int, ...], float], count: int) -> list[int]:
    """By brute force: the loss of every set of layers with windows is known."""
    chosen: list[int] = []
    for _ in range(count):
        rest = [i for i in range(LAYERS) if i not in chosen]
        chosen.append(min(rest, key=lambda i: losses[tuple(sorted((*chosen, i)))]))
    return chosen


def log_probabilities(folder: Path, rows: torch.Tensor, **changes: Any) -> torch.Tensor:
    """In plain transformers. changes: of config.json."""
    config = AutoConfig.from_pretrained(folder, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        return model(rows).logits.double().log_softmax(-1)


def kl(source: Path, out: Path, rows: torch.Tensor, **changes: Any) -> float:
    p, q = log_probabilities(source, rows), log_probabilities(out, rows, **changes)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_greedy_steps_are_those_of_brute_force(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every loss that is measured is that of the model with these windows in plain transformers."""
    source = tiny("llama", num_hidden_layers=LAYERS, dtype="fp32")
    seen, rows = [], []

    def watched(versions: Any, *rest: Any) -> Any:
        rows.append(torch.cat([batch.ids for batch in versions.full.batches]))
        for gain in choose_by_loss(versions, *rest):
            seen.append(gain)
            yield gain

    monkeypatch.setattr("compress.passes.structure.choices.WINDOWS_BY", {"loss": watched})
    data = text_source(tmp_path, samples=16)
    run(recipe(hybrid(**{"global": 1}), calibration=data), source, tmp_path / "out")
    losses = {}
    for layers in (x for n in range(1, LAYERS) for x in combinations(range(LAYERS), n)):
        types = ["sliding_attention" if i in layers else "full_attention" for i in range(LAYERS)]
        losses[layers] = kl(source, tmp_path / "out", rows[0], layer_types=types)
    assert [gain.layer for gain in seen] == greedy(losses, LAYERS - 1)
    before: list[int] = []
    for gain in seen:
        wanted = {i: losses[tuple(sorted((*before, i)))] for i in range(LAYERS) if i not in before}
        assert gain.losses == pytest.approx(wanted, rel=1e-3)
        before.append(gain.layer)


def test_alone_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {0: 0.3, 1: 0.1, 2: 0.2, 3: 0.1}
    calls: list[Sequence[int]] = []

    def losses_with(versions: Any, windowed: Any, tried: Any, *rest: Any) -> dict[int, float]:
        calls.append(tuple(windowed))
        return told

    monkeypatch.setattr("compress.edits.select.windows.losses_with", losses_with)
    nothing: Any = None
    gains = choose_alone(nothing, range(4), 3, nothing, nothing)
    assert [gain.layer for gain in gains] == [1, 3, 2]
    assert calls == [()]


def test_later_stages_train_and_round_what_it_leaves(tiny, tmp_path: Path) -> None:
    """A training mends what the windows cost; all of it is planned before."""
    source = tiny("llama", num_hidden_layers=LAYERS, dtype="fp32")
    data = text_source(tmp_path, samples=8)
    train = {**DISTILL, "tokens": 512, "rate": 1e-3}
    for name, stages in (("plain", ()), ("trained", (train,))):
        asked = recipe(hybrid(keep=[3]), *stages, calibration=data)
        run(asked, source, tmp_path / name)
    ids = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    assert kl(source, tmp_path / "trained", rows) < kl(source, tmp_path / "plain", rows)
    asked = recipe(hybrid(keep=[3]), GPTQ, calibration=data)
    plan, report = make_plan(asked, source), run(asked, source, tmp_path / "rounded")
    assert report.result.bytes == plan.shards.total_bytes
    assert plan.spec.model_type == "ministral"
    assert [stage.name for stage in report.stages] == ["hybrid", "quantize"]


@pytest.mark.long
def test_it_stands_behind_and_before_other_structural_stages(tiny, tmp_path: Path) -> None:
    source = tiny("llama", num_hidden_layers=LAYERS, num_key_value_heads=4, dtype="fp32")
    data = text_source(tmp_path, samples=16)
    asked = recipe(
        {"method": "prune_depth", "keep": [0, 1, 3]},
        hybrid(**{"global": 1}),
        {"method": "gqa", "groups": 2},
        calibration=data,
    )
    report = run(asked, source, tmp_path / "out")
    assert report.loads is not None
    assert report.loads.model_class == "MinistralForCausalLM"
    assert torch.isfinite(said(tmp_path / "out", TEXT)).all()


def test_options_survive_a_dump() -> None:
    asked = recipe(hybrid(**{"global": 2}), calibration={"sources": "self"})
    assert "global: 2" in dump(asked)
    assert parse(dump(asked)).edits == asked.edits
    assert asked.edits[0].describe() == "hybrid, window 4, global 2"


LONG = {"sources": "self", "samples": 4, "length": 64}
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", hybrid(), "global is missing; say how many layers see every position, or with keep"),
    ("llama", {"method": "hybrid", "global": 1}, "required key 'window' is missing"),
    (
        "llama",
        hybrid(window=0, keep=[0]),
        "window is 0; it is 1 token or more, or with a point",
    ),
    (
        "llama",
        hybrid(window=1.0, keep=[0]),
        "window is 1.0; it is 1 token or more, or with a",
    ),
    ("llama", hybrid(window=0.001, keep=[0]), "window: is 0.001: of 128 that is none; give more"),
    ("llama", hybrid(window=128, keep=[0]), "window: is 128, and the model reads 128 tokens, so"),
    (
        "llama",
        hybrid(**{"global": 2}),
        "global: is 2, and 2 layers of the model see every",
    ),
    ("llama", hybrid(**{"global": 3}), "global: is 3; the source has 2; give 1 to 2"),
    ("llama", hybrid(**{"global": 0}), "global: global is 0; 1 or more must stay"),
    ("llama", hybrid(**{"global": 0.25}), "of the source's 2 that is less than 1"),
    ("llama", hybrid(**{"global": 1}, keep=[1]), "keep is given beside global; one of them says"),
    ("llama", hybrid(keep=[1, 0]), "keep: keep is [1, 0]; it takes indices of layers, each once"),
    ("llama", hybrid(keep=[2]), "keep: has 2; the model's layers are 0 to 1"),
    ("llama", hybrid(keep=[0, 1]), "keep: is [0, 1], all layers that see every position, so"),
    ("gemma2", hybrid(window=32, keep=[0]), "keep: has 0, and layer 0 of the model has a window"),
    ("gemma2", hybrid(window=32, keep=[1]), "keep: is [1], all layers that see every position"),
    ("phi3", hybrid(keep=[0]), "phi3 has no class in which some layers have a window"),
    ("deepseek_v3", hybrid(keep=[0]), "deepseek_v3 has latent attention, and no class has that"),
    (
        "llama",
        hybrid(window=17, **{"global": 1}),
        "calibration.length: is 64; by: loss takes rows of 4 windows of 17, 68 tokens, so give",
    ),
    (
        "llama",
        hybrid(window=0.5, **{"global": 1}),
        "window: is 64 tokens; by: loss takes rows of 4 windows, 256 tokens, and the model reads",
    ),
]


@pytest.mark.parametrize(("family", "stage", "line"), REFUSALS, ids=range(len(REFUSALS)))
def test_what_cannot_be_is_refused_before_work(
    tiny, family: str, stage: dict[str, Any], line: str
) -> None:
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(stage, calibration=LONG), tiny(family))
    assert line in str(caught.value)


def test_what_does_not_go_with_it_is_refused(tiny) -> None:
    asked = hybrid(**{"global": 1})
    with pytest.raises(RecipeError, match=r"calibration.packing: is pad, and a padded text may be"):
        make_plan(recipe(asked, calibration={**LONG, "packing": "pad"}), tiny("llama"))
    with pytest.raises(RecipeError, match=r"stages\[1\].method: is a second hybrid; one of them"):
        recipe(hybrid(keep=[0]), hybrid(keep=[0]))
    with pytest.raises(RecipeError, match=r"'hybrid' needs calibration data"):
        recipe(asked)
    with pytest.raises(RecipeError, match=r"train: is changed, and no edit changes a tensor"):
        recipe(asked, {**DISTILL, "train": "changed"}, calibration=LONG)


@pytest.mark.long
@killed_at(0, 40)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    data = text_source(tmp_path, samples=2, length=16)
    asked = recipe(hybrid(**{"global": 1}), DISTILL, RTN, calibration=data)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    assert kill_at_each_fifth(asked, tiny("llama", **small), tmp_path / "runs", first, step)


def test_killed_while_it_chooses_it_chooses_the_same(tiny, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    asked = recipe(hybrid(**{"global": 1}), calibration=text_source(tmp_path, samples=2, length=16))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    assert kill_at_each_fifth(asked, tiny("llama", **small), tmp_path / "runs", 1, 31)
