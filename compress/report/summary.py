"""What the page and the terminal table both say: values derived from the report alone."""

from dataclasses import dataclass
from pathlib import PurePath

from compress.report import units
from compress.report.records.quality import TextQuality
from compress.report.schema import Layer, Report


@dataclass(frozen=True, slots=True)
class Change:
    """A value before and after, and the relative change; None where it was not measured."""

    before: float | None
    after: float

    @property
    def relative(self) -> float | None:
        if self.before is None or self.before == 0:
            return None
        return self.after / self.before - 1


def model_name(report: Report) -> str:
    """The last part of the source's path, whichever way its slashes lean."""
    return PurePath(report.source.path.replace("\\", "/")).name or report.source.path


def headline(report: Report) -> TextQuality | None:
    """The text whose numbers stand for the run: the first."""
    if report.quality is None or not report.quality.texts:
        return None
    return report.quality.texts[0]


def spoken_name(text: TextQuality) -> str:
    """What a text is, inside a sentence."""
    return "text that the model wrote" if "sampled_with_seed" in text.settings else text.name


def perplexity(text: TextQuality) -> Change:
    return Change(text.ppl_source, text.ppl_result)


def compressed(report: Report) -> list[Layer]:
    """Layers that were compressed; a layer that several stages touched counts once, as left."""
    last = {layer.name: layer for layer in report.layers}
    return [layer for layer in last.values() if layer.skipped_reason is None]


def has_before(report: Report) -> bool:
    """Whether there is anything to compare with; an evaluation may be of one model alone."""
    return report.source.path != report.result.path


def model_changes(report: Report) -> list[tuple[str, str, str]]:
    """What became another model, not only stored otherwise: name, before and after; mostly none."""
    source, result = report.source, report.result
    if not has_before(report):
        return []
    changes = []
    if result.architecture not in ("", source.architecture):
        changes += [
            ("Model", source.architecture, result.architecture),
            ("Params", units.count(source.params), units.count(result.params)),
        ]
    if result.dtype not in ("", source.dtype) and source.dtype:
        changes.append(("Dtype", source.dtype, result.dtype))
    return changes


def windowed_contexts(report: Report) -> tuple[int, int] | None:
    """Bytes of keys and values of a whole context, of source and result; None where no layer of
    either has a window that makes it less than its tokens by themselves."""
    windowed, found = False, []
    for side in (report.source, report.result):
        token, tokens, whole = side.kv_bytes_per_token, side.context, side.kv_bytes_of_context
        if not token or not tokens or whole is None or tokens != report.result.context:
            return None
        windowed |= whole < token * tokens
        found.append(whole)
    return (found[0], found[1]) if windowed else None


_DTYPE_BITS = {"F32": 32.0, "BF16": 16.0, "F16": 16.0}


def bits_before(report: Report) -> float | None:
    """Bits a weight took in the source, over the layers that were compressed; where the report
    lists none (an evaluation, a recipe of edits alone), those of the source's dtype."""
    if not compressed(report) and has_before(report):
        return _DTYPE_BITS.get(report.source.dtype)
    layers = [layer for layer in compressed(report) if layer.bits_per_weight > 0]
    weights = sum(8 * layer.bytes_after / layer.bits_per_weight for layer in layers)
    return 8 * sum(layer.bytes_before for layer in layers) / weights if weights else None


def is_rounded(report: Report) -> bool:
    """Whether some linears of the result were compressed, which its bits a weight are then of."""
    return report.result.format != "dense" or bool(compressed(report))


def whole_file_bits(report: Report) -> float | None:
    """Bits a parameter takes over the whole result, embeddings and norms included."""
    return 8 * report.result.bytes / report.result.params if report.result.params else None


def schemes(report: Report) -> list[str]:
    """Distinct (method, scheme) of the compressed layers, the most used first: "gptq int4 g64"."""
    seen: dict[str, int] = {}
    for layer in compressed(report):
        label = f"{layer.method} {layer.scheme}".strip()
        seen[label] = seen.get(label, 0) + 1
    return sorted(seen, key=lambda label: (-seen[label], label))


def common_prefix(first: str, second: str) -> int:
    """Length of the shared beginning, cut back to the start of the word where they part."""
    length = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        length += 1
    if length == len(first) == len(second):
        return length
    while length and not first[length - 1].isspace():
        length -= 1
    return length
