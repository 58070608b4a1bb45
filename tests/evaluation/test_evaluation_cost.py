"""What an evaluation says before it starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from compress.errors import DataError
from compress.evaluation import cost
from compress.evaluation.windows import WindowRule, cut_windows
from compress.events import Event
from compress.plan import probes
from compress.plan.probes import MachineRates
from compress.recipe.evaluation_config import EvaluationConfig
from compress.verbs import EvaluationOptions, evaluate_checkpoint, make_plan
from helpers.short_runs import RTN, WORDS, recipe

SLOW = MachineRates(product=1e9, product_fp32=1e9, gram=1e9, search=1e9, elementwise=1e9)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "measure_rates", lambda dtype: SLOW)


@pytest.mark.usefixtures("slow")
def test_a_long_evaluation_says_how_long_and_how_to_shorten_it(tiny) -> None:
    spec, config = make_plan(recipe(RTN), tiny("llama")).spec, EvaluationConfig()
    short, long = (cut_windows("t", [[1] * n], WindowRule(128, 64)) for n in (65, 6401))
    assert cost.announcement([short], spec, config, 2) == "64 tokens in 1 window"
    wide = replace(spec, vocab=1_000_000)
    line = cost.announcement([long], wide, config, 2)
    assert line.startswith("6,400 tokens in 100 windows, about ")
    assert line.endswith("max_tokens of a text (eval: --max-tokens) takes fewer")
    elsewhere = cost.announcement([long], wide, config, 2, "cuda")
    assert elsewhere == "6,400 tokens in 100 windows"


@pytest.mark.usefixtures("slow")
def test_time_goes_with_the_tokens_and_the_models(tiny) -> None:
    spec, config = make_plan(recipe(RTN), tiny("llama")).spec, EvaluationConfig()
    wide = replace(spec, vocab=100_000)

    def seconds(tokens: int, models: int) -> float:
        windows = [cut_windows("t", [[1] * (tokens + 1)], WindowRule(128, 64))]
        return cost.evaluation_seconds(windows, wide, config, models)

    assert seconds(6400, 2) == pytest.approx(10 * seconds(640, 2), rel=0.1)
    assert 2 * seconds(640, 1) < seconds(640, 2) < 3 * seconds(640, 1)


@pytest.mark.usefixtures("slow")
def test_a_token_costs_the_experts_it_is_sent_to(tiny) -> None:
    spec, config = make_plan(recipe(RTN), tiny("mixtral")).spec, EvaluationConfig()
    windows = [cut_windows("t", [[1] * 6401], WindowRule(128, 64))]
    experts = [x.shape[0] * x.shape[1] for x in spec.linears() if x.expert is not None]
    everywhere = replace(spec, experts_per_token=spec.experts)
    more = cost.evaluation_seconds(windows, everywhere, config, 1)
    more -= cost.evaluation_seconds(windows, spec, config, 1)
    left_out = 1 - spec.experts_per_token / spec.experts
    seen = int(windows[0].lengths.sum())
    assert 0 < left_out < 1
    assert more == pytest.approx(2 * seen * sum(experts) * left_out / SLOW.product, rel=0.2)


def test_max_tokens_of_eval(tiny, tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text(WORDS * 40)
    events: list[Event] = []

    def tokens(limit: int | None) -> int:
        report = evaluate_checkpoint(
            tiny("llama"),
            EvaluationOptions(texts=[str(file)], max_tokens=limit, device="cpu"),
            progress=events.append,
        )
        assert report.quality is not None
        return report.quality.texts[0].tokens

    assert tokens(20) == 20
    assert events[0].stage == "evaluate"
    assert events[0].unit == "texts read"
    assert events[1].message == "20 tokens in 1 window"
    assert tokens(None) > 500


def test_max_tokens_of_text_that_the_model_writes(tiny) -> None:
    events: list[Event] = []
    report = evaluate_checkpoint(
        tiny("llama"),
        EvaluationOptions(texts=["self"], max_tokens=200, device="cpu"),
        progress=events.append,
    )
    assert events[0].message == "the model writes 2 rows of 128 tokens"
    assert report.quality is not None
    (text,) = report.quality.texts
    assert text.tokens == 200
    assert text.settings["max_tokens"] == 200


def test_a_text_that_is_not_there_stops_eval(tiny) -> None:
    with pytest.raises(
        DataError, match=r"^evaluation text 'nope': nope.txt: there is no such file"
    ):
        evaluate_checkpoint(tiny("llama"), EvaluationOptions(texts=["nope.txt"]))
