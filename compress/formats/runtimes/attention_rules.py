"""What runtimes make of attention that not all of them compute alike: layers of which some have a
window, and latents."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.forward.kinds import Latent
from compress.arch.forward.table import FORWARDS
from compress.arch.spec import DecoderSpec
from compress.formats.runtimes.verdicts import Verdict

# Family -> what vLLM's class does with windows in some layers, as read in its source.
WINDOWS: Mapping[str, str] = MappingProxyType(
    {
        family: f"vLLM's {family} refuses windows in some layers only, or leaves them out"
        for family in ("qwen2", "qwen3")
    }
)
# What vLLM takes of latents: numbers that are cached; on a CPU the rank, and numbers of the
# rotated key.
GPU_LATENTS = (320, 512, 576)
CPU_LATENT = (512, 64)


def with_attention(
    found: Iterable[Verdict], config: Mapping[str, Any], spec: DecoderSpec
) -> list[Verdict]:
    """The verdicts on a model with this config.json; "no" where its attention stands in the way."""
    if spec.family not in FORWARDS:
        return list(found)
    forward = describe_forward(config, spec)
    return [
        next((Verdict(x.runtime, "no", why) for why in _against(x.runtime, forward, spec)), x)
        for x in found
    ]


def _against(runtime: str, forward: ForwardSpec, spec: DecoderSpec) -> Iterator[str]:
    """What stands in the way of a runtime."""
    if not runtime.startswith("vLLM"):
        return
    if spec.family in WINDOWS and len(forward.windows) > 1:
        yield WINDOWS[spec.family]
    for kind in forward.rows:
        if not isinstance(kind, Latent):
            continue
        if kind.rope is not None and kind.rope.kind == "longrope":
            yield "vLLM's class puts another rotation in the place of longrope, without a word"
        if any(path.endswith("kv_a_proj_with_mqa.bias") for _, path in spec.blocks[0].modules):
            yield "vLLM's class has no biases of attention"
        cached = kind.rank + kind.rotated
        if cached not in GPU_LATENTS:
            yield (
                f"its kernels for latents take rank + rope_dim of"
                f" {', '.join(map(str, GPU_LATENTS))}; these are {cached}"
            )
        if runtime == "vLLM on CPU" and (kind.rank, kind.rotated) != CPU_LATENT:
            yield f"its kernels take latents of {CPU_LATENT[0]} + {CPU_LATENT[1]} numbers only"
