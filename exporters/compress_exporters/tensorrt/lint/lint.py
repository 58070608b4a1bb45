"""Whether TensorRT's parser will take a graph, found out without a GPU."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from compress.errors import CheckpointError
from compress_exporters.tensorrt.lint import rules_layout as layout
from compress_exporters.tensorrt.lint import rules_operators as nodes
from compress_exporters.tensorrt.lint import rules_quantization as quantization
from compress_exporters.tensorrt.lint.facts import Facts
from compress_exporters.tensorrt.lint.findings import Finding, Rule
from compress_exporters.tensorrt.lint.operators import VERSION

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "opset": nodes.opsets,
        "operator": nodes.operators,
        "restriction": nodes.restrictions,
        "constant-input": nodes.constants,
        "shape-arithmetic": nodes.shape_arithmetic,
        "input-type": nodes.types,
        "strong-typing": nodes.strong_typing,
        "attention-kernel": nodes.kernels,
        "type": nodes.dtypes,
        "finite": nodes.finite,
        "quantized-constant": quantization.quantized_constants,
        "quantized-value": quantization.quantized_values,
        "dq-input": quantization.inputs_of_dq,
        "dq-output": quantization.what_dq_feeds,
        "scale": quantization.scales,
        "zero-point": quantization.zero_points,
        "granularity": quantization.granularity,
        "four-bits": quantization.four_bits,
        "shape": layout.shapes,
        "past": layout.past,
        "external-data": layout.external,
    }
)


def lint(model: Path) -> tuple[tuple[str, Finding], ...]:
    """All findings, with the names of their rules. CheckpointError for a file that is no model."""
    facts = Facts.of(model)
    # Numbers of constants are read by other rules, so their file is looked at first.
    broken = tuple(("external-data", finding) for finding in layout.external(facts))
    if broken:
        return broken
    return tuple((name, finding) for name, rule in RULES.items() for finding in rule(facts))


def require_clean(model: Path) -> None:
    """CheckpointError with the first finding, and how many there are."""
    found = lint(model)
    if found:
        name, first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise CheckpointError(
            f"{model}: TensorRT {VERSION} would not parse it: rule {name}, {first.at}:"
            f" {first.what}; {first.remedy}{more}"
        )
