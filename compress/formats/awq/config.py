"""AWQ's quantization_config, written and read: one scheme, and modules that it leaves alone."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.checkpoint.detect import find_block
from compress.errors import RecipeError
from compress.expressions import Expression
from compress.formats.compressed_tensors.config import ignored_modules
from compress.formats.config_values import flag, names, require, whole
from compress.formats.gptq.config import read_rules, refuse_others, rules, scheme_of
from compress.formats.names import module_of
from compress.quant.scheme import QuantScheme

METHOD = "awq"
GEMM = "gemm"


@dataclass(frozen=True, slots=True)
class AwqSchemes:
    """base: of every module that has codes and that no rule matches; the first rule that does
    counts, None for modules without codes. ignored: as the config lists them, whole names only;
    loaders take some for parts of names, which the tensors tell from the others."""

    base: QuantScheme
    rules: tuple[tuple[Expression, QuantScheme | None], ...]
    ignored: tuple[str, ...]
    transposed: frozenset[str]

    def scheme(self, module: str) -> QuantScheme | None:
        if module in self.ignored:
            return None
        return next((scheme for found, scheme in self.rules if found.match(module)), self.base)


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: object = None,
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when nothing is quantized.

    shapes: of every tensor of the source. schemes: of every quantized tensor, by tensor name.
    "transposed" is ours: modules that the source stores as [K, N]. RecipeError for more than one
    scheme, act-order, and a quantized cache or embedding.
    """
    refuse_others(METHOD, spec, schemes, kv_cache)
    if not schemes:
        return None
    found = {(s.granularity, s.group_size): s for s in schemes.values()}
    if len(found) > 1 or with_g_idx:
        shown = "act-order" if with_g_idx else " and ".join(s.describe() for s in found.values())
        raise RecipeError(
            f"format {METHOD!r} has one group size for all layers and no act-order, these have"
            f" {shown}; use format 'gptq'"
        )
    (scheme,) = found.values()
    members = {module_of(name): (scheme, False) for name in schemes}
    dynamic = rules(spec, shapes, members, (scheme, False))
    transposed = [x.name for x in spec.all_linears() if x.transposed and x.tensor in schemes]
    return {
        "quant_method": METHOD,
        "bits": scheme.bits,
        "group_size": scheme.group_size if scheme.granularity == "group" else -1,
        # Loaders that hear of no zero points would leave out those of symmetric weights, 8.
        "zero_point": True,
        "version": GEMM,
        "lm_head": spec.head in schemes,
        "modules_to_not_convert": ignored_modules(spec, shapes, schemes) or None,
        # gptqmodel heeds no such list: without rules these layers would be left empty.
        **({"dynamic": dynamic} if dynamic else {}),
        **({"transposed": transposed} if transposed else {}),
    }


def read_schemes(config: Mapping[str, Any]) -> AwqSchemes:
    """Schemes of a checkpoint whose config.json has an AWQ quantization_config.

    CheckpointError, naming the key, for what is malformed, for widths other than 4 bits and for
    layouts other than GEMM.
    """
    place, block = find_block(config) or ("quantization_config", {})
    version = block.get("version", block.get("checkpoint_format", block.get("format", GEMM)))
    require(f"{place}.version", version.lower() if isinstance(version, str) else version, (GEMM,))
    return AwqSchemes(
        _scheme(place, block),
        read_rules(place, block, _scheme),
        names(f"{place}.modules_to_not_convert", block.get("modules_to_not_convert")),
        frozenset(names(f"{place}.transposed", block.get("transposed"))),
    )


def _scheme(place: str, block: Mapping[str, Any]) -> QuantScheme:
    bits = whole(f"{place}.bits", block.get("bits", block.get("w_bit", 4)))
    require(f"{place}.bits", bits, (4,))
    # gptqmodel says `sym` instead.
    other = flag(f"{place}.sym", block.get("sym", False))
    symmetric = not flag(f"{place}.zero_point", block.get("zero_point", not other))
    return scheme_of(place, bits, symmetric, block.get("group_size", block.get("q_group_size")))
