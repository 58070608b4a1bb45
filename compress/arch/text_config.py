"""Where a decoder's own config lies inside of config.json: a model of images or sound has it below
a key, a plain decoder at the top. The only place that knows the keys."""

from collections.abc import Mapping
from typing import Any

# The first that is there and holds something counts. transformers' classes say text_config; the
# checkpoints that its configurations of Nemotron Omni and Unlimited OCR read say the others.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


def text_config(config: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Path of the text decoder's own config inside config.json (() at the top), and that config."""
    for key in TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return (key,), inner
    return (), config


def config_at(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The config at a path that `text_config` or a DecoderSpec gave."""
    for key in path:
        config = config[key]
    return config


def with_config_at(
    config: Mapping[str, Any], path: tuple[str, ...], inner: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json with another config at a path."""
    if not path:
        return dict(inner)
    key, *rest = path
    return {**config, key: with_config_at(config[key], tuple(rest), inner)}
