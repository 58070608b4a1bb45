"""The tensors that a checkpoint of a config has, told by the tables alone: for files that call them
something else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compress.arch.describe import expand, fits, rows_of
from compress.arch.families.family import Family, TensorRow
from compress.arch.families.table import FAMILIES
from compress.arch.names import join
from compress.arch.sizes import BlockSizes, Sizes, read_sizes
from compress.arch.text_config import text_config
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """Names as transformers' own save_pretrained writes them, with shapes as they lie on disk.

    must: those that are always there. may: biases that may be there or not, by the weight that each
    belongs to. head: the output head, where it is not the embedding.
    """

    must: Mapping[str, tuple[int, ...]]
    may: Mapping[str, tuple[str, tuple[int, ...]]]
    head: tuple[str, tuple[int, ...]]


def expected_tensors(config: Mapping[str, Any]) -> ExpectedTensors:
    """config: config.json. CheckpointError for a family that is in no table, and as `describe`."""
    _, text = text_config(config)
    model_type = text.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not fits(family, text):
        raise CheckpointError(
            f"config.json: model_type is {model_type!r}, whose tensors are in no table of families;"
            " give the checkpoint in safetensors"
        )
    sizes = read_sizes(text, family.sizes)
    must: dict[str, tuple[int, ...]] = {}
    may: dict[str, tuple[str, tuple[int, ...]]] = {}
    for row, path, block in _modules(family, sizes):
        logical = tuple(sizes.of(name, block) for name in row.dims)
        must[f"{path}.weight"] = logical[::-1] if row.transposed else logical
        wanted = text.get(row.bias) if isinstance(row.bias, str) else row.bias
        bias = f"{path}.bias", logical[:1]
        if wanted:
            must[bias[0]] = bias[1]
        else:
            may[f"{path}.weight"] = bias
    return ExpectedTensors(must, may, (family.head[0], (sizes.vocab, sizes.hidden)))


def _modules(family: Family, sizes: Sizes) -> Iterator[tuple[TensorRow, str, BlockSizes | None]]:
    """Every row with the path of its module, and the sizes of its block."""
    for row in family.outside:
        yield row, join(family.root, row.disk), None
    for index in range(sizes.layers):
        block = sizes.block(index)
        for row, expert in rows_of(family, block):
            path = f"{family.blocks}.{index}.{expand(row.disk, expert)}"
            yield row, join(family.root, path), block
