"""The tokenizer of a checkpoint: text to ids without special tokens, and back.

`tokenizer.json` is opened with the `tokenizers` package alone, which starts in milliseconds.
transformers is asked where that file is missing (sentencepiece only) or where
tokenizer_config.json changes it: a special token it does not know, or knows under another id.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.arch.text_config import text_config
from compress.checkpoint.small_files import SmallFiles
from compress.errors import CompressError, DataError, DependencyError
from compress.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What the rest of the tool needs of a tokenizer.

    `vocab_size` counts ids including added tokens; `bos_id` and `eos_id` are None where the
    checkpoint names none. Special tokens written out in a text become their ids.
    """

    folder: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    chat: ChatTemplate | None
    encode_many: Callable[[list[str]], list[list[int]]]
    decode_one: Callable[[list[int], bool], str]

    def encode(self, text: str) -> list[int]:
        """Ids of one text, no special token added."""
        return self.encode_many([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, on all cores."""
        return self.encode_many(list(texts))

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of some ids; special tokens are written out unless `skip_special`."""
        return self.decode_one([int(i) for i in ids], skip_special)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """Text of one chat. Raises DataError when the checkpoint has no chat template."""
        if self.chat is None:
            raise DataError(
                f"{self.folder} has no chat template, so messages cannot be rendered;"
                " add chat_template.jinja, or use a text field"
            )
        return self.chat.render(messages, add_generation_prompt=add_generation_prompt)


def load_tokenizer(where: str | Path | SmallFiles) -> Tokenizer:
    """Tokenizer of a Hugging Face checkpoint: a folder, or its small files (`Checkpoint.small`),
    whose content may be known already.

    Raises DataError when there is none, or its files cannot be read; DependencyError when it is a
    sentencepiece model and that package is missing.
    """
    files = where if isinstance(where, SmallFiles) else SmallFiles(Path(where))
    try:
        return _load(files)
    # The files come with the checkpoint; a value of the wrong kind in one of them shows wherever
    # it is first used.
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise DataError(
            f"{files.folder} has tokenizer files with a value that is of the wrong kind"
            f" ({_one_line(error)}); fetch tokenizer.json, tokenizer_config.json and"
            " generation_config.json again"
        ) from error


def _load(files: SmallFiles) -> Tokenizer:
    settings = _json(files, "tokenizer_config.json")
    stored = files.find("tokenizer.json")
    if stored is not None:
        backend = _backend(files.folder, stored)
        if _agrees(settings, backend):
            return _light(files, settings, backend)
    return _through_transformers(files)


def _light(files: SmallFiles, settings: Mapping[str, Any], backend: "Backend") -> Tokenizer:
    def encode_many(texts: list[str]) -> list[list[int]]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode_one(ids: list[int], skip_special: bool) -> str:
        return backend.decode(ids, skip_special_tokens=skip_special)

    bos_id, eos_id = (_special_id(files, settings, backend, kind) for kind in ("bos", "eos"))
    tokens = {name: text for name, text in _special_tokens(settings).items() if text is not None}
    for name, special_id in (("bos_token", bos_id), ("eos_token", eos_id)):
        if special_id is not None:
            tokens[name] = str(backend.id_to_token(special_id))
    return Tokenizer(
        folder=files.folder,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        bos_id=bos_id,
        eos_id=eos_id,
        chat=_chat_template(files, settings, tokens),
        encode_many=encode_many,
        decode_one=decode_one,
    )


def _through_transformers(files: SmallFiles) -> Tokenizer:
    slow = _from_transformers(files)

    def encode_many(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = slow(texts, add_special_tokens=False)["input_ids"]
        return ids

    def decode_one(ids: list[int], skip_special: bool) -> str:
        text: str = slow.decode(ids, skip_special_tokens=skip_special)
        return text

    settings = _json(files, "tokenizer_config.json")
    tokens = {name: str(text) for name, text in slow.special_tokens_map.items()}
    return Tokenizer(
        folder=files.folder,
        vocab_size=len(slow),
        bos_id=slow.bos_token_id,
        eos_id=slow.eos_token_id,
        chat=_chat_template(files, settings, tokens),
        encode_many=encode_many,
        decode_one=decode_one,
    )


def _from_transformers(files: SmallFiles) -> Any:
    from transformers import AutoTokenizer

    folder = files.folder
    # transformers' own words name tiktoken here, which does not read this file.
    if (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
        raise DependencyError(
            f"{folder / 'tokenizer.model'} needs sentencepiece: pip install sentencepiece protobuf"
        )
    try:
        with files.in_folder() as held:
            return AutoTokenizer.from_pretrained(
                held, local_files_only=True, trust_remote_code=False
            )
    except CompressError:
        raise
    except Exception as error:  # a dozen types, by the tokenizer class and the missing package
        # A line that ends in a colon names files on the next ones.
        said = _one_line(error).rstrip()
        reason = "" if said.endswith(":") else f" ({said})"
        raise DataError(
            f"{folder} has no tokenizer that transformers can load{reason};"
            " copy tokenizer.json and tokenizer_config.json beside the weights"
        ) from error


def _backend(folder: Path, stored: bytes) -> "Backend":
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(stored.decode("utf-8"))
    except Exception as error:  # tokenizers raises the bare Exception for every fault in the file
        raise DataError(
            f"{folder / 'tokenizer.json'} is not a tokenizer file: {_one_line(error)}"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _agrees(settings: Mapping[str, Any], backend: "Backend") -> bool:
    """Whether tokenizer.json knows every special token that tokenizer_config.json names."""
    for name, text in _special_tokens(settings).items():
        wanted = name in ("bos_token", "eos_token") and text is not None
        if wanted and backend.token_to_id(str(text)) is None:
            return False
    added = settings.get("added_tokens_decoder") or {}
    return all(backend.token_to_id(_text(entry)) == int(key) for key, entry in added.items())


def _special_id(
    files: SmallFiles, settings: Mapping[str, Any], backend: "Backend", kind: str
) -> int | None:
    """The tokenizer's word on its BOS or EOS (null included) goes before the model config's."""
    named = _special_tokens(settings)
    if f"{kind}_token" in named:
        text = named[f"{kind}_token"]
        return None if text is None else backend.token_to_id(text)
    for file in ("generation_config.json", "config.json"):
        config = _json(files, file)
        places, key = (config, text_config(config)[1]), f"{kind}_token_id"
        found = next((place[key] for place in places if key in place), None)
        if found is not None:
            # Several ends of text are usual for chat models; the first one is the main one.
            first = int(found[0] if isinstance(found, list) else found)
            return first if backend.id_to_token(first) is not None else None
    return None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """`bos_token`, `eos_token` ... as named in tokenizer_config.json; None where it says null."""
    return {
        name: None if value is None else _text(value)
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | Mapping | None)
    }


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise TypeError(f"token {token!r} has no text")
    return text


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _chat_template(
    files: SmallFiles, settings: Mapping[str, Any], tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template file goes before the one in tokenizer_config.json, as in transformers."""
    stored = files.find(TEMPLATE)
    if stored is not None:
        try:
            # As a text file is read, whose lines may end otherwise.
            text = io.TextIOWrapper(io.BytesIO(stored), encoding="utf-8").read()
            return ChatTemplate(text, tokens)
        except ValueError as error:
            path = files.folder / TEMPLATE
            raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise TypeError(f"chat_template is {found!r}")
    return None if found is None else ChatTemplate(found, tokens)


def _json(files: SmallFiles, name: str) -> dict[str, Any]:
    """A JSON object from a file, empty where there is no file."""
    path, content = files.folder / name, files.find(name)
    if content is None:
        return {}
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value
