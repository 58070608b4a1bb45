"""compressed-tensors' quantization_config of what we write: which module has which scheme.

Written without null values and without keys that say nothing: readers of other versions refuse
keys that they do not know. Modules go by the names of the checkpoint, as vLLM compares them.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.formats.compressed_tensors.encode import NAME, is_packed, storage
from compress.formats.kv_cache import kv_to_config
from compress.formats.names import module_of
from compress.quant.scheme import ActivationScheme, QuantScheme

MIXED, DENSE = "mixed-precision", "dense"
HEAD = "lm_head"  # what transformers calls every output head
# Oldest compressed-tensors that reads it right (transformers 5 wants 0.15 anyway).
_VERSION, _VERSION_ODD_BITS = "0.15.0", "0.18.0"

_Key = tuple[QuantScheme, bool]  # scheme, has g_idx


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: ActivationScheme | None = None,
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when nothing is quantized.

    shapes: of every tensor of the source. schemes: of every quantized tensor, by tensor name.
    with_g_idx: those of them that carry a g_idx (act-order "group"). kv_cache: of the key/value
    cache whose scales are stored.
    """
    if not schemes and kv_cache is None:
        return None
    linears = {linear.tensor: linear for linear in spec.all_linears() if linear.tensor in schemes}
    members: dict[_Key, list[LinearSpec]] = {}
    for tensor, linear in linears.items():
        members.setdefault((schemes[tensor], tensor in with_g_idx), []).append(linear)
    formats = sorted({storage(scheme) for scheme, _ in members}) or [DENSE]
    whole = len(members) == 1
    groups = {
        f"group_{i}": {
            "targets": _everything(found) if whole else targets(found, linears.values()),
            **({"format": storage(scheme)} if len(formats) > 1 else {}),
            **scheme_to_config(scheme, g_idx),
        }
        for i, ((scheme, g_idx), found) in enumerate(members.items())
    }
    odd = any(32 % s.bits for s in schemes.values() if is_packed(s))
    transposed = [linear.name for linear in linears.values() if linear.transposed]
    return {
        "quant_method": NAME,
        "version": _VERSION_ODD_BITS if odd else _VERSION,
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": ignored_modules(spec, shapes, schemes),
        "config_groups": groups,
        **({"kv_cache_scheme": kv_to_config(kv_cache)} if kv_cache else {}),
        **({"transposed": transposed} if transposed else {}),
    }


def ignored_modules(
    spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], quantized: Collection[str]
) -> list[str]:
    """Modules with a weight matrix that is not quantized, by checkpoint name.

    Embeddings are left out, which no target means, unless one of them is quantized. A tied head has
    no tensor, yet its runtimes build a Linear for it, "lm_head" in all of them; a head that has
    another name on disk (gpt_neox's embed_out) is "lm_head" in transformers. A decoder in no table
    may have more of them, under the paths of its class.
    """
    embeddings = {name for name, _ in spec.outside if name != spec.head} | {spec.embedding}
    embeddings = set() if spec.embedding in quantized else embeddings
    names = [
        module_of(name)
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and name not in quantized
        and name not in embeddings
    ]
    dense = spec.head is None or spec.head not in quantized
    if dense and HEAD not in (name.split(".")[-1] for name in names):
        names.append(HEAD)
    return list(dict.fromkeys([*names, *(spec.unnamed or ())]))


def _everything(found: Sequence[LinearSpec]) -> list[str]:
    """Targets of a config with one group. The head goes by its name: vLLM has no Linear for it."""
    others = [x for x in found if x.role in ("head", "embedding")]
    return ["Linear", *(name for x in others for name in _names(x))]


def _names(linear: LinearSpec) -> list[str]:
    # Most of vLLM's models do not tell their embedding its name.
    if linear.role == "embedding":
        return [linear.name, "Embedding"]
    elsewhere = linear.role == "head" and linear.name.split(".")[-1] != HEAD
    return [linear.name, HEAD] if elsewhere else [linear.name]


def targets(found: Sequence[LinearSpec], quantized: Iterable[LinearSpec]) -> list[str]:
    """Module names; one pattern for all experts of a layer where they share the scheme.

    Patterns because transformers recognises the group of the experts only by a "re:" target.
    """
    everyone = {_expert_pattern(x): 0 for x in found}
    for linear in quantized:
        if (pattern := _expert_pattern(linear)) in everyone:
            everyone[pattern] += 1
    mine: dict[str | None, int] = {}
    for linear in found:
        pattern = _expert_pattern(linear)
        mine[pattern] = mine.get(pattern, 0) + 1
    result: dict[str, None] = {}
    for linear in found:
        pattern = _expert_pattern(linear)
        together = pattern is not None and mine[pattern] == everyone[pattern]
        result |= dict.fromkeys([pattern] if together and pattern else _names(linear))
    return list(result)


def scheme_to_config(scheme: QuantScheme, g_idx: bool) -> dict[str, Any]:
    """The weights and input_activations of a config group. g_idx: act-order "group"."""
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": scheme.type,
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if scheme.is_fp4 else scheme.granularity,
        "dynamic": False,
    }
    if scheme.granularity == "group":
        weights["group_size"] = scheme.group_size
    if scheme.granularity == "block":
        weights["block_structure"] = [scheme.group_size, scheme.group_size]
    if g_idx:
        weights["actorder"] = "group"
    if scheme.activation is None:
        return {"weights": weights}
    return {"weights": weights, "input_activations": _inputs_to_config(scheme.activation)}


def _inputs_to_config(activation: ActivationScheme) -> dict[str, Any]:
    return {
        "num_bits": activation.bits,
        "type": activation.type,
        "symmetric": True,
        "strategy": activation.granularity,
        "dynamic": activation.dynamic,
        **({"group_size": activation.group_size} if activation.group_size else {}),
    }


def _expert_pattern(linear: LinearSpec) -> str | None:
    """ "re:" pattern of the same linear in every expert of the layer, None outside a mixture."""
    if linear.expert is None:
        return None
    before, found, after = linear.name.rpartition(f".{linear.expert}.")
    return rf"re:^{re.escape(before)}\.\d+\.{re.escape(after)}$" if found else None
