"""Rows of METHODS: what a method needs of a run, and that mypy refuses a row that does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest

from compress.methods import METHODS
from compress.methods.observed import Needs

REPO = Path(__file__).resolve().parents[2]
# Only the methods and what describes a scheme are read, or a call takes a minute: of other modules,
# torch among them, every name is Any here.
SETTINGS = f"""[mypy]
strict = True
disallow_any_unimported = False
follow_imports = skip
explicit_package_bases = True
mypy_path = {REPO}
[mypy-compress.methods.*,compress.quant.scheme]
follow_imports = silent
ignore_errors = True
"""
HEAD = """
from collections.abc import Sequence
import torch
from torch import Tensor
from compress.methods import gptq, rtn
from compress.methods.gptq import GptqConfig
from compress.methods.method import row
from compress.methods.observed import UNOBSERVED, Observed
from compress.methods.outcome import Outcome
from compress.methods.rtn import RtnConfig
from compress.quant.scheme import QuantScheme

def without_inputs(
    weights: Sequence[Tensor], scheme: QuantScheme, config: RtnConfig, *, scale_dtype: torch.dtype
) -> list[Outcome]:
    return []

def one_outcome(
    weights: Sequence[Tensor], scheme: QuantScheme, config: RtnConfig, *,
    scale_dtype: torch.dtype, observed: Observed = UNOBSERVED,
) -> Outcome:
    raise NotImplementedError

"""
FITS = "row(RtnConfig, rtn.quantize, '', why_not=rtn.why_not, needs=rtn.needs)"
WRONG = {
    "a quantize that takes no observed inputs": "rtn.quantize -> without_inputs",
    "a quantize that returns no list": "rtn.quantize -> one_outcome",
    "a quantize of another method's options": "rtn.quantize -> gptq.quantize",
    "a why_not of another kind": "rtn.why_not -> rtn.needs",
    "needs of another method's options": "rtn.needs -> gptq.needs",
    "options of another method": "RtnConfig -> GptqConfig",
}


def test_mypy_refuses_rows_that_do_not_fit(tmp_path: Path) -> None:
    """All in one file and one call: line by line, so that each is refused by itself."""
    rows = [FITS, *(FITS.replace(*change.split(" -> ")) for change in WRONG.values())]
    file, settings = tmp_path / "rows.py", tmp_path / "mypy.ini"
    file.write_text(HEAD + "\n".join(rows) + "\n")
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    first = HEAD.count("\n") + 1
    refused = {
        int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("rows.py")
    }
    assert refused == set(range(first + 1, first + len(rows))), done.stdout + done.stderr


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
