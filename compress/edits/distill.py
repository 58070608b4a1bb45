"""distill: trains what earlier edits left to say what the source says.

Knowledge distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531) on the model's own
logits, as Minitron does behind its cuts (https://arxiv.org/abs/2407.14679): no labels but the
teacher's. Scope `block` trains each block alone to give what the source's gave, scope `model` the
whole model on the divergence of its next tokens. Names, shapes and config.json stay as they are.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from compress.checkpoint.outline import Outline
from compress.distill.memory import (
    FP32,
    MicroBatch,
    adapter_shapes,
    all_shapes,
    block_bytes,
    model_bytes,
    some_shapes,
    tuned_shapes,
    walked_bytes,
)
from compress.distill.optimizer import OptimizerName
from compress.edits.edit import Edited
from compress.edits.writers import check_roles
from compress.errors import CheckpointError, RecipeError
from compress.quant.scheme import QuantScheme
from compress_calibration.config import CalibrationConfig, SourceConfig

FLOATS = ("F32", "BF16", "F16")
MICRO = 8  # rows at once: more were no faster on two cores
DEFAULT_LENGTH = 512  # of a row, where no calibration says
SOURCE = "source"  # the teacher that is the model that the run was given
# Options of scope model alone, with what they are where nothing is said.
OF_MODEL: Mapping[str, Any] = MappingProxyType(
    {"rank": 16, "loss": "kl", "ce": 0.0, "blocks": 0.0, "cache": 64, "recompute": False}
)
ScopeName = Literal["block", "model"]
TrainName = Literal["all", "changed", "lora", "rounding", "scales", "norms"]
TUNED: tuple[TrainName, ...] = ("rounding", "scales", "norms")  # of what rounding left


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """tokens: to train on, in each scope; texts that hold fewer are read again and again.

    scope: "block", "model", or both in this order. teacher: "source" for the model that the run was
    given, or another one that reads the same ids: a folder or a hub id.
    train: "all" parameters; of scope "model" those that edits have "changed", or "lora" (adapters
    of `rank` on all linears, merged in the end), while scope "block" trains all; behind stages that
    round some of "scales", "norms" and in scope "block" "rounding".
    loss: "kl" (of the student from the teacher), "reverse_kl" or "jsd"; ce: share of the text's own
    next token in it, 0 to 1; blocks: weight of the relative error of the blocks' outputs beside it,
    for which the teacher is in memory.
    rate: the peak; None for one that follows the damage. schedule, optimizer: docs/structure.md.
    batch: rows of a step. every: steps between two looks at held-out rows. patience: such looks
    without a better one after which it stops; 0 for never.
    cache: likeliest tokens of the teacher that are kept for each token, with the mass of the rest;
    0 for none: the teacher is then in memory too. recompute: blocks keep what enters them alone,
    and compute the rest again for the gradients: less memory for a third more time.
    sources, length: texts of its own and their rows; None for those of the calibration, behind its
    rows. samples: rows that are drawn at most, and read again for more tokens.
    """

    tokens: int
    scope: tuple[ScopeName, ...] = ("block", "model")
    teacher: str = SOURCE
    train: tuple[TrainName, ...] = ("all",)
    rank: int = 16
    loss: Literal["kl", "reverse_kl", "jsd"] = "kl"
    ce: float = 0.0
    blocks: float = 0.0
    rate: float | None = None
    schedule: Literal["cosine", "wsd"] = "cosine"
    optimizer: OptimizerName = "adamw"
    batch: int = 4
    every: int = 100
    patience: int = 0
    cache: int = 64
    recompute: bool = False
    sources: tuple[SourceConfig, ...] | None = None
    length: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        at_least = {"tokens": 1, "rank": 1, "batch": 1, "every": 1, "patience": 0, "cache": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise RecipeError(f"{name} is {getattr(self, name)}; it is {least} or more")
        if self.length is not None and self.length < 2:
            raise RecipeError(f"length is {self.length}; a row holds 2 tokens or more")
        if self.samples is not None and self.samples < 2:
            raise RecipeError(f"samples is {self.samples}; training takes 2 rows or more")
        if not 0 <= self.ce <= 1:
            raise RecipeError(f"ce is {self.ce:g}; it is a share, 0 to 1")
        if self.blocks < 0:
            raise RecipeError(f"blocks is {self.blocks:g}; it is 0 or more")
        if self.rate is not None and self.rate <= 0:
            raise RecipeError(f"rate is {self.rate:g}; it is above 0")
        if self.scope not in (("block",), ("model",), ("block", "model")):
            words = ", ".join(self.scope)
            raise RecipeError(f"scope is [{words}]; it takes block, model, or [block, model]")
        self._check_train()
        self._check_idle()

    def _check_train(self) -> None:
        words = ", ".join(self.train)
        if len(self.train) != 1 and not self.tunes:
            raise RecipeError(
                f"train is [{words}]; it takes all, changed or lora, and behind stages that round"
                " some of rounding, scales and norms"
            )
        if self.moves_codes and self.optimizer == "adafactor":
            raise RecipeError(
                "optimizer is adafactor, whose steps are shares of what it moves, and the rounding"
                " begins at 0; take adamw or muon"
            )
        if self.train == ("rounding",) and self.rate is not None:
            raise RecipeError(
                f"rate is {self.rate:g}, and train is rounding alone, which goes one way whatever"
                " the rate; leave it out, or train scales too"
            )
        alone = len(self.scope) == 1 or not self._of_model
        if self.moves_codes and "model" in self.scope and alone:
            raise RecipeError(
                f"scope is [{', '.join(self.scope)}], and rounding is trained block by block; set"
                " scope: block"
            )

    def _check_idle(self) -> None:
        """RecipeError for an option that would change nothing."""
        if self.scope == ("block",):
            said = next((x for x, none in OF_MODEL.items() if getattr(self, x) != none), None)
            if said is not None:
                raise RecipeError(
                    f"{said} is {getattr(self, said)}, which is of scope model, and scope is block;"
                    " leave it out, or set scope: [block, model]"
                )
            if self.train in (("changed",), ("lora",)):
                raise RecipeError(
                    f"train is {self.train[0]}, which is of scope model, and scope block trains all"
                    " of each block; leave it out, or set scope: [block, model]"
                )
        if self.rank != OF_MODEL["rank"] and self.train != ("lora",):
            raise RecipeError(f"rank is {self.rank}, that of adapters; set train: lora too")
        if self.blocks and self.cache != OF_MODEL["cache"]:
            raise RecipeError(
                f"cache is {self.cache}, and with blocks the teacher is in memory; leave one out"
            )

    @property
    def tunes(self) -> bool:
        """Whether it trains what stages that round have left."""
        return bool(self.train) and set(self.train) <= set(TUNED)

    @property
    def moves_codes(self) -> bool:
        """Whether it trains to which code a weight is rounded."""
        return "rounding" in self.train

    @property
    def _of_model(self) -> tuple[TrainName, ...]:
        """What scope model trains."""
        return tuple(each for each in self.train if each != "rounding")

    def rows(self, length: int) -> int:
        """Rows of so many tokens that are drawn at most."""
        whole = -(-self.tokens // length)
        return whole if self.samples is None else min(whole, self.samples)

    @property
    def by_cache(self) -> bool:
        """Whether what the teacher says is kept, and no teacher stays in memory."""
        return self.cache > 0 and not self.blocks

    def parts(self) -> Mapping[str, "DistillConfig"]:
        """Each scope is a pass of its own."""
        if len(self.scope) < 2:
            return {"": self}
        of_block = self.train if self.tunes else ("all",)
        return {
            "block": replace(self, scope=("block",), train=of_block, **OF_MODEL),
            "model": replace(self, scope=("model",), train=self._of_model),
        }


def plan(source: Outline, config: DistillConfig) -> Edited:
    """The same tensors. CheckpointError for weights that are no floats of 16 or 32 bits."""
    check_roles(source.spec)
    trained = {name for block in source.spec.blocks for name, _ in block.modules}
    tensors = [x for x in source.tensors.values() if x.name in trained]
    odd = next((x for x in tensors if x.dtype not in FLOATS), None)
    if odd is not None:
        raise CheckpointError(
            f"tensor {odd.name} is stored as {odd.dtype}; {', '.join(FLOATS)} can be trained"
        )
    return Edited(dict(source.config), tuple(source.entries))


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """What a pass trains. stored: the checkpoint of codes that stands for `model`, where stages
    have rounded it. changed: tensors that edits before the pass have changed."""

    model: Outline
    stored: Outline | None = None
    changed: Collection[str] = ()


def smaller(
    config: DistillConfig, student: Student, stage: str
) -> Iterator[tuple[str, DistillConfig]]:
    """Options that take less memory in scope model, the mildest first: as a command line sets them,
    and all of them. stage: its place in the recipe."""
    if config.scope != ("model",):
        return
    shared = f"--set {stage}.recompute=true"
    if not config.recompute:
        yield shared, replace(config, recompute=True)
    if config.tunes:
        return
    every: tuple[TrainName, ...] = ("all", "changed", "lora")
    for train in every[every.index(config.train[0]) + 1 :]:
        if train == "changed" and not student.changed:
            continue
        less, words = replace(config, train=(train,)), f"--set {stage}.train={train}"
        yield words, less
        yield f"{words} with {shared}", replace(less, recompute=True)
    block = replace(config, scope=("block",), train=("all",), **OF_MODEL)
    yield f"--set {stage}.scope=block", block


def row_length(config: DistillConfig, data: CalibrationConfig | None) -> int:
    """Tokens of a row. data: that the recipe calibrates on."""
    return config.length or (DEFAULT_LENGTH if data is None else data.length)


def training_bytes(
    student: Student,
    given: Outline,
    config: DistillConfig,
    data: CalibrationConfig | None,
    width: int = FP32,
) -> int:
    """Most bytes that a pass of one scope works with. given: the model that the teacher is. width:
    bytes of a number that blocks compute with."""
    whole = config.scope == ("model",)
    walks = (given, student.model) if not whole else (given,) if config.by_cache else ()
    length = row_length(config, data)
    walked = (walked_bytes(x, config.rows(length), length, head=whole) for x in walks)
    return max(_trained_bytes(student, given, config, data, width), *walked, 0)


def _trained_bytes(
    student: Student,
    given: Outline,
    config: DistillConfig,
    data: CalibrationConfig | None,
    width: int,
) -> int:
    """Of the training itself."""
    width = FP32 if config.tunes else width  # scales, norms and offsets are fp32 as they are
    length, rows = row_length(config, data), min(config.batch, MICRO)
    batch, model = MicroBatch(rows, length, checkpointed=config.recompute), student.model
    if config.scope == ("block",):
        moving = config.moves_codes
        return block_bytes(model, batch, config.optimizer, moving=moving, width=width).total
    trained = trained_shapes(config, student)
    teacher = None if config.by_cache else given
    return model_bytes(model, trained, batch, config.optimizer, teacher, width).total


def trained_shapes(config: DistillConfig, student: Student) -> list[tuple[int, ...]]:
    """Of what scope model trains."""
    if student.stored is not None:
        return tuned_shapes(student.model, student.stored)
    if config.train == ("lora",):
        return adapter_shapes(student.model.spec, config.rank)
    if config.train == ("changed",):
        return some_shapes(student.model, student.changed)
    return all_shapes(student.model)


def why_not_tuned(scheme: QuantScheme, coded: bool) -> str | None:
    """Why scales of such a linear cannot be trained; None where they can. coded: whether the
    result's format stores codes."""
    if not coded:
        return "the result stores dequantized weights, which have no scales"
    if scheme.type != "int":
        return f"codes of {scheme.describe()} are floats, and scales of integers can be trained"
    if scheme.activation is not None:
        return f"{scheme.describe()} rounds inputs too, and gradients do not pass through that"
    return None
