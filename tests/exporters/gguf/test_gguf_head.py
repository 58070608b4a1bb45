"""What stands before the data of a file, beside what the package gguf writes."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from compress.quant.ggml_kinds import KINDS
from compress_exporters.gguf.plan import GgufPlan
from compress_exporters.gguf.target import PlannedGguf
from helpers.exporters.gguf_files import tiny, written


def by_the_package(plan: GgufPlan, path: Path) -> bytes:
    writer = GGUFWriter(path, plan.arch.name)
    for key, value in plan.fields[1:]:  # the writer itself adds the architecture
        if isinstance(value, tuple):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for piece, name in zip(plan.pieces, plan.kinds, strict=True):
        kind = KINDS[name]
        number, size = GGMLQuantizationType(kind.number), kind.nbytes(piece.numel)
        dtype = np.dtype(np.float32)  # the kind counts
        writer.add_tensor_info(piece.name, piece.shape, dtype, size, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3", "gpt2"])
def test_it_is_what_the_package_writes_and_the_size_is_known(family: str, tmp_path: Path) -> None:
    plan, path = written(tiny(tmp_path / "model", family), tmp_path / "out", type="IQ4_NL")
    wanted = by_the_package(plan, tmp_path / "head.gguf")
    assert plan.map.head.rstrip(b"\0") == wanted.rstrip(b"\0")
    assert len(plan.map.head) % 32 == 0
    assert path.read_bytes()[: len(wanted)] == wanted
    assert path.stat().st_size == plan.map.size == PlannedGguf(plan).size
