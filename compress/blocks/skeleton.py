"""A decoder without weights: it knows how to run any one block, and fills only that one.

Everything a block needs beside its hidden states (masks, rotary tables) is taken from a forward of
transformers' own model in which each block is replaced by a recorder; embedding, final norm and
head are run by the same model around such recorders. So scalings, soft caps and position
embeddings are transformers' business and no family needs code here.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compress.arch.spec import DecoderSpec
from compress.blocks.experts import split_experts
from compress.blocks.kv_states import PassingCache, call_with_cache
from compress.blocks.linear import check_linear
from compress.blocks.model import build_model, find_stack, remedy, set_parameter, short_reason
from compress.blocks.recorder import FirstReached, LastReached, Recorder, Tape
from compress.errors import CheckpointError
from compress.formats.checked_reads import RowReader, check_names, expert_paths
from compress.quant.activations import fake_quantize, quantize_inputs

if TYPE_CHECKING:
    from compress.formats.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class BlockContext:
    """Arguments of every block beside the hidden states, for one batch shape and mask."""

    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]


class Skeleton:
    """Runs a checkpoint's decoder block by block; not for use from several threads at once."""

    def __init__(
        self,
        checkpoint_config: Mapping[str, Any],
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.config = checkpoint_config
        self.spec, self.dtype, self.device = spec, dtype, device
        model = build_model(checkpoint_config, spec, dtype, device)
        self.model: Any = model
        self.base_name = str(model.base_model_prefix)
        self.stack = find_stack(model, spec)
        self.blocks = list(model.get_submodule(self.stack).children())
        self.head_path = self._head_path()
        self._tape, self._rows = Tape(), RowReader()
        last = len(self.blocks) - 1
        recorders = [Recorder(b, i, i == last, self._tape) for i, b in enumerate(self.blocks)]
        parent, _, leaf = self.stack.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, nn.ModuleList(recorders))
        self._zeros = torch.zeros(1, dtype=dtype, device=device)
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            self._clear(name, parameter.shape)
        self._contexts: dict[tuple[int, ...], BlockContext] = {}
        self._head: tuple[Weights, dict[str, Tensor]] | None = None
        self._find_block_output()

    def context(self, ids: Tensor, mask: Tensor | None = None) -> BlockContext:
        """Per-block arguments for a batch. ids: [batch, seq]; mask: bool [batch, seq] or None.

        Without a mask they depend on the shape alone and are kept for the next call.
        """
        shape = tuple(ids.shape)
        if mask is None and shape in self._contexts:
            return self._contexts[shape]
        with self._tape.recording(), torch.no_grad(), _stopping(LastReached):
            self._run_base(ids, mask)
        context = BlockContext(tuple(self._tape.take_calls()))
        if mask is None:
            self._contexts = {shape: context}
        return context

    def embed(
        self,
        weights: "Weights",
        ids: Tensor,
        mask: Tensor | None = None,
        change: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Tensor:
        """Hidden states entering block 0: [batch, seq, hidden]. ids: int64 [batch, seq].

        change: of the embedding's rows, as they are stored, before they are used.
        """
        used, index = torch.unique(ids, return_inverse=True)
        rows = change(self._rows.read(weights, self.spec.embedding, used))
        table = rows.to(self.device, self.dtype)
        paths = self.outside_paths()
        state = self._read_outside(weights)
        state[paths[self.spec.embedding]] = table
        with (
            self._filled(state),
            self._tape.recording(stop_at_first=True),
            torch.no_grad(),
            _stopping(FirstReached),
        ):
            self._run_base(index, mask)
        return self._tape.take_first()

    def load_block(self, weights: "Weights", index: int) -> nn.Module:
        """Block `index` with its weights, in `dtype` on `device`, experts as separate linears.

        Inputs of linears that the checkpoint quantizes at run time are rounded alike. The block
        lives as long as the caller keeps it. Raises CheckpointError naming a tensor with NaN or
        infinity, and when disk and transformers' module do not match.
        """
        self._rows.forget()  # embedding comes before the blocks
        block = self.fill_block(index, partial(weights.read, check_finite=True))
        for linear in self.spec.blocks[index].linears:
            check_linear(block, linear)
            scheme = weights.activation(linear.name)
            if scheme is not None:
                quantize_inputs(block.get_submodule(linear.module), scheme)
        return block

    def fill_block(self, index: int, read: Callable[[str], Tensor]) -> nn.Module:
        """Block `index` with the tensors that `read` gives by name, in `dtype` on `device`, experts
        as separate linears. CheckpointError when they do not match transformers' module."""
        spec = self.spec.blocks[index]
        block: nn.Module = copy.deepcopy(
            self.blocks[index], {id(self.model.config): self.model.config}
        )
        for path in expert_paths(spec):
            split_experts(block, path)
        wanted = block.state_dict()
        check_names(spec, wanted)
        state: dict[str, Tensor] = {}
        for tensor, path in spec.modules:
            value = read(tensor)
            if value.shape != wanted[path].shape:
                raise CheckpointError(
                    f"tensor {tensor} has shape {list(value.shape)}, transformers'"
                    f" {type(block).__name__} asks for {list(wanted[path].shape)}"
                )
            state[path] = value.to(self.device, wanted[path].dtype)
        block.load_state_dict(state, assign=True)
        return block.eval().requires_grad_(False)

    def run_block(
        self,
        block: nn.Module,
        index: int,
        hidden: Tensor,
        context: BlockContext,
        cache: PassingCache | None = None,
    ) -> Tensor:
        """Output of a loaded block. hidden: [batch, seq, hidden], the batch of `context`.

        cache: sees, and may change, the keys and values that attention uses. CheckpointError when
        the block does not offer them. Gradients are recorded where parameters of the block or
        `hidden` ask for them, which those of a block just loaded do not.
        """
        args, kwargs = context.calls[index]
        if cache is not None:
            args, kwargs = call_with_cache(block, args, kwargs, cache)
        asked = hidden.requires_grad or any(p.requires_grad for p in block.parameters())
        with torch.set_grad_enabled(asked and torch.is_grad_enabled()):
            out = block(hidden, *args, **kwargs)
        if cache is not None and not cache.met:
            raise CheckpointError(
                f"block {index} ({type(block).__name__}) stores no keys and values through a cache;"
                " leave kv_cache out"
            )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def stored_cache(self, weights: "Weights", index: int) -> PassingCache | None:
        """What keys and values of a block go through in a quantized cache, None without one."""
        how = weights.cache(self.spec.blocks[index])
        if how is None:
            return None
        key, value = how
        return PassingCache(lambda x: fake_quantize(x, key), lambda x: fake_quantize(x, value))

    def final_hidden(self, weights: "Weights", hidden: Tensor) -> Tensor:
        """The last block's output behind the final norm. hidden: [..., hidden]."""
        with self._filled(self._read_outside(weights)), torch.no_grad():
            out = self._finish(hidden.reshape(-1, 1, hidden.shape[-1]))
        return out.reshape(*hidden.shape[:-1], out.shape[-1])

    def logits(self, weights: "Weights", hidden_rows: Tensor) -> Tensor:
        """Logits [n, vocab] of rows [n, hidden] that `final_hidden` gave.

        The rows are rounded first where the checkpoint quantizes the head's inputs at run time. The
        head stays in memory for further calls with the same weights, until `release`.
        """
        if self._head is None or self._head[0] is not weights:
            self._head = None
            self._head = (weights, self._read_head(weights))
        rows = hidden_rows.to(self.device, self.dtype)
        head = self.spec.head_linear()
        inputs = None if head is None else weights.activation(head.name)
        if inputs is not None:
            # Rows of many texts, and how many is our business: each as if it was a call.
            rows = fake_quantize(rows, inputs, alone=True)
        rows = rows.unsqueeze(1)  # [n, 1, hidden]
        ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=self.device)
        with self._filled(self._head[1]), self._base_returning(rows), torch.no_grad():
            out: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return out.squeeze(1)

    def read_all_outside(self, weights: "Weights") -> dict[str, Tensor]:
        """Parameter path in the causal LM -> value, of everything beside the blocks."""
        paths = self.outside_paths()
        state = self._read_outside(weights) | self._read_head(weights)
        tied = state.get(f"{self.head_path}.weight") if self.spec.tied else None
        if tied is None:
            tied = weights.read(self.spec.embedding, check_finite=True).to(self.device, self.dtype)
        return state | {paths[self.spec.embedding]: tied}

    def check_outside(self) -> None:
        """CheckpointError for a parameter beside the blocks that no tensor of the spec fills."""
        filled = {*self.outside_paths().values(), f"{self.head_path}.weight"}
        filled |= {path for _, path in self.spec.outside}
        for path, _ in self.model.named_parameters(remove_duplicate=False):
            if path not in filled and not path.startswith(self.stack + "."):
                raise CheckpointError(
                    f"transformers' {type(self.model).__name__} has a parameter {path} beside its"
                    " blocks, for which no tensor of the decoder is known; use a recipe without"
                    " calibration and evaluation"
                )

    def release(self) -> None:
        """Forget the head and the contexts kept for further calls."""
        self._head = None
        self._contexts = {}

    def _run_base(self, ids: Tensor, mask: Tensor | None) -> Any:
        base = getattr(self.model, self.base_name)
        mask = None if mask is None else mask.to(self.device, torch.int64)
        return base(input_ids=ids.to(self.device), attention_mask=mask, use_cache=False)

    def _finish(self, hidden: Tensor) -> Tensor:
        """What the model does behind its blocks. hidden: [n, 1, hidden]."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        with self._tape.replacing(hidden.to(self.device, self.dtype)):
            out: Tensor = self._run_base(ids, None)[0]
        return out

    def _find_block_output(self) -> None:
        """Whether the model expects a block to return a tensor or a tuple; both are in use."""
        hidden = self._zeros.expand(2, 3, self.spec.hidden)
        reason = "its output has another shape than its input"
        for as_tuple in (False, True):
            self._tape.as_tuple = as_tuple
            try:
                with torch.no_grad():
                    if self._finish(hidden).shape[:2] == hidden.shape[:2]:
                        return
            except Exception as error:  # whatever transformers' code makes of config.json
                reason = short_reason(error)
        raise CheckpointError(
            f"transformers' {type(self.model).__name__} cannot be run block by block ({reason});"
            f" {remedy(self.spec)}"
        )

    def _head_path(self) -> str:
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if module is head:
                return str(name)
        raise CheckpointError(
            f"transformers' {type(self.model).__name__} has no output head; {remedy(self.spec)}"
        )

    def outside_paths(self) -> dict[str, str]:
        """Parameter path of every tensor beside the blocks, the head's left out."""
        paths: dict[str, str] = {}
        for tensor, path in self.spec.outside:
            if not path.startswith(self.head_path + ".") and tensor != self.spec.head:
                paths[tensor] = self._resolve(tensor, path)
        return paths

    def _resolve(self, tensor: str, path: str) -> str:
        for candidate in (path, f"{self.base_name}.{path}"):
            parent, _, leaf = candidate.rpartition(".")
            try:
                if hasattr(self.model.get_submodule(parent), leaf):
                    return candidate
            except AttributeError:
                continue
        raise CheckpointError(
            f"tensor {tensor} has no place in transformers' {type(self.model).__name__} (no"
            f" parameter {path}); {remedy(self.spec)}"
        )

    def _read_outside(self, weights: "Weights") -> dict[str, Tensor]:
        """Everything beside the blocks except the embedding and the head: small tensors."""
        return {
            path: weights.read(tensor, check_finite=True).to(self.device, self.dtype)
            for tensor, path in self.outside_paths().items()
            if tensor != self.spec.embedding
        }

    def _read_head(self, weights: "Weights") -> dict[str, Tensor]:
        name = self.spec.head or self.spec.embedding
        state = {f"{self.head_path}.weight": weights.read(name, check_finite=True)}
        for tensor, path in self.spec.outside:
            if path == f"{self.head_path}.bias":
                state[path] = weights.read(tensor, check_finite=True)
        return {path: value.to(self.device, self.dtype) for path, value in state.items()}

    def _clear(self, path: str, shape: torch.Size) -> None:
        # A zero-stride tensor: the model can be run for its masks and takes no memory.
        set_parameter(self.model, path, self._zeros.expand(shape))

    @contextmanager
    def _filled(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        shapes = {path: self.model.get_parameter(path).shape for path in state}
        for path, value in state.items():
            set_parameter(self.model, path, value)
        try:
            yield
        finally:
            for path, shape in shapes.items():
                self._clear(path, shape)

    @contextmanager
    def _base_returning(self, hidden: Tensor) -> Iterator[None]:
        base = getattr(self.model, self.base_name)
        setattr(self.model, self.base_name, GivenHidden(hidden))
        try:
            yield
        finally:
            setattr(self.model, self.base_name, base)


class GivenHidden(nn.Module):
    """Stands in for the decoder when only the head is to be run."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.output = _Output((hidden,))

    def __getattr__(self, name: str) -> "GivenHidden":
        return self  # some models call `self.model.decoder(...)`

    def forward(self, *args: Any, **kwargs: Any) -> "_Output":
        return self.output


class _Output(tuple[Tensor]):
    """A decoder's output that has hidden states and nothing else."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _stopping(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
