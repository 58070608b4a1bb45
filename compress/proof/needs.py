"""Memory that a fresh process takes to load a checkpoint in fp32."""

from math import prod

from compress.arch.spec import DecoderSpec
from compress.checkpoint.outline import Outline
from compress.machine.memory import available_bytes
from compress.proof.own_reading import TOKENS
from compress.report.units import two_sizes

FP32 = 4
# A Python with torch and transformers: 463 MB resident (torch 2.13, transformers 5.23). With a
# llama of 334 M values the process had 1.81 GB of its own where this file says 1.93 (bf16) and 2.00
# (fp32); the pages of the bf16 file, mapped meanwhile, are given back on demand.
PROCESS = 480_000_000
# Logits of both sides, and in fp64 twice while they are compared.
LOGITS = 4 + 4 + 8 + 8


def whole_bytes(model: Outline) -> int:
    """Of all weights, and the largest tensor once more as it is stored."""
    elements = sum(info.numel for info in model.tensors.values())
    largest = max(info.nbytes for info in model.tensors.values())
    return PROCESS + FP32 * elements + largest + _logits(model.spec)


def why_not_whole(model: Outline) -> str | None:
    """What stands against loading all of it here; None where nothing does, or nobody knows."""
    free, needed = available_bytes(), whole_bytes(model)
    if free is None or needed <= free:
        return None
    needs, there = two_sizes(needed, free)
    return f"{needs} of memory are needed, {there} are free"


def _logits(spec: DecoderSpec) -> int:
    return LOGITS * TOKENS * prod(spec.head_shape or spec.embedding_shape) // spec.hidden
