"""What every exporter is: a row of functions, and the data that goes in and comes out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from compress.errors import DependencyError
from compress.formats.weights import Weights
from compress_exporters.packages import installed, too_old

DenseDtype = Literal["fp32", "fp16", "bf16"]
EmbeddingKind = Literal["f16", "q8_0", "q6_k"]
if TYPE_CHECKING:
    from torch import Tensor


class RoundedRows(Protocol):
    """Weights that are rounded into blocks already."""

    def rows(self, tensor: str, start: int, stop: int) -> "Tensor":
        """Blocks of rows of a checkpoint's weight [N, K], in its order: uint8 [n, bytes]."""


# (what was just written, how many of them are, of how many).
Progress = Callable[[str, int, int], None]


CALIBRATION = "the recipe's calibration"


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose; a field that a target does not read has no effect on it.

    dtype: of dense weights and of what is computed in between; None for the target's own choice:
    16 bits in GGUF files, whose embedding and head then have `embedding`, fp32 elsewhere.
    max_context: positions that tables of positions are made for; None for what the model reads.
    round_scales: let scales change that the target cannot hold exactly. accuracy_level: of products
    with 4 and 8 bits, where a target's operators have it: 4 rounds inputs to int8, which is fast,
    and 0 leaves them as they are. in_place: the artifact goes beside the checkpoint's weights and
    points to those that it can take as they lie; for targets that say how (Exporter.in_place).
    embedding: of GGUF files, how embedding and head are stored where they are dense. type: of GGUF
    files, the mixture of types that dense weights are rounded to, by llama.cpp's name (Q4_K_M).
    imatrix: path of a file of llama-imatrix, which says what errors in a column weigh. text: a
    file, or several by a pattern: weights are rounded by what they read of it; in a recipe
    CALIBRATION, the recipe's own. imatrix_out: path of a file, for llama-quantize, of what columns
    multiply in that text.
    """

    dtype: DenseDtype | None = None
    max_context: int | None = None
    round_scales: bool = False
    accuracy_level: Literal[0, 4] = 4
    in_place: bool = False
    embedding: EmbeddingKind | None = None
    type: str | None = None
    imatrix: str | None = None
    text: str | None = None
    imatrix_out: str | None = None

    @property
    def computed(self) -> Literal["fp32", "fp16"]:
        """What a graph computes in."""
        assert self.dtype != "bf16", "no graph computes in bf16"
        return self.dtype or "fp32"


@dataclass(frozen=True, slots=True)
class Written:
    """files: names below the folder. notes: what was converted, widened or left out, a line each.

    beside: names of small files of the source that lie there too, and whose bytes do not count:
    the artifact is one file without them.

    fused: operator of the target that does several steps at once -> how many. unfused: what stayed
    in single steps -> why.
    """

    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    fused: Mapping[str, int] = field(default_factory=dict)
    unfused: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the artifact was checked.

    level: "form": it is well-formed, which needs no runtime. "loads": its runtime opens it.
    "logits": they are those of the weights in our decoder. "tokens": so are the tokens it chooses.
    max_logit_error: largest difference of a logit, None where none were computed. detail: what was
    compared, or why no more was, a line each.
    """

    level: Literal["form", "loads", "logits", "tokens"]
    max_logit_error: float | None = None
    detail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InPlace:
    """How a target is added to the checkpoint's own folder, where Options.in_place asks for it.

    graph: the file without which the others mean nothing. unproved: its name in the checkpoint's
    folder until `verify`, which is given that folder, has taken it. others: names of all else that
    `write` may make, which takes none that the graph that is there reads. reads: names of what a
    graph of ours reads; None for another tool's.
    """

    graph: str
    unproved: str
    others: tuple[str, ...]
    reads: Callable[[Path], frozenset[str] | None]


class PlannedExport(Protocol):
    """An artifact that is worked out and not written: what a target makes of a source."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is converted, widened or left out, a line each."""

    @property
    def size(self) -> int:
        """Bytes of the weights that `write` writes, or a few more."""

    @property
    def linked(self) -> int:
        """Bytes of the checkpoint that stay where they are, which Options.in_place asks for."""

    def write(self, folder: Path, progress: Progress) -> Written:
        """Fills an empty folder. OutputError where the disk refuses, CheckpointError for weights
        that are not finite."""

    def verify(self, folder: Path) -> Proof:
        """Compares a written folder with the source; CheckpointError for an artifact that is
        wrong."""

    def start(self, folder: Path) -> tuple[str, ...]:
        """Lines that start the target's runtime on what lies in that folder, a block of text
        each."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """A row of EXPORTERS.

    summary: one line for `--help`.
    plan: looks at the source once, before anything is written, and reads what lies beside the
        codes; codes only where the target's answer depends on them. RecipeError or CheckpointError,
        in one line that names the nearest target, for what the target cannot say.
    in_place: None for a target that has no such way.
    positive_scales: whether integers keep their width only where no scale is below 0.
    dtypes: of dense weights that it has. blocks: it has types of blocks for them, too.
    """

    name: str
    summary: str
    plan: Callable[[Weights, Options], PlannedExport]
    in_place: InPlace | None = None
    positive_scales: bool = False
    dtypes: tuple[DenseDtype, ...] = ("fp32", "fp16")
    blocks: bool = False


# What to do where a disk refuses: an export is not resumed.
AGAIN = "look after the disk, then export again"


def require(target: str, extra: str, *modules: str) -> None:
    """DependencyError, with the extra to install, unless the modules are there and new enough."""
    missing = [name for name in modules if not installed(name)]
    if missing:
        raise DependencyError(
            f"{target} needs {', '.join(missing)}; install it with"
            f' `pip install "compress-model[{extra}]"`'
        )
    for name in modules:
        if (old := too_old(name)) is not None:
            raise DependencyError(
                f'{target} needs {old}; run `pip install -U "compress-model[{extra}]"`'
            )
