"""What llama.cpp's mixtures of types cost a model: made by `export --to gguf --type --text`, and by
llama-quantize with llama-imatrix.

    python -m benchmarks.export.mixtures --tools FOLDER --work FOLDER

FOLDER of the tools has llama-quantize and llama-imatrix (../peers/README.md says how they are
built). Both sides see the same text (CALIBRATION tokens of tales, 512 at a time) and write a file
of tale-6m; `types` tells whether every matrix has one type in both, `bytes` what all matrices take.
Both files are decoded by the same code, ours, and run in fp32 by transformers over the first 120
tales of the test text: KL divergence from the source in nats a token, and perplexity.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.export.k_quants import (
    EMBEDDING,
    LINEARS,
    MODEL,
    Bench,
    prepare,
    quality,
    tool,
    weigh,
    write_source,
)
from benchmarks.processes import package_versions, setting, write_result
from compress.quant.ggml_mixtures import MIXTURES
from compress_kernels import decode_blocks

COMMAND = "python -m benchmarks.export.mixtures --tools FOLDER --work FOLDER"
CALIBRATION = 512 * 128  # tokens: as many as `--text` takes


@dataclass(frozen=True, slots=True, eq=False)
class GgufMatrices:
    """weights: by name without ".weight", rows of queries and keys where transformers has them.
    types: of each. size: bytes of all."""

    weights: dict[str, Tensor]
    types: dict[str, str]
    size: int


def matrices_of(path: Path, heads: int) -> GgufMatrices:
    from gguf import GGUFReader

    found = GgufMatrices({}, {}, 0)
    size = 0
    for tensor in GGUFReader(path).tensors:
        name = tensor.name.removesuffix(".weight")
        if name != EMBEDDING and name.rpartition(".")[2] not in LINEARS:
            continue
        kind = tensor.tensor_type.name
        weight = decode_blocks(kind, torch.from_numpy(tensor.data.copy()))
        if name.endswith(("attn_q", "attn_k")):
            rows, columns = weight.shape
            weight = weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2)
        found.weights[name] = weight.reshape(-1, weight.shape[-1]).contiguous()
        found.types[name] = kind
        size += int(tensor.n_bytes)
    return GgufMatrices(found.weights, found.types, size)


def ours(name: str, text: Path, path: Path) -> None:
    """The file as a user's command makes it."""
    from compress.verbs import ArtifactTarget, export_artifact
    from compress_exporters.exporter import Options

    target = ArtifactTarget("gguf", Options(type=name, text=str(text)))
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        export_artifact(MODEL, target, Path(work) / "made", verify=False)
        shutil.move(Path(work) / "made" / "model.gguf", path)


def compare(bench: Bench, name: str, tools: Path, work: Path) -> dict[str, Any]:
    """Both sides of one mixture."""
    mine, others = work / f"ours-{name}.gguf", work / f"theirs-{name}.gguf"
    options = ("--imatrix", work / "imatrix.gguf")
    tool(tools, "llama-quantize", *options, work / "source.gguf", others, name, 1)
    ours(name, work / "calibration.txt", mine)
    heads = bench.model.config.num_attention_heads
    sides = {"llama-quantize": matrices_of(others, heads), "ours": matrices_of(mine, heads)}
    first, second = sides.values()
    row: dict[str, Any] = {
        "bytes": {label: side.size for label, side in sides.items()},
        "types": "the same" if first.types == second.types else "differ",
        **{label: quality(bench, side.weights) for label, side in sides.items()},
    }
    row["kl_ratio"] = row["ours"]["kl"] / row["llama-quantize"]["kl"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mixtures", nargs="*", default=list(MIXTURES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    bench = prepare(options.work, CALIBRATION)
    write_source(options.work / "source.gguf")
    weigh(options.tools, options.work)
    rows = {}
    for name in options.mixtures:
        rows[name] = compare(bench, name, options.tools, options.work)
        print(name, json.dumps(rows[name]), flush=True)
    result = {
        **setting("benchmarks.export.mixtures"),
        "command": COMMAND,
        "versions": package_versions(sys.executable, ("torch", "transformers", "gguf")),
        "calibration_tokens": CALIBRATION,
        "tokens": sum(map(len, bench.tested)),
        "mixtures": rows,
    }
    write_result("export_mixtures", result)


if __name__ == "__main__":
    main()
