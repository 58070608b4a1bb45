"""Which runtimes take a GGUF file: facts about loaders, as data.

llama.cpp and transformers were tried (tests/interop repeats it); vLLM, whose own documents call its
reader of GGUF files experimental, was not.
"""

from compress.arch.spec import DecoderSpec
from compress.formats.gguf.arches import ARCHES
from compress.formats.runtimes.verdicts import Verdict


def verdicts(spec: DecoderSpec) -> tuple[Verdict, ...]:
    """A verdict a runtime, for a family that has an architecture there."""
    arch = ARCHES[spec.family]
    if arch.read_as is None:
        against = f"it reads no GGUF files of {spec.model_type}"
        in_transformers = Verdict("transformers", "no", against)
    else:
        note = "decodes the blocks when it loads them; with gguf and accelerate"
        in_transformers = Verdict("transformers", "yes", note, "gguf")
    unknown = "its reader of GGUF files is experimental, and was not tried"
    return (
        Verdict("llama.cpp", "yes", ""),
        in_transformers,
        Verdict("vLLM on GPU", "unknown", unknown),
        Verdict("vLLM on CPU", "unknown", unknown),
    )
