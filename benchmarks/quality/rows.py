"""What is measured: every method on every model, and what another tool makes of the same scheme."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.processes import SHARED

Tool = Literal["llm-compressor", "bitsandbytes"]
SAMPLES, LENGTH, DOCUMENTS = 128, 256, 120
CALIBRATION = SHARED / "text" / "tinystories" / "tinystories_train.txt"
TEXT = SHARED / "text" / "tinystories" / "tinystories_test.txt"


@dataclass(frozen=True, slots=True)
class Model:
    """A folder of ../shared/models. group: columns a scale has in 3 and 4 bits; None is a row."""

    name: str
    group: int | None

    @property
    def path(self) -> Path:
        return SHARED / "models" / self.name


@dataclass(frozen=True, slots=True)
class Peer:
    """flags: of the tool's script in benchmarks/peers. seeds: whether it looks at data."""

    tool: Tool
    flags: tuple[str, ...] = ()
    seeds: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One way to compress. stages: of our recipe; the model's groups go to the last one if
    `grouped`. seeds: whether ours looks at data. models: () is all of them."""

    group: str
    name: str
    stages: tuple[Mapping[str, Any], ...]
    peer: Peer | None
    seeds: bool = True
    grouped: bool = False
    models: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(stage["method"] for stage in self.stages)

    def is_for(self, model: Model) -> bool:
        return not self.models or model.name in self.models


MODELS = (Model("tale-6m", 128), Model("tale-6m-outliers", 128), Model("stories260K", None))
# Their layers are multiples of 128 wide, as blocks of 128 and groups of 16 want; 172 is neither.
WIDE = ("tale-6m", "tale-6m-outliers")


def llmc(scheme: str, *flags: str, seeds: bool = True) -> Peer:
    return Peer("llm-compressor", ("--scheme", scheme, *flags), seeds)


def weights(bits: int) -> tuple[Row, ...]:
    """Integers of that many bits in groups, activations as they are."""
    group, scheme = f"int{bits}", f"W{bits}A16"

    def row(name: str, peer: Peer | None, *stages: Mapping[str, Any], seeds: bool = True) -> Row:
        return Row(group, name, (*stages[:-1], {**stages[-1], "scheme": scheme}), peer, seeds, True)

    awq, gptq = {"method": "awq"}, {"method": "gptq"}
    return (
        row("rtn", llmc(scheme, seeds=False), {"method": "rtn"}, seeds=False),
        row("gptq", llmc(scheme, "--round", "gptq"), gptq),
        row("awq", llmc(scheme, "--fold", "awq"), awq),
        row("awq+gptq", llmc(scheme, "--fold", "awq", "--round", "gptq"), awq, gptq),
    )


def w8a8() -> tuple[Row, ...]:
    """Integers of 8 bits on both sides. llm-compressor's examples smooth with 0.8, not with its
    default."""
    smooth = {"method": "smoothquant"}
    gptq = {"method": "gptq", "scheme": "W8A8"}
    fold = ("--fold", "smoothquant")
    rtn = ({"method": "rtn", "scheme": "W8A8"},)
    both = ("--round", "gptq")
    strong = (*fold, "--strength", "0.8")
    return (
        Row("w8a8", "rtn", rtn, llmc("W8A8", seeds=False), seeds=False),
        Row("w8a8", "gptq", (gptq,), llmc("W8A8", *both)),
        Row("w8a8", "smoothquant", ({**smooth, "scheme": "W8A8"},), llmc("W8A8", *fold)),
        Row("w8a8", "smoothquant static", ({**smooth, "scheme": "W8A8_STATIC"},), None),
        Row("w8a8", "smoothquant+gptq", (smooth, gptq), llmc("W8A8", *fold, *both)),
        Row("w8a8", "smoothquant+gptq, 0.8", (smooth, gptq), llmc("W8A8", *strong, *both)),
    )


def floats() -> tuple[Row, ...]:
    """E4M3 and NVFP4. What chooses scales for inputs before the run looks at data."""

    def row(scheme: str, method: str, seeds: bool, models: tuple[str, ...] = ()) -> Row:
        stage = {"method": method, "scheme": scheme}
        return Row("float", scheme, (stage,), llmc(scheme, seeds=seeds), seeds, False, models)

    return (
        row("FP8_DYNAMIC", "fp8", False),
        row("FP8", "fp8", True),
        row("FP8_BLOCK", "fp8", False, WIDE),
        row("NVFP4A16", "nvfp4", False, WIDE),
    )


def llm_int8() -> tuple[Row, ...]:
    peer = Peer("bitsandbytes", seeds=False)

    def row(name: str, scheme: str, seeds: bool) -> Row:
        return Row("llm_int8", name, ({"method": "llm_int8", "scheme": scheme},), peer, seeds)

    return (row("dynamic", "LLM_INT8", False), row("calibrated", "LLM_INT8_CALIBRATED", True))


ROWS = (*weights(4), *weights(3), *w8a8(), *floats(), *llm_int8())
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))


@dataclass(frozen=True, slots=True)
class Cell:
    """A row on a model by one tool, over all calibration seeds."""

    model: Model
    row: Row
    tool: str
    flags: tuple[str, ...] = ()
    stages: tuple[Mapping[str, Any], ...] = field(default=())
    seeds: int = 1

    @property
    def label(self) -> str:
        return f"{self.model.name} {self.row.group} {self.row.name} {self.tool}"


OURS = "compress-model"


def our_cell(model: Model, row: Row, seeds: int) -> Cell:
    """Ours; the last stage has the model's group size where the row is grouped."""
    stages = row.stages
    if row.grouped:
        size = {"granularity": "channel"} if model.group is None else {"group_size": model.group}
        stages = (*stages[:-1], {**stages[-1], **size})
    return Cell(model, row, OURS, stages=stages, seeds=seeds if row.seeds else 1)


def peer_cell(model: Model, row: Row, seeds: int) -> Cell | None:
    """The other tool's, None where there is none."""
    peer = row.peer
    if peer is None:
        return None
    flags = peer.flags
    if row.grouped:
        flags += ("--channel",) if model.group is None else ("--group-size", str(model.group))
    return Cell(model, row, peer.tool, flags, seeds=seeds if peer.seeds else 1)
