"""Text sampled from a model itself, for calibration without data.

The whole model is in memory here, with a key/value cache. Each token's randomness is a hash of
(seed, sequence, position), so neither the batch size nor the number of sequences changes what a
sequence draws.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.arch.spec import DecoderSpec
from compress.blocks.model import build_model, set_parameter
from compress.blocks.skeleton import Skeleton
from compress.checkpoint import TensorInfo
from compress.errors import DataError
from compress.formats.weights import rounds_calls
from compress.machine.memory import resident_bytes, room_bytes, too_much
from compress.report.units import two_sizes

if TYPE_CHECKING:
    from compress.formats.weights import Weights

# A step is dispatch more than arithmetic: on tale-6m it took 16 ms for 32 rows, 32 ms for 128.
MOST_ROWS, CACHE_BYTES = 128, 512 << 20


@dataclass(frozen=True, slots=True, eq=False)
class OwnText:
    """Text that a model is to write: `count` sequences of `length` tokens, the prompt included.

    temperature: 0 takes the likeliest token. prompt_ids: int64 [p] or [count, p]; without it a
    sequence starts with the config's BOS token, or with a random token when there is none.
    """

    count: int
    length: int
    seed: int
    temperature: float = 1.0
    prompt_ids: Tensor | None = None


def generate(
    weights: "Weights",
    skeleton: Skeleton,
    asked: OwnText,
    *,
    batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Sampled token ids: int64 [count, length], the prompt included.

    Generation goes on behind an end-of-text token, as in packed training data. batch: sequences at
    once, `rows_at_once` by default. progress: called after every step with (steps done, steps in
    all). Raises DataError when the model does not fit the free memory, or when the model cannot be
    that long.
    """
    count, length = asked.count, asked.length
    _check_length(skeleton, length)
    if rounds_calls(weights):
        batch = 1  # what a sequence says must not depend on the others
    batch = batch or rows_at_once(skeleton.spec, skeleton.dtype, length)
    rows = min(batch, count)
    needed = sampling_bytes(weights.checkpoint.tensors, skeleton.spec, skeleton.dtype, rows, length)
    check_memory(needed, skeleton.device)
    model = whole_model(weights, skeleton)
    prompts = _prompts(skeleton, asked)
    slices = list(_slices(count, batch))
    step = _counter(progress, len(slices) * (length - prompts.shape[1]))
    parts = [_generate_batch(model, prompts[rows], rows, asked, step) for rows in slices]
    return torch.cat(parts).cpu()


