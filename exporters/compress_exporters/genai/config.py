"""genai_config.json: what onnxruntime-genai has to know of a graph."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.arch.text_config import config_at
from compress.checkpoint import write_atomic
from compress.formats.weights import Weights
from compress_exporters.onnx.graph.attention import PAST, PRESENT
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.rotary import context
from compress_exporters.onnx.saving import MODEL

NAME = "genai_config.json"
# Tokens of a text by default: keys and values have room for all of them from the start.
LENGTH = 4096
# Of generation_config.json, and what holds without.
SEARCH: Mapping[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "early_stopping": True,
}


def write_config(build: Build, folder: Path) -> str:
    """Its name."""
    text = json.dumps(genai_config(build), indent=2) + "\n"
    write_atomic(folder / NAME, text.encode())
    return NAME


def genai_config(build: Build) -> dict[str, Any]:
    settings, length = _settings(build.weights), context(build)
    search = {key: _given(settings, key, value) for key, value in SEARCH.items()}
    return {
        "model": {
            "type": "decoder",
            **_special(build, settings),
            "context_length": length,
            "vocab_size": (build.spec.head_shape or build.spec.embedding_shape)[0],
            "decoder": _decoder(build),
        },
        "search": {
            **search,
            "min_length": 0,
            "max_length": min(length, LENGTH),
            "past_present_share_buffer": True,
        },
    }


def _decoder(build: Build) -> dict[str, Any]:
    how, names = build.how, [value.name for value in build.graph.inputs]
    heads = how.grouped(0)  # those of all layers: see require_heads
    given = ("input_ids", "attention_mask", "position_ids")
    return {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL,
        "head_size": heads.key_width,
        "hidden_size": build.spec.hidden,
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "num_hidden_layers": len(how.layers),
        "inputs": {
            **{name: name for name in given if name in names},
            "past_key_names": PAST.format("%d", "key"),
            "past_value_names": PAST.format("%d", "value"),
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": PRESENT.format("%d", "key"),
            "present_value_names": PRESENT.format("%d", "value"),
        },
    }


def _special(build: Build, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of tokens that begin, end and fill up texts; those that anything says."""
    config = build.weights.checkpoint.config
    text = config_at(config, build.spec.text_config)
    found = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        said = [place[key] for place in (settings, text, config) if place.get(key) is not None]
        if said:
            found[key] = said[0]
    if "eos_token_id" in found and "pad_token_id" not in found:
        ends = found["eos_token_id"]
        found["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    return found


def _given(settings: Mapping[str, Any], key: str, value: Any) -> Any:
    found = settings.get(key)
    return value if found is None else found


def _settings(source: Weights) -> dict[str, Any]:
    return source.checkpoint.small.find_object("generation_config.json")
