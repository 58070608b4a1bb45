"""What tests of exports share: checkpoints opened, copied and compared."""

import shutil
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint
from compress.formats import Weights, open_weights
from compress.quant.scheme import QuantScheme

SYM, ASYM = QuantScheme(group_size=32), QuantScheme(group_size=32, symmetric=False)
CT = "compressed-tensors"


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def opened(folder: Path) -> Weights:
    weights = open_weights(Checkpoint.open(folder))
    assert weights.format.coded
    return weights


def assert_same_weights(before: Path, after: Path) -> None:
    """Every weight means the same numbers, and everything else is the same tensor."""
    a, b = opened(before), open_weights(Checkpoint.open(after))
    assert b.spec == a.spec
    for tensor in {x.tensor for x in a.spec.all_linears()}:
        x, y = a.quantized(tensor), b.quantized(tensor)
        if y is not None:
            assert x is not None
            assert torch.equal(x.dequantize(), y.dequantize()), tensor
        elif x is not None:  # dense: rounded once, to the dtype of the rest
            assert torch.equal(a.read(tensor).to(a.plain_dtype), b.read(tensor)), tensor
    plain = [
        n for n in a.checkpoint.tensors if n in b.checkpoint.tensors and ("norm" in n or "ln_" in n)
    ]
    assert plain
    assert all(torch.equal(a.read(name), b.read(name)) for name in plain)
