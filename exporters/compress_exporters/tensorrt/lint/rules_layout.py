"""Rules of the whole graph: shapes, keys and values of the past, the file of weights."""

from collections.abc import Iterator
from math import prod
from pathlib import PurePosixPath

from onnx import TensorProto

from compress_exporters.tensorrt.lint.facts import Facts, Shape, name_of
from compress_exporters.tensorrt.lint.findings import Finding

BITS = {"INT4": 4, "FLOAT4E2M1": 4, "INT8": 8, "FLOAT8E4M3FN": 8, "BOOL": 8}
BITS |= {"FLOAT16": 16, "BFLOAT16": 16, "FLOAT": 32, "INT32": 32, "INT64": 64}
PAST, PRESENT = "past_key_values.", "present."


def shapes(facts: Facts) -> Iterator[Finding]:
    """Strict inference gives every value a type and a rank, and the graph's own have names."""
    if facts.failure:
        yield Finding("graph", facts.failure, "mend the node that it names")
        return
    for name, node in facts.made.items():
        found = facts.type(name)
        if found is None or found.shape is None:
            yield Finding(node.name, f"shape inference does not know {name}", "say its shape")
    for value in (*facts.model.graph.input, *facts.model.graph.output):
        shape = facts.types[value.name].shape
        if shape is None or "" in shape:
            yield Finding(
                value.name, f"it has shape {shape}", "give every dimension a name or size"
            )


def past(facts: Facts) -> Iterator[Finding]:
    """Keys and values are [batch, heads, length, head_dim], heads and head_dim being numbers, and
    what goes in comes out longer."""
    given = [x.name for x in facts.model.graph.input if x.name.startswith(PAST)]
    made = [x.name for x in facts.model.graph.output if x.name.startswith(PRESENT)]
    for name in (*given, *made):
        shape = facts.types[name].shape
        if shape is None or not _is_state(shape):
            what = f"it has shape {shape}"
            yield Finding(name, what, "make it [batch, heads, length, head_dim]")
    for name in given:
        wanted = name.replace(PAST, PRESENT)
        if wanted not in made:
            yield Finding(name, f"there is no output {wanted}", "give out what goes in")
        elif not _appended(facts, name, wanted):
            what = f"{wanted} is not its concatenation on axis 2"
            yield Finding(name, what, "append by Concat; TensorRT's Attention keeps no past")


def _is_state(shape: Shape) -> bool:
    return len(shape) == 4 and [type(dim) for dim in shape] == [str, int, str, int]


def _appended(facts: Facts, given: str, made: str) -> bool:
    node = facts.made.get(made)
    if node is None or node.op_type != "Concat" or node.input[0] != given:
        return False
    return any(x.name == "axis" and x.i in (2, -2) for x in node.attribute)


def external(facts: Facts) -> Iterator[Finding]:
    """One file, beside the model and named relative to it, as long as its tensors say."""
    places = {x.name: _entries(x) for x in facts.model.graph.initializer if x.external_data}
    files = {entries.get("location", "") for entries in places.values()}
    if len(files) > 1:
        yield Finding(", ".join(sorted(files)), "weights are in several files", "write one")
    for name in files:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or len(path.parts) != 1 or ".." in path.parts:
            yield Finding(name, "the file of weights is not beside the model", "name it alone")
            return
        if not (facts.folder / name).is_file():
            yield Finding(name, "the file of weights is not there", "write it beside the model")
            return
    for tensor in facts.model.graph.initializer:
        if tensor.external_data:
            yield from _extent(facts, tensor)


def _extent(facts: Facts, tensor: TensorProto) -> Iterator[Finding]:
    entries = _entries(tensor)
    offset = int(entries.get("offset", "0"))
    size = (facts.folder / entries["location"]).stat().st_size
    length = int(entries.get("length", str(size - offset)))
    needed = -(-prod(tensor.dims) * BITS.get(name_of(tensor.data_type), 0) // 8)
    if offset + length > size:
        what = f"its bytes end at {offset + length}, and the file has {size}"
        yield Finding(tensor.name, what, "export again; the file was cut off")
    elif length != needed:
        what = f"it has {length} bytes, and its shape and type need {needed}"
        yield Finding(tensor.name, what, "export again")


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}
