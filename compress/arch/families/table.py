"""The table of families: what the tensors of a family are called, and what each is for.

A family is one literal row, composed of shared tuples. There is no code for a single family:
`compress/arch/describe.py` reads all rows alike. The facts are those of transformers 5: disk names
are what its `save_pretrained` writes and hub checkpoints hold, module names are what its classes
have.
"""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family
from compress.arch.families.gpt_like import GPT_LIKE
from compress.arch.families.latent import LATENT
from compress.arch.families.llama_like import LLAMA_LIKE
from compress.arch.families.mixtures import MIXTURES
from compress.arch.families.post_norm import POST_NORM

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {**LLAMA_LIKE, **LATENT, **MIXTURES, **POST_NORM, **GPT_LIKE}
)
