"""The walk that rounds a model into llama.cpp's blocks, or only looks at what it reads.

At each block it is seen what the linears read, they are rounded with that in view
(compress.methods.k_quants), and the block runs on with what the file will hold. Only one block, its
Hessians and a batch of hidden states are in memory.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.artifacts.rounding.block_file import BlockFile
from compress.artifacts.rounding.measured import MeasuredFile
from compress.blocks.linear import set_linear_weight
from compress.blocks.walk import Chain, LoadedBlock, walk
from compress.formats.weights import Weights
from compress.methods.k_quants import KQuantsConfig, RoundedBlocks, round_weights
from compress.methods.observed import UNOBSERVED, Observed
from compress.methods.outcome import judge
from compress.plan.row_counts import ROWS_AT_ONCE
from compress_calibration.block_inputs import HESSIAN_BYTES, block_grams, block_squares
from compress_calibration.hessian import GramAccumulator, InputStats, SquareSums
from compress_exporters.gguf.plan import ToRound
from compress_kernels import decode_blocks

EMBED, HEAD = "embed", "head"


@dataclass(frozen=True, slots=True)
class RoundedTensor:
    """What became of a tensor of the checkpoint: as RoundedBlocks has it. tokens: that its error
    was measured over; None where nothing was looked at."""

    tensor: str
    kind: str
    error: float
    method: str
    kept: str | None = None
    damping: float | None = None
    tokens: int | None = None
    plain: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockRounding:
    """weights: of the model, dense. to_round: what of them is rounded to what. blocks: where the
    rows go. measured: where it is kept what columns multiply, if it is; of all that it has a place
    for, rounded or not."""

    weights: Weights
    to_round: ToRound
    blocks: BlockFile
    config: KQuantsConfig
    device: str = "cpu"
    measured: MeasuredFile | None = None

    @property
    def spec(self) -> DecoderSpec:
        return self.weights.spec

    def is_rounded(self, tensor: str) -> bool:
        return tensor in self.to_round.weights

    def kind(self, tensor: str) -> str:
        return self.to_round.weights[tensor][0]

    def rounded_in(self, block: BlockSpec) -> list[LinearSpec]:
        return [x for x in block.linears if self.is_rounded(x.tensor)]

    def only_measured_in(self, block: BlockSpec) -> list[LinearSpec]:
        kept = () if self.measured is None else self.measured
        return [x for x in block.linears if x.tensor in kept and not self.is_rounded(x.tensor)]

    def keep(self, tensor: str, mean: Tensor, tokens: int) -> None:
        """Mean squares fp32 [K] of what the columns of a weight multiply, if that is kept."""
        if self.measured is not None and tensor in self.measured:
            self.measured.write(tensor, mean, tokens)


Unit = tuple[str, list[RoundedTensor]]


def unit_of(block: BlockSpec) -> str:
    return f"block {block.index}"


def units(spec: DecoderSpec) -> list[str]:
    """Names of what is done, in order."""
    return [EMBED, *map(unit_of, spec.blocks), HEAD]


def round_along(work: BlockRounding, chain: Chain, done: Collection[str] = ()) -> Iterator[Unit]:
    """Each unit as it is finished: its rows and the states behind it are written, not flushed.

    chain: the same model, over the tokens that it is calibrated on. done: units that an earlier
    process has finished; the states behind the last of them are there.
    """
    if EMBED not in done:
        yield EMBED, _embed(work, chain)
    left = [x for x in work.spec.blocks if unit_of(x) not in done]
    for block in walk(chain, left):
        found = _block(work, block)
        block.run_on()
        yield unit_of(block.spec), found
    if HEAD not in done:
        yield HEAD, _head(work, chain)


def round_alone(work: BlockRounding, done: Collection[str] = ()) -> Iterator[Unit]:
    """The same units without a look at what the weights read."""
    embedding, head = work.spec.embedding, work.to_round.head
    if EMBED not in done:
        apart = work.is_rounded(embedding) and embedding != head
        yield EMBED, [_by_rows(work, embedding, UNOBSERVED)] if apart else []
    for block in work.spec.blocks:
        if unit_of(block) not in done:
            yield unit_of(block), [_alone(work, x) for x in work.rounded_in(block)]
    if HEAD not in done:
        yield HEAD, [] if head is None else [_by_rows(work, head, UNOBSERVED)]


def _alone(work: BlockRounding, linear: LinearSpec) -> RoundedTensor:
    (rounded,) = round_weights([_weight(work, linear)], work.kind(linear.tensor), work.config)
    work.blocks.write(linear.tensor, rounded.data)
    return _told(linear.tensor, rounded, None)


def _embed(work: BlockRounding, chain: Chain) -> list[RoundedTensor]:
    """The first states, of the embedding as the file will hold it; one that is the head too is
    rounded when it is known what that reads, and enters as it is."""
    embedding = work.spec.embedding
    if not work.is_rounded(embedding) or embedding == work.to_round.head:
        chain.embed()
        return []
    chain.embed(partial(_rounded_rows, work.kind(embedding)))
    return [_by_rows(work, embedding, UNOBSERVED)]


def _rounded_rows(kind: str, rows: Tensor) -> Tensor:
    (found,) = round_weights([rows], kind, KQuantsConfig(compensate=False, importance=False))
    return decode_blocks(kind, found.data)


def _block(work: BlockRounding, block: LoadedBlock) -> list[RoundedTensor]:
    """Every linear of a block that is rounded, in the block's place as well."""
    linears = work.rounded_in(block.spec)
    waiting: list[tuple[LinearSpec, RoundedBlocks]] = []
    found: dict[str, RoundedTensor] = {}
    _measure(work, block)
    for together in observed_together(linears):
        grams = block_grams(block, together)
        for linear, rounded, tokens in _solve(work, together, grams):
            work.blocks.write(linear.tensor, rounded.data)
            found[linear.tensor] = _told(linear.tensor, rounded, tokens)
            waiting.append((linear, rounded))
    for linear, rounded in waiting:
        weight = decode_blocks(rounded.kind, rounded.data)
        set_linear_weight(block.module, linear, weight)
    return [found[x.tensor] for x in linears]


