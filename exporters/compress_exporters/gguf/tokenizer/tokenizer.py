"""A checkpoint's tokenizer in GGUF's words: tokens, merges or scores, special ids, chat template.

GGUF has two kinds that decoders use: byte-level BPE ("gpt2"), whose way to cut texts has a name
that the reader must know, and sentencepiece's BPE ("llama"), which joins by the score of a token.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.arch.text_config import config_at
from compress.checkpoint.jsonfile import read_object
from compress.errors import CheckpointError
from compress.formats.gguf.fields import Field, Fields
from compress.formats.weights import Weights
from compress.text.tokenizer import Tokenizer, load_tokenizer
from compress_exporters.gguf.tokenizer.bytelevel import bytelevel
from compress_exporters.gguf.tokenizer.sentencepiece import sentencepiece
from compress_exporters.gguf.tokenizer.tokens import CONTROL, UNUSED, USER_DEFINED, Words, refusal

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files of slow tokenizers, of which transformers makes fast ones.
_OLDER = ("tokenizer.model", "vocab.json", "spiece.model")
# llama.cpp takes a model for Phi-3 by its name, and then expects these tokens.
_PHI_NAMES, _PHI_TOKENS = ("phi-3", "phi3"), {"</s>", "<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """texts: of all tokens. fields: of tokenizer.ggml and the chat template. notes: a line each."""

    texts: frozenset[str]
    fields: Fields
    notes: tuple[str, ...]


def model_name(name: str, words: Vocabulary) -> str:
    """general.name: `name`, unless it would make llama.cpp look for tokens that are not there."""
    taken = any(phi in name.lower() for phi in _PHI_NAMES)
    return "model" if taken and not words.texts >= _PHI_TOKENS else name


def vocabulary(source: Weights) -> Vocabulary:
    """CheckpointError, in one line, for a tokenizer that GGUF cannot express."""
    folder = source.checkpoint.path
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and a GGUF file carries its tokenizer;"
            f" {_remedy(folder)}"
        )
    stored, tokenizer = read_object(file), load_tokenizer(folder)
    words = _words(stored, file)
    texts, types = _table(stored, words, source.spec.embedding_shape[0], file)
    scores = (*words.scores, *([-10000.0] * (len(texts) - len(words.scores))))
    front, back = _added(stored, tokenizer, file)
    fields: Fields = (
        ("tokenizer.ggml.model", words.model),
        ("tokenizer.ggml.pre", words.cut),
        ("tokenizer.ggml.tokens", texts),
        ("tokenizer.ggml.token_type", types),
        *((("tokenizer.ggml.scores", scores),) if words.scores else ()),
        *((("tokenizer.ggml.merges", words.merges),) if words.merges else ()),
        *_special(source, tokenizer, folder),
        ("tokenizer.ggml.add_bos_token", front),
        ("tokenizer.ggml.add_eos_token", back),
        *((("tokenizer.ggml.add_space_prefix", words.space),) if words.scores else ()),
    )
    if tokenizer.chat is not None:
        fields += (("tokenizer.chat_template", tokenizer.chat.text),)
    ends = _ends(source, tokenizer)[len(_END_KEYS) :]
    notes = (*words.notes, *_stripping(stored), *_beyond(ends, texts))
    return Vocabulary(frozenset(texts), fields, notes)


def _beyond(ends: Sequence[int], texts: Sequence[str]) -> Iterator[str]:
    """Of more ends of a text than there are keys."""
    if ends:
        yield (
            f"GGUF has keys for {len(_END_KEYS)} tokens that end a text; llama.cpp may go on behind"
            f" {', '.join(repr(texts[i]) for i in ends)}"
        )


def _remedy(folder: Path) -> str:
    """How a folder comes to a tokenizer.json."""
    older = next((name for name in _OLDER if (folder / name).is_file()), None)
    if older is None:
        return "copy it from the model that this one was made of"
    place = repr(str(folder))
    needs = ", where sentencepiece is installed" if older.endswith(".model") else ""
    return (
        f"transformers makes one of {older}{needs}:"
        f" AutoTokenizer.from_pretrained({place}).save_pretrained({place})"
    )


def _stripping(stored: Mapping[str, Any]) -> Iterator[str]:
    added = stored.get("added_tokens") or ()
    count = sum(bool(x.get("lstrip") or x.get("rstrip")) for x in added)
    if count:
        yield f"{count} added tokens swallow spaces beside them, which GGUF has no word for"


def _words(stored: Mapping[str, Any], file: Path) -> Words:
    model = stored.get("model") or {}
    kind = model.get("type")
    if kind != "BPE":
        raise refusal(
            file,
            f"its model is {kind!r}",
            "BPE for decoders, byte-level or as sentencepiece has it",
        )
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise refusal(file, "its tokens mark the inside or end of words", "none of such marks")
    if model.get("byte_fallback") or stored.get("pre_tokenizer") is None:
        return sentencepiece(stored, file)
    return bytelevel(stored, file)


def _table(
    stored: Mapping[str, Any], words: Words, rows: int, file: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Text and type of every row of the embedding; rows that no token has get a name of their
    own, as no two may be called alike."""
    texts = {i: text for text, i in stored["model"]["vocab"].items()}
    types = dict(words.types)
    for token in stored.get("added_tokens") or ():
        special = bool(token.get("special"))
        texts[token["id"]] = token["content"] if special else words.plain(token["content"])
        types[token["id"]] = types.get(token["id"], CONTROL if special else USER_DEFINED)
    most = max(texts)
    if most >= rows:
        raise CheckpointError(
            f"{file} has a token of id {most}, and the embedding has {rows} rows; take tokenizer"
            " and weights of the same model"
        )
    taken = set(texts.values())
    if len(taken) < len(texts):
        double, _ = Counter(texts.values()).most_common(1)[0]
        raise refusal(file, f"two tokens are called {double!r}", "one token of a name")
    for i in range(rows):
        if i not in texts:
            texts[i], types[i] = _unused(i, taken), UNUSED
    return tuple(texts[i] for i in range(rows)), tuple(types.get(i, 1) for i in range(rows))


