"""What the tensors of a checkpoint are called in transformers' class, by its own rules."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from compress.arch.names import join
from compress.arch.spec import BlockSpec, LinearSpec

if TYPE_CHECKING:
    from compress.blocks.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class Place:
    """Where from_pretrained puts a tensor of a block.

    path: of the parameter, below the block. merged: it becomes a part of it, with others.
    missing: the class has no such parameter.
    """

    path: str
    merged: bool
    missing: bool


class Naming:
    """Of one class. transformers renames tensors of old checkpoints, and stacks experts."""

    def __init__(self, skeleton: "Skeleton") -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        self._skeleton = skeleton
        rules = get_model_conversion_mapping(skeleton.model)
        self._merging = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._renaming = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        self.kind = type(skeleton.model).__name__

    def place(self, block: BlockSpec, tensor: str) -> Place:
        """tensor: name on disk of a tensor of the block."""
        from transformers.core_model_loading import rename_source_key

        before = join(self._skeleton.stack, f"{block.index}.")
        own = before + tensor.removeprefix(block.prefix + ".")
        renamed, pattern = rename_source_key(own, self._renaming, self._merging)
        path = renamed.removeprefix(before)
        parent, _, leaf = path.rpartition(".")
        module = _submodule(self._skeleton.blocks[block.index], parent)
        return Place(path, pattern is not None, not hasattr(module, leaf))

    def module(self, block: BlockSpec, linear: LinearSpec) -> str | None:
        """Path below the block of a linear's module; None where it is stacked with others."""
        place = self.place(block, linear.tensor)
        return None if place.merged else place.path.rpartition(".")[0]

    def merges(self, block: BlockSpec, tensor: str) -> bool:
        """Whether a tensor becomes part of another, experts aside."""
        experts = {linear.tensor for linear in block.linears if linear.expert is not None}
        return tensor not in experts and self.place(block, tensor).merged

    def unnamed(self, packed: Collection[str]) -> tuple[str, ...]:
        """Paths of the class's linear modules that are not packed and that no tensor is named for.

        packed: names of linears. A tied head has no tensor; a router may go by another name.
        """
        spec, stack = self._skeleton.spec, self._skeleton.stack
        if spec.text_config:  # a part of the class that will be loaded, under paths of its own
            return ()
        tensors = {tensor for block in spec.blocks for tensor, _ in block.modules}
        named = (*tensors, *dict(spec.outside), *spec.copied)
        known = {name.removesuffix(".weight") for name in named}
        if spec.head is not None:
            known.add(self._skeleton.head_path)
        for block in spec.blocks:
            taken = (self.module(block, x) for x in block.linears if x.name in packed)
            known |= {join(stack, f"{block.index}.{path}") for path in taken}
        return tuple(name for name in self._linears() if name not in known)

    def _linears(self) -> Iterator[str]:
        """Of the class as it was before its blocks were replaced."""
        stack = self._skeleton.stack
        for index, block in enumerate(self._skeleton.blocks):
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    yield join(stack, f"{index}.{name}")
        for name, module in self._skeleton.model.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith(stack + "."):
                yield name


def _submodule(root: nn.Module, path: str) -> Any:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None
