"""A decoder in no table, tried in transformers' class without its weights.

Loaders of packed weights take a linear's weight away and put their own forward in its place, so a
class that reads the weight itself fails in them: mamba's initialisation, which from_pretrained runs
always, asks for `dt_proj.weight`, and so does its forward. Such classes are found by doing the same
to one block of each kind and running it.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.experts import split_experts
from compress.blocks.model import short_reason
from compress.blocks.naming import Naming
from compress.blocks.skeleton import Skeleton
from compress.errors import CheckpointError
from compress.formats.checked_reads import check_names, expert_paths

TOKENS = 4
# Of matrices; norms are one, so that what flows through a block is neither lost nor too large.
_VALUE = 0.02
_SHOWN = 3


def rehearse(
    skeleton: Skeleton,
    packed: Sequence[LinearSpec],
    *,
    decoded: bool = False,
    streamed: bool = False,
) -> tuple[str, ...]:
    """Run one block of each kind as a loader of packed weights leaves it.

    skeleton: of a decoder in no table, in fp32. packed: linears whose weights will be packed.
    decoded: whether the loader puts the weights back before the first forward, as that of
    compressed-tensors does in transformers. streamed: whether the weights will also be read into
    the blocks here, tensor by tensor.

    Returns the linear modules of the class that go by no name of the checkpoint (a tied head).
    Raises CheckpointError for a class that cannot be run, that reads weights of packed linears
    itself, or whose tokens read later ones.
    """
    spec, naming = skeleton.spec, Naming(skeleton)
    # Expert by expert: the other ways copy all of them at once.
    skeleton.model.set_experts_implementation("eager")
    if streamed:
        skeleton.check_outside()
    wanted = {linear.name for linear in packed}
    for index in _one_of_each_kind(skeleton.blocks):
        block = spec.blocks[index]
        _check_names(naming, block, wanted)
        if streamed:
            _check_streaming(skeleton, block)
        inside = [x for x in block.linears if x.name in wanted]
        _check_block(skeleton, naming, block, inside, decoded=decoded)
    return naming.unnamed(wanted)


def _one_of_each_kind(blocks: Sequence[nn.Module]) -> list[int]:
    """Numbers of the first blocks with the same modules at the same places."""
    kinds: dict[tuple[tuple[str, str], ...], int] = {}
    for index, block in enumerate(blocks):
        kind = tuple((name, type(module).__name__) for name, module in block.named_modules())
        kinds.setdefault(kind, index)
    return list(kinds.values())


def _check_names(naming: Naming, block: BlockSpec, wanted: set[str]) -> None:
    for linear in block.linears:
        place = naming.place(block, linear.tensor)
        if linear.name in wanted and place.missing:
            raise CheckpointError(
                f"{linear.name} is planned, and transformers' {naming.kind} has no parameter"
                f" {place.path}; config.json is of another model, or add the layer to ignore"
            )
    merged = [tensor for tensor, _ in block.modules if naming.merges(block, tensor)]
    if wanted and merged:
        path = naming.place(block, merged[0]).path
        raise CheckpointError(
            f"transformers' {naming.kind} makes {path} of {merged[0]} and others, which its loader"
            " of packed weights does not do; the format dense loads anywhere"
        )


def _check_streaming(skeleton: Skeleton, block: BlockSpec) -> None:
    module = _copy(skeleton, block.index)
    for path in expert_paths(block):
        try:
            split_experts(module, path)
        except AttributeError as error:
            raise CheckpointError(
                f"transformers' {type(skeleton.model).__name__} has no experts at {path} in"
                f" {block.prefix}, where the checkpoint has; use a recipe without calibration and"
                " evaluation"
            ) from error
    check_names(block, module.state_dict())


def _check_block(
    skeleton: Skeleton,
    naming: Naming,
    block: BlockSpec,
    packed: Sequence[LinearSpec],
    *,
    decoded: bool,
) -> None:
    """CheckpointError unless the block runs without the weights of `packed`."""
    paths = {linear.name: naming.module(block, linear) for linear in packed}
    taken = {name: path for name, path in paths.items() if path is not None}
    found: list[str] = []
    while (read := _run_without(skeleton, block.index, taken, decoded=decoded)) is not None:
        found.append(read)
        del taken[read]
    if found:
        leaves = dict.fromkeys(name.rpartition(".")[2] for name in found)
        more = f" and of {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(
            f"transformers' {naming.kind} reads the weight of {', '.join(found[:_SHOWN])}{more}"
            " itself, which its loaders replace by packed codes; add"
            f" {', '.join(leaves)} to ignore, or take the format dense"
        )


def _run_without(
    skeleton: Skeleton, index: int, taken: dict[str, str], *, decoded: bool
) -> str | None:
    """The first of the linears whose weight is missed; None when the block runs without them.

    taken: module paths below the block, by name.
    """
    reads: list[str] = []
    block = _copy(skeleton, index)
    weights = {
        path: _take_weight(block.get_submodule(path), name, reads) for name, path in taken.items()
    }
    try:
        with _refusing(skeleton):
            for module in block.modules():
                # from_pretrained does so even where every tensor was read. On the meta device.
                skeleton.model._init_weights(module)
            for path, weight in weights.items() if decoded else ():
                block.get_submodule(path)._parameters["weight"] = weight
            _fill(block)
            _check_causal(skeleton, block, index)
    except CheckpointError as error:
        # Whoever looks for an attribute that may be missing goes on without it.
        if reads and isinstance(error.__cause__, AttributeError):
            return reads[-1]
        raise
    return None


@contextmanager
def _refusing(skeleton: Skeleton) -> Iterator[None]:
    """Whatever transformers' code raises, as a CheckpointError of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: transformers' code of a family that nobody here knows
        raise CheckpointError(
            f"a block of transformers' {type(skeleton.model).__name__} does not run"
            f" ({short_reason(error)}); {skeleton.spec.model_type!r} is in no architecture table,"
            " and what cannot be tried is not written"
        ) from error


