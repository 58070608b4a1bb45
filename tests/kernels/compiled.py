"""Run by test_triton.py: compile the Triton kernels for sm_90 (no GPU), print what they use."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compress_kernels.triton import columns, gram, scale

ALIGNED = ("stride", "columns", "weight_stride", "out_stride", "row_stride", "width")


def usage(kernel, types: dict[str, str], constants: dict[str, object], warps: int):
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # What a launch finds out by itself: pointers aligned, these numbers multiples of 16.
    aligned = [n for n, t in signature.items() if t.startswith("*") or n in ALIGNED]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(done.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [str(cuobjdump()), "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    assert found, report
    return {
        "registers": int(found[1]),
        "spills": int(found[2]) + int(found[4]),
        "shared": done.metadata.shared,
    }


def cuobjdump() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main() -> None:
    fp32 = "*fp32"
    block_types = dict.fromkeys(
        ("weight", "factor", "importance", "ratios", "scale", "quantized", "lost"), fp32
    )
    block_types |= {"groups": "*i32", "zero": "*i8", "codes": "*i8"}
    block_types |= {"code_min": "fp32", "code_max": "fp32"}
    block = {"PULLED": True, "SYMMETRIC": False, "WEIGHTED": True, "KIND": 1,
             "ROWS": columns.ROWS, "COLUMNS": 128}  # fmt: skip
    scale_types = dict.fromkeys(("w", "ratios", "importance", "scale"), fp32)
    scale_types |= {"zero": "*i8", "code_min": "fp32", "code_max": "fp32"}
    shape = {"ROWS": scale.ROWS, "COLUMNS": scale.COLUMNS}
    results = {
        "block": usage(columns.block_kernel, block_types, {**block, "SEARCH": True}, columns.WARPS),
        "block-fixed": usage(
            columns.block_kernel, block_types, {**block, "SEARCH": False}, columns.WARPS
        ),
        "scale": usage(
            scale.scale_kernel, scale_types,
            {"SYMMETRIC": False, "WEIGHTED": True, "KIND": 2, **shape}, 4,
        ),
        "gram": usage(
            gram.gram_kernel, {"x": "*bf16", "out": fp32},
            {"SIDE": gram.SIDE, "TOKENS": gram.TOKENS}, 8,
        ),
    }  # fmt: skip
    print(json.dumps(results))


if __name__ == "__main__":
    main()
