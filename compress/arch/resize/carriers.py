"""The table of carriers: which numbers of heads transformers' classes take, and which other class
computes the same where a family's own does not take them. Facts are those of transformers 5.23,
tried in tests/arch/resize/test_carriers.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from compress.arch.families.family import NONE
from compress.arch.resize.shape import head_counts, listed
from compress.arch.sizes import Sizes
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError

Fit = Literal["any", "multiple", "exact", "floor"]
# Whether hidden, heads and the width of a head go together.
FITS: Mapping[Fit, Callable[[int, int, int], bool]] = MappingProxyType(
    {
        "any": lambda hidden, heads, width: True,
        "multiple": lambda hidden, heads, width: hidden % heads == 0,
        "exact": lambda hidden, heads, width: hidden == heads * width,
        "floor": lambda hidden, heads, width: hidden // heads == width,
    }
)
REASONS: Mapping[Fit, str] = MappingProxyType(
    {
        "multiple": "hidden must be a multiple of heads",
        "exact": "heads × {width} must be hidden",
        "floor": "hidden // heads must be {width}, half of which are its factors of rotation",
    }
)


@dataclass(frozen=True, slots=True)
class Landing:
    """Another class that computes the same.

    unless: config keys that must be false or missing for that. drop: keys that it does not know.
    add: keys that it needs. fill: values that the family's own class assumes for absent keys, where
    the other one assumes something else.
    """

    model_type: str
    architecture: str
    unless: tuple[str, ...]
    drop: tuple[str, ...]
    add: Mapping[str, Any]
    fill: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Carrier:
    """What transformers' class of a family takes.

    heads: rule for their number; but for "any" and "multiple" there is no head_dim in config.json.
    factors: the rule where the rotation has a factor for each frequency. words: keys of sizes where
    config.json has none, if they are not the first of sizes.KEYS and sizes.BLOCK_KEYS. groups:
    whether query heads may share keys and values.
    """

    heads: Fit = "any"
    factors: Fit | None = None
    words: Mapping[str, str] = field(default_factory=lambda: NONE)
    landing: Landing | None = None
    groups: bool = True


MISTRAL = Landing(
    "mistral",
    "MistralForCausalLM",
    unless=("attention_bias", "mlp_bias"),
    drop=("attention_bias", "mlp_bias", "pretraining_tp", "layer_types"),
    add=MappingProxyType({"sliding_window": None}),
    fill=MappingProxyType({"max_position_embeddings": 2048}),
)

CARRIERS: Mapping[str, Carrier] = MappingProxyType(
    {
        "llama": Carrier("multiple", landing=MISTRAL),
        "mistral": Carrier(),
        "ministral": Carrier(),
        "cwm": Carrier("multiple"),
        "qwen2": Carrier(),
        "qwen3": Carrier(),
        # Phi3Config counts the factors of longrope by hidden // heads, whatever head_dim is.
        "phi3": Carrier(factors="floor"),
        "smollm3": Carrier(),
        "deepseek_v3": Carrier(),
        "mixtral": Carrier(),
        "qwen3_moe": Carrier(words=MappingProxyType({"experts": "num_experts"})),
        "gemma2": Carrier("multiple"),
        "gemma3_text": Carrier("multiple"),
        "olmo2": Carrier(),
        "gpt2": Carrier("exact", words=MappingProxyType({"intermediate": "n_inner"}), groups=False),
        "gpt_neox": Carrier("exact", groups=False),
        "opt": Carrier("exact", words=MappingProxyType({"intermediate": "ffn_dim"}), groups=False),
    }
)


def check_groups(spec: DecoderSpec) -> None:
    """CheckpointError for a class whose query heads have keys and values of their own."""
    if not CARRIERS[spec.family].groups:
        raise CheckpointError(
            f"{spec.model_type} has keys and values for each query head, and its config.json no key"
            " for fewer; leave gqa out"
        )


def landing_of(spec: DecoderSpec, text: Mapping[str, Any], sizes: Sizes) -> Landing | None:
    """Another class for the new sizes; None where the family's own takes them.

    text: the decoder's own config. Raises CheckpointError, with the counts that fit, where no class
    takes them.
    """
    if takes(spec, text, sizes):
        return None
    landing = CARRIERS[spec.family].landing
    if landing is not None and not any(text.get(key) for key in landing.unless):
        return landing
    raise CheckpointError(_refusal(spec, _rule(spec, text), sizes))


def takes(spec: DecoderSpec, text: Mapping[str, Any], sizes: Sizes) -> bool:
    """Whether the family's own class takes the sizes."""
    block = sizes.blocks[0]
    return FITS[_rule(spec, text)](sizes.hidden, block.heads, block.key_width)


def _rule(spec: DecoderSpec, text: Mapping[str, Any]) -> Fit:
    carrier = CARRIERS[spec.family]
    return carrier.factors if carrier.factors and _has_factors(text) else carrier.heads


def note_of(spec: DecoderSpec, landing: Landing, sizes: Sizes) -> str:
    """Why the result is of another class."""
    heads = sizes.blocks[0].heads
    return (
        f"the result is a {landing.model_type} ({landing.architecture}), which computes the same:"
        f" {spec.model_type} takes no hidden {sizes.hidden} with {heads} heads"
    )


def _has_factors(text: Mapping[str, Any]) -> bool:
    ropes = (text.get(key) for key in ("rope_scaling", "rope_parameters"))
    return any(isinstance(rope, Mapping) and "short_factor" in rope for rope in ropes)


def _refusal(spec: DecoderSpec, rule: Fit, sizes: Sizes) -> str:
    """One line with what would fit: heads with this hidden, hidden with these heads."""
    block, fits = sizes.blocks[0], FITS[rule]
    hidden, heads, width = sizes.hidden, block.heads, block.key_width
    counts = [x for x in head_counts(spec, block.kv_heads) if fits(hidden, x, width)]
    widths = [x for x in range(1, spec.hidden + 1) if fits(x, heads, width)]
    found = []
    if counts:
        found.append(f"{listed(counts, heads)} heads fit hidden {hidden}")
    if widths:
        found.append(f"hidden {listed(widths, hidden)} fits {heads} heads")
    remedy = ", and ".join(found) or "no other counts fit"
    if widths and (hidden == spec.hidden) != (heads == spec.blocks[0].sizes.heads):
        remedy += "; a prune_width with both cuts them together"
    biases = CARRIERS[spec.family].landing is not None
    return (
        f"{spec.model_type} takes no hidden {hidden} with {heads} heads:"
        f" {REASONS[rule].format(width=width)}{' in a model with biases' if biases else ''};"
        f" {remedy}"
    )