def _measure(work: BlockRounding, block: LoadedBlock) -> None:
    """What those multiply that are not rounded, where that is kept."""
    linears = work.only_measured_in(block.spec)
    sums = block_squares(block, linears) if linears else {}
    for linear in linears:
        found = sums[linear.shared_input]
        work.keep(linear.tensor, found.mean(), found.tokens)


def observed_together(linears: Sequence[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """Linears in runs whose Hessians are held at once, those of one input in one run."""
    run: list[LinearSpec] = []
    held = 0
    for members in _by(linears, lambda x: x.shared_input):
        size = 4 * members[0].shape[1] ** 2
        if run and held + size > HESSIAN_BYTES:
            yield run
            run, held = [], 0
        run, held = [*run, *members], held + size
    if run:
        yield run


def _solve(
    work: BlockRounding, linears: Sequence[LinearSpec], grams: dict[str, GramAccumulator]
) -> Iterator[tuple[LinearSpec, RoundedBlocks, int]]:
    for members in _by(linears, lambda x: x.shared_input):
        # Each sum goes as its mean comes, or both would be in memory.
        stats = grams.pop(members[0].shared_input).stats()
        for linear in members:
            work.keep(linear.tensor, stats.hessian.diagonal(), stats.tokens)
        expert = members[0].expert is not None
        seen = Observed(stats.hessian, expert_tokens=stats.tokens if expert else None)
        for alike in _by(members, lambda x: work.kind(x.tensor)):
            weights = [_weight(work, x) for x in alike]
            kind = work.kind(alike[0].tensor)
            rounded = round_weights(weights, kind, work.config, seen)
            yield from ((x, r, stats.tokens) for x, r in zip(alike, rounded, strict=True))


def _by(
    linears: Sequence[LinearSpec], key: Callable[[LinearSpec], str]
) -> Iterable[list[LinearSpec]]:
    """In the order in which each key first comes."""
    found: dict[str, list[LinearSpec]] = {}
    for linear in linears:
        found.setdefault(key(linear), []).append(linear)
    return found.values()


def _weight(work: BlockRounding, linear: LinearSpec) -> Tensor:
    """[N, K] as stored, on the device that computes."""
    stored = work.weights.read(linear.tensor, check_finite=True)
    weight = stored.t() if linear.transposed else stored
    return weight.to(work.device).contiguous()


def _head(work: BlockRounding, chain: Chain) -> list[RoundedTensor]:
    """What the output head multiplies by, as it reads the last block's outputs behind the norm."""
    tensor = work.to_round.head
    if tensor is None:
        _measure_head(work, chain)
        return []
    stats = _final_stats(chain)
    work.keep(tensor, stats.hessian.diagonal(), stats.tokens)
    return [_by_rows(work, tensor, Observed(stats.hessian), stats.tokens)]


def _measure_head(work: BlockRounding, chain: Chain) -> None:
    if work.measured is None:
        return
    sums = SquareSums.create(HEAD, chain.weights.spec.hidden, device=chain.skeleton.device)
    _read_final(chain, sums.add)
    work.keep(work.measured.head, sums.mean(), sums.tokens)


def _final_stats(chain: Chain) -> InputStats:
    width, device = chain.weights.spec.hidden, chain.skeleton.device
    gram = GramAccumulator.create(HEAD, width, device=device)
    _read_final(chain, gram.add)
    return gram.stats()


def _read_final(chain: Chain, add: Callable[[Tensor], None]) -> None:
    """What the head reads, [tokens, hidden] of each batch."""
    for batch, read in zip(chain.batches, chain.final(), strict=True):  # [rows, length, hidden]
        mask = batch.mask
        add(read.reshape(-1, read.shape[-1]) if mask is None else read[mask.to(read.device)])


def _by_rows(
    work: BlockRounding, tensor: str, observed: Observed, tokens: int | None = None
) -> RoundedTensor:
    """A matrix with a row a token of the vocabulary, in runs of rows: whole it is large in fp32."""
    weights, kind = work.weights, work.kind(tensor)
    rows, width = weights.shapes[tensor]
    step, found = max(1, ROWS_AT_ONCE // width), list[tuple[RoundedBlocks, float]]()
    for start in range(0, rows, step):
        stored = weights.read_rows(tensor, start, min(start + step, rows), check_finite=True)
        part = stored.to(work.device).float()
        (rounded,) = round_weights([part], kind, work.config, observed)
        work.blocks.write(tensor, rounded.data, start)
        found.append((rounded, judge(part, observed.hessian).whole))
    return _joined(tensor, found, tokens)


def _joined(
    tensor: str, parts: Sequence[tuple[RoundedBlocks, float]], tokens: int | None
) -> RoundedTensor:
    """Of runs of rows, each with the energy that its error is a share of."""
    whole = sum(energy for _, energy in parts) or 1.0
    runs = [run for run, _ in parts]
    return RoundedTensor(
        tensor,
        runs[0].kind,
        sum(run.error * energy for run, energy in parts) / whole,
        " and ".join(dict.fromkeys(run.method for run in runs)),
        next((run.kept for run in runs if run.kept is not None), None),
        next((run.damping for run in runs if run.damping is not None), None),
        tokens,
        sum((run.plain or 0.0) * energy for run, energy in parts) / whole,
    )


def _told(tensor: str, rounded: RoundedBlocks, tokens: int | None) -> RoundedTensor:
    return RoundedTensor(
        tensor,
        rounded.kind,
        rounded.error,
        rounded.method,
        rounded.kept,
        rounded.damping,
        tokens,
        rounded.plain,
    )
