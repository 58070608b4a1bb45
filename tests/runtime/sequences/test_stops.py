"""Text as tokens come: never half a character, nothing that may begin a stop string, never taken
back."""

from collections.abc import Callable
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compress.runtime.sequences.stops import PATIENCE, Writer, with_single_texts

Decode = Callable[[list[int]], str]
TEXTS = (
    "naïve café",
    "日本語のテキスト",
    "🦊👩‍👩‍👧 ok 🦊",
    "a\tb\n\nc",
    "Ω≈ç√ plain words after it",
)


def bytes_of(ids: list[int]) -> str:
    """One token a byte: every character of more bytes is cut."""
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Byte-level BPE as gpt2's and llama 3's, with a special token 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Pieces with ▁ for spaces and bytes as <0x..>, as llama 2's."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def written(
    decode: Decode, prompt: list[int], output: list[int], stops: tuple[str, ...] = ()
) -> tuple[list[str], bool]:
    """What is new after each token and after the end; whether a stop string was found."""
    writer = Writer(decode, prompt, stops)
    parts = []
    for token in output:
        stopped = writer.push(token)
        parts.append(writer.take())
        if stopped:
            assert writer.text == "".join(parts)
            return parts, True
    stopped = writer.flush()
    parts.append(writer.take())
    assert writer.text == "".join(parts)
    return parts, stopped


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    """However prompt and output share it, and with no half character on the way."""
    if kind == "bytes":
        decode, ids = bytes_of, list(text.encode())
    else:
        tokenizer: Tokenizer = request.getfixturevalue(kind)
        decode, ids = tokenizer.decode, tokenizer.encode(text).ids
    whole = decode(ids)
    for cut in range(len(ids)):
        parts, _ = written(decode, ids[:cut], ids[cut:])
        assert not any("\ufffd" in part for part in parts)
        begun = (decode(ids[: cut - n]) for n in range(min(cut, 3) + 1))
        before = next(text for text in begun if not text.endswith("\ufffd"))
        assert before + "".join(parts) == whole


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes(seed: int, byte_level: Tokenizer) -> None:
    """Ids that are no text at all: the same replacement characters as of the whole."""
    random = Random(seed)
    high = [random.randrange(128, 256) for _ in range(30)]
    ids = [byte_level.token_to_id(c) for c in byte_level.get_vocab()][:256]
    output = [ids[h] for h in high] + [byte_level.token_to_id("a")]
    parts, _ = written(byte_level.decode, [], output)
    found = "".join(parts)
    assert found.replace("\ufffd", "") == byte_level.decode(output).replace("\ufffd", "")
    assert found.endswith("a")


def test_the_text_of_a_token_alone_is_decoded_once() -> None:
    asked: list[tuple[int, ...]] = []

    def decode(ids: list[int]) -> str:
        asked.append(tuple(ids))
        return bytes_of(ids)

    output = list("a naïve café, 日本 and a naïve café, 日本".encode())
    assert written(with_single_texts(decode), [], output) == written(bytes_of, [], output)
    alone = [ids for ids in asked if len(ids) == 1]
    assert len(alone) == len(set(alone)) > 5
    assert len(asked) > len(alone)


def test_an_unfinished_character_waits_and_nothing_else() -> None:
    parts, _ = written(bytes_of, [], list("a€b".encode()))
    assert parts == ["a", "", "", "€", "b", ""]
    assert written(bytes_of, [], list("a€".encode())[:-1])[0][-1] == "\ufffd"


def test_what_is_no_character_does_not_wait_for_ever() -> None:
    output = [0x80] * (3 * PATIENCE)
    sizes = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return bytes_of(ids)

    parts, _ = written(decode, [], output)
    assert "".join(parts) == "\ufffd" * len(output)
    assert max(sizes) <= 2 * PATIENCE


def test_special_tokens_without_text_do_not_pile_up(byte_level: Tokenizer) -> None:
    sizes = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return byte_level.decode(ids)

    end, a = byte_level.token_to_id("<end>"), byte_level.token_to_id("a")
    parts, _ = written(decode, [a], [end] * 200 + [a, a])
    assert "".join(parts) == "aa"
    assert max(sizes) <= 2 * PATIENCE


def test_a_space_between_prompt_and_output_stays(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("once upon").ids
    cut = len(sentencepiece.encode("once").ids)
    assert "".join(written(sentencepiece.decode, ids[:cut], ids[cut:])[0]) == " upon"


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings_against_the_whole_text(seed: int) -> None:
    """Random texts of few letters, so that beginnings of stop strings come all the time."""
    random = Random(seed)

    def letters(most: int) -> str:
        return "".join(random.choice("abé") for _ in range(random.randint(1, most)))

    text, stops = letters(30), tuple(letters(4) for _ in range(random.randint(1, 3)))
    output = list(text.encode())
    parts, stopped = written(bytes_of, [], output, stops)
    # The stop string that is complete first ends the output, before its beginning.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert stopped == bool(ends)
    if ends:
        first = min(end for end, _ in ends)
        assert "".join(parts) == text[: min(start for end, start in ends if end == first)]
    else:
        assert "".join(parts) == text
    shown = ""
    for count, part in enumerate(parts[:-1], start=1):
        shown += part
        seen = bytes(output[:count]).decode(errors="ignore")
        held = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
        assert len(shown) <= len(seen) - held or stopped


def test_several_stop_strings_in_one_token_the_first_counts() -> None:
    texts = ["one two", " three four five"]

    def decode(ids: list[int]) -> str:
        return "".join(texts[i] for i in ids)

    assert written(decode, [], [0, 1], ("five", "four", "zero")) == (["one two", " three "], True)


def test_a_stop_string_over_the_edge_of_the_prompt_is_none() -> None:
    assert written(bytes_of, list(b"ST"), list(b"OP!"), ("STOP",)) == (["O", "P", "!", ""], False)


def test_min_tokens_let_stop_strings_pass() -> None:
    writer = Writer(bytes_of, [], ("ab",))
    assert not any(writer.push(token, may_stop=False) for token in b"ab")
    assert writer.push(ord("x")) is False
    assert writer.text == "abx"
    assert [writer.push(token) for token in b"ab"] == [False, True]
    assert writer.text == "abx"
