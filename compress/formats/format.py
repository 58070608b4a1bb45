"""A format of checkpoints as one value: the functions of its codec, and how it is read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.layout import Entry
from compress.formats import conv1d
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.gguf.matching import Matched
from compress.formats.storage import WeightStorage
from compress.formats.stored import Beside, Has, Parts, Read, ShapeOf, Stored
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor


def _never(block: Mapping[str, Any]) -> bool:
    return False


def _never_reorders(schemes: object, module: str) -> bool:
    return False


def _no_zeros(zero: Tensor, scheme: QuantScheme) -> int:
    return 0


def _nothing_to_say(schemes: Sequence[QuantScheme]) -> list[str]:
    return []


def _itself(scheme: QuantScheme) -> QuantScheme:
    return scheme


class Schemes(Protocol):
    """What a checkpoint's config says of its modules."""

    def scheme(self, module: str) -> QuantScheme | None:
        """How a module's weight is stored, None for as it is."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a quantized checkpoint is read.

    parts: what a quantized module's tensors are called below its path. marks: a module that has
        one of these is quantized. scales: those that hold scales; the first that is there is
        the weight's. g_idx: the one with the columns' groups. factor: the
        one that inputs are multiplied by.
    schemes(config): the scheme of every module; CheckpointError for what is malformed.
    decode(name, scheme, has, read): the weight of that original name.
    gather(stored): all tensors of a module, by part; CheckpointError for those that are missing or
        do not fit. It does with tensors without values, but of `sizes`.
    beside(stored, parts): what a weight has beside codes and scales, checked by value; does without
        values of `large`.
    weight_shape(module, scheme, shape_of): its (N, K), from the shapes of the parts.
    as_read(scheme): what a written scheme reads back as, where that is another one.
    inputs(module, scheme, has, read): how the inputs of a module are quantized.
    transposed(config): whether the original stores a module's weight as [K, N].
    large: the parts with codes and scales. sizes: those whose values tell others' shapes.
    reorders(schemes, module): whether the config promises an order of columns (g_idx).
    lists_modules: the config says which modules are quantized, not only the tensors do.
    skips_head(block): whether loaders leave an output head alone that the quantization_config does
        not list.
    """

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    scales: tuple[str, ...]
    schemes: Callable[[Mapping[str, Any]], Schemes]
    decode: Callable[[str, QuantScheme, Has, Read], QuantizedTensor]
    gather: Callable[[Stored], Parts]
    beside: Callable[[Stored, Parts], Beside]
    large: tuple[str, ...]
    weight_shape: Callable[[str, QuantScheme, ShapeOf], tuple[int, int]]
    sizes: tuple[str, ...] = ()
    inputs: Callable[[str, QuantScheme, Has, Read], InputQuantization | None] = ct_decode.inputs
    transposed: Callable[[Mapping[str, Any]], Callable[[str], bool]] = conv1d.by_config_or_family
    g_idx: str | None = None
    factor: str | None = None
    lists_modules: bool = True
    skips_head: Callable[[Mapping[str, Any]], bool] = _never
    as_read: Callable[[QuantScheme], QuantScheme] = _itself
    reorders: Callable[[Any, str], bool] = _never_reorders


class WhyNotWeight(Protocol):
    """Why a format cannot hold a weight and the nearest thing that can; None when it can."""

    def __call__(
        self, scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
    ) -> str | None:
        """shape: (N, K), None to ask for any. g_idx: with columns grouped in another order."""


class WeightLayout(Protocol):
    """Which tensors one weight becomes: exactly what `encode` returns, known before any work."""

    def __call__(self, how: WeightStorage) -> list[Entry]:
        """(name, dtype code, shape) of each. RecipeError for a weight that has no place here."""


class EncodeWeight(Protocol):
    """The tensors to write for one weight."""

    def __call__(self, how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """By name, in the order of the layout. tensor: as `how` says."""


class ConfigBlock(Protocol):
    """The quantization_config of config.json, None without one."""

    def __call__(
        self,
        spec: DecoderSpec,
        shapes: Mapping[str, tuple[int, ...]],
        schemes: Mapping[str, QuantScheme],
        *,
        with_g_idx: Collection[str] = (),
        kv_cache: ActivationScheme | None = None,
    ) -> dict[str, Any] | None:
        """shapes: of every tensor of the source. schemes: of every quantized tensor, by name.

        RecipeError for layers that the format holds one by one but not together.
        """


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Where scales of the key/value cache lie.

    layout(spec, scale_dtype_code): two tensors a block, in the order of the blocks.
    encode(block, k, v): the tensors of one block, from scales [1].
    in_runs: whether a recipe's `kv_cache` may ask for it; else a conversion alone writes them.
    """

    layout: Callable[[DecoderSpec, str], list[Entry]]
    encode: Callable[[BlockSpec, Tensor, Tensor], dict[str, Tensor]]
    in_runs: bool


@dataclass(frozen=True, slots=True)
class OutlierFile:
    """A file beside the weights for calibrated outlier columns, of which none knows the number
    before.

    folder, name: where it lies below the checkpoint. tensors(weight): what it calls the columns of
    that weight. encode(weight, columns): those tensors.
    """

    folder: str
    name: str
    tensors: Callable[[str], tuple[str, str]]
    encode: Callable[[str, OutlierColumns], dict[str, Tensor]]

    @property
    def path(self) -> str:
        """Below the checkpoint."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, slots=True)
class FileReader:
    """How a file is read that an exporter writes whole.

    match(checkpoint): where each tensor of the original lies in it; CheckpointError for the file of
        another model.
    decode(kind, data, rows): uint8 [bytes] of so many whole rows of a tensor of that type -> their
        numbers [rows, K].
    """

    match: Callable[[Checkpoint], Matched]
    decode: Callable[[str, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a compressed model.

    name: its key in FORMATS. method: config.json's `quant_method`, None for a dense checkpoint.
    why_not, layout, encode, config: as their protocols say.
    reader: of modules one by one; None for a dense checkpoint and for a file.
    file: of a file that an exporter writes whole. No weight has a place of its own in it, so that
        `why_not` refuses each.
    scale_dtype: code of the only dtype that it has for scales, None where it takes those it gets.
    files: small files that repeat the quantization_config for some loaders, each with how it
        follows from that.
    unstorable(zero, scheme): how many of a weight's zero points (int8) it has no place for.
    cache: of the key/value cache's scales, None where it has no place for them.
    outliers: of calibrated outlier columns, None where it has no place for them.
    remarks(schemes): what a person should know before such weights are written.
    why_not_split: why vLLM splits no checkpoint of it over devices, None where it does.
    holds_experts: whether transformers loads quantized experts of a mixture from it.
    decoded_first: whether transformers decodes its weights before the first forward.
    """

    name: str
    method: str | None
    why_not: WhyNotWeight
    layout: WeightLayout
    encode: EncodeWeight
    config: ConfigBlock
    reader: Reader | None
    file: FileReader | None = None
    scale_dtype: str | None = None
    files: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )
    unstorable: Callable[[Tensor, QuantScheme], int] = _no_zeros
    cache: CacheScales | None = None
    outliers: OutlierFile | None = None
    remarks: Callable[[Sequence[QuantScheme]], list[str]] = _nothing_to_say
    why_not_split: str | None = None
    holds_experts: bool = True
    decoded_first: bool = False

    @property
    def coded(self) -> bool:
        """Whether it stores codes: a dense checkpoint has weights alone."""
        return self.method is not None
