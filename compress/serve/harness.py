"""lm-evaluation-harness on the engine: `lm_eval --model compress_model`.

Only the harness imports this module; compress needs no lm_eval. What is asked, cut and counted is
what the harness's own `hf` model does, so that the numbers are the same.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from compress.checkpoint import model_folder, resolve_model
from compress.checkpoint.jsonfile import read_object
from compress.errors import DataError, RequestError
from compress.runtime.sequences.request import Sampling
from compress.serve.harness_arguments import (
    HarnessArguments,
    device_of,
    dtype_of,
    max_length_of,
    read_arguments,
)
from compress.serve.harness_requests import (
    FIELDS,
    OTHER_SETTINGS,
    continue_prompts,
    sampling_of,
    window,
)
from compress.serve.open_model import CacheOptions, open_model
from compress.serve.questions import score_pairs

_log = logging.getLogger(__name__)


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A checkpoint as a model of the harness. Arguments: HarnessArguments.

    Raises a CompressError for what the user can mend.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        arguments, notices = read_arguments(given)
        place = resolve_model(arguments.pretrained)
        folder = model_folder(place)
        self.arguments, self.dtype = arguments, dtype_of(arguments.dtype, folder)
        self.tokenizer = _tokenizer(folder, arguments)
        self.settings, left_out = _settings(folder)
        device, moved = device_of(arguments.device)
        self.model = open_model(
            place,
            device=device,
            dtype=self.dtype,
            math="exact",
            cache=CacheOptions(arguments.cache_tokens),
        )
        self._device = torch.device(device)
        self._max_length = max_length_of(arguments, self.model.context)
        self.notices = (*notices, *moved, *left_out, *self.model.notices)
        for line in self.notices:
            _log.warning(line)

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: as asked, or the tokenizer's BOS, or EOS."""
        found = self._prefix()
        if found is None:
            raise RequestError(
                f"the tokenizer of {self.arguments.pretrained} has no token that begins or ends a"
                " text, and this task scores texts without context; give prefix_token_id=ID"
            )
        return found

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        return self.arguments.max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids as the checkpoint's tokenizer gives them, with the special tokens that it adds itself
        (or add_bos_token); none where the text begins with the prefix token already.
        """
        if add_special_tokens is not None:
            return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))
        prefix = self._prefix()
        return self._encode(string, None if prefix is None else self.tokenizer.decode(prefix))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation. A template that refuses a system message gets none."""
        try:
            return self._render(chat_history, add_generation_prompt)
        except TemplateError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            _log.warning("the chat template takes no system message (%s): left out", error)
            return self._render(others, add_generation_prompt)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        if self.arguments.enable_thinking:
            raise RequestError(
                "enable_thinking=True is for tasks that generate, and this one scores; leave it out"
            )
        if any(request.args == ("", "") for request in requests):
            raise RequestError("a task scores an empty text behind an empty context")
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts (nats), in windows of max_length; each token once."""
        pieces, owners = [], []
        for place, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pieces.append((None, context, continuation))
                owners.append(place)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(pieces, disable_tqdm=disable_tqdm)
        for place, (score, _) in zip(owners, scores, strict=True):
            totals[place] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts behind contexts, up to a stop string, without it."""
        asked = [self._asked(*request.args) for request in requests]
        texts = [""] * len(requests)
        prompts = [(ids, sampling) for ids, sampling, _ in asked]
        with tqdm(total=len(requests), desc="compress: generating", disable=disable_tqdm) as bar:

            def tell(place: int, ids: tuple[int, ...]) -> None:
                texts[place] = self._text(ids, asked[place][2])
                self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
                bar.update()

            continue_prompts(self.model, prompts, tell)
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """Written beside the results."""
        return {"model_dtype": self.dtype, "model_notices": list(self.notices)}

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs, cut = [], 0
        for key, context, continuation in requests:
            shown = "" if key is None else key[1]
            pair = window(tuple(context), tuple(continuation), self.max_length, shown)
            cut += len(pair[0]) < len(context)
            pairs.append(pair)
        if cut:
            _log.warning("%d of %d contexts are cut at their beginning", cut, len(pairs))
        answers = [(0.0, False)] * len(pairs)
        with tqdm(total=len(pairs), desc="compress: scoring", disable=disable_tqdm) as bar:

            def tell(place: int, score: float, greedy: bool) -> None:
                answers[place] = (score, greedy)
                # Windows of a text have no key: the text is told as a whole.
                if (key := requests[place][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answers[place])
                bar.update()

            score_pairs(self.model, pairs, tell)
        return answers

    def _asked(
        self, context: str, settings: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], Sampling, list[str]]:
        """Ids of a prompt cut at the left, how to go on from it, and where its text ends."""
        own = normalize_gen_kwargs(dict(settings), self.max_gen_toks)
        most = own.pop("max_gen_toks")
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = handle_stop_sequences(own.pop("until"), eos=eos)
        if most >= self.max_length:
            raise RequestError(
                f"max_gen_toks is {most} and max_length {self.max_length}: no token is left for the"
                " prompt; set max_gen_toks lower, in the task's generation_kwargs or --gen_kwargs"
            )
        # `hf` looks for the prefix token when it scores, and for BOS when it generates.
        ids = self._encode(context, self.tokenizer.bos_token) or [self.prefix_token_id]
        seed = torch.initial_seed() % 2**64  # what --seed sets
        sampling = sampling_of({**self.settings, **own}, until, most, seed)
        return tuple(ids[most - self.max_length :]), sampling, until

    def _encode(self, text: str, beginning: str | None) -> list[int]:
        """Ids; no special token is added to a text that begins so."""
        asked = self.arguments.add_bos_token
        add = False if beginning is not None and text.startswith(beginning) else asked
        return list(
            self.tokenizer.encode(text, **({} if add is None else {"add_special_tokens": add}))
        )

    def _text(self, ids: Sequence[int], until: list[str]) -> str:
        end = self.arguments.think_end_token
        by_id = end is not None and end.isdigit()
        if by_id and int(str(end)) in ids:
            ids = ids[len(ids) - tuple(reversed(ids)).index(int(str(end))) :]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return str(
            postprocess_generated_text(
                generation=text.lstrip() if by_id else text,
                stop=until,
                think_end_token=None if by_id else end,
            )
        )

    def _prefix(self) -> int | None:
        asked, bos = self.arguments.prefix_token_id, self.tokenizer.bos_token_id
        found = asked if asked is not None else bos
        return self.eot_token_id if found is None else found

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        extra = dict(self.arguments.chat_template_args)
        if self.arguments.enable_thinking is not None:
            extra["enable_thinking"] = self.arguments.enable_thinking
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **extra,
            )
        )


def _tokenizer(folder: Path, arguments: HarnessArguments) -> Any:
    """transformers' own, as the `hf` model has it: the special tokens it adds are part of a score.

    DataError where transformers cannot load it.
    """
    from transformers import AutoTokenizer

    place = folder if arguments.tokenizer is None else resolve_model(arguments.tokenizer)
    bos = arguments.add_bos_token
    extra = {} if bos is None else {"add_bos_token": bos}
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False, **extra)
    except Exception as error:  # a dozen types, by the tokenizer class and the missing package
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{place} has no tokenizer that transformers can load ({reason}); copy tokenizer.json"
            " and tokenizer_config.json beside the weights, or give tokenizer=FOLDER"
        ) from error


def _settings(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Generation settings that come with the checkpoint, and a line for those left out."""
    file = folder / "generation_config.json"
    found = read_object(file) if file.is_file() else {}
    others = [name for name in OTHER_SETTINGS if found.get(name)]
    line = f"{file} asks for {', '.join(others)}, which the engine does not have: left out"
    return {name: found[name] for name in FIELDS if name in found}, (line,) if others else ()
