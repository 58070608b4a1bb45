"""Recipe and Stage: what to do to a checkpoint, in order; complete after parsing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from compress.errors import RecipeError
from compress.quant.scheme import QuantScheme, Signs
from compress.recipe.evaluation_config import EvaluationConfig
from compress.recipe.keys import key_of
from compress_calibration.config import CalibrationConfig

OutputFormat = Literal[
    "auto",
    "compressed-tensors",
    "gptq",
    "gptq_v2",
    "awq",
    "fp8",
    "modelopt",
    "bitsandbytes",
    "gguf",
    "dense",
]
KvCache = Literal["fp8", "int8"]
Sensitivity = Literal["output_error", "kl"]
DEFAULT_TARGETS = ("*",)
# These two words mean a role, whatever the layer is called, and may match nothing.
DEFAULT_IGNORE = ("lm_head", "router")
MOST_BYTES = 2**63 - 1
DEFAULT_SHARD_SIZE = 5_000_000_000


def default_ignore(targets: Iterable[str]) -> tuple[str, ...]:
    """What a stage leaves that says nothing of it: the two words, but one that it names."""
    return tuple(word for word in DEFAULT_IGNORE if word not in targets)


@dataclass(frozen=True, slots=True)
class Places:
    """Where each value of a recipe was written: key path -> "file.yaml:12" or "--set a=b"."""

    table: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def at(self, path: str) -> str:
        """ "file.yaml:12: stages[0].bits", for the front of a message about that key.

        A key that was left out has the place of what holds it; without any place (a Recipe built
        in Python) the path stands alone.
        """
        holder = path
        while holder and holder not in self.table:
            holder = holder[: max(holder.rfind("."), holder.rfind("["), 0)]
        place = self.table.get(holder)
        return f"{place}: {path}" if place else path


@dataclass(frozen=True, slots=True)
class Target:
    """What the layers of a stage may take, scales and zeros included: bits for each of their
    weights, bytes of them all, or what they leave each other of the bytes of a `prune` in front.
    RecipeError unless one of the three is given, and above 0."""

    bits_per_weight: float | None = None
    bytes: int | None = None
    of: Literal["prune"] | None = None

    def __post_init__(self) -> None:
        if self.of is not None and (self.bits_per_weight, self.bytes) != (None, None):
            raise RecipeError("of is prune, whose bytes are shared; take the other number out")
        if self.of is None and (self.bits_per_weight is None) == (self.bytes is None):
            given = "neither" if self.bytes is None else "both"
            raise RecipeError(f"gives {given} of bits_per_weight and bytes; it takes one of them")
        for key in ("bits_per_weight", "bytes"):
            value = getattr(self, key)
            if value is not None and not 0 < value <= MOST_BYTES:
                most = f", {MOST_BYTES} at most" if value > MOST_BYTES else ""
                raise RecipeError(f"{key} is {value}; it is a number above 0{most}")

    def describe(self) -> str:
        """ "4.25 bits a weight", "4000000000 bytes" or "the bytes of prune"."""
        if self.of is not None:
            return f"the bytes of {self.of}"
        if self.bytes is not None:
            return f"{self.bytes} bytes"
        return f"{self.bits_per_weight:g} bits a weight"


@dataclass(frozen=True, slots=True)
class Claim:
    """What an override takes from its stage and from the overrides before it.

    targets, ignore: patterns as a stage's; they count within the targets of the stage.
    skip: whether the layers stay as they are.
    path: of the override, "stages[0].overrides[1]".
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    skip: bool = False
    path: str = field(default="", compare=False)


@runtime_checkable
class HasSigns(Protocol):
    """Options of a method that may choose the signs of its scales."""

    signs: Signs


@dataclass(frozen=True, slots=True)
class Stage:
    """One method over some layers.

    method: a key of compress.methods.METHODS; config: an instance of that row's dataclass.
    scheme: how the layers are stored; None for a method that only scales channels, where a later
        stage says it, and for one that rounds the whole model.
    candidates, target: in place of a scheme, those of which each layer gets one, so that all of
        them together stay within the target and lose as little as possible.
    sensitivity: how the loss of a candidate is measured.
    targets, ignore: patterns (compress.recipe.matching); a layer is taken when a target names it
        and no ignore does.
    index: place in the recipe.
    within: for an override, which is a stage of its own: the targets of the stage it belongs to,
        one of which must name a layer too; empty for any other stage.
    claims: overrides that win over this stage; for an override those behind it.
    path: what messages call the stage, "stages[0]" or "stages[0].overrides[1]".
    """

    method: str
    config: Any
    scheme: QuantScheme | None
    targets: tuple[str, ...] = DEFAULT_TARGETS
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    index: int = 0
    candidates: tuple[QuantScheme, ...] = ()
    target: Target | None = None
    sensitivity: Sensitivity = "output_error"
    within: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    path: str = field(default="", compare=False)
    places: Places = field(default_factory=Places, compare=False, repr=False)

    @property
    def label(self) -> str:
        """ "stages[0]" or "stages[0].overrides[1]", for a message."""
        return self.path or f"stages[{self.index}]"

    @property
    def signs(self) -> Signs:
        """Of the scales that its method may choose; "auto" for a method that has no such choice."""
        return self.config.signs if isinstance(self.config, HasSigns) else "auto"

    @property
    def base(self) -> str:
        """The label of the stage that an override belongs to; of any other its own."""
        return self.label.partition(".overrides[")[0]

    def at(self, key: str) -> str:
        """ "file.yaml:12: stages[0].key", for the front of a message."""
        # An override has no method to point at.
        of_base = key == "method" and self.label != self.base
        return self.places.at(self.label if of_base else f"{self.label}.{key}")


