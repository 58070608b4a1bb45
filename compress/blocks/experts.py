"""Experts as separate linears, in place of transformers' fused 3-D parameters.

transformers 5 keeps all experts of a layer in two stacked parameters; statistics need a linear a
hook can sit on for each expert. The views are filled from the per-expert tensors on disk, so the
stacked form never exists.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError


class _Expert(nn.Module):
    def __init__(self, hidden: int, width: int, act: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False, device="meta", dtype=dtype)
        self.up = nn.Linear(hidden, width, bias=False, device="meta", dtype=dtype)
        self.down = nn.Linear(width, hidden, bias=False, device="meta", dtype=dtype)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        # x: [tokens, hidden]
        out: Tensor = self.down(self.act_fn(self.gate(x)) * self.up(x))
        return out


class ExpertViews(nn.Module):
    """The experts of one layer, with the forward signature of the fused module it replaces.

    all_tokens: every expert computes every token, so that hooks see all of them; the output still
        uses only what the router chose.
    row_mask: bool [tokens]; rows that are False (padding) are not shown to any expert and give
        zero.
    kept: int64, the experts that the router knows, in its order; None for all.
    told: gets the experts and their shares of each token, [tokens, k] each, when it is a list.
    """

    def __init__(self, fused: nn.Module) -> None:
        """fused: a transformers experts module (gate_up_proj [E, 2*I, H], down_proj [E, H, I]).

        Raises CheckpointError when it computes anything but act(gate) * up without biases.
        """
        super().__init__()
        _check_plain(fused)
        gate_up = fused.gate_up_proj
        assert isinstance(gate_up, Tensor)
        act = fused.act_fn
        assert isinstance(act, nn.Module)
        self.experts, double, hidden = gate_up.shape
        for index in range(self.experts):
            self.add_module(str(index), _Expert(hidden, double // 2, act, gate_up.dtype))
        self.all_tokens = False
        self.row_mask: Tensor | None = None
        self.kept: Tensor | None = None
        self.told: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [tokens, hidden]; index and weights: [tokens, k] -> [tokens, hidden]."""
        tokens, chosen = top_k_index.shape
        if self.kept is not None:
            top_k_index = self.kept[top_k_index]
        if self.told is not None:
            self.told.append((top_k_index, top_k_weights))
        dtype = torch.result_type(hidden_states, top_k_weights)
        slots = hidden_states.new_zeros(tokens * chosen, hidden_states.shape[1], dtype=dtype)
        # Cut once: with all tokens shown, every expert must be seen to read one and the same input.
        masked = self.all_tokens and self.row_mask is not None
        shown = hidden_states[self.row_mask] if masked else hidden_states
        for index in range(self.experts):
            routed = top_k_index == index
            if self.row_mask is not None:
                routed &= self.row_mask[:, None]
            rows, slot = torch.where(routed)
            if rows.numel() or self.all_tokens:
                out = self._expert_rows(index, shown, rows)
                slots[rows * chosen + slot] = out * top_k_weights[rows, slot, None]
        # A sum over slots, not index_add_: its order is fixed and it accumulates in fp32.
        return slots.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _expert_rows(self, index: int, shown: Tensor, rows: Tensor) -> Tensor:
        """Expert `index` on the given rows; computed on all of `shown` if `all_tokens`.

        shown: the hidden states, without the masked rows if `all_tokens`.
        """
        expert = self.get_submodule(str(index))
        if not self.all_tokens:
            out: Tensor = expert(shown[rows])
            return out
        out = expert(shown)
        if self.row_mask is None:
            return out[rows]
        place = self.row_mask.cumsum(0) - 1
        return out[place[rows]]


def split_experts(block: nn.Module, path: str) -> None:
    """Replace the fused experts at `path` in a block by ExpertViews, still without weights."""
    fused = block.get_submodule(path)
    if isinstance(fused, nn.ModuleList):
        return
    parent, _, leaf = path.rpartition(".")
    setattr(block.get_submodule(parent), leaf, ExpertViews(fused))


def expert_views(block: nn.Module) -> Iterator[ExpertViews]:
    """The mixtures of a loaded block (none in a dense one)."""
    return (module for module in block.modules() if isinstance(module, ExpertViews))


def mixture_of(block: nn.Module) -> ExpertViews:
    """The one mixture of a loaded block that has one."""
    (views,) = expert_views(block)
    return views


def route_among(block: nn.Module, router: str, kept: Tensor) -> None:
    """Send tokens of a loaded block to some experts alone, as its router shares them out then.

    router: path of its module. kept: int64, ascending. Experts keep their numbers.
    """
    module, views = block.get_submodule(router), mixture_of(block)
    assert isinstance(module.weight, Tensor), router
    kept = kept.to(module.weight.device)
    module.weight = nn.Parameter(module.weight.data[kept], requires_grad=False)
    views.kept = kept


@contextmanager
def told_routes(views: ExpertViews) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While it is open, for each forward which experts every token went to, and their shares:
    [tokens, k] each."""
    views.told = []
    try:
        yield views.told
    finally:
        views.told = None


def _check_plain(fused: nn.Module) -> None:
    shape = getattr(getattr(fused, "gate_up_proj", None), "shape", ())
    plain = (
        len(shape) == 3
        and getattr(fused, "has_gate", True)
        and getattr(fused, "is_concatenated", True)
        and not getattr(fused, "is_transposed", False)
        and not getattr(fused, "has_bias", False)
        and not getattr(fused, "has_post_expert_norm", False)
    )
    if not plain:
        raise CheckpointError(
            f"experts of type {type(fused).__name__} are not of the gate/up/down form that can be"
            " run expert by expert; use a method without calibration (rtn)"
        )
