"""How the numbers of a weight are stored, and the field's names for the usual choices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from compress.errors import RecipeError

NumberType = Literal["int", "float"]
Granularity = Literal["tensor", "channel", "group", "block"]
InputGranularity = Literal["token", "tensor", "group"]
Outliers = Literal["none", "dynamic", "calibrated"]
# Of the scales that a search may choose: "both" has negative ones where the scheme may have them
# (compress.quant.rounding); "auto" is what a recipe's exports ask for
# (compress.recipe.reading.exports settles it), and "both" where no recipe says anything.
Signs = Literal["auto", "both", "positive"]
FP4_GROUP = 16  # columns of an NVFP4 weight that share an E4M3 scale


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How the inputs of a linear are quantized at run time; always symmetric.

    type, bits: integers, or E4M3 floats (8 bits).
    granularity: one scale a token, one for the whole tensor, or one for every `group_size`
        neighbouring columns of a token.
    dynamic: scales come from the values at hand; otherwise one scale for the tensor comes from
        calibration (QuantizedTensor.input_scale).
    outliers: LLM.int8(): columns that reach `threshold` stay in 16 bit. "dynamic" looks at the
        inputs of every call, "calibrated" fixed the columns beforehand.
    """

    bits: int = 8
    type: NumberType = "int"
    granularity: InputGranularity = "token"
    group_size: int = 0
    dynamic: bool = True
    outliers: Outliers = "none"
    threshold: float = 6.0

    def __post_init__(self) -> None:
        if self.type == "float" and self.bits != 8:
            raise RecipeError(f"activation bits is {self.bits}; floats have 8 (E4M3)")
        if not 2 <= self.bits <= 8:
            raise RecipeError(f"activation bits is {self.bits}; activations take 2 to 8 bits")
        if (self.granularity == "group") != (self.group_size > 0):
            raise RecipeError(
                f"activation group_size is {self.group_size} with granularity"
                f" {self.granularity!r}; a size of 1 or more goes with 'group', 0 with the others"
            )
        if not self.dynamic and self.granularity != "tensor":
            raise RecipeError(
                f"activation granularity is {self.granularity!r} with dynamic false; a scale from"
                " calibration is one for the tensor"
            )
        if not self.threshold > 0:
            raise RecipeError(f"activation threshold is {self.threshold}; it is above 0, such as 6")

    def describe(self) -> str:
        """`a8`, `a8 static`, `a-fp8`, `a8 dynamic outliers`; `a8 dynamic outliers>=4` for any
        threshold but 6."""
        words = f"a{self.bits}" if self.type == "int" else f"a-fp{self.bits}"
        words += f" g{self.group_size}" if self.granularity == "group" else ""
        words += "" if self.dynamic else " static"
        if self.outliers == "none":
            return words
        words += f" {self.outliers} outliers"
        # Never rounded: layers whose descriptions are equal are taken to be stored alike.
        return words if self.threshold == 6 else f"{words}>={self.threshold!r}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How a weight is stored.

    type "int": codes are signed, in [-2^(bits-1), 2^(bits-1) - 1]; a weight is
    (code - zero) * scale. type "float": codes are E4M3 numbers (8 bits) or E2M1 numbers (4 bits:
    NVFP4, groups of 16 with E4M3 scales below one fp32 scale a tensor); a weight is code * scale.
    granularity: how many weights share a scale; "block" is a square of `group_size` rows and
    columns. `group_size` is 0 for "tensor" and "channel".
    """

    bits: int = 4
    symmetric: bool = True
    granularity: Granularity = "group"
    group_size: int = 128
    activation: ActivationScheme | None = None
    type: NumberType = "int"

    def __post_init__(self) -> None:
        self._check_type()
        if self.granularity in ("group", "block") and self.group_size < 1:
            raise RecipeError(f"group_size is {self.group_size}; a group holds 1 column or more")
        if self.granularity not in ("group", "block") and self.group_size != 0:
            raise RecipeError(
                f"group_size is {self.group_size} with granularity {self.granularity!r};"
                " leave it out, or use granularity 'group'"
            )

    def _check_type(self) -> None:
        if self.type == "int":
            if not 2 <= self.bits <= 8:
                raise RecipeError(f"bits is {self.bits}; weights take 2 to 8 bits")
            return
        if self.bits not in (4, 8):
            raise RecipeError(f"bits is {self.bits}; floats have 8 (E4M3) or 4 (NVFP4)")
        if not self.symmetric:
            raise RecipeError("symmetric is false; floats have no zero points")
        groups_of_16 = (self.granularity, self.group_size) == ("group", FP4_GROUP)
        if self.bits == 4 and not groups_of_16:
            raise RecipeError(
                f"group_size is {self.group_size} with granularity {self.granularity!r}; NVFP4 has"
                f" groups of {FP4_GROUP}"
            )

    @property
    def code_min(self) -> int:
        """Least code of an integer scheme."""
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        """Largest code of an integer scheme."""
        return (1 << (self.bits - 1)) - 1

    @property
    def is_fp4(self) -> bool:
        return self.type == "float" and self.bits == 4

    @property
    def spans_merged(self) -> bool:
        """Whether a number of the scheme is for a whole weight, and so for all that a runtime
        merges into one: NVFP4's divisor, the one scale of E4M3. (Where integers have one scale a
        weight, runtimes write it out for each row.)"""
        return self.type == "float" and (self.bits == 4 or self.granularity == "tensor")

    def columns_per_scale(self, in_features: int) -> int:
        """Input columns that share one scale in a weight of that width."""
        return self.group_size if self.granularity in ("group", "block") else in_features

    def rows_per_scale(self, out_features: int) -> int:
        """Output rows that share one scale in a weight of that height."""
        if self.granularity == "tensor":
            return out_features
        return self.group_size if self.granularity == "block" else 1

    def groups(self, in_features: int) -> int:
        """Scales a row has (1 for channel and tensor granularity)."""
        return -(-in_features // self.columns_per_scale(in_features))

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of the scales of a weight [out, in]."""
        return -(-out_features // self.rows_per_scale(out_features)), self.groups(in_features)

    def describe(self) -> str:
        """Short name for tables: `int4 sym g128`, `fp8 block128`, `nvfp4`."""
        act = f" {self.activation.describe()}" if self.activation else ""
        if self.is_fp4:
            return f"nvfp4{act}"
        where = self.granularity if not self.group_size else f"g{self.group_size}"
        where = f"block{self.group_size}" if self.granularity == "block" else where
        if self.type == "float":
            return f"fp{self.bits} {where}{act}"
        sign = "sym" if self.symmetric else "asym"
        return f"int{self.bits} {sign} {where}{act}"


_W8 = QuantScheme(bits=8, granularity="channel", group_size=0)
_FP8 = replace(_W8, type="float")
_A8 = ActivationScheme()
_AFP8 = ActivationScheme(type="float")

# compressed-tensors' and vLLM's names; W4A16 is symmetric in groups of 128, W8A16 per channel.
# The last three are ours: W8A8 with calibrated input scales, and LLM.int8().
PRESETS: Mapping[str, QuantScheme] = MappingProxyType(
    {
        "W2A16": QuantScheme(bits=2),
        "W3A16": QuantScheme(bits=3),
        "W4A16": QuantScheme(bits=4),
        "W4A16_ASYM": QuantScheme(bits=4, symmetric=False),
        "W5A16": QuantScheme(bits=5),
        "W6A16": QuantScheme(bits=6),
        "W7A16": QuantScheme(bits=7),
        "W8A16": _W8,
        "W8A16_ASYM": replace(_W8, symmetric=False),
        "W8A8": replace(_W8, activation=_A8),
        "FP8": replace(
            _FP8,
            granularity="tensor",
            activation=replace(_AFP8, granularity="tensor", dynamic=False),
        ),
        "FP8_DYNAMIC": replace(_FP8, activation=_AFP8),
        "FP8_BLOCK": replace(
            _FP8,
            granularity="block",
            group_size=128,
            activation=replace(_AFP8, granularity="group", group_size=128),
        ),
        "NVFP4A16": QuantScheme(type="float", group_size=FP4_GROUP),
        "W8A8_STATIC": replace(_W8, activation=replace(_A8, granularity="tensor", dynamic=False)),
        "LLM_INT8": replace(_W8, activation=replace(_A8, outliers="dynamic")),
        "LLM_INT8_CALIBRATED": replace(_W8, activation=replace(_A8, outliers="calibrated")),
    }
)
