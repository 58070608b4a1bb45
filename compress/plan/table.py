"""The plan for a person: what happens to which layers, sizes, estimates, and who loads it."""

from collections import Counter
from itertools import islice
from pathlib import Path

from compress.arch.cache_size import CacheSize
from compress.checkpoint.regular import read_lines
from compress.errors import DataError
from compress.plan.budget import waits_for_prune
from compress.plan.layers import ModulePlan
from compress.plan.plan import Plan
from compress.plan.whole.file import BlocksPlan
from compress.recipe.evaluation_config import TextConfig
from compress.recipe.task_config import TaskConfig
from compress.report import units
from compress.report.columns import aligned
from compress.report.units import counted, size, span, trimmed, whole
from compress_calibration.readers import source_files


def plan_table(plan: Plan, *, modules: bool = False) -> str:
    """Plain text, one fact a line; layers that are treated alike are one row.

    modules: every layer is a row of its own, with its bytes.
    """
    spec = plan.spec
    exact, files = plan.shards.total_bytes, counted(len(plan.shards.files), "file")
    lines = [
        f"recipe   {plan.recipe.name}: {plan.recipe.description or 'no description'}",
        f"model    {spec.model_type}, {counted(len(spec.blocks), 'block')}, hidden {spec.hidden}",
        *_edited(plan),
        f"size     {size(plan.source_bytes)} -> {size(exact)} ({exact} bytes in {files})",
        *_range(plan),
        f"weights  {plan.bits_per_weight:.2f} bits each in the {_counted_layers(plan)}",
        *(f"then     {stage.describe()}" for stage in plan.recipe.tuning),
        *_cache(plan),
        *_budget(plan),
        *([f"device   {plan.device.line}"] if plan.device.line else []),
        f"time     {_time(plan)}",
        f"memory   {_memory(plan)}",
        *_evaluated(plan),
        "",
        *(_module_rows(plan) if modules else _rows(plan)),
        "",
    ]
    if not modules:
        lines += ["layer by layer: compress-model plan with --modules", ""]
    for n, reasons in plan.tensor_parallel.items():
        lines.append(f"tensor parallel {n}   {'; '.join(reasons) or 'divides'}")
    lines += [f"{v.runtime:<17}   {v.verdict}: {v.reason}".rstrip(": ") for v in plan.runtimes]
    lines += [f"note: {line}" for line in (*plan.notes, *plan.warnings)]
    lines += [f"copied: {name}" for name in plan.spec.copied]
    lines += [f"problem: {problem}" for problem in plan.problems]
    return "\n".join(lines)


def _edited(plan: Plan) -> list[str]:
    """What each edit does, and the parameters and bytes that it leaves."""
    lines = []
    for each in plan.edits:
        assert each.stage is not None, "the pass is no edit"
        before, after = each.source, each.result
        params = f"{units.count(before.params)} -> {units.count(after.params)} parameters"
        stored = f"{size(before.file_bytes)} -> {size(after.file_bytes)}"
        lines.append(f"edit     {each.stage.describe()}: {params}, {stored}")
    return lines


def _range(plan: Plan) -> list[str]:
    """Where the sizes wait for a measurement: between what the result lies."""
    if plan.bytes_range is None:
        return []
    low, high = plan.bytes_range
    if low == high:
        return [f"range    {low} bytes, whatever the run's measurement chooses"]
    shown = "the most" if plan.shards.total_bytes == high else "the largest model"
    if plan.budget is not None and plan.budget.is_open:
        shown = "the largest model in the smallest schemes"
    return [f"range    {low} to {high} bytes, as the run's measurement chooses; shown is {shown}"]


def _counted_layers(plan: Plan) -> str:
    return "compressed layers" if plan.compressed else "layers, none of them compressed"


def _cache(plan: Plan) -> list[str]:
    """Where the recipe changes what keys and values take."""
    before, after = plan.caches
    if plan.kv_cache is None and before == after:
        return []
    line = f"cache    {size(before.token)} -> {size(after.token)} a token"
    if (before.windowed or after.windowed) and before.context and after.context:
        line += f", {size(before.context)} -> {size(after.context)} {_of_all(before, after)}"
    return [line]


def _of_all(before: CacheSize, after: CacheSize) -> str:
    """Which text that is of."""
    if before.tokens == after.tokens:
        return f"a context of {after.tokens}"
    return f"a context of {before.tokens}, of {after.tokens}"


def _evaluated(plan: Plan) -> list[str]:
    """What will be measured on: tokens where the recipe says how many, else the size of files; of
    tasks the items."""
    config = plan.recipe.evaluation
    if config is None or not (config.texts or config.tasks):
        return []
    parts = [f"{text.name} ({_amount(text)})" for text in config.texts]
    parts += [f"{task.name} ({_items(task)})" for task in config.tasks]
    return [f"measures {', '.join(parts)}"]


