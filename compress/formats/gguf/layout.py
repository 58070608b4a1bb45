"""What becomes of every tensor of a checkpoint: its name in the file and the order of its rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.kinds import Grouped
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.formats.gguf.arches import NORMS, ROLES, Arch

Shapes = Mapping[str, tuple[int, ...]]
Order = Literal["as it is", "neighbours", "parts"]
ENDS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the file.

    sources: tensors of the checkpoint; several are experts, one after the other.
    shape: of the whole, experts first. matrix: it may be stored as codes or in 16 bits; everything
    else (norms, biases, positions, routers, factors) is fp32.
    order: of rows. heads: of it, where rows change places.
    transposed: lies [K, N] in the checkpoint. added: to every number (a norm's offset).
    values: what a piece without a source holds.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    matrix: bool = False
    order: Order = "as it is"
    heads: int = 0
    transposed: bool = False
    added: float = 0.0
    values: tuple[float, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows(self) -> Tensor | None:
        """Where each row is taken from, int64 [N]; None where all stay."""
        if self.order == "as it is":
            return None
        index = torch.arange(self.shape[0])
        if self.order == "neighbours":  # [heads, half, number] -> [heads, number, half]
            return index.view(self.heads, 2, -1).transpose(1, 2).reshape(-1)
        return index.view(self.heads, 3, -1).transpose(0, 1).reshape(-1)  # q, k, v of each head

    def in_place(self, values: Tensor) -> Tensor:
        """Rows as they lie in the file, each of any length, where they are in the checkpoint."""
        rows = self.rows()
        if rows is None:
            return values
        back = torch.empty_like(values)
        back[rows] = values
        return back

    def original(self, values: Tensor) -> Tensor:
        """One source of it as it lies in the checkpoint, of its rows [N, K] as they lie in the
        file, what is added left in."""
        values = self.in_place(values)
        return values.t() if self.transposed else values


def pieces(
    spec: DecoderSpec, shapes: Shapes, how: ForwardSpec, arch: Arch, factors: tuple[Piece, ...]
) -> list[Piece]:
    """All tensors, in the order in which they stand in the file.

    shapes: of the checkpoint's tensors, at least of those that are no linear. factors: of
    rotations.
    """
    embedding = Piece(ENDS[0], (spec.embedding,), spec.embedding_shape, matrix=True)
    found = [embedding, *factors]
    if how.positions is not None:
        name = how.positions.tensor
        shape = shapes[name]
        found.append(Piece("position_embd.weight", (name,), shape))
    for block in spec.blocks:
        found += _block(shapes, block, how, arch)
    if spec.final_norm is not None:
        found += _norm(shapes, spec.final_norm.removesuffix(".weight"), "output_norm", how)
    head = spec.head if arch.head != "tied" else None
    if head is None and arch.head == "own":
        head = spec.embedding
    if head is not None:
        shape = spec.head_shape or spec.embedding_shape
        found.append(Piece(ENDS[1], (head,), shape, matrix=True))
    return found


def _block(shapes: Shapes, block: BlockSpec, how: ForwardSpec, arch: Arch) -> Iterator[Piece]:
    for field, name in NORMS.items():
        path = getattr(how.norms, field)
        if path is not None:
            yield from _norm(shapes, f"{block.prefix}.{path}", f"blk.{block.index}.{name}", how)
    experts: dict[str, list[LinearSpec]] = {}
    for linear in block.linears:
        if linear.expert is None:
            yield from _linear(shapes, linear, block.index, how, arch)
        else:
            experts.setdefault(linear.role, []).append(linear)
    for role, members in experts.items():
        yield Piece(
            f"blk.{block.index}.{ROLES[role]}_exps.weight",
            tuple(x.tensor for x in sorted(members, key=_number)),
            (len(members), *members[0].shape),
            matrix=True,
        )


def _number(linear: LinearSpec) -> int:
    assert linear.expert is not None
    return linear.expert


def _norm(shapes: Shapes, path: str, name: str, how: ForwardSpec) -> Iterator[Piece]:
    weight, bias = f"{path}.weight", f"{path}.bias"
    yield Piece(f"{name}.weight", (weight,), shapes[weight], added=how.norm_offset)
    if bias in shapes:
        yield Piece(f"{name}.bias", (bias,), shapes[bias])


def _linear(
    shapes: Shapes, linear: LinearSpec, index: int, how: ForwardSpec, arch: Arch
) -> Iterator[Piece]:
    name = f"blk.{index}.{ROLES[linear.role]}"
    order, heads = _order(linear, how.grouped(index), arch)
    yield Piece(
        f"{name}.weight",
        (linear.tensor,),
        linear.shape,
        matrix=linear.role != "router",
        order=order,
        heads=heads,
        transposed=linear.transposed,
    )
    bias = f"{linear.name}.bias"
    if bias in shapes:
        yield Piece(f"{name}.bias", (bias,), shapes[bias], order=order, heads=heads)


def _order(linear: LinearSpec, how: Grouped, arch: Arch) -> tuple[Order, int]:
    if arch.neighbours and linear.role in ("q", "k"):
        return "neighbours", how.heads if linear.role == "q" else how.kv_heads
    if how.qkv == "heads" and linear.role == "qkv":
        return "parts", how.heads
    return "as it is", 0
