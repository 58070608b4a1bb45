"""A decoder's graph in ONNX Runtime, on the CPU: chunks, batches, keys and values of the past."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from compress.errors import CheckpointError

Array = np.ndarray[Any, Any]
Past = Mapping[str, Array]  # by the names of the inputs
SILENT = 4  # of ONNX Runtime's levels: fatal errors only; others are raised


class Steps(Protocol):
    """A graph that is open in some runtime."""

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Array, Past]:
        """Logits fp32 [B, S, vocab] of tokens behind a past, and the past with them.

        ids: int64 [B, S]. mask: int64 [B, past + S], 1 where a token is real. CheckpointError where
        an operator of the graph fails.
        """


def given(ids: Array, mask: Array) -> dict[str, Array]:
    """Inputs of a step, by name, without the past."""
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def found(outputs: Mapping[str, Array]) -> tuple[Array, Past]:
    """Logits, and the outputs as inputs of the next step."""
    past = {k.replace("present", "past_key_values"): v for k, v in outputs.items()}
    return past.pop("logits"), past


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """A graph that is open. Names are those of decoder.py."""

    session: ort.InferenceSession

    @classmethod
    def open(cls, path: Path, config: Mapping[str, str] | None = None) -> "Runner":
        """config: entries of the session's configuration. CheckpointError where ONNX Runtime does
        not take the graph."""
        options = ort.SessionOptions()
        options.log_severity_level = SILENT
        for key, value in (config or {}).items():
            options.add_session_config_entry(key, value)
        try:
            return cls(ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
        except Exception as error:  # ONNX Runtime's own types have no common base
            reason = " ".join(str(error).split())
            raise CheckpointError(f"ONNX Runtime does not open {path}: {reason}") from error

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Array, Past]:
        """As Steps has it."""
        inputs = given(ids, mask) | dict(self.empty(len(ids)) if past is None else past)
        known = {value.name for value in self.session.get_inputs()}
        names = [value.name for value in self.session.get_outputs()]
        outputs = self._run(names, {k: v for k, v in inputs.items() if k in known})
        return found(dict(zip(names, outputs, strict=True)))

    def _run(self, names: list[str], inputs: Past) -> list[Array]:
        try:
            return list(self.session.run(names, inputs))
        except Exception as error:  # as in open
            reason = " ".join(str(error).split())
            raise CheckpointError(f"ONNX Runtime does not run the graph: {reason}") from error

    def empty(self, texts: int) -> dict[str, Array]:
        """The past of nothing."""
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        return {
            value.name: np.zeros((texts, value.shape[1], 0, value.shape[3]), types[value.type])
            for value in self.session.get_inputs()
            if value.name.startswith("past_key_values.")
        }

    def whole(self, ids: Array) -> Array:
        """Logits of texts of one length in one step."""
        return self.step(ids, np.ones_like(ids))[0]

    def greedy(self, prompt: Array, count: int) -> list[int]:
        """The likeliest tokens behind a prompt int64 [1, S], one step each."""
        logits, past = self.step(prompt, np.ones_like(prompt))
        tokens: list[int] = []
        while True:
            tokens.append(int(logits[0, -1].argmax()))
            if len(tokens) == count:
                return tokens
            mask = np.ones((1, prompt.shape[1] + len(tokens)), np.int64)
            logits, past = self.step(np.array([tokens[-1:]]), mask, past)