def _items(task: TaskConfig) -> str:
    """How many there are, or will be asked."""
    try:
        lines = (line for line in read_lines(Path(task.path)) if line.strip())
        return counted(sum(1 for _ in islice(lines, task.max_items)), "item")
    except (OSError, ValueError):
        return "not found"


def _amount(text: TextConfig) -> str:
    written = text.samples * text.length
    if text.kind == "self" and (text.max_tokens is None or text.max_tokens >= written):
        return f"{whole(written)} tokens"
    if text.max_tokens is not None:
        return f"{whole(text.max_tokens)} tokens at most"
    if text.kind not in ("text", "jsonl", "parquet"):
        return text.kind
    try:
        return f"{size(sum(p.stat().st_size for p in source_files(text.source())))}"
    except (DataError, OSError):
        return "not found"


def _budget(plan: Plan) -> list[str]:
    """For a recipe with a target: what it chose, or between what it will."""
    budget = plan.budget
    if budget is None:
        return []
    words = f"budget   {' and '.join(budget.targets)}: "
    if budget.predicted is not None:
        return [
            f"{words}schemes chosen, predicted loss {budget.predicted:.4g} ({budget.sensitivity})"
        ]
    if waits_for_prune(plan.given):
        return [f"{words}sizes and schemes are weighed against each other by the run's measurement"]
    span = f"{budget.low} to {budget.high} bytes"
    return [f"{words}layers take {span}, as the run's measurement chooses; shown is the least"]


def _time(plan: Plan) -> str:
    """A range, and beside other work that was met the range that this makes of it."""
    estimate = plan.estimate
    quiet = f"{span(*estimate.quiet_range)} on a quiet machine"
    loaded, load = estimate.loaded_range, estimate.load
    if loaded is not None and load is not None:
        busy = f"{trimmed(load.others, 2)} of {counted(load.cores, 'core')}"
        quiet += f"; {busy} were busy with other work, so {span(*loaded)}"
    here = ", of this machine" if plan.room.assumed else ""
    return f"{quiet} ({_left_out(plan)} not included{here})"


def _memory(plan: Plan) -> str:
    """The peak, which part of the run has it, and what there is."""
    worst = max(plan.estimate.needs, key=lambda need: need.bytes)
    peak = f"peak about {size(worst.bytes)} ({worst.part})"
    if plan.room.bytes is None:
        return peak
    there = "given" if plan.room.assumed else "free"
    return f"{peak}, {size(plan.room.bytes)} {there}"


def _left_out(plan: Plan) -> str:
    """What the time of the work leaves out."""
    exported = ["exports"] if plan.recipe.export else []
    measured = ["the measurement of schemes"] if plan.is_open else []
    *some, last = ["evaluation", *exported, *measured]
    return f"{', '.join(some)} and {last}" if some else last


def _scheme(plan: Plan, m: ModulePlan | BlocksPlan) -> str:
    open_yet = plan.budget is not None and m.linear.name in plan.budget.open_layers
    return "chosen by measurement" if open_yet else m.how


def _rows(plan: Plan) -> list[str]:
    """role, shape, how many, method, scheme, bytes before and after."""
    groups: Counter[tuple[str, str, str, str]] = Counter()
    before: Counter[tuple[str, str, str, str]] = Counter()
    after: Counter[tuple[str, str, str, str]] = Counter()
    for m in plan.compressed:
        key = (m.linear.role, _shape(m.linear.shape), m.method, _scheme(plan, m))
        groups[key] += 1
        before[key] += m.bytes_before
        after[key] += m.bytes_after
    for s in plan.skipped:
        key = (s.linear.role, _shape(s.linear.shape), "left", s.reason)
        groups[key] += 1
    table = [("layer", "shape", "count", "method", "scheme", "before", "after")]
    for key, count in groups.items():
        role, shape, method, scheme = key
        sizes = (size(before[key]), size(after[key])) if key in before else ("", "")
        table.append((role, shape, str(count), method, scheme, *sizes))
    return aligned(table)


def _module_rows(plan: Plan) -> list[str]:
    """name, shape, method, scheme (or why there is none) and bytes of every layer, in order."""
    planned = {m.linear.name: m for m in plan.compressed}
    reasons = {s.linear.name: s.reason for s in plan.skipped}
    table = [("layer", "shape", "method", "scheme", "bytes before", "bytes after")]
    for linear in plan.spec.all_linears():
        name, shape, m = linear.name, _shape(linear.shape), planned.get(linear.name)
        if m is None:
            table.append((name, shape, "left", reasons[name], "", ""))
        else:
            sizes = (str(m.bytes_before), str(m.bytes_after))
            table.append((name, shape, m.method, _scheme(plan, m), *sizes))
    return aligned(table, None)  # one line a layer, to be searched


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"
