"""What numbers that are computed from a model depend on, beside what is asked of it."""

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compress_kernels
from compress.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

# Rooms whose code has a say in a forward, a draw and the cutting of texts: an installation that is
# edited keeps its version.
_ROOMS = ("arch", "blocks", "checkpoint", "evaluation", "formats", "quant")
# By what their names begin with: settings of libraries that choose how a product is computed.
_SETTINGS = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_", "COMPRESS_MODEL_ISA")


def computed_facts(
    checkpoint: Checkpoint, device: str, dtype: "torch.dtype"
) -> dict[str, Any] | None:
    """What the bits of a forward depend on: the model, its arithmetic, this machine and software.

    None of a checkpoint that was not hashed: what it holds may be something else by now.
    """
    if checkpoint.seal is None:
        return None
    from compress.machine.environment import cpu_name, fingerprint

    said = json.dumps([checkpoint.config, _tensors(checkpoint)], sort_keys=True, default=str)
    return {
        "model": checkpoint.seal.sha256,
        "read as": hashlib.sha256(said.encode()).hexdigest(),
        "code": _code(),
        "processor": cpu_name(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)},
        **fingerprint(device, dtype),
    }


def _tensors(checkpoint: Checkpoint) -> list[Any]:
    """A name may be given to bytes of another."""
    return [[x, i.file, i.start, i.dtype, list(i.shape)] for x, i in checkpoint.tensors.items()]


@cache
def _code() -> str:
    """Hash of our own code that computes."""
    ours, kernels = Path(__file__).parents[1], Path(str(compress_kernels.__file__)).parent
    digest = hashlib.sha256()
    for folder in (*(ours / room for room in _ROOMS), kernels):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".hpp"):
                digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
