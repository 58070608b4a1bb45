"""Changes of config.json and of safetensors headers, as damage, other tools or malice make them.

Every function draws from hypothesis and changes what it is given in place.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from helpers.fuzzing import SIDE_FILES, WEIGHTS, config_of

# Words that some format knows, so that a change may say something else that is well formed.
WORDS = (
    *("compressed-tensors", "gptq", "gptq_v2", "awq", "fp8", "modelopt", "bitsandbytes", "gemm"),
    *("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "dense"),
    *("naive-quantized", "mixed-precision", "tensor", "channel", "group", "block", "token"),
    *("tensor_group", "int", "float", "static", "dynamic", "weight", "Linear", "Embedding"),
    *("FP8", "FP8_PB_WO", "W4A16_AWQ", "W8A16", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
    *("W8A8_SQ_PER_CHANNEL", "FP8_PER_CHANNEL_PER_TOKEN", "re:.*", "re:.*down.*", "llama", "gpt2"),
    *("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head", "*"),
)
# Keys that may be added anywhere, most of them known to some format.
KEYS = (
    *("bits", "num_bits", "group_size", "sym", "symmetric", "zero_point", "desc_act", "dynamic"),
    *("strategy", "type", "format", "checkpoint_format", "version", "quant_method", "quant_algo"),
    *("ignore", "targets", "transposed", "actorder", "block_structure", "weight_block_size"),
    *("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "llm_int8_threshold"),
    *("load_in_4bit", "load_in_8bit", "kv_cache_scheme", "input_activations", "transform_config"),
    *("sparsity_config", "quantized_layers", "quantization", "has_zero_point", "pack_dtype"),
    *("text_config", "quantization_config", "compression_config", "tie_word_embeddings", "x"),
)
ODD = st.one_of(
    st.sampled_from([None, True, False, "", "4", "re:(", 0.5, float("nan"), float("inf"), -0.0]),
    st.sampled_from([[], {}, [[]], [5], [None], {"x": 1}, {"a": {"b": {}}}, ["re:("], [32, 32]]),
    st.sampled_from([0, 1, -1, 2, 3, 4, 5, 8, 16, 33, 40, 48, 64, 128, 10**12, -(2**70), 1 << 63]),
    st.sampled_from([*WORDS]),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([4, 8, 32, True, "group"]), max_size=2),
)
DTYPES = (
    *("BF16", "F16", "F32", "F64", "I8", "U8", "I16", "I32", "U32", "I64", "BOOL", "F8_E4M3"),
    *("F8_E5M2", "F8_E8M0", "F4", "", "bf16", 4, None, ["F32"]),
)


def change_config(data: st.DataObject, folder: Path) -> None:
    """One to three changes of config.json, or of a file that repeats it for some loaders."""
    found = [name for name in SIDE_FILES if (folder / name).exists()]
    name = data.draw(st.sampled_from(["config.json", "config.json", *found]))
    config = config_of(folder) if name == "config.json" else json.loads((folder / name).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        mutate_json(data, config)
    (folder / name).write_text(json.dumps(config))


def change_header(data: st.DataObject, folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(mutate_file(data, path.read_bytes()))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all keys and positions of a JSON value."""
    inside = value.items() if isinstance(value, dict) else []
    inside = enumerate(value) if isinstance(value, list) else inside
    return [p for key, below in inside for p in [(*at, key), *places(below, (*at, key))]]


def mutate_json(data: st.DataObject, config: Any, often: str = "quantization_config") -> None:
    """One change somewhere, in most cases below the key `often`."""
    found = places(config)
    near = [path for path in found if often in path]
    if near and data.draw(st.integers(0, 3)):
        found = near
    if not found:
        return
    *path, last = data.draw(st.sampled_from(found))
    holder = config
    for key in path:
        holder = holder[key]
    kind = data.draw(st.sampled_from(["replace", "replace", "near", "near", "drop", "name", "add"]))
    if kind == "replace":
        holder[last] = copy.deepcopy(data.draw(ODD))
    elif kind == "near":
        holder[last] = _near(data, holder[last])
    elif kind == "drop":
        del holder[last]
    elif isinstance(holder, dict):
        value = holder.pop(last) if kind == "name" else copy.deepcopy(data.draw(ODD))
        holder[data.draw(st.sampled_from(KEYS))] = value


