"""Which experts compute a token, in plain torch."""

from torch import Tensor


def choose_experts(logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """As experts.choose_experts."""
    # Of equal experts the lowest number, as ONNX's TopK has it; torch's leaves that open.
    order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, index = order.values[:, :chosen], order.indices[:, :chosen]
    if normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, index
