"""A report such as a run over the 6M-parameter demo model writes."""

import math
import random
from dataclasses import replace

import pytest

from compress.report.records.quality import Quality, TextQuality
from compress.report.schema import (
    Layer,
    Machine,
    Planned,
    PlanVsActual,
    RecipeInfo,
    Report,
    Result,
    Sample,
    SizePart,
    Source,
    StageRecord,
)

HIDDEN, FFN, BLOCKS = 256, 768, 6
SHAPES = {
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN, HIDDEN),
    "v": (HIDDEN, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
LEVEL = {"q": 1.1, "k": 1.0, "v": 4.2, "o": 5.5, "gate": 3.0, "up": 4.1, "down": 7.5}
RECIPE = """\
# GPTQ, 4-bit weights in groups of 64: for any decoder, calibrated on its own text.
version: 1
stages:
  - gptq:
      scheme: {bits: 4, symmetric: true, group_size: 64}
      targets: [linears]
      damping: 0.01
calibration:
  sources: [{kind: self}]
  samples: 128
  length: 256
evaluation:
  texts:
    - {name: tinystories, path: text/tinystories_test.txt}
    - {name: self, kind: self}
"""


def make_layer(block: int, role: str) -> Layer:
    noise = random.Random(f"{block}{role}")
    rows, columns = SHAPES[role]
    where = "self_attn" if role in "qkvo" else "mlp"
    before = 2 * rows * columns
    after = rows * columns // 2 + 2 * rows * columns // 64
    return Layer(
        name=f"model.layers.{block}.{where}.{role}_proj",
        scheme="int4 sym g64",
        method="gptq",
        bits_per_weight=4.25,
        bytes_before=before,
        bytes_after=after,
        error=LEVEL[role] * 1e-4 * math.exp(0.35 * block + noise.gauss(0, 0.18)),
        tokens=32768,
        damping=0.01,
        block=block,
        role=role,
    )


def make_layers() -> tuple[Layer, ...]:
    every = [make_layer(block, role) for block in range(BLOCKS) for role in SHAPES]
    every[16] = replace(
        every[16], method="rtn", kept_reason="rtn has the lower error: 0.00071 against 0.00074"
    )
    head = Layer(
        name="lm_head",
        scheme="bf16",
        method="",
        bits_per_weight=16,
        bytes_before=2 * 4096 * HIDDEN,
        bytes_after=2 * 4096 * HIDDEN,
        skipped_reason="ignored by default: the head stays as it is",
        role="head",
    )
    return (*every, head)


def make_quality() -> Quality:
    settings = {"window": 512, "stride": 256, "bos": True, "mode": "documents"}
    own = {"mode": "documents", "window": 256, "stride": 128, "bos": True, "kind": "self"}
    return Quality(
        texts=(
            TextQuality("tinystories", 24310, 7.9904, 8.0711, 0.0233, 0.9384, settings),
            TextQuality("novels", 61877, 65.052, 66.914, 0.0307, 0.9121, settings),
            TextQuality("self", 8160, 5.8801, 5.9206, 0.0198, 0.9467, own),
        )
    )


SAMPLES = (
    Sample(
        "Once upon a time, there was a little girl named",
        " Lily. She loved to play outside in the sunshine. One day, she saw a big tree with many"
        " apples on it. She wanted to pick one, but she was too small to reach. Her mom came and"
        " helped her, and they ate the apple together.",
        " Lily. She loved to play outside in the sunshine. One day, she saw a big dog in the park."
        " The dog was very friendly and wagged its tail. Lily was happy and gave the dog a hug.",
    ),
    Sample(
        "The captain looked at the map and",
        " said nothing for a while. The sea was quiet, and the men were asleep below.",
        " said nothing for a while. The sea was quiet, and the men were asleep below.",
    ),
)


def make_report() -> Report:
    layers = make_layers()
    embeddings = 2 * 4096 * HIDDEN
    linears = sum(layer.bytes_before for layer in layers[:-1])
    codes = linears // 4
    scales = sum(layer.bytes_after for layer in layers[:-1]) - codes
    norms = 2 * HIDDEN * (2 * BLOCKS + 1)
    return Report(
        tool="compress-model 0.1.0",
        versions={"python": "3.11.2", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
        recipe=RecipeInfo("w4a16-gptq-g64", RECIPE, ("calibration.samples=128",)),
        seed=1234,
        source=Source(
            path="/home/me/models/tale-6m",
            sha256="9f2c41d7a0e5b86c1f3d27e94ab0557d63c8e1f2094b7a6d5e8c3b1a0f9e8d7c",
            params=6164736,
            bytes=12333488,
            dtype="bf16",
            architecture="llama, 6 blocks, hidden 256",
        ),
        result=Result(
            path="/home/me/out/tale-6m-w4",
            params=6164736,
            bytes=embeddings + codes + scales + norms + 12704,
            bits_per_weight=4.25,
            kv_bytes_per_token=6144,
            format="compressed-tensors pack-quantized",
            sizes=(
                SizePart("quantized weights", linears, codes),
                SizePart("scales", 0, scales),
                SizePart("embeddings", embeddings, embeddings),
                SizePart("norms and other", norms + 4000, norms + 12704),
            ),
        ),
        stages=(
            StageRecord("sample text", 6.81, 498_000_000),
            StageRecord("gptq", 9.94, 641_500_000, None, layers),
            StageRecord("evaluation", 14.02, 702_300_000),
        ),
        machine=Machine("Intel(R) Xeon(R) Platinum 8481C", 2, 25_200_000_000, "avx512_vnni"),
        started="2026-11-21T03:05:11+00:00",
        finished="2026-11-21T03:05:43+00:00",
        calibration={
            "tokens": 32768,
            "samples": 128,
            "length": 256,
            "packing": "pack",
            "sha256": "5b1de0c46a8f90731d2ce4f7a6b38895c0d1e2f3a4b5c6d7e8f9a0b1c2d3e4f5",
            "sources": [
                {"kind": "self", "documents": 128, "tokens": 32768, "weight": 1.0, "seed": 1234}
            ],
        },
        quality=make_quality(),
        samples=SAMPLES,
        plan_vs_actual=PlanVsActual(
            bytes=Planned(4830640, 4830640),
            seconds=Planned(27.5, 30.77),
            peak_rss=Planned(660_000_000, 702_300_000),
        ),
        warnings=(
            "group size 64 keeps tensor parallel 2 and 4 possible, but not 8: k of q_proj is 256",
        ),
        copied_tensors=("model.embed_tokens.weight", "model.norm.weight"),
        copied_files=("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        skipped_files=("README.md",),
    )


@pytest.fixture(scope="session")
def report() -> Report:
    return make_report()
