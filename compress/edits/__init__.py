"""The table of edits, which a recipe's first stages name. Each edit is one file and one row."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compress.edits import (
    cast,
    distill,
    gqa,
    hybrid,
    mla,
    prune,
    prune_depth,
    prune_hidden,
    prune_width,
    untie,
)
from compress.edits.cast import CastConfig
from compress.edits.distill import DistillConfig
from compress.edits.edit import ByConfig, ByTraining, Edit, learned_row, narrowing_row, row
from compress.edits.gqa import GqaConfig
from compress.edits.hybrid import HybridConfig
from compress.edits.learned import BySite
from compress.edits.mla import MlaConfig
from compress.edits.prune import PruneConfig
from compress.edits.prune_depth import PruneDepthConfig
from compress.edits.prune_hidden import PruneHiddenConfig
from compress.edits.prune_width import PruneWidthConfig
from compress.edits.untie import UntieConfig

EDITS: Mapping[str, Edit] = MappingProxyType(
    {
        "cast": row(
            CastConfig,
            cast.plan,
            cast.apply,
            cast.held,
            "stores every floating-point tensor in bf16, fp16 or fp32",
        ),
        "untie": row(
            UntieConfig,
            untie.plan,
            untie.apply,
            untie.held,
            "gives a model whose output head is the embedding a head of its own",
        ),
        "prune_width": Edit(
            PruneWidthConfig,
            prune_width.plan,
            BySite(
                prune_width.sites,
                prune_width.change,
                prune_width.neutral,
                prune_width.by_gradients,
            ),
            "cuts heads, FFN channels, experts and the residual stream, and refits what is left to"
            " the source's residual stream",
        ),
        "prune_hidden": narrowing_row(
            PruneHiddenConfig,
            prune_hidden.plan,
            prune_hidden.kind,
            "narrows the residual stream to one basis of all layers, and refits what reads and"
            " writes it",
        ),
        "prune_depth": learned_row(
            PruneDepthConfig,
            prune_depth.plan,
            prune_depth.sites,
            prune_depth.change,
            prune_depth.neutral,
            "takes blocks out, and refits those before a gap to the source's residual stream",
        ),
        "prune": learned_row(
            PruneConfig,
            prune.plan,
            prune.sites,
            prune.change,
            prune.neutral,
            "cuts heads, FFN channels and blocks to a budget, so many of each as cost the least",
        ),
        "gqa": learned_row(
            GqaConfig,
            gqa.plan,
            gqa.sites,
            gqa.change,
            gqa.neutral,
            "has query heads share keys and values, and refits outputs to the source's residual"
            " stream",
        ),
        "mla": Edit(
            MlaConfig,
            mla.plan,
            BySite(
                mla.sites,
                mla.change,
                mla.neutral,
                land=mla.land,
                of_heads=mla.neutral_of,
                evenly=mla.counts_evenly,
                requeries=mla.refits_queries,
            ),
            "makes keys and values of one latent and a rotated key, in the stock class of DeepSeek",
        ),
        "hybrid": Edit(
            HybridConfig,
            hybrid.plan,
            ByConfig(),
            "gives all but the most sensitive layers a window, in a class that has both kinds",
        ),
        "distill": Edit(
            DistillConfig,
            distill.plan,
            ByTraining(),
            "trains what is left to say what the source says, block by block and whole",
        ),
    }
)


# Names that users know from papers, of what no stock class carries.
_SHARED_BY_LAYERS = (
    "keys and values that layers share (2405.12981) have a class in gemma3n and gemma4 alone, for"
    " blocks that were trained so; gqa, mla and hybrid make a cache smaller"
)
NOT_CARRIED: Mapping[str, str] = MappingProxyType(
    {"cla": _SHARED_BY_LAYERS, "cross_layer": _SHARED_BY_LAYERS}
)


def reads_calibration(method: str, config: Any) -> bool:
    """Whether an edit looks at the recipe's calibration data; one may have texts of its own."""
    own = isinstance(config, DistillConfig) and config.sources is not None
    is_open = isinstance(config, HybridConfig) and config.is_open
    return (EDITS[method].needs_data or is_open) and not own
