"""A TensorRT that builds anything and runs it in ONNX Runtime, by the names of the real package.

tests/interop has a real one; what is asked of it there and here is the same.
"""

import ctypes
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from compress_exporters.tensorrt import engine, engine_proof, engine_steps

NAMES = {"tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(int64)": "INT64"}
DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64}


@dataclass(slots=True)
class Played:
    """What it is to say. device: its compute capability. why: it builds nothing. off: a part that
    logits are wrong by."""

    version: str = "10.15.1.29"
    device: tuple[int, int] | None = (9, 0)
    starts: bool = True
    parses: bool = True
    builds: bool = True
    why: str = "no kernel\nfor this"
    loads: bool = True
    fits: bool = True
    off: float = 0.0
    profiles: list[Any] = field(default_factory=list)
    used: list[int] = field(default_factory=list)


class Logger:
    Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2)

    def __init__(self) -> None:
        pass


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: Any) -> None:
        self.shapes[name] = shapes


class Context:
    """Reads and writes memory at the addresses that it is given."""

    def __init__(self, played: Played, session: Any) -> None:
        self.played, self.session = played, session
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.places: dict[str, int] = {}
        self.number = 0

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        self.number = number
        return number < len(self.played.profiles)

    def set_input_shape(self, name: str, shape: Any) -> bool:
        least, _, most = self.played.profiles[self.number].shapes[name]
        self.shapes[name] = tuple(shape)
        return all(a <= x <= b for a, x, b in zip(least, shape, most, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        value = next(x for x in self.session.get_outputs() if x.name == name)
        texts, new = self.shapes["input_ids"]
        if name == "logits":
            return texts, new, value.shape[2]
        return texts, value.shape[1], self.shapes["attention_mask"][1], value.shape[3]

    def set_tensor_address(self, name: str, place: int) -> bool:
        self.places[name] = place
        return place != 0

    def execute_async_v3(self, stream: int) -> bool:
        self.played.used.append(self.number)
        inputs = {x.name: self._array(x, self.shapes[x.name]) for x in self.session.get_inputs()}
        names = [x.name for x in self.session.get_outputs()]
        found = self.session.run(names, {k: v.copy() for k, v in inputs.items()})
        for value, array in zip(self.session.get_outputs(), found, strict=True):
            if value.name == "logits":
                array = (array * (1 + self.played.off)).astype(array.dtype)
            self._array(value, self.get_tensor_shape(value.name))[:] = array
        return True

    def _array(self, value: Any, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype(DTYPES[NAMES[value.type]])
        size = math.prod(shape) * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.places[value.name])
        return np.frombuffer(memory, dtype).reshape(shape)


def _engine(played: Played, path: str) -> Any:
    """What `deserialize_cuda_engine` gives."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = [*session.get_inputs(), *session.get_outputs()]
    inputs = len(session.get_inputs())
    by_name = {x.name: x for x in values}
    dims = {x.name: [d if isinstance(d, int) else -1 for d in x.shape] for x in values}
    return SimpleNamespace(
        num_io_tensors=len(values),
        get_tensor_name=lambda number: values[number].name,
        get_tensor_dtype=lambda name: SimpleNamespace(name=NAMES[by_name[name].type]),
        get_tensor_shape=dims.__getitem__,
        get_tensor_mode=lambda name: "in" if name in [x.name for x in values[:inputs]] else "out",
        create_execution_context=lambda: Context(played, session) if played.fits else None,
    )


def module(played: Played) -> Any:
    """What `import tensorrt` gives."""

    class Parser:
        num_errors = 0

        def __init__(self, network: Any, log: Any) -> None:
            self.network = network

        def parse_from_file(self, path: str) -> bool:
            self.network.path = path
            self.num_errors = 0 if played.parses else 2
            return played.parses

        def get_error(self, number: int) -> Any:
            say = {"node": 3, "node_name": "mask/Or", "node_operator": "Or"}
            error = {name: (lambda value=value: value) for name, value in say.items()}
            noise = "[checkMacros.cpp::catchCudaError::250] Error Code 1"
            return SimpleNamespace(**error, desc=lambda: f"no  such\nthing\n{noise}")

    def builder(log: Any) -> Any:
        if not played.starts:
            log.log(Logger.Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

        def build(network: Any, config: Any) -> Any:
            log.log(Logger.Severity.WARNING, "nobody reads this")
            if not played.builds:
                log.log(Logger.Severity.ERROR, played.why)
                return None
            return SimpleNamespace(nbytes=1_500_000, path=network.path)

        def add(profile: Profile) -> int:
            played.profiles.append(profile)
            return len(played.profiles) - 1

        config = SimpleNamespace(clear_flag=lambda flag: None, add_optimization_profile=add)
        return SimpleNamespace(
            create_network=lambda flags: SimpleNamespace(),
            create_builder_config=lambda: config,
            create_optimization_profile=Profile,
            build_serialized_network=build,
        )

    return SimpleNamespace(
        __version__=played.version,
        ILogger=Logger,
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=0),
        BuilderFlag=SimpleNamespace(TF32="TF32"),
        TensorIOMode=SimpleNamespace(INPUT="in"),
        OnnxParser=Parser,
        Builder=builder,
        Runtime=lambda log: SimpleNamespace(
            deserialize_cuda_engine=lambda plan: (
                _engine(played, plan.path) if played.loads else None
            )
        ),
    )


def install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, Played]) -> None:
    """Only these packages are there, by their names, and devices are those of the last."""
    monkeypatch.setattr(engine, "installed", lambda name: name in packages)
    monkeypatch.setattr(engine, "import_module", lambda name: module(packages[name]))
    played = next(reversed(packages.values()), Played(device=None))
    cuda = engine_proof.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: played.device is not None)
    monkeypatch.setattr(cuda, "get_device_capability", lambda: played.device)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "a device")
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(engine_steps, "DEVICE", "cpu")
