"""Graphs of latent attention: what they compute, and why heads are rows of one product.

    python -m benchmarks.export.latents

Numbers: tale-6m by the stage mla (rank 96, rope_dim 32), exported in fp32 and in fp16; KL
divergence from transformers in nats a token, over texts of 256 tokens: a prompt of 200, two single
tokens, and the rest in one step. Products: attention of one layer in ONNX Runtime, of two texts, as
our graphs have it and as the operator Attention; the two take turns on one thread, medians of its
processor time, which others on the machine change little. Needs the extra onnx; the result goes to
benchmarks/results/export_latents.json.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from benchmarks.export.divergence import Array, windows
from benchmarks.export.genai_speed import TEXT
from benchmarks.processes import REPO, package_versions, setting, write_result
from compress import verbs
from compress.arch.forward.kinds import Latent
from compress.recipe.reading.parse import parse
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.graph import Graph
from compress_exporters.onnx.graph.latent import LatentQueries, read, values_of
from compress_exporters.onnx.names import MODEL
from compress_exporters.onnx.proof.running import Runner

PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxruntime")
RECIPE = {
    "name": "latents",
    "stages": [{"method": "mla", "rank": 96, "rope_dim": 32}],
    "calibration": {"sources": "self", "samples": 32, "length": 128},
    "evaluation": None,
}
STEPS = (200, 1, 1, 54)  # tokens
TEXTS, ROUNDS = 32, 15
# What -> (heads, rank, rotated, tokens, tokens before them and their own).
SHAPES: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "a token behind 1023, tale-6m": (8, 96, 32, 1, 1024),
        "a token behind 1023, DeepSeek's latents": (32, 512, 64, 1, 1024),
        "a prompt of 256, tale-6m": (8, 96, 32, 256, 256),
        "a prompt of 256, DeepSeek's latents": (32, 512, 64, 256, 256),
    }
)
Read = Callable[[Graph, str, Latent, LatentQueries], ir.Value]


def operator(graph: Graph, at: str, how: Latent, asked: LatentQueries) -> ir.Value:
    """The same as one operator."""
    values = values_of(graph, at, how, asked.latents)
    inputs = (asked.queries, asked.latents, values, asked.seen)
    return graph.op(at, "Attention", *inputs, scale=how.scale)


def session(shape: tuple[int, int, int, int, int], made: Read, path: Path) -> ort.InferenceSession:
    """Attention of one layer, on one thread."""
    heads, rank, rotated = shape[:3]
    how = Latent(heads, rank, rotated, 128, 128, None, None, False, 0.1, 1e-6)
    graph, fp32 = Graph(ir.DataType.FLOAT, {"": 23}), ir.DataType.FLOAT
    width = rank + rotated
    asked = LatentQueries(
        graph.input("q", fp32, ("batch", heads, "tokens", width)),
        graph.input("latents", fp32, ("batch", 1, "total", width)),
        graph.input("seen", ir.DataType.BOOL, ("batch", 1, "tokens", "total")),
    )
    sums = made(graph, "attention", how, asked)
    graph.output("sums", sums, fp32, ("batch", heads, "tokens", rank))
    ir.save(graph.model("latents", "0"), path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def products(work: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time, by shape and way."""
    found: dict[str, dict[str, float]] = {}
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        heads, rank, rotated, tokens, total = shape
        sizes = {"q": (2, heads, tokens, rank + rotated), "latents": (2, 1, total, rank + rotated)}
        given = {k: random.normal(size=v).astype(np.float32) for k, v in sizes.items()}
        given["seen"] = np.tril(np.ones((2, 1, tokens, total), bool), total - tokens)
        ways = {"rows of one product": read, "Attention": operator}
        sessions = {way: session(shape, made, work / "one.onnx") for way, made in ways.items()}
        first, second = (each.run(None, given)[0] for each in sessions.values())
        assert np.abs(first - second).max() < 1e-4, "both compute the same"
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, each in sessions.items():
                began = time.thread_time()
                each.run(None, given)
                spent[way].append(1e3 * (time.thread_time() - began))
        found[name] = {way: round(statistics.median(x), 3) for way, x in spent.items()}
    return found


def divergence(model: Path, folders: Mapping[str, Path]) -> dict[str, float]:
    """Of each graph from transformers, nats a token."""
    from transformers import AutoModelForCausalLM

    ids = windows(model, TEXT, TEXTS)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids)).logits.double().log_softmax(-1)
    found = {}
    for name, folder in folders.items():
        got = torch.from_numpy(played(Runner.open(folder / MODEL), ids)).double().log_softmax(-1)
        found[name] = float(f"{float((want.exp() * (want - got)).sum(-1).mean()):.2g}")
    return found


def played(runner: Runner, ids: Array) -> Array:
    """Logits of texts in STEPS."""
    past, found, at = None, [], 0
    for size in STEPS:
        at += size
        mask = np.ones((len(ids), at), np.int64)
        logits, past = runner.step(ids[:, at - size : at], mask, past)
        found.append(logits)
    return np.concatenate(found, axis=1)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        work = Path(folder)
        source, model = REPO / "examples" / "tale-6m", work / "model"
        verbs.run(parse(json.dumps(RECIPE)), source, model)
        for dtype in ("fp32", "fp16"):
            target = verbs.ArtifactTarget("onnx", Options(dtype))
            verbs.export_artifact(model, target, work / dtype)
        result = {
            "made": setting("benchmarks.export.latents"),
            "versions": package_versions(sys.executable, PACKAGES),
            "kl_nats_a_token": divergence(model, {x: work / x for x in ("fp32", "fp16")}),
            "tokens": TEXTS * sum(STEPS),
            "cpu_milliseconds": products(work),
        }
    write_result("export_latents", result)


if __name__ == "__main__":
    main()
