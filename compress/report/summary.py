"""What the page and the terminal table both say: values derived from the report alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

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


def is_of_speed(report: Report) -> bool:
    """Whether speed alone was looked at, and no quality."""
    return report.command in ("bench", "roofline")


def has_before(report: Report) -> bool:
    """Whether there is anything to compare with; an evaluation may be of one model alone."""
    if report.two_models is not None:  # two models in memory may go by one name
        return report.two_models
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


def verdict(text: TextQuality) -> str | None:
    """Where a text lies between plain rounding and lossless: "closes 38.2 % of what plain rounding
    loses"; None where plain rounding was not measured on it, or loses nothing."""
    plain = text.plain
    if plain is None or plain.closed is None:
        return None
    if plain.closed >= 0:
        return f"closes {units.percent(plain.closed)} of what plain rounding loses"
    return f"loses {units.percent(-plain.closed)} more than plain rounding"


def losses(text: TextQuality) -> tuple[str, str, str] | None:
    """What the verdict is of: "KL", the result's and plain rounding's; None without a verdict."""
    if text.plain is None or text.plain.closed is None:
        return None
    if text.kl is not None and text.plain.kl is not None:
        return "KL", units.significant(text.kl), units.significant(text.plain.kl)
    after, plain = text.ppl_result, text.plain.perplexity
    return "perplexity", units.significant(after, 4), units.significant(plain, 4)


def worse_than_plain(report: Report) -> list[str]:
    """A warning for each text on which plain rounding would have lost less, with what to do."""
    texts = () if report.quality is None else report.quality.texts
    return [_worse(text, report) for text in texts if _is_worse(text)]


def _is_worse(text: TextQuality) -> bool:
    """Also in the digits that are shown: none reads of a difference that it cannot see."""
    shown = losses(text)
    is_worse = text.plain is not None and (text.plain.closed or 0.0) < 0
    return is_worse and shown is not None and shown[1] != shown[2]


def _worse(text: TextQuality, report: Report) -> str:
    shown = losses(text)
    assert shown is not None
    measure, after, plain = shown
    sources = (report.calibration or {}).get("sources", ())
    own = "" if _all_own(sources) else " or on the model's own (--set calibration.sources=self)"
    return (
        f"on {spoken_name(text)} the result is worse than plain rounding at the same bits,"
        f" {measure} {after} against {plain}: calibrate on text like it{own}, or round without data"
        " (method rtn)"
    )


def _all_own(sources: Sequence[Any]) -> bool:
    """Whether calibration saw text of the model alone."""
    return all(isinstance(each, dict) and each.get("kind") == "self" for each in sources)


def layer_errors(report: Report) -> tuple[int, float, float] | None:
    """Layers whose method compares itself with plain rounding on the calibration data, their mean
    error and that of plain rounding; None where there is none."""
    pairs = [(x.error, x.plain_error) for x in compressed(report)]
    known = [(error, plain) for error, plain in pairs if error is not None and plain is not None]
    if not known:
        return None
    count = len(known)
    return count, sum(e for e, _ in known) / count, sum(p for _, p in known) / count


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
