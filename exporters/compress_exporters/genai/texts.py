"""Whether onnxruntime-genai's tokenizer cuts texts as tokenizer.json says."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from compress_exporters.genai.lowering import TOKENIZER

SAID = (
    "Once upon a time, there was a dog.\n\nHe didn't  like rain: in 2024, 1,234 mm! Déjà vu, 日本."
)


def told(folder: Path) -> str | None:
    """In a line; None where the folder has no tokenizer."""
    if not all((folder / name).is_file() for name in TOKENIZER):
        return None
    try:
        apart = _apart(_theirs(folder), _ours(folder))
    except Exception as error:  # neither package's own types have a common base
        reason = " ".join(str(error).split())
        return f"onnxruntime-genai makes no tokenizer of the folder, give it tokens: {reason}"
    if apart is None:
        return "onnxruntime-genai cuts a text into the tokens that tokenizer.json says"
    return (
        "onnxruntime-genai cuts a text otherwise than tokenizer.json says, from token"
        f" {apart} on; give it tokens"
    )


def _theirs(folder: Path) -> list[int]:
    import onnxruntime_genai as genai

    tokenizer = genai.Tokenizer(genai.Model(str(folder)))
    # By default it puts no token in front of a text, whatever the files say.
    tokenizer.update_options(add_special_tokens="true")
    return [int(token) for token in tokenizer.encode(SAID)]


def _ours(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAID).ids
    return ids


def _apart(found: Sequence[int], want: Sequence[int]) -> int | None:
    """The first token that differs, counted from 0."""
    pairs = enumerate(zip_longest(found, want))
    return next((at for at, (one, other) in pairs if one != other), None)
