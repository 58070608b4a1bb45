"""What TensorRT itself says of a graph, where it is installed: whether it parses it, builds an
engine of it and computes the same."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from compress.errors import DependencyError
from compress.formats.weights import Weights
from compress_exporters.onnx.proof.checks import Asked
from compress_exporters.onnx.proof.measuring import Seen
from compress_exporters.onnx.saving import MODEL
from compress_exporters.reference import Reference, fits, text
from compress_exporters.tensorrt.build_notes import JSON
from compress_exporters.tensorrt.engine import Tools, line
from compress_exporters.tensorrt.engine_steps import EngineSteps

Capability = tuple[int, int]

ROOM = 4  # bytes that building takes by one of the weights; 3 were seen
BASE = 1 << 30  # and whatever their size


def proved(source: Weights, folder: Path, asked: Asked) -> tuple[str, ...]:
    """Lines of a proof. CheckpointError for a graph that TensorRT refuses, or computes otherwise.

    folder: as `write` left it.
    """
    facts = json.loads((folder / JSON).read_text())
    try:
        tools = Tools.find()
    except DependencyError as reason:
        return (f"no engine was built: {reason}",)
    device, needed = _device(), facts["compute_capability"]
    weak = None if device is None else _why_not_run(device, needed)
    if weak is not None and not tools.package.ahead:
        return (f"no engine was built: {weak}",)
    weights = sum(path.stat().st_size for path in folder.glob(f"{MODEL}*"))
    if not fits(ROOM * weights + BASE):
        return (f"too little memory is free to build an engine with {tools.name}",)
    try:
        engine = tools.engine(folder / MODEL, facts["profiles"])
    except DependencyError as reason:
        return (f"no engine was built: {reason}",)
    built = (
        f"{tools.name} parses the graph and builds an engine of it ({engine.size / 1e6:.1f} MB) for"
        f" the profiles {' and '.join(engine.profiles)}"
    )
    if device is None or weak is not None:
        return (built, f"the engine was not run: {weak or 'torch finds no CUDA device'}")
    longest = facts["profiles"]["prefill"]["max"]["input_ids"][1]
    asked = replace(asked, length=min(asked.length, longest))
    try:
        return (built, _ran(source, EngineSteps.load(tools, engine), asked))
    except (DependencyError, torch.OutOfMemoryError) as reason:
        return (built, f"the engine was not run: {line(str(reason))}")


def _device() -> Capability | None:
    """Compute capability of the device that torch uses; None where it has none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _why_not_run(device: Capability, needed: str | None) -> str | None:
    """Why a device does not run a graph; None where it does."""
    if needed is None or device >= tuple(int(x) for x in needed.split(".")):
        return None
    have = ".".join(map(str, device))
    return f"its types need compute capability {needed}, and the device here has {have}"


def _ran(source: Weights, steps: EngineSteps, asked: Asked) -> str:
    """How near the engine's logits are to our decoder's.

    The limits are those of ONNX Runtime, which multiplies fp16 in fp32. They leave room for what
    does not: fp16 throughout differs by 0.16 % of the largest logit on the demo model, of 2 %.
    """
    ids = text(source, asked.length)
    seen = Seen(ids, Reference.load(source, inputs=asked.rounds).logits(ids).numpy())
    errors = seen.errors(steps, left=asked.left)
    where = f"{steps.tools.name} on {torch.cuda.get_device_name()}"
    for what, error in errors.items():
        asked.require(f"in {where}, {what}", error, seen)
    worst = max(errors.values(), key=lambda error: error.relative)
    return f"{where}, in one step, in chunks and beside padding: {asked.shown(worst)}"
