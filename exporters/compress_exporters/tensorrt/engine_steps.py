"""An engine on a CUDA device: steps of a text, keys and values of the past."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import DependencyError
from compress_exporters.onnx.proof.running import Array, Past, found, given
from compress_exporters.tensorrt.engine import BuiltEngine, Tools

# By TensorRT's names.
TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"FLOAT": torch.float32, "HALF": torch.float16, "INT64": torch.int64}
)
DEVICE = "cuda"
ONE = "decode"  # the profile of steps with one token a text


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An input or output of an engine. shape: -1 for what a step decides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_input: bool


@dataclass(frozen=True, slots=True, eq=False)
class EngineSteps:
    """An engine that is loaded. contexts: by profile. values: by name."""

    tools: Tools
    stream: Any
    contexts: Mapping[str, Any]
    values: Mapping[str, Value]
    # The runtime and the engine, which the contexts need.
    held: tuple[Any, Any]

    @classmethod
    def load(cls, tools: Tools, engine: BuiltEngine) -> "EngineSteps":
        """DependencyError where the device has no room for the engine, or does not load it."""
        runtime = tools.trt.Runtime(tools.log)
        loaded = runtime.deserialize_cuda_engine(engine.plan)
        if loaded is None:
            raise DependencyError(f"{tools.name} does not load it: {tools.why}")
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has none here
        contexts = {}
        for number, name in enumerate(engine.profiles):
            context = loaded.create_execution_context()
            if context is None:
                raise DependencyError(f"{tools.name} does not start it: {tools.why}")
            if not context.set_optimization_profile_async(number, stream.cuda_stream):
                raise tools.refused(f"does not take the profile {name}")
            contexts[name] = context
        stream.synchronize()
        return cls(tools, stream, contexts, _values(tools.trt, loaded), (runtime, loaded))

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Array, Past]:
        """As Steps has it."""
        inputs = given(ids, mask) | dict(self.empty(len(ids)) if past is None else past)
        name = ONE if ids.shape[1] == 1 else next(x for x in self.contexts if x != ONE)
        return found(self._run(self.contexts[name], inputs))

    def empty(self, texts: int) -> dict[str, Array]:
        """The past of nothing."""
        return {
            name: np.zeros((texts, value.shape[1], 0, value.shape[3]), _numpy(value.dtype))
            for name, value in self.values.items()
            if value.is_input and name.startswith("past_key_values.")
        }

    def _run(self, context: Any, inputs: Past) -> dict[str, Array]:
        """All outputs."""
        held: dict[str, Tensor] = {}
        with torch.cuda.stream(self.stream):
            for name, value in self.values.items():
                if value.is_input:
                    array = np.ascontiguousarray(inputs[name])
                    if not context.set_input_shape(name, array.shape):
                        raise self.tools.refused(f"does not take {name} as {list(array.shape)}")
                    held[name] = _room(array.shape, value.dtype)
                    held[name].copy_(torch.from_numpy(array))
            for name, value in self.values.items():
                if not value.is_input:
                    held[name] = _room(tuple(context.get_tensor_shape(name)), value.dtype)
            for name, tensor in held.items():
                if not context.set_tensor_address(name, tensor.untyped_storage().data_ptr()):
                    raise self.tools.refused(f"does not take the memory of {name}")
            if not context.execute_async_v3(self.stream.cuda_stream):
                raise self.tools.refused("does not run the engine")
        self.stream.synchronize()
        outputs = (name for name, value in self.values.items() if not value.is_input)
        return {name: held[name].cpu().numpy() for name in outputs}


def _values(trt: Any, engine: Any) -> dict[str, Value]:
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    return {
        name: Value(
            TYPES[engine.get_tensor_dtype(name).name],
            tuple(engine.get_tensor_shape(name)),
            engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        )
        for name in names
    }


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the device, never none: TensorRT wants an address also for a past of nothing."""
    size = int(np.prod(shape, dtype=np.int64))
    return torch.empty(max(1, size), dtype=dtype, device=DEVICE)[:size].view(shape)


def _numpy(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype
