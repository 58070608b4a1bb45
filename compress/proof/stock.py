"""What runs in the fresh process: plain transformers, and nothing else of ours than the question.

`python -m compress.proof.stock QUESTION` prints its answer as one line of JSON. It reaches for no
network and runs no code of the checkpoint's folder, whatever the checkpoint says.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from compress.proof.question import Answer, LoadQuestion, Question

# Two processes add up the same numbers in fp32, in other orders where threads or kernels differ.
# Over 17 families it was 0 with one thread and at most 1.8e-7 with two (qwen3_moe, experts one by
# one here and grouped there). A norm's epsilon of 1e-6 in place of 1e-5 moves tale-6m by 4.8e-5.
BOUND = 1e-5
# Lists of the config with an entry for each block.
PER_BLOCK = ("layer_types", "no_rope_layers", "mlp_layer_types")
_LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_SHOWN = 3


class Unlike(Exception):
    """The checkpoint is not what it should be, in words."""


def main(path: str) -> None:
    """Answer the question in a file, on standard output."""
    sys.addaudithook(_refuse_network)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = answer_to(Question.read(Path(path)))
    print(f"\n{answer.to_json()}", flush=True)


def answer_to(question: Question) -> Answer:
    """Load the checkpoint as anyone would, and compare its logits and ids with ours."""
    from transformers import __version__

    asked, kind = question.asked, ""
    try:
        _check_tokens(asked)
        model = _first_block(asked) if asked.first_block else _whole(asked)
        kind = type(model).__name__
        most, relative = _difference(model, question)
        if not relative <= BOUND:  # nor where it is not a number
            raise Unlike(
                "its logits differ from those that were computed of the same files by"
                f" {relative:.2g} of their norm (bound {BOUND:g})"
            )
    except Unlike as error:
        return Answer(__version__, kind, why_not=str(error))
    except Exception as error:  # of whatever type transformers has for what it finds
        words = " ".join(str(error).split())
        return Answer(__version__, kind, why_not=f"{type(error).__name__}: {words}"[:400])
    return Answer(__version__, kind, most, relative)


def _whole(asked: LoadQuestion) -> Any:
    model, report = _load(asked.folder)
    _check_report(report, _spare(asked, model))
    return model


def _first_block(asked: LoadQuestion) -> Any:
    """The model cut behind its first block, once all names and shapes are those of the class."""
    whole, config = _on_meta(asked.folder)
    keys = _check_form(asked, whole)
    _cut_behind_first_block(config)
    model, report = _load(asked.folder, config=config)
    behind = set(keys.values()) - model.state_dict().keys()
    _check_report(report, _spare(asked, whole) | behind | {x for x in keys if keys[x] in behind})
    return model


def _spare(asked: LoadQuestion, model: Any) -> set[str]:
    """What is part of no decoder, by the files' names and the class's."""
    return {*asked.spare, *(key for _, (key, _) in _places(asked.spare, model))}


def _load(folder: str, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report; else it says no more than "above"
        **_LOCAL,
        **options,
    )
    return model.eval(), report


def _on_meta(folder: str) -> tuple[Any, Any]:
    """The class without weights, and its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **_LOCAL)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False), config


def _cut_behind_first_block(config: Any) -> None:
    text = config.get_text_config()
    text.num_hidden_layers = 1
    for key in PER_BLOCK:
        if isinstance(getattr(text, key, None), list):
            setattr(text, key, getattr(text, key)[:1])


def _check_report(report: Mapping[str, Any], spare: set[str]) -> None:
    """Unlike where the class lacks a value, or a value the class."""
    if missing := set(report["missing_keys"]):
        raise Unlike(f"no tensor is in the files for {_listed(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        raise Unlike(_misshapen(*mismatched[0]))
    if unknown := set(report["unexpected_keys"]) - spare:
        raise Unlike(f"the class has no place for {_listed(unknown)}")
    if errors := [*report.get("error_msgs", ()), *report.get("conversion_errors", ())]:
        raise Unlike(_listed(str(error) for error in errors))


def _check_form(asked: LoadQuestion, model: Any) -> dict[str, str]:
    """Unlike where names or shapes are not the class's. Returns tensor -> the class's name."""
    wanted = model.state_dict(keep_vars=True)
    places = {
        name: place for name, place in _places(asked.shapes, model) if name not in asked.spare
    }
    if unknown := {name for name, (key, _) in places.items() if key not in wanted}:
        raise Unlike(f"the class has no place for {_listed(unknown)}")
    # A head that is the embedding is one tensor of the class under two names.
    filled = {id(wanted[key]) for key, _ in places.values()}
    if missing := {key for key, value in wanted.items() if id(value) not in filled}:
        raise Unlike(f"no tensor is in the files for {_listed(missing)}")
    counts: dict[str, int] = {}
    for name, (key, merged) in places.items():
        size, asks = torch.Size(asked.shapes[name]), wanted[key].shape
        if not merged and size != asks:
            raise Unlike(_misshapen(name, size, asks))
        counts[key] = counts.get(key, 0) + size.numel()
    for key, count in counts.items():  # experts become one tensor
        if count != wanted[key].numel():
            asks = list(wanted[key].shape)
            raise Unlike(
                f"the files have {count:,} values for {key}, and the class asks for {asks}"
            )
    return {name: key for name, (key, _) in places.items()}


def _places(names: Iterable[str], model: Any) -> Iterator[tuple[str, tuple[str, bool]]]:
    """What transformers calls tensors of a file, and whether each becomes one with others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    merging = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renaming = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    for name in names:
        key, pattern = rename_source_key(name, renaming, merging, prefix, state)
        yield name, (key, pattern is not None)


def _difference(model: Any, question: Question) -> tuple[float, float]:
    """Largest difference of a logit, and the norm of all of them over that of ours."""
    with torch.inference_mode():
        logits = model(input_ids=question.ids, use_cache=False).logits
    if logits.shape != question.logits.shape:
        found, ours = list(logits.shape), list(question.logits.shape)
        raise Unlike(f"its logits are {found}, and those computed of the same files are {ours}")
    lost = (logits.double() - question.logits).flatten()
    return float(lost.abs().max()), float(lost.norm() / question.logits.double().norm())


def _check_tokens(asked: LoadQuestion) -> None:
    """Unlike where the folder's tokenizer does not give the source's ids."""
    if not asked.texts:
        return
    every = token_ids(tokenizer_of(asked.folder), asked.texts)
    for text, wanted, found in zip(asked.texts, asked.tokens, every, strict=True):
        if wanted != found:
            place = next((i for i, x in enumerate(wanted) if found[i : i + 1] != [x]), len(wanted))
            raise Unlike(
                f"AutoTokenizer reads {text[:40]!r} otherwise than of the source: id {place} is"
                f" {_at(found, place)} and was {_at(wanted, place)}"
            )


def tokenizer_of(folder: str) -> Any:
    """AutoTokenizer's, of whatever class."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **_LOCAL)


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of texts, with the special tokens that the tokenizer adds."""
    return [list(ids) for ids in tokenizer(texts)["input_ids"]]


def _misshapen(name: str, found: Iterable[int], asks: Iterable[int]) -> str:
    return f"{name} is {list(found)}, and the class asks for {list(asks)}"


def _at(ids: list[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "none"


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{', '.join(every[:_SHOWN])}{more}"


def _refuse_network(event: str, args: object) -> None:
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise PermissionError("a checkpoint is loaded without the network")


def _end_with_parent() -> None:
    """End when the process that asked is gone: it holds the other end of our standard input."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
