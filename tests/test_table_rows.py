"""Rows of METHODS and FORMATS: mypy refuses one whose functions do not fit."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
# Only what the rows are made of is read, or a call takes a minute: of other modules, torch among
# them, every name is Any here.
SETTINGS = """[mypy]
strict = True
disallow_any_unimported = False
follow_imports = skip
explicit_package_bases = True
mypy_path = {path}
[mypy-{read}]
follow_imports = silent
ignore_errors = True
"""


METHODS_HEAD = """
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
    raise NotImplementedError  # mypy reads it, nothing calls it

"""
METHODS_ROW = "row(RtnConfig, rtn.quantize, '', why_not=rtn.why_not, needs=rtn.needs)"
WRONG_METHODS = {
    "a quantize that takes no observed inputs": "rtn.quantize -> without_inputs",
    "a quantize that returns no list": "rtn.quantize -> one_outcome",
    "a quantize of another method's options": "rtn.quantize -> gptq.quantize",
    "a why_not of another kind": "rtn.why_not -> rtn.needs",
    "needs of another method's options": "rtn.needs -> gptq.needs",
    "options of another method": "RtnConfig -> GptqConfig",
}
FORMATS_HEAD = """
from collections.abc import Mapping
from torch import Tensor
from compress.checkpoint.shards.layout import Entry
from compress.formats import dense
from compress.formats.format import Format
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

def config(spec: object, shapes: object, schemes: object, *, with_g_idx: object = (),
           kv_cache: object = None) -> None: ...

def no_order(name: str, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: str, *,
             transposed: bool = False) -> list[Entry]:
    return []

def one_tensor(name: str, tensor: QuantizedTensor, *, dtype: object = None,
               transposed: bool = False) -> int:
    return 0

def shapeless(scheme: QuantScheme) -> str | None:
    return None

"""
FORMATS_ROW = "Format('x', None, dense.why_not, dense.layout, dense.encode, config, None)"
WRONG_FORMATS = {
    "a layout that knows no order of columns": "dense.layout -> no_order",
    "an encode that returns no tensors by name": "dense.encode -> one_tensor",
    "a why_not that takes no shape": "dense.why_not -> shapeless",
    "a layout in the place of a config": "config -> dense.layout",
}
METHODS_READ = "compress.methods.*,compress.quant.scheme"
FORMATS_READ = (
    "compress.formats.format,compress.formats.dense,compress.quant.*,compress.checkpoint.*"
)


def refused(head: str, rows: list[str], read: str, folder: Path) -> list[bool]:
    """Whether mypy finds an error at each row; rows are expressions of one line.

    head: the lines before them. read: modules that are looked at, with commas between.
    """
    file, settings = folder / "rows.py", folder / "mypy.ini"
    file.write_text(head + "\n".join(rows) + "\n")
    settings.write_text(SETTINGS.format(path=REPO, read=read))
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), str(file)]
    command += ["--cache-dir", str(folder / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    lines = {int(x.split(":")[1]) for x in done.stdout.splitlines() if x.startswith(file.name)}
    first = head.count("\n") + 1
    assert lines <= set(range(first, first + len(rows))), done.stdout
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [first + i in lines for i in range(len(rows))]


@pytest.mark.parametrize(
    ("head", "row", "wrong", "read"),
    [
        (METHODS_HEAD, METHODS_ROW, WRONG_METHODS, METHODS_READ),
        pytest.param(
            *(FORMATS_HEAD, FORMATS_ROW, WRONG_FORMATS, FORMATS_READ), marks=pytest.mark.long
        ),
    ],
    ids=["methods", "formats"],
)
def test_mypy_refuses_rows_that_do_not_fit(
    tmp_path: Path, head: str, row: str, wrong: dict[str, str], read: str
) -> None:
    rows = [row, *(row.replace(*change.split(" -> ")) for change in wrong.values())]
    found = dict(zip(("fits", *wrong), refused(head, rows, read, tmp_path), strict=True))
    assert found == {"fits": False} | dict.fromkeys(wrong, True)
