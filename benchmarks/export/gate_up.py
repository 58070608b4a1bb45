"""Products that read the same inputs as one product with a split behind it, beside several.

    python -m benchmarks.export.gate_up

onnx-genai writes gate and up as one product, and q, k and v where queries and keys have norms of
their own. Here a graph is rewritten that has several: rows of codes and scales go to products of
their own. Of the demo model, of the first blocks of the 400M shape, and of as many of a Qwen3 of
its widths, with random weights; all in 4 bits with groups of 32. Folders take turns in
onnxruntime-genai, as in generate.py; ratios are those of one product over several. Needs the extras
onnx and interop; the result goes to benchmarks/results.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.export.genai_speed import PACKAGES, asked, ours, source
from benchmarks.models import SHAPES
from benchmarks.processes import package_versions, setting, wait_until_quiet, write_result

MODEL, DATA = "model.onnx", "model.onnx.data"
KIND = "MatMulNBits"
INLINE = 1024  # bytes; smaller weights stay in the graph
GATE_UP, Q_K_V = 2, 3  # parts of a product
PARTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"tale-6m": (GATE_UP,), "400m": (GATE_UP,), "qwen3": (GATE_UP, Q_K_V)}
)
NAMES: Mapping[int, str] = MappingProxyType({GATE_UP: "gate_up", Q_K_V: "qkv"})


def separated(folder: Path, out: Path, number: int) -> int:
    """A copy of an exported folder without products that are split into `number` parts; how many
    there were."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(MODEL, DATA))
    model = ir.load(folder / MODEL)
    splits = [node for node in model.graph if node.op_type == "Split"]
    found = [node for node in splits if len(node.outputs) == number and _product(node)]
    for split in found:
        _separate(model.graph, split)
    ir.save(model, out / MODEL, external_data=DATA, size_threshold_bytes=INLINE)
    return len(found)


def _product(split: ir.Node) -> ir.Node | None:
    """What a split takes apart, None where that is no product with codes."""
    assert split.inputs[0] is not None
    made = split.inputs[0].producer()
    return made if made is not None and made.op_type == KIND else None


def _separate(graph: ir.Graph, split: ir.Node) -> None:
    product, sizes = _product(split), split.inputs[1]
    assert product is not None
    assert sizes is not None
    assert sizes.const_value is not None
    first, weights = 0, [x for x in product.inputs[1:] if x is not None]
    for part, size in zip(split.outputs, sizes.const_value.numpy().tolist(), strict=True):
        rows, name = slice(first, first + size), f"{product.name}: rows from {first} on"
        inputs = [product.inputs[0]]
        inputs += [None if x is None else _rows(graph, x, rows) for x in product.inputs[1:]]
        attributes = {**product.attributes, "N": ir.AttrInt64("N", size)}
        own = ir.Node(product.domain, KIND, inputs, list(attributes.values()), name=name)
        graph.insert_before(split, own)
        part.replace_all_uses_with(own.outputs[0])
        first += size
    graph.remove((split, product), safe=True)
    for weight in weights:
        graph.initializers.pop(str(weight.name))


def _rows(graph: ir.Graph, weight: ir.Value, rows: slice) -> ir.Value:
    assert weight.const_value is not None
    array = weight.const_value.numpy()[rows]
    return _constant(graph, f"{weight.name}: rows from {rows.start} on", array)


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
    one, _ = ours(given, "rtn", work, options.quiet)
    size = (options.prompt, options.tokens, options.rounds, options.threads)
    result: dict[str, Any] = {"blocks": blocks}
    for number in PARTS[name]:
        several = work / f"{NAMES[number]}, several"
        count = separated(one, several, number)
        wait_until_quiet(options.quiet)
        speed = asked("generate", f"one={one}", f"several={several}", *map(str, size))
        result[NAMES[number]] = {"products": count, **speed}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--blocks", type=int, default=4, help="of all but tale-6m")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="generated")
    parser.add_argument("--rounds", type=int, default=15, help="one more, not counted, comes first")
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
