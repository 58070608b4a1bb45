"""Inputs of a block's linears, as a forward produces them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.arch.spec import LinearSpec
from compress.blocks.experts import expert_views
from compress.errors import CheckpointError


class _AllSeen(Exception):
    """Ends a forward whose rest nobody needs."""


def collect(
    block: nn.Module,
    linears: Sequence[LinearSpec],
    run: Callable[[], object],
    on_input: Callable[[str, Tensor], None],
    *,
    mask: Tensor | None = None,
    stop_after_last: bool = False,
) -> None:
    """Run a forward and hand over what `linears` read, once a shared input.

    run: does the forward of `block`. on_input: gets the shared-input key and x [tokens, K] (a view
    of the live activation: read it, do not keep it). mask: bool [batch, seq], False for padding,
    whose rows are left out. stop_after_last: end the forward as soon as all linears were reached,
    so that the last one is not computed; `run` then does not return.

    A linear that a router sent no token to gets no call. Raises CheckpointError when linears of
    one key read different tensors.
    """
    seen: dict[str, Tensor] = {}
    waiting = {linear.module for linear in linears}

    def visit(linear: LinearSpec, x: Tensor) -> None:
        first = seen.get(linear.shared_input)
        if first is None:
            seen[linear.shared_input] = x
            on_input(linear.shared_input, _rows(x, linear, mask))
        elif not _same(first, x):
            raise CheckpointError(
                f"{linear.name} does not read the same input as the other layers of"
                f" {linear.shared_input!r}; this decoder is not of the form its names suggest"
            )
        waiting.discard(linear.module)
        if stop_after_last and not waiting:
            raise _AllSeen

    with torch.no_grad(), _hooks(block, linears, visit), _masked_experts(block, mask):
        try:
            run()
        except _AllSeen:
            return


@contextmanager
def calls(block: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """While it is open, what the modules at these paths below a block read and gave in the last
    forward, by path: [..., in] and [..., out], of a tuple the first."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook_of(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            read = args[0] if args else next(iter(kwargs.values()))
            seen[path] = read, out[0] if isinstance(out, tuple) else out

        return hook

    handles = [
        block.get_submodule(path).register_forward_hook(hook_of(path), with_kwargs=True)
        for path in paths
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def regroup(
    block: nn.Module, linears: Sequence[LinearSpec], run: Callable[[], object]
) -> tuple[LinearSpec, ...]:
    """`linears` with shared-input keys by what they really read in one small forward.

    For decoders in no table: layers that read the same tensor share a key, whatever their names
    say. Linears that were not reached keep theirs.
    """
    inputs: list[tuple[str, Tensor]] = []  # holds the tensors, so that their addresses stay taken
    keys: dict[str, str] = {}

    def visit(linear: LinearSpec, x: Tensor) -> None:
        found = next((key for key, first in inputs if _same(first, x)), None)
        if found is None:
            found = linear.module
            inputs.append((found, x))
        keys[linear.module] = found

    with torch.no_grad(), _hooks(block, linears, visit):
        run()
    return tuple(
        replace(item, shared_input=keys.get(item.module, item.shared_input)) for item in linears
    )


@contextmanager
def _hooks(
    block: nn.Module, linears: Sequence[LinearSpec], visit: Callable[[LinearSpec, Tensor], None]
) -> Iterator[None]:
    def hook_of(linear: LinearSpec) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visit(linear, args[0] if args else next(iter(kwargs.values())))

        return hook

    # First in line: a simulated activation quantizer must not change what is recorded.
    handles = [
        block.get_submodule(linear.module).register_forward_pre_hook(
            hook_of(linear), prepend=True, with_kwargs=True
        )
        for linear in linears
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _masked_experts(block: nn.Module, mask: Tensor | None) -> Iterator[None]:
    """Keep padding from the experts: behind a router, rows are no longer tokens in order."""
    views = list(expert_views(block))
    for view in views:
        device = next(view.parameters()).device
        view.row_mask = None if mask is None else mask.reshape(-1).bool().to(device)
    try:
        yield
    finally:
        for view in views:
            view.row_mask = None


def _rows(x: Tensor, linear: LinearSpec, mask: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if mask is None or linear.expert is not None:
        return rows
    return rows[mask.reshape(-1).bool().to(rows.device)]


def _same(first: Tensor, second: Tensor) -> bool:
    return first is second or (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
    )
