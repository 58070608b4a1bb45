"""hybrid: most layers see a window of positions, and the most sensitive ones see them all.

A layer with a window keeps keys and values of so many tokens, however long the text. No tensor
changes: config.json says which layers have a window, and a class that cannot say it is left for one
that can. Which layers stay global is measured (compress/edits/select/windows.py), or given by
`keep`, which is also where the recipe of a result says what was chosen. What the windows cost is
mended by a `distill` behind, on texts of several windows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compress.arch.resize.windowed import check_windows, windowed, windows_within
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.edits.counts import Amount, check_amount, counted_of, listed
from compress.edits.edit import Edited
from compress.errors import CheckpointError, RecipeError
from compress.report.units import counted, size

WINDOWS = 4  # that a row holds at least where windows are measured: few tokens of it see one whole


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """window: positions that a layer with a window sees, the token's own included; with a point a
    share of the model's context. global_: layers that see all of them, `global` in a recipe; with a
    point a share. by: what is measured to choose them. keep: these layers, by index, in place of
    both."""

    window: Amount
    global_: Amount | None = None
    by: Literal["loss", "alone"] = "loss"
    keep: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        window, kept = self.window, self.keep
        share = isinstance(window, float)
        if isinstance(window, bool) or window <= 0 or (share and window >= 1):
            raise RecipeError(
                f"window is {window}; it is 1 token or more, or with a point a share of the context"
                " above 0 and below 1.0"
            )
        check_amount("global", self.global_)
        if (self.global_ is None) == (kept is None):
            raise RecipeError(
                "global is missing; say how many layers see every position, or with keep which ones"
                if kept is None
                else "keep is given beside global; one of them says which layers see every position"
            )
        if kept is not None and (not kept or list(kept) != sorted(set(kept)) or kept[0] < 0):
            raise RecipeError(
                f"keep is {list(kept)}; it takes indices of layers, each once, the lowest first"
            )

    @property
    def is_open(self) -> bool:
        """Whether which layers stay global has yet to be measured."""
        return self.keep is None


def plan(source: Outline, config: HybridConfig) -> Edited:
    """The same tensors, and a config.json with windows; in the last layers where it is not measured
    yet which get them.

    CheckpointError for a model whose layers cannot get a window each; RecipeError for a window that
    is no less than the context, and where no layer would get one.
    """
    check_windows(source.config, source.spec)
    width, able = width_of(source, config), able_layers(source)
    keep: Sequence[int] = config.keep or ()
    if config.is_open:
        # Any may get one, so what does not go in one of them is refused before measuring.
        with_windows(source, width, able)
        keep = able[: count_of(source, config)]
    _check_keep(source, keep, able)
    made = with_windows(source, width, [index for index in able if index not in keep])
    if config.is_open or not keep:
        return made
    sees = "see" if len(keep) > 1 else "sees"
    return replace(made, notes=(*made.notes, f"{listed('layer', keep)} {sees} every position"))


def with_windows(source: Outline, width: int, layers: Collection[int]) -> Edited:
    """The edit itself, whatever its width: windows in these layers, of those without one."""
    made = windowed(source.config, source.spec, source.shapes, width, layers)
    notes = (*made.notes, *_cache_note(source, width, layers))
    return Edited(made.config, tuple(source.entries), notes)


def width_of(source: Outline, config: HybridConfig) -> int:
    """Positions of the window. RecipeError for all that the model reads, and for none."""
    context, width = source.spec.context, config.window
    if isinstance(width, float):
        if not context:
            raise RecipeError(
                f"window is {width}, a share of the context, and config.json does not say what the"
                " model reads; give a count"
            )
        width = int(width * context + 1e-9)
        if not width:
            raise RecipeError(f"window is {config.window}: of {context} that is none; give more")
    if context and width >= context:
        raise RecipeError(
            f"window is {width}, and the model reads {counted(context, 'token')}, so nothing would"
            " be saved; give less"
        )
    return width


def able_layers(source: Outline) -> list[int]:
    """The layers that may get a window: those that have none."""
    windows = windows_within(source.config, source.spec)
    return [index for index, window in enumerate(windows) if window is None]


def count_of(source: Outline, config: HybridConfig) -> int:
    """How many layers stay global; RecipeError for more than there are, and for all of them."""
    assert config.global_ is not None, "the layers that stay are known"
    there = len(able_layers(source))
    count = counted_of("global", config.global_, there)
    if count == there:
        raise RecipeError(
            f"global is {config.global_}, and {counted(there, 'layer')} of the model"
            f" {'sees' if there == 1 else 'see'} every position, so nothing would be saved; give"
            " fewer"
        )
    return count


def _check_keep(source: Outline, keep: Sequence[int], able: Sequence[int]) -> None:
    """CheckpointError for layers that are not there, or see no more than a window."""
    count = len(source.spec.blocks)
    unknown = next((index for index in keep if index >= count), None)
    if unknown is not None:
        raise CheckpointError(f"keep has {unknown}; the model's layers are 0 to {count - 1}")
    narrow = next((index for index in keep if index not in able), None)
    if narrow is not None:
        raise CheckpointError(f"keep has {narrow}, and layer {narrow} of the model has a window")
    if len(keep) == len(able):
        raise CheckpointError(
            f"keep is {list(keep)}, all layers that see every position, so nothing would be saved;"
            " leave some out"
        )


def _cache_note(source: Outline, width: int, layers: Collection[int]) -> tuple[str, ...]:
    """What the cache of a whole context takes; nothing where its length is unknown."""
    spec, context = source.spec, source.spec.context
    if not context or not layers:
        return ()
    stored = itemsize(source.tensors[spec.embedding].dtype)
    kept = [window or context for window in windows_within(source.config, spec)]
    left = [min(width, n) if i in layers else n for i, n in enumerate(kept)]
    before, after = spec.kv_bytes(kept, stored), spec.kv_bytes(left, stored)
    seen = f"{counted(len(layers), 'layer')} of {len(kept)} see {counted(width, 'token')}"
    whole = f"the cache of {counted(context, 'token')}"
    return (f"{seen}: {whole} takes {size(after)} in place of {size(before)}",)
