"""What a method needs of a run under its options: asked of its row."""

import pytest

from compress.methods import METHODS
from compress.methods.observed import Needs


@pytest.mark.parametrize(
    ("method", "options", "needs"),
    [
        ("rtn", {"scale_search": "mse"}, Needs()),
        ("rtn", {"scale_search": "output"}, Needs(hessian=True)),
        ("fp8", {"scale_search": "importance"}, Needs(hessian=True)),
        ("nvfp4", {"scale_search": "minmax"}, Needs()),
        ("gptq", {}, Needs(hessian=True, experts="all")),
        (
            "gptq",
            {"act_order": "group", "true_sequential": True, "experts": "routed"},
            Needs(hessian=True, sequential=True, experts="routed", g_idx=True),
        ),
        ("awq", {}, Needs(hessian=True, magnitudes=True)),
        ("smoothquant", {}, Needs(hessian=True, magnitudes=True, pairs="norms")),
        ("smoothquant", {"pairs": "all"}, Needs(hessian=True, magnitudes=True)),
        ("llm_int8", {"experts": "routed"}, Needs(experts="routed")),
    ],
)
def test_a_row_says_what_its_options_ask_of_a_run(
    method: str, options: dict[str, object], needs: Needs
) -> None:
    row = METHODS[method]
    assert row.needs(row.config(**options)) == needs
    assert needs.data == (needs.hessian or needs.magnitudes)
