"""What the proof of a file takes, from shapes alone: what a plan shows, and what it is tried by."""

from math import prod

from compress.arch.spec import DecoderSpec

FP32 = 4
# Times that the package gguf decodes every number: to read the file back, for our decoder, and for
# transformers.
DECODED = 3
# Models of the file's numbers in fp32 at once: our decoder's, and transformers'.
HELD = 2
# Of the largest tensor in fp32, while transformers decodes it.
BESIDE = 4
# Bytes that passes over a number read and write beside that: it is read as the source has it and
# widened, errors are summed in fp64, both models are filled. 46 ns of a core on a model of 393M
# numbers, whose core passed 11.8 GB a second through silu.
NUMBER_BYTES = 540


def proof_bytes(spec: DecoderSpec) -> int:
    """Beside what the process has anyway."""
    largest = max(prod(x.shape) for x in spec.all_linears())
    return FP32 * (HELD * spec.all_numbers() + BESIDE * largest)


def proved_tokens() -> int:
    """Tokens that our decoder and transformers read, one forward for each that is chosen."""
    # Late: a plan of another recipe loads no engine.
    from compress_exporters.gguf.loaded import PROMPTS, TOKENS
    from compress_exporters.reference import LENGTH

    more = sum(range(TOKENS))
    chosen = 2 * (LENGTH // 4 * TOKENS + more) + sum(n * TOKENS + more for n in PROMPTS)
    return 3 * LENGTH + sum(PROMPTS) + chosen