@runtime_checkable
class MayBeOpen(Protocol):
    """Options of an edit that is measured before it is known what it does."""

    @property
    def is_open(self) -> bool: ...


@runtime_checkable
class HasParts(Protocol):
    """Options of an edit that is several passes, one after another."""

    def parts(self) -> Mapping[str, Any]:
        """The options of each pass, by its name; a single one has the name ''. They may be those of
        another edit, whose pass it then is."""


@dataclass(frozen=True, slots=True)
class EditStage:
    """A stage that changes the model itself, before any that rounds layers; or a training behind
    those.

    method: a key of compress.edits.EDITS; config: an instance of that row's dataclass.
    index: place in the recipe; label: what messages call the stage, "stages[0]".
    """

    method: str
    config: Any
    index: int = 0
    places: Places = field(default_factory=Places, compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"stages[{self.index}]"

    @property
    def is_open(self) -> bool:
        """Whether a measurement has yet to say what it does."""
        return isinstance(self.config, MayBeOpen) and self.config.is_open

    def parts(self) -> "dict[str, EditStage]":
        """The stage of each of its passes, by the pass's name in it, "" for a single one."""
        if not isinstance(self.config, HasParts):
            return {"": self}
        # Late: what a recipe can name is told without torch.
        from compress.edits import EDITS

        methods = {edit.config: method for method, edit in EDITS.items()}
        return {
            name: replace(self, method=methods[type(part)], config=part)
            for name, part in self.config.parts().items()
        }

    def describe(self) -> str:
        """ "cast, dtype bf16"; options that have their defaults are left out."""
        told = [(key_of(x), getattr(self.config, x.name), x.default) for x in fields(self.config)]
        options = (f"{key} {_spoken(value)}" for key, value, usual in told if value != usual)
        return ", ".join([self.method, *options])

    def at(self, key: str) -> str:
        """ "file.yaml:12: stages[0].key", for the front of a message."""
        return self.places.at(f"{self.label}.{key}")


def _spoken(value: Any) -> str:
    """A value of an option; of several, with spaces between them, and those that are set."""
    if is_dataclass(value):
        told = ((key_of(x), getattr(value, x.name), x.default) for x in fields(value))
        return " ".join(f"{name} {_spoken(x)}" for name, x, usual in told if x != usual)
    return " ".join(map(_spoken, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Result files. format "auto" takes the one that suits; shard_size: most bytes of one file."""

    format: OutputFormat = "auto"
    shard_size: int = DEFAULT_SHARD_SIZE


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """An artifact of the result for another runtime, in a folder of the target's name.

    to: a key of compress_exporters' EXPORTERS. verify: whether it is compared with the weights. The
    others are compress_exporters' Options, as `compress-model export` has them.
    """

    to: str
    dtype: Literal["fp32", "fp16", "bf16"] | None = None
    max_context: int | None = None
    round_scales: bool = False
    accuracy_level: Literal[0, 4] = 4
    embedding: Literal["f16", "q8_0", "q6_k"] | None = None
    type: str | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        if self.max_context is not None and self.max_context < 1:
            raise RecipeError(f"max_context is {self.max_context}; it is 1 position or more")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to do, in order: the edits of the model, then the stages that round its layers.

    stages: none for a recipe that only edits.
    calibration: None for a recipe whose stages see no data.
    evaluation: None when nothing is to be measured.
    kv_cache: calibrated scales with which runtimes store keys and values in 8 bits; None for none.
    export: artifacts that are made of the result.
    tuning: trainings of what the stages have left, behind them.
    text: the YAML as it was written, before `overrides` ("key=value"); empty for one built in
        Python. Both, and `places`, are history: they play no part in equality.
    """

    name: str
    stages: tuple[Stage, ...]
    description: str = ""
    seed: int = 0
    calibration: CalibrationConfig | None = None
    evaluation: EvaluationConfig | None = None
    output: OutputConfig = OutputConfig()
    kv_cache: KvCache | None = None
    export: tuple[ExportConfig, ...] = ()
    edits: tuple[EditStage, ...] = ()
    tuning: tuple[EditStage, ...] = ()
    text: str = field(default="", compare=False, repr=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)
    places: Places = field(default_factory=Places, compare=False, repr=False)

    def at(self, path: str) -> str:
        """ "file.yaml:12: path", for the front of a message about the value at that key path."""
        return self.places.at(path)
