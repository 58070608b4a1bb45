"""A conversation with a model, by the chat template of its tokenizer."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compress.checkpoint import model_folder, resolve_model
from compress.errors import DataError, RequestError
from compress.runtime.loading.model import Model
from compress.runtime.sequences.request import Sampling
from compress.text.prompt import proper_text
from compress.text.tokenizer import Tokenizer, load_tokenizer

Message = dict[str, str]  # role and content
# This part of the context at least is left for an answer, or as much as it may have.
ANSWER_SHARE = 0.25


def chat_tokenizer(checkpoint: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint; DataError where it has no chat template."""
    tokenizer = load_tokenizer(model_folder(resolve_model(checkpoint)))
    if tokenizer.chat is None:
        raise DataError(
            f"{checkpoint} has no chat template, so it was hardly trained to chat; `compress-model"
            f" generate {checkpoint} PROMPT` continues a text, and a chat_template.jinja beside the"
            " weights makes it chat"
        )
    return tokenizer


@dataclass(slots=True)
class Conversation:
    """messages: all so far. forgotten: how many of the first no longer fit the model's context."""

    model: Model
    tokenizer: Tokenizer
    messages: list[Message] = field(default_factory=list)
    forgotten: int = 0

    @classmethod
    def begin(cls, model: Model, tokenizer: Tokenizer, system: str | None) -> "Conversation":
        messages = [] if system is None else [{"role": "system", "content": system}]
        return cls(model, tokenizer, messages)

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Pieces of the model's answer to the user's text, as they come.

        What was said so far stays in the conversation where the iterator is closed; the oldest
        questions with their answers are left out where all does not fit. Errors: RequestError,
        DataError; the conversation is then as it was before.
        """
        self.messages.append({"role": "user", "content": text})
        said = ""
        try:
            prompt = self._prompt(sampling.max_tokens)
            room = self.model.context - len(prompt)
            limited = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            for update in self.model.stream(prompt, limited):
                said += update.text
                yield update.text
                if update.result is not None and update.result.error is not None:
                    raise RequestError(update.result.error)
        except (RequestError, DataError):
            said = ""
            raise
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said.strip()})
            else:
                self.messages.pop()

    def _prompt(self, wanted: int) -> tuple[int, ...]:
        """Ids of the messages that fit, with the beginning of an answer behind them."""
        most = self.model.context - min(wanted, int(ANSWER_SHARE * self.model.context))
        start = self.messages[0]["role"] == "system"
        head, rest = self.messages[:start], self.messages[start:]
        for left_out in range(0, len(rest), 2):
            ids = self._encoded([*head, *rest[left_out:]])
            if len(ids) <= most:
                self.forgotten = left_out
                return ids
        raise RequestError(
            f"the message is too long: {len(ids)} tokens with what goes around it, and at most"
            f" {most} leave room for an answer, as the model reads {self.model.context}; write less"
        )

    def _encoded(self, messages: Sequence[Message]) -> tuple[int, ...]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tuple(self.tokenizer.encode(proper_text(text)))