def rows_at_once(spec: DecoderSpec, dtype: torch.dtype, length: int) -> int:
    """Sequences of `length` tokens whose keys and values fit the budget, at most MOST_ROWS."""
    # Where the config names no attention heads, the hidden size stands for what a block keeps.
    width = dtype.itemsize
    token = spec.kv_bytes_per_token(width) or len(spec.blocks) * spec.hidden * width
    return max(1, min(MOST_ROWS, CACHE_BYTES // (token * length)))


def whole_model(weights: "Weights", skeleton: Skeleton) -> nn.Module:
    """The complete causal LM in the skeleton's dtype, experts as separate linears."""
    model = build_model(skeleton.config, skeleton.spec, skeleton.dtype, skeleton.device)
    stack = model.get_submodule(skeleton.stack)
    for index in range(len(skeleton.spec.blocks)):
        setattr(stack, str(index), skeleton.load_block(weights, index))
    for path, value in skeleton.read_all_outside(weights).items():
        set_parameter(model, path, value)
    return model


def uniforms(seed: int, sequences: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
    """A number in [0, 1) for each sequence index, by (seed, sequence, position): float64 [n]."""
    with np.errstate(over="ignore"):
        key = _mix(np.uint64(seed & (2**64 - 1)))
        key = _mix(key ^ _mix(sequences.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
        key = _mix(key ^ _mix(np.uint64(position) + np.uint64(0xD1B54A32D192ED03)))
    unit: np.ndarray[Any, Any] = (key >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit


def draw(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """One token a row by inversion of the cumulative distribution.

    logits: [n, vocab]; noise: float64 [n] in [0, 1) -> int64 [n]. temperature 0 takes the largest.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits.float() / temperature).softmax(-1).double().cumsum(-1)  # [n, vocab]
    target = noise[:, None].to(cumulative.device) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return token.clamp_(max=logits.shape[-1] - 1)


def _generate_batch(
    model: nn.Module,
    prompt: Tensor,
    rows: slice,
    asked: OwnText,
    on_step: Callable[[], None],
) -> Tensor:
    """prompt: int64 [batch, p], of the sequences `rows` -> int64 [batch, length]."""
    from compress.blocks.cache import cache_argument, reserved_cache

    ids = prompt[:, : asked.length].to(next(model.parameters()).device)  # [batch, prompt]
    indices = np.arange(rows.start, rows.stop)
    named = cache_argument(model)
    cache = {} if named is None else {named: reserved_cache(model.config, asked.length)}
    tokens, step = [ids], ids
    with torch.no_grad():
        for position in range(ids.shape[1], asked.length):
            # Without a cache the text so far is read again for every token.
            read = step if cache else torch.cat(tokens, 1)
            out: Any = model(input_ids=read, use_cache=bool(cache), **cache)
            noise = torch.from_numpy(uniforms(asked.seed, indices, position))
            step = draw(out.logits[:, -1], noise, asked.temperature)[:, None]
            tokens.append(step)
            on_step()
    return torch.cat(tokens, 1)


def _prompts(skeleton: Skeleton, asked: OwnText) -> Tensor:
    """First tokens: int64 [count, p]."""
    count = asked.count
    if asked.prompt_ids is not None:
        return asked.prompt_ids.long().expand(count, -1)
    bos = getattr(skeleton.model.config, "bos_token_id", None)
    if isinstance(bos, int) and 0 <= bos < skeleton.spec.vocab:
        return torch.full((count, 1), bos)
    first = uniforms(asked.seed, np.arange(count), 0) * skeleton.spec.vocab
    return torch.from_numpy(first.astype(np.int64))[:, None]


def _slices(count: int, batch: int) -> Iterator[slice]:
    return (slice(start, min(start + batch, count)) for start in range(0, count, batch))


def _counter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[], None]:
    """What to call after every step, whichever batch it belongs to."""
    numbers = itertools.count(1)
    return lambda: None if progress is None else progress(next(numbers), total)


def _check_length(skeleton: Skeleton, length: int) -> None:
    context = skeleton.spec.context
    if context and length > context:
        raise DataError(
            f"self-sampled text of length {length} is longer than the model's context of {context}"
            f" tokens; set length to {context} or less"
        )


def sampling_bytes(
    tensors: Mapping[str, TensorInfo],
    spec: DecoderSpec,
    dtype: torch.dtype,
    rows: int,
    length: int,
) -> int:
    """Memory to sample so many sequences at once: the whole model, the widest of its tensors as it
    is read, keys and values, and what is made of a step's logits."""
    names = [tensor for block in spec.blocks for tensor, _ in block.modules]
    names += [tensor for tensor, _ in spec.outside]
    elements = [_elements(tensors, spec, name) for name in names]
    token = spec.kv_bytes_per_token(dtype.itemsize)
    # Logits, the same in fp32, their softmax, and that and its sums in fp64.
    drawn = (dtype.itemsize + 4 + 4 + 8 + 8) * rows * spec.vocab
    return dtype.itemsize * (sum(elements) + max(elements)) + rows * length * token + drawn


def check_memory(needed: int, device: str) -> None:
    """DataError unless so many bytes more fit the device's memory, as far as estimates can say."""
    held, room = _held_and_room(device)
    if too_much(held + needed, held, room):
        whole, there = two_sizes(held + needed, room)
        raise DataError(
            f"sampling from the model needs {whole} of memory, {there} are free; use a text file"
            " instead of 'self'"
        )


def _elements(tensors: Mapping[str, TensorInfo], spec: DecoderSpec, tensor: str) -> int:
    """Values of a weight; a packed one (no tensor of that name) counts by its linear's shape."""
    info = tensors.get(tensor)
    if info is not None:
        return int(np.prod(info.shape, dtype=np.int64))
    shapes = (each.shape for each in spec.all_linears() if each.tensor == tensor)
    rows, columns = next(shapes, (0, 0))
    return rows * columns


def _held_and_room(device: str) -> tuple[int, int]:
    """Bytes that this process has, and that it may have in all; of a GPU those that are free."""
    if device.startswith("cuda"):
        return 0, int(torch.cuda.mem_get_info(device)[0])
    room = room_bytes()
    if room is None:
        raise DataError(
            "this system does not say how much memory is free; use a text file instead of 'self'"
        )
    return resident_bytes(), room


def _mix(value: Any) -> Any:
    """The finalizer of splitmix64 on uint64: every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