def _unused(i: int, taken: set[str]) -> str:
    name = f"[PAD{i}]"
    while name in taken:
        name = f"[{name}]"
    return name


def _special(source: Weights, tokenizer: Tokenizer, folder: Path) -> Iterator[Field]:
    """Ids of tokens with a meaning. A model may end texts in several ways: GGUF has keys for the
    ends of a text, of a turn and of a message, at each of which llama.cpp stops."""
    rows = source.spec.embedding_shape[0]
    ids: dict[str, int | None] = {"bos_token_id": tokenizer.bos_id}
    ids |= zip(_END_KEYS, _ends(source, tokenizer), strict=False)
    settings = _json(folder / "tokenizer_config.json")
    names = {token["content"]: token["id"] for token in _added_tokens(folder)}
    for kind in ("unk", "pad"):
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        ids[f"{'unknown' if kind == 'unk' else 'padding'}_token_id"] = names.get(str(text))
    for key, value in ids.items():
        if value is not None and 0 <= value < rows:
            yield f"tokenizer.ggml.{key}", value


def _added_tokens(folder: Path) -> Sequence[Mapping[str, Any]]:
    return read_object(folder / "tokenizer.json").get("added_tokens") or ()


def _ends(source: Weights, tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that end a text or a turn, each once: the tokenizer's own, then what
    generation_config.json says, or else config.json."""
    config = source.checkpoint.config
    text = config_at(config, source.spec.text_config)
    settings = _json(source.checkpoint.path / "generation_config.json")
    said = (x.get("eos_token_id") for x in (settings, config, text))
    found: Any = next((x for x in said if x is not None), [])
    ids = [tokenizer.eos_id, *(found if isinstance(found, list) else [found])]
    rows = source.spec.embedding_shape[0]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < rows))


def _json(path: Path) -> Mapping[str, Any]:
    return read_object(path) if path.is_file() else {}


def _added(stored: Mapping[str, Any], tokenizer: Tokenizer, file: Path) -> tuple[bool, bool]:
    """Whether the tokenizer puts its BOS in front of a text, and its EOS behind it."""
    steps = _template(stored.get("post_processor"))
    names = [next(iter(step)) for step in steps]
    if "Sequence" not in names:
        return False, False
    at = names.index("Sequence")
    front, back = ([_id(stored, x) for x in part] for part in (steps[:at], steps[at + 1 :]))
    if front not in ([], [tokenizer.bos_id]) or back not in ([], [tokenizer.eos_id]):
        raise refusal(
            file,
            f"its template puts {json.dumps(steps)[:120]} around a text",
            "nothing but BOS in front and EOS behind",
        )
    return bool(front), bool(back)


def _template(processor: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Steps of the template for one text; none where there is no template."""
    if processor is None:
        return []
    for step in processor.get("processors") or [processor]:
        if step.get("type") == "TemplateProcessing":
            return list(step.get("single") or [])
    return []


def _id(stored: Mapping[str, Any], step: Mapping[str, Any]) -> int | None:
    name = (step.get("SpecialToken") or {}).get("id")
    return next((x["id"] for x in stored.get("added_tokens") or () if x["content"] == name), None)
