"""The architecture tables: what a family's tensors are called and what they are for.

One literal entry a family, composed of shared tuples. Nothing here is code about one model;
`describe` reads these rows for all of them. Facts are those of transformers 5: the disk names are
what its `save_pretrained` writes and hub checkpoints hold, the module names what its classes have.
"""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family
from compress.arch.families.gpt_like import GPT_LIKE
from compress.arch.families.llama_like import LLAMA_LIKE
from compress.arch.families.mixtures import MIXTURES
from compress.arch.families.post_norm import POST_NORM

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {**LLAMA_LIKE, **MIXTURES, **POST_NORM, **GPT_LIKE}
)
