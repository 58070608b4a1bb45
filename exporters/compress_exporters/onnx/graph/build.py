"""What the parts of a graph are built with, and the table of functions that a target is."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import onnx_ir as ir

from compress.arch.forward.forward import ForwardSpec
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.formats.weights import Weights
from compress.quant.tensor import InputQuantization, QuantizedTensor
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.graph import Graph

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Build:
    """A decoder's graph in the making.

    states: name of a layer's output of keys or values -> the value, filled by `attend`.
    session: entries that ONNX Runtime's session needs to run the graph as it is meant.
    rounds: whether linears round their inputs. notes: of what was converted.
    unfused: what stayed in single steps -> why. copied: in place, why weights of the checkpoint are
    written anew -> which. widened: "codes of 4 bits in 8-bit integers", and why -> which layers.
    """

    graph: Graph
    weights: Weights
    how: ForwardSpec
    options: Options
    lowering: "Lowering"
    states: dict[str, ir.Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unfused: dict[str, str] = field(default_factory=dict)
    session: dict[str, str] = field(default_factory=dict)
    copied: dict[str, set[str]] = field(default_factory=dict)
    widened: dict[str, set[str]] = field(default_factory=dict)
    rounds: bool = False
    _last: tuple[str, QuantizedTensor] | None = None
    _once: dict[str, object] = field(default_factory=dict)

    @property
    def spec(self) -> DecoderSpec:
        return self.weights.spec

    def input(self, name: str) -> ir.Value:
        """An input of the graph."""
        return next(value for value in self.graph.inputs if value.name == name)

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        """What several layers share, made when it is first asked for."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]  # type: ignore[return-value]

    def has(self, tensor: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return tensor in self.weights.checkpoint.tensors

    def quantized(self, tensor: str) -> QuantizedTensor:
        """A quantized weight; the last one is kept, as its parts are written one by one."""
        if self._last is None or self._last[0] != tensor:
            self._last = None
            found = self.weights.quantized(tensor)
            assert found is not None, "the weight is quantized"
            self._last = tensor, found
        return self._last[1]

    def forget(self) -> None:
        """Lets go of the last quantized weight, which a plan would hold until it is written."""
        self._last = None

    def fused(self, *kinds: str) -> dict[str, int]:
        """How many nodes there are of each kind; those that there are."""
        found = Counter(node.op_type for node in self.graph.nodes)
        return {kind: found[kind] for kind in kinds if found[kind]}

    def note(self, line: str) -> None:
        """Each line once."""
        if line not in self.notes:
            self.notes.append(line)


@dataclass(frozen=True, slots=True)
class Lowering:
    """How a target says what a decoder does. Every function adds nodes and returns values.

    opsets: domain -> version. positions: whether position_ids is an input.
    embedding: (build) -> hidden states [B, S, hidden], scaled, learned positions added.
    norm: (build, path, x) -> x behind the norm at a path of the checkpoint.
    add_norm: (build, path, x, y) -> (x + y, the same behind the norm).
    attention: (build, block, x) -> what attention adds, x being behind the norm.
    attend: (build, block, q, k, v) -> [B, S, heads * value width]; q, k, v are [B, S, heads of
        each * width], normed but not rotated. Puts present keys and values into build.states.
    mlp: (build, block, x) -> what the MLP or the mixture adds.
    linear: (build, linear, x) -> x times its weight, bias added.
    rounded: (build, inputs, x) -> x as inputs are rounded, where that can be said; their factor is
        in x.
    head: (build, x) -> logits [B, S, rows of the head], fp32.
    """

    opsets: Mapping[str, int]
    positions: bool
    embedding: Callable[[Build], ir.Value]
    norm: Callable[[Build, str, ir.Value], ir.Value]
    add_norm: Callable[[Build, str, ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
    attention: Callable[[Build, BlockSpec, ir.Value], ir.Value]
    attend: Callable[[Build, BlockSpec, ir.Value, ir.Value, ir.Value], ir.Value]
    mlp: Callable[[Build, BlockSpec, ir.Value], ir.Value]
    linear: Callable[[Build, LinearSpec, ir.Value], ir.Value]
    rounded: Callable[[Build, InputQuantization, ir.Value], ir.Value]
    head: Callable[[Build, ir.Value], ir.Value]
