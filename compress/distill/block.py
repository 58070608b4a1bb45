"""One block alone, against what its teacher's block gave: scope "block".

What enters is the edited model's, the target is the source's, so a block also mends what those
before it did. In memory are this block and its optimizer; the states are where the walk has them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.blocks.states import HiddenStates
from compress.blocks.walk import BlockInput, LoadedBlock, TokenBatch
from compress.distill.rows import split_places
from compress.distill.schedule import highest_rate
from compress.distill.trained import Trained


@dataclass(frozen=True, slots=True, eq=False)
class BlockScope:
    """A scope for `loop.train`. Its loss: squared error of the block's output, as a share of what
    the block is to add, ‖target - what enters‖², in the mean of the held-out tokens. So 1 is a
    block that does nothing, and blocks of all depths are measured alike.

    block: of a walk with gradients. targets: what the teacher's block gave, shaped as the block's
    own outputs. places: (batch, row in it) of the rows to train on; held: of those to measure on.
    share: 1 / the mean of ‖target - what enters‖² over the held-out tokens; see `block_scope`.
    """

    block: LoadedBlock
    trained: Trained
    targets: HiddenStates
    places: Tensor  # int64 [rows, 2]
    held: Tensor  # int64 [rows, 2]
    share: float = 1.0
    micro: int = 8

    @property
    def stage(self) -> str:
        return f"distill block {self.block.spec.index}"

    @property
    def rows(self) -> int:
        return len(self.places)

    def peak(self, loss: float) -> float:
        """The most, whatever the damage: of tale-6m (60 % of it, 20 steps) blocks with errors of
        0.033 and 0.36 came to 0.0296 and 0.353 at 2e-3, to 0.0307 and 0.358 at 5e-4."""
        return highest_rate(self.targets.shapes[0][-1])

    def tokens(self, places: Tensor) -> int:
        return sum(int(mask.sum()) for mask in self._masks(self.places[places]))

    def loss(self, places: Tensor) -> Tensor:
        return self._loss(self.places[places])

    def held_loss(self) -> float:
        with torch.no_grad():
            total = sum(self._loss(part).item() for part in torch.split(self.held, self.micro))
        return total / self.held_tokens

    @property
    def held_tokens(self) -> int:
        return max(1, sum(int(mask.sum()) for mask in self._masks(self.held)))

    def added(self) -> float:
        """Mean over the held-out tokens of ‖target - what enters‖²."""
        total = 0.0
        for part in torch.split(self.held, self.micro):
            entering, target, mask = self._read(part)
            total += _squares(target - entering.hidden.float(), mask).item()
        return total / self.held_tokens

    def _loss(self, places: Tensor) -> Tensor:
        """Sum over all tokens. places: int64 [rows, 2]."""
        entering, target, mask = self._read(places)
        out = self.block.run(entering)
        return self.share * _squares(out.float() - target, mask)

    def _read(self, places: Tensor) -> tuple[BlockInput, Tensor, Tensor]:
        """What enters, the target [rows, length, hidden] in fp32, and which tokens are real."""
        skeleton, between = self.block.skeleton, self.block.between
        pairs = [(int(batch), int(row)) for batch, row in places]
        found = [between.batches[batch] for batch, _ in pairs]
        ids = torch.stack([b.ids[row] for b, (_, row) in zip(found, pairs, strict=True)])
        real = torch.stack(self._masks(places))
        mask = None if bool(real.all()) else real
        hidden, target = (
            torch.cat(
                [
                    store.read(b.index, row, row + 1)
                    for b, (_, row) in zip(found, pairs, strict=True)
                ]
            ).to(skeleton.device)
            for store in (between.source, self.targets)
        )
        context = skeleton.context(ids, mask)
        return BlockInput(0, hidden, mask, context), target.float(), real.to(skeleton.device)

    def _masks(self, places: Tensor) -> list[Tensor]:
        """Of each row, which tokens are real: bool [length]."""
        batches = self.block.between.batches
        return [_real(batches[int(batch)], int(row)) for batch, row in places]


def block_scope(
    block: LoadedBlock, trained: Trained, targets: HiddenStates, held: int, seed: int
) -> BlockScope:
    """Measure on `held` of the rows, train on the others; drawn by the seed."""
    batches = block.between.batches
    every = [(i, row) for i, batch in enumerate(batches) for row in range(len(batch.ids))]
    learn, measured = split_places(len(every), held, seed)
    places = torch.tensor(every)
    scope = BlockScope(block, trained, targets, places[learn], places[measured])
    added = scope.added()
    return replace(scope, share=1.0 / added if added else 1.0)


def _real(batch: TokenBatch, row: int) -> Tensor:
    if batch.mask is None:
        return torch.ones(batch.ids.shape[1], dtype=torch.bool)
    return batch.mask[row]


def _squares(difference: Tensor, mask: Tensor) -> Tensor:
    """Sum over real tokens. difference: [rows, length, hidden]; mask: bool [rows, length]."""
    return difference.square().sum(-1).masked_fill(~mask, 0.0).sum()
