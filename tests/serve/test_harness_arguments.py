"""`--model_args` of compress_model: what is taken, what is refused and what has no effect."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.arch.text_config import TEXT_CONFIGS
from compress.errors import RequestError
from compress.serve.harness_arguments import (
    HarnessArguments,
    device_of,
    dtype_of,
    max_length_of,
    read_arguments,
)


def test_arguments_are_named_as_those_of_the_hf_model() -> None:
    given = {
        "pretrained": "small",
        "dtype": "bfloat16",
        "device": None,
        "max_length": 512,
        "add_bos_token": True,
        "think_end_token": 7,  # the harness reads digits as a number
        "chat_template_args": {"language": "en"},
    }
    arguments, notices = read_arguments(given)
    assert arguments == HarnessArguments(
        pretrained="small",
        dtype="bfloat16",
        max_length=512,
        add_bos_token=True,
        think_end_token="7",
        chat_template_args={"language": "en"},
    )
    assert notices == ()


def test_what_has_no_effect_is_said() -> None:
    plain = {"pretrained": "small", "batch_size": 1, "max_batch_size": None}
    assert read_arguments(plain)[1] == ()
    given = {"pretrained": "small", "batch_size": "auto", "trust_remote_code": True}
    assert read_arguments(given)[1] == (
        "batch_size=auto has no effect: the engine fills its steps by itself",
        "trust_remote_code=True has no effect: code that comes with a checkpoint is never run",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no pretrained among the model_args; give pretrained=FOLDER"),
        ({"paralellize": True}, "paralellize=True is no argument of compress_model; it has pret"),
        ({"max_length": 0}, "max_length=0: a whole number from 1 on is needed"),
        ({"max_length": True}, "max_length=True: a whole number from 1 on is needed"),
        ({"max_length": "long"}, "max_length='long': a whole number from 1 on is needed"),
        ({"add_bos_token": 1}, "add_bos_token=1: True or False is needed"),
        ({"pretrained": True}, "pretrained=True: text is needed"),
        ({"chat_template_args": "x"}, "chat_template_args='x': a map is needed"),
        ({"dtype": "int8"}, "dtype=int8: it is auto or one of float32, bfloat16, float16"),
        ({"enable_thinking": True}, "enable_thinking=True needs think_end_token=TEXT"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    whole = {"pretrained": "small", **given} if given else {}
    with pytest.raises(RequestError) as caught:
        read_arguments(whole)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "asked", "found"),
    [
        ({"dtype": "bfloat16"}, "auto", "bf16"),
        ({"torch_dtype": "float16"}, "auto", "fp16"),
        *(({key: {"dtype": "bfloat16"}}, "auto", "bf16") for key in TEXT_CONFIGS),
        ({}, "auto", "fp32"),
        ({"dtype": "bfloat16"}, "float32", "fp32"),
    ],
)
def test_the_dtype(config: dict[str, Any], asked: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dtype_of(asked, tmp_path) == found


@pytest.mark.parametrize(
    ("asked", "cuda", "found"),
    [("cuda:0", True, "cuda:0"), ("cuda:0", False, "cpu"), ("cuda:1", False, "cuda:1")],
)
def test_the_device(asked: str, cuda: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the harness asks for by itself is changed; what a user names is left to refuse."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    device, lines = device_of(asked)
    assert device == found
    assert len(lines) == (device != asked)


def test_the_length() -> None:
    assert max_length_of(HarnessArguments("small"), 512) == 512
    assert max_length_of(HarnessArguments("small", max_length=512), 512) == 512
    with pytest.raises(RequestError, match="max_length is 513: small reads 512 tokens; leave it"):
        max_length_of(HarnessArguments("small", max_length=513), 512)
