"""Lines that open a result: only for runtimes that take it."""

from dataclasses import replace

import pytest

from compress.formats import Verdict
from compress.formats.runtimes.snippets import all_lines, why_not_opened
from compress.runs.card import model_card
from compress.verbs import Plan, make_plan
from helpers.short_runs import RTN, recipe

PYTHON = (
    "from transformers import AutoModelForCausalLM",
    'model = AutoModelForCausalLM.from_pretrained("/my out")',
)


@pytest.fixture
def plan(tiny) -> Plan:
    return make_plan(recipe(RTN), tiny("llama"))


def with_verdicts(plan: Plan, transformers: str, vllm: str) -> Plan:
    found = (Verdict("transformers", transformers, ""), Verdict("vLLM on CPU", vllm, ""))
    return replace(plan, runtimes=found)


def lines(plan: Plan) -> tuple[str, ...]:
    return all_lines(plan.format, plan.runtimes, "/my out")


def test_a_line_for_each_runtime_that_takes_it(plan: Plan) -> None:
    first, server = "pip install compressed-tensors", "vllm serve '/my out'"
    assert lines(with_verdicts(plan, "yes", "yes")) == (first, "", *PYTHON, "", server)
    assert lines(with_verdicts(plan, "yes", "expected")) == (first, "", *PYTHON)
    assert lines(with_verdicts(plan, "no", "yes")) == (server,)
    assert lines(with_verdicts(plan, "no", "no")) == ()
    assert why_not_opened(plan.format, with_verdicts(plan, "yes", "no").runtimes, "") is None


def test_without_a_line_there_is_the_reason() -> None:
    found = (Verdict("transformers", "no", "q is odd"), Verdict("vLLM on GPU", "expected", "rules"))
    reason = (
        "vLLM on GPU is expected to take it, which was not tried; others do not, transformers:"
        " q is odd"
    )
    assert why_not_opened("gptq", found, "--to dense") == f"{reason}; --to dense loads anywhere"
    assert why_not_opened("dense", found, "") == reason
    both = (*found, Verdict("vLLM on CPU", "expected", ""))
    assert why_not_opened("dense", both, "") == reason.replace("GPU is", "GPU and vLLM on CPU are")
    assert why_not_opened("dense", found[:1], "") == (
        "no runtime is known to take it: transformers: q is odd"
    )


DEQUANTIZE = "quantization_config=CompressedTensorsConfig(dequantize=True)"
FLOAT_INPUTS = {"bits": 4, "group_size": 32, "activation": {"type": "float"}}


@pytest.mark.parametrize(
    ("stage", "option"),
    [
        ({"method": "rtn", "scheme": "W4A16_ASYM", "group_size": 32}, DEQUANTIZE),
        ({"method": "rtn", "scheme": "W8A16_ASYM"}, DEQUANTIZE),
        ({"method": "rtn", "scheme": FLOAT_INPUTS}, DEQUANTIZE),
        ({"method": "nvfp4", "scheme": "NVFP4A16"}, 'dtype="bfloat16"'),
    ],
)
def test_the_option_that_transformers_needs_is_in_the_line(tiny, stage, option: str) -> None:
    plan = make_plan(recipe(stage), tiny("llama"))
    first, _, imports, call, *_ = lines(plan)
    assert first == "pip install compressed-tensors"
    assert call == f'model = AutoModelForCausalLM.from_pretrained("/my out", {option})'
    assert ("CompressedTensorsConfig" in imports) == (option == DEQUANTIZE)
    compile(f"{imports}\n{call}", "lines", "exec")


@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2", "awq"])
def test_vllm_is_told_the_dtype_of_the_scales(tiny, fmt: str) -> None:
    plan = make_plan(recipe(RTN, output={"format": fmt}), tiny("llama"))
    assert lines(with_verdicts(plan, "yes", "yes")) == (
        "pip install gptqmodel optimum",
        "",
        *PYTHON,
        "",
        "vllm serve '/my out' --dtype half",
    )


def test_dense_results_need_nothing_else(tiny) -> None:
    plan = make_plan(recipe(RTN, output={"format": "dense"}), tiny("llama"))
    assert lines(with_verdicts(plan, "yes", "no")) == PYTHON


def test_the_card_shows_them(plan: Plan) -> None:
    card = model_card(with_verdicts(plan, "yes", "yes"), "tiny", "1").decode()
    assert "With `pip install compressed-tensors`:\n```python\nfrom transformers" in card
    assert card.endswith("```sh\nvllm serve FOLDER\n```\n")
    assert "How to open" not in model_card(with_verdicts(plan, "no", "no"), "tiny", "1").decode()


def test_the_card_speaks_of_quality_only_where_it_was_measured(tiny, plan: Plan) -> None:
    assert plan.recipe.evaluation is None
    card = model_card(plan, "tiny", "1").decode()
    assert "quality was not measured; `compress-model eval` does." in card
    assert "report.html" not in card
    measured = recipe(RTN, evaluation={"texts": ["self"]})
    card = model_card(make_plan(measured, tiny("llama")), "tiny", "1").decode()
    assert "What that cost in\nquality is in `report/report.html`." in card
