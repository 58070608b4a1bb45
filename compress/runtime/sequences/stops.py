"""The text of an output as its tokens come, and the stop strings in it."""

from collections.abc import Callable

Decode = Callable[[list[int]], str]

# Tokens of the prompt that are decoded before the output: the first token of an output keeps the
# space it begins with, and a character that the prompt leaves unfinished is finished.
CONTEXT = 5
# A character has four bytes at most, so at most so many tokens of one precede its last.
UNFINISHED_TOKENS = 3
# Where so many tokens settle nothing, they are no characters or have no text, and waiting on would
# decode them all again for every new one.
PATIENCE = 16
UNFINISHED = "\ufffd"


def with_single_texts(decode: Decode) -> Decode:
    """The same, which decodes each single token once: a Writer asks for the text of every token
    alone when it has settled, one of the two texts that it needs for a token. Kept are as many as
    the vocabulary has, at most."""
    known: dict[int, str] = {}

    def decoded(ids: list[int]) -> str:
        if len(ids) != 1:
            return decode(ids)
        (token,) = ids
        text = known.get(token)
        if text is None:
            text = known[token] = decode(ids)
        return text

    return decoded


class Writer:
    """Turns tokens into text that never changes afterwards.

    Held back are tokens that end inside a character, and an end of the text that may become a stop
    string. decode: ids -> text, special tokens left out, spaces as they are.
    """

    def __init__(self, decode: Decode, prompt: list[int], stops: tuple[str, ...]) -> None:
        self.decode, self.stops = decode, stops
        self.text = ""
        self._taken = 0
        self._held = ""
        # Text of _tokens[:_read] has been written; _tokens goes on growing behind.
        self._tokens, self._read, self._before = _context(self._decoded, prompt)

    def push(self, token: int, may_stop: bool = True) -> bool:
        """One more token. True where its text completes a stop string, which then is cut off."""
        self._tokens.append(token)
        return self._release(self._settled(), may_stop)

    def flush(self) -> bool:
        """The output has ended: all that is held becomes text. True as in push()."""
        rest = self._decoded(self._tokens)[len(self._before) :]
        stopped = self._release(rest, True)
        self.text, self._held = self.text + self._held, ""
        return stopped

    def take(self) -> str:
        """The text written since the last call."""
        start, self._taken = self._taken, len(self.text)
        return self.text[start:]

    def _settled(self) -> str:
        """New text since the last call, without an unfinished character at its end."""
        text = self.decode(self._tokens)
        patient = len(self._tokens) - self._read < PATIENCE
        if patient and (text.endswith(UNFINISHED) or len(text) <= len(self._before)):
            return ""
        new = text[len(self._before) :]
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        self._before = self.decode(self._tokens)
        return new

    def _release(self, new: str, may_stop: bool) -> bool:
        if not self.stops:
            self.text += new
            return False
        text, self._held = self._held + new, ""
        found = [text.find(stop) for stop in self.stops if stop in text] if may_stop else []
        if found:
            self.text += text[: min(found)]
            return True
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.text += text[: len(text) - held]
        self._held = text[len(text) - held :]
        return False

    def _decoded(self, tokens: list[int]) -> str:
        return self.decode(tokens) if tokens else ""


def _context(decode: Decode, prompt: list[int]) -> tuple[list[int], int, str]:
    """The prompt's last tokens, how many of them end with a whole character, and their text.

    They begin with a whole character too: some decoders give nothing of a text that does not.
    """
    first, last = max(0, len(prompt) - CONTEXT), len(prompt)
    for end in range(last, max(0, last - UNFINISHED_TOKENS) - 1, -1):
        for start in range(first, max(0, first - UNFINISHED_TOKENS) - 1, -1):
            text = decode(prompt[start:end])
            if not text.startswith(UNFINISHED) and not text.endswith(UNFINISHED):
                return prompt[start:], end - start, text
    return prompt[first:], last - first, decode(prompt[first:]).rstrip(UNFINISHED)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string without completing it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
