"""The table of edits, which a recipe's first stages name. Each edit is one file and one row."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.edits import cast, untie
from compress.edits.cast import CastConfig
from compress.edits.edit import Edit, row
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
    }
)