def _copy(skeleton: Skeleton, index: int) -> nn.Module:
    config = skeleton.model.config
    return copy.deepcopy(skeleton.blocks[index], {id(config): config})


def _take_weight(module: nn.Module, name: str, reads: list[str]) -> nn.Parameter:
    """Do to a linear what a loader of packed weights does. Who misses the weight is in `reads`."""
    kind: Any = type(module)
    weight = module.weight
    assert isinstance(weight, nn.Parameter), name
    rows = weight.shape[1] if kind.__name__ == "Conv1D" else weight.shape[0]

    def look_up(self: nn.Module, attribute: str) -> Any:
        if attribute == "weight" and attribute not in self._parameters:
            reads.append(name)
        return kind.__getattr__(self, attribute)

    def forward(self: nn.Module, x: Tensor, *_: Any) -> Tensor:
        # No product: columns of the input, repeated, so that every output depends on its input.
        return x[..., torch.arange(rows, device=x.device) % x.shape[-1]]

    del module._parameters["weight"]
    module.__class__ = type(kind.__name__, (kind,), {"__getattr__": look_up, "forward": forward})
    return weight


def _fill(block: nn.Module) -> None:
    """Parameters that take no memory: one number each, without strides."""
    for module in block.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                number = torch.full((), 1.0 if value.dim() < 2 else _VALUE, dtype=value.dtype)
                module._parameters[name] = nn.Parameter(number.expand(value.shape), False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)


def _check_causal(skeleton: Skeleton, block: nn.Module, index: int) -> None:
    """Run the block twice: the first token must not see that the last one is another."""
    hidden = torch.sin(torch.arange(1, TOKENS * skeleton.spec.hidden + 1, dtype=torch.float32))
    hidden = hidden.view(1, TOKENS, -1)  # [1, tokens, hidden]
    other = hidden.clone()
    other[:, -1] = other[:, -1].flip(-1)
    context = skeleton.context(torch.zeros(1, TOKENS, dtype=torch.int64))
    first, second = (skeleton.run_block(block, index, x, context) for x in (hidden, other))
    if first.shape != hidden.shape:
        raise CheckpointError(
            f"a block of transformers' {type(skeleton.model).__name__} makes"
            f" {list(first.shape)} of {list(hidden.shape)}; blocks that keep the shape are run"
        )
    if not torch.allclose(first[:, 0], second[:, 0], rtol=1e-3, atol=1e-5, equal_nan=True):
        raise CheckpointError(
            f"transformers' {type(skeleton.model).__name__} is no decoder: its tokens read later"
            " ones; only decoders are compressed"
        )
