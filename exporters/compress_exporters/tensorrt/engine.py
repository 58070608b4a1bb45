"""Engines of a graph, by TensorRT's own parser and builder, where one of its packages is installed.

TensorRT for RTX builds without a GPU; TensorRT needs one. Neither package is loaded before it is
used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.errors import CheckpointError, DependencyError
from compress_exporters.packages import installed


@dataclass(frozen=True, slots=True)
class TensorrtPackage:
    """title: what it is called. least: the first version that reads these graphs. ahead: whether it
    builds for devices that are not here."""

    title: str
    least: tuple[int, int]
    ahead: bool


PACKAGES: Mapping[str, TensorrtPackage] = MappingProxyType(
    {
        "tensorrt": TensorrtPackage("TensorRT", (10, 15), ahead=False),
        "tensorrt_rtx": TensorrtPackage("TensorRT for RTX", (1, 7), ahead=True),
    }
)
NONE = "neither tensorrt nor tensorrt_rtx is installed (pip install tensorrt-rtx)"
MOST = 400  # characters of a reason
REPORT = "please report this with the model"
# What TensorRT for RTX adds to every reason on a machine without a GPU.
_NOISE = "catchCudaError"
# What TensorRT says where its device has too little memory to try a graph's kernels.
_NO_ROOM = re.compile("out ?of ?memory|insufficient workspace", re.IGNORECASE)

# Shapes by name of the input, of the steps "min", "opt" and "max".
Profile = Mapping[str, Mapping[str, list[int]]]


@dataclass(frozen=True, slots=True, eq=False)
class BuiltEngine:
    """plan: what TensorRT makes of a graph, as it is stored. profiles: their names, in order."""

    plan: Any
    profiles: tuple[str, ...]

    @property
    def size(self) -> int:
        return int(self.plan.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Tools:
    """A package that can build here.

    name: with its version. trt: the module. said: reasons that it gave so far.
    """

    package: TensorrtPackage
    name: str
    trt: Any
    log: Any
    builder: Any
    said: list[str]

    @classmethod
    def find(cls) -> "Tools":
        """DependencyError that says of each package that is installed why it builds nothing."""
        reasons = []
        for module in PACKAGES:
            if installed(module):
                try:
                    return _opened(module)
                except DependencyError as reason:
                    reasons.append(str(reason))
        raise DependencyError("; ".join(reasons) or NONE)

    def engine(self, model: Path, profiles: Mapping[str, Profile]) -> BuiltEngine:
        """One for all profiles. CheckpointError, with TensorRT's own word, for a graph that it does
        not parse or build; DependencyError where its device has too little memory to build it."""
        network, _weights = _parsed(self, model)
        config = self.builder.create_builder_config()
        # With it, products in fp32 keep 10 bits of their inputs.
        config.clear_flag(self.trt.BuilderFlag.TF32)
        for name, profile in profiles.items():
            if config.add_optimization_profile(_profile(self, profile)) < 0:
                raise self.refused(f"does not take the profile {name} of {model}")
        before = len(self.said)
        plan = self.builder.build_serialized_network(network, config)
        if plan is None and any(map(_NO_ROOM.search, self.said[before:])):
            raise DependencyError(f"{self.name} has too little memory on the device: {self.why}")
        if plan is None:
            raise self.refused(f"builds no engine of {model}")
        return BuiltEngine(plan, tuple(profiles))

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.name} {what}: {self.why}; {REPORT}")

    @property
    def why(self) -> str:
        """The last reason that TensorRT gave."""
        return self.said[-1] if self.said else "it gives no reason"


def _opened(module: str) -> Tools:
    package = PACKAGES[module]
    try:
        trt = import_module(module)
    except (ImportError, OSError) as error:
        raise DependencyError(f"{module} cannot be loaded: {line(str(error))}") from error
    name, said = f"{package.title} {trt.__version__}", list[str]()
    if tuple(int(x) for x in trt.__version__.split(".")[:2]) < package.least:
        needed = ".".join(map(str, package.least))
        raise DependencyError(f"{name} is older than {needed}, which reads these graphs")
    log = _log(trt, said)
    try:
        return Tools(package, name, trt, log, trt.Builder(log), said)
    except (RuntimeError, TypeError) as error:  # its bindings' word for no device
        reason = said[-1] if said else line(str(error))
        raise DependencyError(f"{name} builds nothing here: {reason}") from error


def _log(trt: Any, said: list[str]) -> Any:
    """Keeps errors, and drops all else."""
    errors = (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)

    class Log(trt.ILogger):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in errors and (reason := line(message)):
                said.append(reason)

    return Log()


def _parsed(tools: Tools, model: Path) -> tuple[Any, Any]:
    """A network, and the parser, which has its weights and so must outlive it."""
    trt = tools.trt
    strong = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = tools.builder.create_network(strong)
    parser = trt.OnnxParser(network, tools.log)
    if parser.parse_from_file(str(model)):
        return network, parser
    if not parser.num_errors:
        raise tools.refused(f"does not parse {model}")
    error = parser.get_error(0)
    at = f"{error.node_name()} ({error.node_operator()})" if error.node() >= 0 else "the graph"
    more = f" (and {parser.num_errors - 1} more)" if parser.num_errors > 1 else ""
    reason = f"{at}: {line(error.desc())}{more}"
    raise CheckpointError(f"{tools.name} does not parse {model}: {reason}; {REPORT}")


def _profile(tools: Tools, profile: Profile) -> Any:
    made = tools.builder.create_optimization_profile()
    for name, least in profile["min"].items():
        made.set_shape(name, least, profile["opt"][name], profile["max"][name])
    return made


def line(text: str) -> str:
    """One line of what TensorRT says."""
    told = (part for part in text.splitlines() if _NOISE not in part)
    return " ".join(" ".join(told).split())[:MOST]
