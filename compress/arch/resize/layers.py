"""What config.json says of single blocks, when some of them go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from compress.arch.forward.table import FORWARDS
from compress.arch.forward.values import refuse
from compress.arch.forward.windows import FULL, SLIDING, rotates
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError

# Lists with an entry for each block.
LISTS = ("no_rope_layers", "layer_types", "mlp_layer_types")
# Lists that may be as long as there are blocks, and are about something else.
OTHER_LISTS = ("architectures", "eos_token_id", "bos_token_id", "pad_token_id", "mlp_only_layers")
SPARSE_STEP, DENSE_LAYERS, FIRST_WINDOW = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "max_window_layers",
)


@dataclass(frozen=True, slots=True)
class LayerRule:
    """A list that transformers' class makes for itself where config.json has none.

    value: entry of a block by that rule. stale: keys of the rule, which say nothing true when the
    list no longer follows it.
    """

    key: str
    value: Callable[[Mapping[str, Any], int], Any]
    stale: tuple[str, ...] = ()


ROTATIONS: Mapping[str, LayerRule] = MappingProxyType(
    {"smollm3": LayerRule("no_rope_layers", lambda text, index: int(rotates(text, index)))}
)
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


def reindexed(
    text: Mapping[str, Any], spec: DecoderSpec, kept: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """The decoder's own config with everything that is said of single blocks, and notes; their
    number stays as it is.

    kept: indices of the blocks that stay, ascending. Raises CheckpointError where a block computes
    something else at its new place, and for a list that is too short.
    """
    _check_places(text, spec, kept)
    changed = dict(text)
    for key in LISTS:
        if isinstance(text.get(key), list):
            changed[key] = _chosen(key, text[key], spec, kept)
    changed |= _windows(text, spec, kept)
    mixtures, notes = _mixtures(text, spec, kept)
    changed |= mixtures
    for rule in _rules(spec):
        notes += _follow(rule, text, changed, kept)
    return changed, notes + _unknown(text, spec, kept)


def _check_places(text: Mapping[str, Any], spec: DecoderSpec, kept: Sequence[int]) -> None:
    scale = FORWARDS[spec.family].scale
    for place, index in enumerate(kept):
        width = spec.blocks[index].sizes.key_width
        if scale(text, width, index) != scale(text, width, place):
            raise CheckpointError(
                f"block {index} would become block {place}, and its attention is scaled by its"
                " place (scale_attn_by_inverse_layer_idx); only the last blocks can go"
            )


def _chosen(key: str, given: list[Any], spec: DecoderSpec, kept: Sequence[int]) -> list[Any]:
    count = len(spec.blocks)
    if len(given) < count:
        raise refuse(key, given, f"it must be a list of {count} entries, one a layer")
    return [given[index] for index in kept]


def _windows(text: Mapping[str, Any], spec: DecoderSpec, kept: Sequence[int]) -> dict[str, Any]:
    """The number of first blocks without a window: of those that stay."""
    first = text.get(FIRST_WINDOW)
    if not isinstance(first, int) or first > len(spec.blocks):
        return {}
    return {FIRST_WINDOW: sum(index < first for index in kept)}


def _mixtures(
    text: Mapping[str, Any], spec: DecoderSpec, kept: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """Which blocks of a mixture have a plain MLP."""
    if not spec.experts:
        return {}, []
    plain = [place for place, index in enumerate(kept) if spec.blocks[index].sizes.dense]
    named = set(text.get(DENSE_LAYERS) or ())
    moved = [place for place, index in enumerate(kept) if index in named]
    step = text.get(SPARSE_STEP) or 1
    said = {DENSE_LAYERS: moved} if text.get(DENSE_LAYERS) is not None or moved else {}
    if plain == sorted({place for place in range(len(kept)) if (place + 1) % step} | set(moved)):
        return said, []
    note = f"{SPARSE_STEP} {step} became {DENSE_LAYERS} {plain}, which say the same of the blocks"
    return {DENSE_LAYERS: plain, SPARSE_STEP: 1}, [note]


def _follow(
    rule: LayerRule, text: Mapping[str, Any], changed: dict[str, Any], kept: Sequence[int]
) -> list[str]:
    """Write a rule's list out where the blocks that stay no longer follow the rule; notes."""
    given = isinstance(text.get(rule.key), list)
    before, after = {**text, rule.key: None}, {**changed, rule.key: None}
    wanted = changed[rule.key] if given else [rule.value(before, index) for index in kept]
    if wanted == [rule.value(after, place) for place in range(len(kept))]:
        return []
    changed[rule.key] = wanted
    stale = [key for key in rule.stale if changed.pop(key, None) is not None]
    notes = [f"{key} is left out, as {rule.key} no longer repeats so" for key in stale]
    if not given:
        notes.append(f"{rule.key} is written out, as the blocks that stay no longer follow a rule")
    return notes


def _rules(spec: DecoderSpec) -> Iterator[LayerRule]:
    if spec.family in ROTATIONS:
        yield ROTATIONS[spec.family]
    windows = FORWARDS[spec.family].windows
    if windows is not None and windows.slides is not None:
        slides = windows.slides
        yield LayerRule(
            "layer_types",
            lambda text, index: SLIDING if slides(text, index) else FULL[0],
            PATTERNS,
        )


def _unknown(text: Mapping[str, Any], spec: DecoderSpec, kept: Sequence[int]) -> list[str]:
    """Notes on lists that may be of the blocks, for all we know."""
    count = len(spec.blocks)
    if len(kept) == count:
        return []
    return [
        f"config.json: {key} has {count} entries, as many as there were blocks; it stays as it is"
        for key, value in text.items()
        if isinstance(value, list) and len(value) == count and key not in (*LISTS, *OTHER_LISTS)
    ]
