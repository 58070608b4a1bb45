"""Products that read the same inputs as one product with a split behind it, beside several.

    python -m benchmarks.export.gate_up

onnx-genai writes gate and up as two products, and q, k and v as three where queries and keys have
norms of their own. Here the graph is rewritten: codes and scales lie one behind the other, as
MatMulNBits takes them. Of the demo model, of the first blocks of the 400M shape, and of as many of
a Qwen3 of its widths, with random weights; all in 4 bits with groups of 32. Folders take turns in
onnxruntime-genai, as in generate.py; ratios are those of one product over several. Needs the extras
onnx and interop; the result goes to benchmarks/results.
"""

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.export.genai_speed import PACKAGES, ours, source, taking_turns
from benchmarks.models import SHAPES
from benchmarks.processes import package_versions, setting, wait_until_quiet, write_result

MODEL, DATA = "model.onnx", "model.onnx.data"
KIND = "MatMulNBits"
INLINE = 1024  # bytes; smaller weights stay in the graph
GATE_UP, Q_K_V = 2, 3  # products that read the same
STACKS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"tale-6m": (GATE_UP,), "400m": (GATE_UP,), "qwen3": (GATE_UP, Q_K_V)}
)
NAMES: Mapping[int, str] = MappingProxyType({GATE_UP: "gate_up", Q_K_V: "qkv"})


def merged(folder: Path, out: Path, number: int) -> int:
    """A copy of an exported folder with one product for each `number` that read the same; how many
    there are."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(MODEL, DATA))
    model = ir.load(folder / MODEL)
    readers: dict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == KIND:
            readers[node.inputs[0]].append(node)
    stacks = [nodes for nodes in readers.values() if len(nodes) == number]
    for nodes in stacks:
        _merge(model.graph, nodes)
    ir.save(model, out / MODEL, external_data=DATA, size_threshold_bytes=INLINE)
    return len(stacks)


def _merge(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    first, sizes = nodes[0], [node.attributes["N"].as_int() for node in nodes]
    inputs = [first.inputs[0]]
    for values in zip(*(node.inputs[1:] for node in nodes), strict=True):
        given = [value for value in values if value is not None]
        inputs.append(_joined(graph, given) if given else None)
    attributes = {**first.attributes, "N": ir.AttrInt64("N", sum(sizes))}
    name = f"{first.name}, stacked"
    product = ir.Node(first.domain, KIND, inputs, list(attributes.values()), name=name)
    parts = _constant(graph, f"{name}: sizes", np.array(sizes, np.int64))
    split = ir.node("Split", [product.outputs[0], parts], {"axis": -1}, num_outputs=len(nodes))
    graph.insert_before(first, (product, split))
    for node, part in zip(nodes, split.outputs, strict=True):
        node.outputs[0].replace_all_uses_with(part)
    graph.remove(nodes, safe=True)


def _joined(graph: ir.Graph, weights: Sequence[ir.Value]) -> ir.Value:
    """Rows of several weights; their own are removed."""
    arrays = []
    for weight in weights:
        assert weight.const_value is not None
        assert weight.name is not None
        arrays.append(weight.const_value.numpy())
        graph.initializers.pop(weight.name)
    return _constant(graph, f"{weights[0].name}, stacked", np.concatenate(arrays))


def _constant(graph: ir.Graph, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
    value = ir.Value(name=name, type=kind, shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def qwen3(folder: Path, blocks: int) -> Path:
    """A checkpoint of random weights with the widths of the 400M shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES["400m"]
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measure(name: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    blocks = None if name == "tale-6m" else options.blocks
    given = qwen3(work / name, blocks) if name == "qwen3" else source(name, work, blocks)
    folders, counts = {}, {}
    several, _ = ours(given, "rtn", work, options.quiet)
    for number in STACKS[name]:
        what = NAMES[number]
        folders[what] = work / what
        counts[what] = merged(several, folders[what], number)
    pairs = [f"{what}={folder}" for what, folder in folders.items()]
    size = (options.prompt, options.tokens, options.rounds, options.threads)
    wait_until_quiet(options.quiet)
    speed = taking_turns([*pairs, f"several={several}"], size, options.processes)
    return {"blocks": blocks, "products_stacked": counts, **speed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--blocks", type=int, default=4, help="of all but tale-6m")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="generated")
    parser.add_argument("--rounds", type=int, default=5, help="one more, not counted, comes first")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=0.1, help="start when others use less")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    result = {
        **setting("benchmarks.export.gate_up"),
        "threads": options.threads,
        "versions": package_versions(sys.executable, PACKAGES),
        "prompt": options.prompt,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "processes": options.processes,
    }
    for name in options.models:
        work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
        try:
            result[name] = measure(name, options, work)
        finally:
            shutil.rmtree(work)
    write_result("export_gate_up", result)


if __name__ == "__main__":
    main()
