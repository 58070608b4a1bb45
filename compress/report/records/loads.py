"""What plain transformers made of a dense model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StockLoad:
    """The dense model that the edits of a recipe left, as plain transformers loads it in a process
    of its own.

    transformers: its version. model_class: what AutoModelForCausalLM chose. proof: "logits", or
    "form" where the memory lacked: names and shapes of all tensors, and logits of the first block
    alone. max_logit_error: largest difference from our own reading. detail: why no more was proved,
    and what became of the tokenizer's ids.
    """

    transformers: str
    model_class: str
    proof: str
    max_logit_error: float
    detail: tuple[str, ...] = ()
