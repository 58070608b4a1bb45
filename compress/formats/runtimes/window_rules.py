"""What runtimes make of a decoder in which some layers have a window and others have none."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from compress.arch.forward.forward import describe_forward
from compress.arch.spec import DecoderSpec
from compress.formats.runtimes.verdicts import Verdict

# Family -> what vLLM's class does, as read in its source.
VLLM: Mapping[str, str] = MappingProxyType(
    {
        family: f"vLLM's {family} refuses windows in some layers only, or leaves them out"
        for family in ("qwen2", "qwen3")
    }
)


def with_windows(
    found: Iterable[Verdict], config: Mapping[str, Any], spec: DecoderSpec
) -> list[Verdict]:
    """The verdicts on a model with this config.json; "no" where its windows stand in the way."""
    reason = VLLM.get(spec.family)
    mixed = reason is not None and len(describe_forward(config, spec).windows) > 1
    return [
        Verdict(x.runtime, "no", reason or "") if mixed and x.runtime.startswith("vLLM") else x
        for x in found
    ]