def _near(data: st.DataObject, value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return data.draw(st.sampled_from([value + 1, value - 1, 2 * value, value // 2, -value]))
    if isinstance(value, float):
        return -value
    if isinstance(value, str):
        return data.draw(st.sampled_from([value.upper(), value + "x", value[:-1], *WORDS]))
    if isinstance(value, list):
        return [*value, *value[:1]] if data.draw(st.booleans()) else value[1:]
    return {str(key).upper(): inner for key, inner in value.items()}


def mutate_file(data: st.DataObject, raw: bytes) -> bytes:
    """A safetensors file with one thing wrong, or one thing other, in its header."""
    length = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + length], raw[8 + length :]
    return data.draw(st.sampled_from(_FILE_CHANGES))(data, header, body)


def _joined(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def _entry(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """One field of one tensor."""
    entries = json.loads(header)
    name = data.draw(st.sampled_from(_names(entries)))
    entry = entries[name]
    kind = data.draw(st.sampled_from(["dtype", "shape", "offsets", "lost", "odd", "more"]))
    if kind == "dtype":
        entry["dtype"] = data.draw(st.sampled_from(DTYPES))
    elif kind == "shape":
        entry["shape"] = _other_shape(data, entry["shape"])
    elif kind == "offsets":
        by = data.draw(st.sampled_from([1, -1, 4, -4, 1 << 40, -(1 << 40)]))
        at = data.draw(st.integers(0, 1))
        entry["data_offsets"][at] += by
    elif kind == "lost":
        del entry[data.draw(st.sampled_from(sorted(entry)))]
    elif kind == "odd":
        entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(ODD)
    else:
        entry["x"] = 1
    return _joined(json.dumps(entries).encode(), body)


def _other_shape(data: st.DataObject, shape: list[int]) -> list[Any]:
    others: list[list[Any]] = [shape[::-1], [*shape, 1], [1, *shape], shape[1:], [], [-1], [None]]
    others += [[n + 1 for n in shape], [2 * n for n in shape], [n / 2 for n in shape]]
    if len(shape) == 2:
        others += [[shape[0] * 2, shape[1] // 2], [shape[0] // 2, shape[1] * 2]]
    return data.draw(st.sampled_from(others))


def _names(entries: dict[str, Any]) -> list[str]:
    return [name for name in entries if name != "__metadata__"]


def _rename(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """One tensor called otherwise: by another's ending, with a mistake in it, or as another."""
    entries = json.loads(header)
    names = _names(entries)
    name, other = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
    module, _, part = name.rpartition(".")
    new = data.draw(
        st.sampled_from([f"{module}.{other.rpartition('.')[2]}", f"x{name}", f"{module}.{part}x"])
    )
    entries = {new if key == name else key: value for key, value in entries.items()}
    return _joined(json.dumps(entries).encode(), body)


def _swap(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """Two tensors in each other's place."""
    entries = json.loads(header)
    names = _names(entries)
    a, b = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
    alike = [n for n in names if entries[n]["shape"] == entries[a]["shape"]]
    b = data.draw(st.sampled_from(alike)) if data.draw(st.booleans()) else b
    entries[a], entries[b] = entries[b], entries[a]
    return _joined(json.dumps(entries).encode(), body)


def _without(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """One tensor and its bytes left out, all else in order."""
    entries = json.loads(header)
    lost = entries.pop(data.draw(st.sampled_from(_names(entries))))
    begin, end = lost["data_offsets"]
    for name in _names(entries):
        span = entries[name]["data_offsets"]
        entries[name]["data_offsets"] = [n - (end - begin) if n >= end else n for n in span]
    return _joined(json.dumps(entries).encode(), body[:begin] + body[end:])


def _added(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """One tensor more, beside those of a module."""
    entries = json.loads(header)
    module = data.draw(st.sampled_from(_names(entries))).rpartition(".")[0]
    part = data.draw(st.sampled_from(_EXTRA))
    entries[f"{module}.{part}"] = {
        "dtype": "F32",
        "shape": [1],
        "data_offsets": [len(body), len(body) + 4],
    }
    return _joined(json.dumps(entries).encode(), body + b"\0\0\x80\x3f")


_EXTRA = (
    *("input_scale", "weight_scale", "weight_scale_2", "weight_zero_point", "input_factor", "SCB"),
    *("bias", "weight", "g_idx", "k_scale", "pre_quant_scale", "R1.weight", "weight_global_scale"),
)


def _twice(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """A key that is there twice."""
    entries = json.loads(header)
    name = data.draw(st.sampled_from(_names(entries)))
    again = f"{json.dumps(name)}:{json.dumps(entries[name])},"
    return _joined(b"{" + again.encode() + header[1:], body)


def _metadata(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    entries = json.loads(header)
    entries["__metadata__"] = data.draw(ODD)
    return _joined(json.dumps(entries).encode(), body)


def _bytes(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """One byte of the header changed."""
    at = data.draw(st.integers(0, len(header) - 1))
    changed = bytearray(header)
    changed[at] = data.draw(st.sampled_from(b'\0 "{}[]:,0129aFI\xff'))
    return _joined(bytes(changed), body)


def _length(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """A wrong length of the header."""
    found = len(header)
    wrong = [0, 1, 2, found - 1, found + 1, found // 2, 2 * found, 1 << 40, (1 << 64) - 1]
    return data.draw(st.sampled_from(wrong)).to_bytes(8, "little") + header + body


def _cut(data: st.DataObject, header: bytes, body: bytes) -> bytes:
    """Bytes lost or too many at the end, or in the middle."""
    raw = _joined(header, body)
    kind = data.draw(st.sampled_from(["cut", "short", "more", "hole"]))
    if kind == "cut":
        return raw[: data.draw(st.integers(0, len(raw) - 1))]
    if kind == "hole":
        return raw[: 8 + len(header)] + body[data.draw(st.integers(1, 8)) :]
    return raw[:-1] if kind == "short" else raw + b"\0"


_FILE_CHANGES: tuple[Callable[[st.DataObject, bytes, bytes], bytes], ...] = (
    *(_entry, _entry, _entry, _rename, _rename, _swap, _without, _added),
    *(_twice, _metadata, _bytes, _length, _cut),
)
