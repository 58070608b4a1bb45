"""config.json of a decoder in which some layers see a window of positions only.

Few classes let each layer say by itself whether it has a window. WINDOWED is the table of those
that do, and of families that land in one. Facts are those of transformers 5.23, tried in
tests/arch/resize/test_windowed.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from compress.arch.describe import describe
from compress.arch.families.family import NONE
from compress.arch.forward.forward import describe_forward
from compress.arch.forward.windows import FULL, SLIDING
from compress.arch.names import Shapes
from compress.arch.resize.carriers import Landing
from compress.arch.resize.config import Resized, landed, sized
from compress.arch.resize.layers import FIRST_WINDOW, PATTERNS
from compress.arch.resize.shape import Shape, sizes_after
from compress.arch.spec import DecoderSpec
from compress.arch.text_config import config_at, with_config_at
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class WindowCarrier:
    """How the config of a family says which layers have a window.

    landing: another class that says it, where the family's own has none. add: keys that turn
    windows on. first: whether older readers know the first layers without one by their number.
    mixed: a model may come with layers of both kinds. told: why there is a landing.
    """

    landing: Landing | None = None
    add: Mapping[str, Any] = field(default_factory=lambda: NONE)
    first: bool = False
    mixed: bool = False
    told: str = ""


# MinistralConfig assumes what MistralConfig does; see carriers.MISTRAL for what differs from llama.
MINISTRAL = Landing(
    "ministral",
    "MinistralForCausalLM",
    unless=("attention_bias", "mlp_bias"),
    drop=("attention_bias", "mlp_bias", "pretraining_tp"),
    add=NONE,
    fill=MappingProxyType({"max_position_embeddings": 2048}),
)
SWITCH = MappingProxyType({"use_sliding_window": True})
WINDOWED: Mapping[str, WindowCarrier] = MappingProxyType(
    {
        "llama": WindowCarrier(
            MINISTRAL,
            told="transformers' llama ignores layer_types, which vLLM's honours",
        ),
        "mistral": WindowCarrier(
            replace(MINISTRAL, unless=(), drop=(), fill=NONE),
            told="transformers' mistral has its window in every layer",
        ),
        "ministral": WindowCarrier(),
        "cwm": WindowCarrier(mixed=True),
        "qwen2": WindowCarrier(add=SWITCH, first=True),
        "qwen3": WindowCarrier(add=SWITCH, first=True),
        "smollm3": WindowCarrier(add=SWITCH),
        "gemma2": WindowCarrier(mixed=True),
        "gemma3_text": WindowCarrier(mixed=True),
    }
)


def windows_within(config: Mapping[str, Any], spec: DecoderSpec) -> list[int | None]:
    """The window of each layer; None where it sees every position that the model reads."""
    context = spec.context
    windows = (layer.window for layer in describe_forward(config, spec).layers)
    return [None if w is None or (context and w >= context) else w for w in windows]


def check_windows(config: Mapping[str, Any], spec: DecoderSpec) -> None:
    """CheckpointError, with the reason, for a decoder whose layers cannot get a window each."""
    if any(block.sizes.latent is not None for block in spec.blocks):
        raise CheckpointError(
            f"{spec.model_type} has latent attention, and no class has that with windows; leave"
            " hybrid out"
        )
    carrier = WINDOWED.get(spec.family)
    if carrier is None:
        raise CheckpointError(
            f"{spec.model_type} has no class in which some layers have a window and others none;"
            f" {', '.join(WINDOWED)} have one"
        )
    text, landing = config_at(config, spec.text_config), carrier.landing
    biases = [key for key in landing.unless if text.get(key)] if landing is not None else []
    if landing is not None and biases:
        raise CheckpointError(
            f"{spec.model_type} with {biases[0]} has no class in which some layers have a window:"
            f" {landing.architecture} has no biases"
        )
    if not carrier.mixed and any(w is not None for w in windows_within(config, spec)):
        raise CheckpointError(
            f"layers of this {spec.model_type} have windows already; leave hybrid out, or start"
            " from a model whose layers see every position"
        )


def windowed(
    config: Mapping[str, Any],
    spec: DecoderSpec,
    shapes: Shapes,
    width: int,
    layers: Collection[int],
) -> Resized:
    """config.json with a window of `width` positions, the token's own included, in some layers.

    shapes: of all tensors, which stay as they are. layers: of those without a window. Whether the
    window bites is the caller's business: with a width of the context or more the decoder computes
    the same. CheckpointError for a decoder that cannot say it, for windows of another width, and
    where layers with a window would differ in more than what they see.
    """
    check_windows(config, spec)
    carrier, before = WINDOWED[spec.family], windows_within(config, spec)
    _check_width(spec, before, width)
    text = config_at(config, spec.text_config)
    inner = {key: value for key, value in text.items() if key not in PATTERNS}
    notes, model_type, landing = [carrier.told], spec.model_type, carrier.landing
    if landing is not None:
        model_type = landing.model_type
        inner = landed(inner, landing, at_top=not spec.text_config)
        inner["head_dim"] = spec.blocks[0].sizes.key_width
        notes[0] = f"the result is a {model_type} ({landing.architecture}): {carrier.told}"
    has = [old is not None or i in layers for i, old in enumerate(before)]
    inner |= carrier.add
    inner |= {"sliding_window": width, "layer_types": [SLIDING if x else FULL[0] for x in has]}
    if carrier.first:
        # Readers of this number alone refuse it, or give windows to all layers behind the first.
        inner[FIRST_WINDOW] = has.index(True) if any(has) else len(has)
    inner = sized(inner, model_type, sizes_after(spec, Shape()))
    made = with_config_at(config, spec.text_config, inner)
    _check_rest(config, spec, made, shapes)
    notes += (f"{x} is left out: layer_types says it of each layer" for x in text if x in PATTERNS)
    return Resized(made, tuple(filter(None, notes)))


def _check_width(spec: DecoderSpec, before: list[int | None], width: int) -> None:
    other = next((w for w in before if w not in (None, width)), None)
    if other is not None:
        raise CheckpointError(
            f"window is {width}; layers of this {spec.model_type} have windows of {other}, and"
            f" config.json has one number for all; give {other}"
        )


def _check_rest(
    config: Mapping[str, Any], spec: DecoderSpec, made: Mapping[str, Any], shapes: Shapes
) -> None:
    """CheckpointError where layers would compute something else beside what they see."""
    was, becomes = describe_forward(config, spec), describe_forward(made, describe(made, shapes))
    for index in range(len(spec.blocks)):
        old, new = was.grouped(index), becomes.grouped(index)
        if replace(old, window=None) != replace(new, window=None):
            raise CheckpointError(
                f"layer {index} of this {spec.model_type} would rotate its keys by other"
                " frequencies with a window, and compute something else; leave hybrid out"
            )
