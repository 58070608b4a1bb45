"""The rest of the page: plan against measurement, data, recipe, environment, what was copied."""

from datetime import UTC, datetime

from compress.report import units
from compress.report.disturbance import disturbance, taken
from compress.report.markup import Html, Node, el, join
from compress.report.parts import Cell, Column, facts, facts_of, number, section, table
from compress.report.proofs import LEVELS, loaded
from compress.report.schema import Export, Planned, PlanVsActual, Report
from compress.report.summary import is_of_speed, model_changes, windowed_contexts
from compress.report.terminal.copied import as_blocks


def warnings(report: Report) -> Html | None:
    """A box below the headline; None without warnings."""
    if not report.warnings:
        return None
    title = "1 warning" if len(report.warnings) == 1 else f"{len(report.warnings)} warnings"
    lines = el("ul", *[el("li", warning) for warning in report.warnings])
    return el("aside", el("h2", title), lines, class_="warnings", id="warnings")


def notes(report: Report) -> Html | None:
    """What stages say of what they leave; None where they say nothing."""
    if not report.notes:
        return None
    return section("notes", "Notes", el("ul", *[el("li", line) for line in report.notes]))


def plan(report: Report) -> Html | None:
    """What was promised before the work, and what came."""
    found = report.plan_vs_actual
    if found is None:
        return None
    columns = [
        Column(""), Column("Planned", True), Column("Measured", True), Column("Deviation", True)
    ]  # fmt: skip
    rows = [
        _planned("Weight files", found.bytes, units.size),
        _planned("Time", found.seconds, units.duration),
        _planned("Peak memory", found.peak_rss, units.size),
    ]
    note = (
        f"{_when_planned(found)} Time is that of the passes on a quiet machine, peak memory that of"
        " the whole run."
    )
    disturbed = disturbance(report.stages[0].others) if report.stages else None
    note += "" if disturbed is None else f" While it quantized, {disturbed}."
    if report.budget is not None:
        rows.append(
            _planned(f"Loss ({report.budget.sensitivity})", report.budget.loss, _significant)
        )
        note += f" Schemes were chosen for {report.budget.target}; the loss is the layers' summed."
    return section("plan", "Plan and measurement", table("Plan", columns, rows), note=note)


def _when_planned(found: PlanVsActual) -> str:
    """What the planned figures were made of."""
    if found.bytes_range is None:
        return "The plan was made before any work, from the checkpoint's headers and the recipe."
    low, high = map(units.size, found.bytes_range)
    between = f"at {low}" if low == high else f"between {low} and {high}"
    return (
        "Time was planned before any work, from the checkpoint's headers and the recipe, and weight"
        f" files {between}. Their bytes here, and peak memory, were planned once the run's"
        " measurement had chosen sizes."
    )


def model(report: Report) -> Html | None:
    """What the edits of a recipe made of the model, and where that loads; None where it is the same
    one and nothing was tried."""
    changes = model_changes(report)
    if not changes:
        return section("model", "Model", _loads(report)) if report.loads else None
    rows = [[Cell(name), Cell(before), Cell(after)] for name, before, after in changes]
    kv = (report.source.kv_bytes_per_token, report.result.kv_bytes_per_token)
    shown = [Cell(units.MISSING if x is None else units.size(x)) for x in kv]
    rows.append([Cell("KV cache a token"), *shown])
    whole = windowed_contexts(report)
    if whole is not None:
        name = f"KV cache of {report.result.context} tokens"
        rows.append([Cell(name), *(Cell(units.size(x)) for x in whole)])
    columns = [Column(""), Column("Before"), Column("After")]
    return section("model", "Model", table("Model", columns, rows), _loads(report))


def _loads(report: Report) -> Html | None:
    """What plain transformers made of it, before anything was rounded."""
    if report.loads is None:
        return None
    found: list[tuple[str, Node]] = [("loads in", loaded(report.loads))]
    return facts([*found, *(("note", line) for line in report.loads.detail)])


def _planned(name: str, pair: Planned, unit: object) -> list[Cell]:
    assert callable(unit)
    exact = pair.planned == pair.measured
    return [
        Cell(name),
        number(pair.planned, unit(pair.planned)),
        number(pair.measured, unit(pair.measured)),
        Cell("exact" if exact else units.deviation(pair.deviation), pair.deviation),
    ]


def _significant(value: float) -> str:
    return units.significant(value)


def exports(report: Report) -> Html | None:
    """Artifacts for other runtimes, and how far each was proven."""
    if not report.exports:
        return None
    columns = [
        Column("Target"), Column("Size", True), Column("Proven"),
        Column("Largest logit error", True), Column("Path"),
    ]  # fmt: skip
    rows = [
        [
            Cell(export.target),
            number(export.bytes, units.size(export.bytes)),
            Cell(LEVELS.get(export.proof, export.proof)),
            number(export.max_logit_error),
            Cell(el("code", export.path)),
        ]
        for export in report.exports
    ]
    about = join([part for export in report.exports for part in _about(export)])
    return section("exports", "Exports", table("Exports", columns, rows), about)


def _about(export: Export) -> list[Html]:
    """What the graph is made of, and what was compared."""
    fused = ", ".join(f"{count} × {name}" for name, count in export.fused.items())
    told: list[tuple[str, Node]] = [("note", line) for line in export.notes]
    told += [("fused", fused)] if fused else []
    told += [("unfused", f"{name}: {why}") for name, why in export.unfused.items()]
    told += [("compared", line) for line in export.detail]
    start = [el("pre", block) for block in export.open_with]
    if not told and not start:
        return []
    return [el("h3", export.target), *([facts(told)] if told else []), *start]


def speed(report: Report) -> Html | None:
    return section("speed", "Speed", facts_of(report.speed)) if report.speed else None


def calibration(report: Report) -> Html | None:
    """What data the run saw; None where speed alone was looked at."""
    if is_of_speed(report):
        return None
    if not report.calibration:
        why = "No calibration data was used."
        return section("calibration", "Calibration data", el("p", why, class_="empty"))
    return section("calibration", "Calibration data", facts_of(report.calibration))


def opening(report: Report) -> Html | None:
    """How to open the result, or why nothing is known to."""
    if report.open_with:
        blocks = [el("pre", block) for block in as_blocks(report.open_with)]
        return section("open", "Open it", *blocks)
    if report.open_reason is None:
        return None
    return section("open", "Open it", el("p", report.open_reason, class_="empty"))


def recipe(report: Report) -> Html:
    """The recipe as it was given, and what the command line changed in it."""
    overrides = None
    if report.recipe.overrides:
        lines = "\n".join(f"--set {line}" for line in report.recipe.overrides)
        overrides = join([el("h3", "Changed on the command line"), el("pre", lines)])
    title = "Settings" if is_of_speed(report) else "Recipe"
    note = report.recipe.name or None
    return section("recipe", title, el("pre", report.recipe.text), overrides, note=note)


def stages(report: Report) -> Html | None:
    """Time and memory, step by step."""
    if not report.stages:
        return None
    gpu = report.peak_gpu_bytes is not None
    met = any(stage.others is not None for stage in report.stages)
    columns = [Column("Stage"), Column("Time", True), Column("Peak memory", True)]
    rows = []
    for stage in report.stages:
        row = [
            Cell(stage.name),
            number(stage.seconds, units.duration(stage.seconds)),
            number(stage.peak_rss_bytes, units.size(stage.peak_rss_bytes)),
        ]
        if gpu:
            peak = stage.peak_gpu_bytes
            row.append(number(peak, None if peak is None else units.size(peak)))
        if met:
            row.append(number(stage.others, None if stage.others is None else _share(stage.others)))
        rows.append(row)
    if gpu:
        columns.append(Column("Peak GPU memory", True))
    if met:
        columns.append(Column("Processor taken by others", True))
    disturbed = disturbance(taken(report.stages))
    note = None if disturbed is None else f"{disturbed[0].upper()}{disturbed[1:]}."
    return section("stages", "Stages", table("Stages", columns, rows), note=note)


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def environment(report: Report) -> Html:
    """Enough to do it again: files, versions, machine, seed."""
    source, result, machine = report.source, report.result, report.machine
    run: list[tuple[str, Node]] = [
        ("source", el("code", source.path)),
        ("sha256", el("code", source.sha256)),
        ("parameters", f"{units.count(source.params)} before, {units.count(result.params)} after"),
        ("stored as", source.dtype or units.MISSING),
        ("result", el("code", result.path)),
        ("seed", str(report.seed)),
        ("started", _moment(report.started)),
        ("finished", _moment(report.finished)),
    ]
    place: list[tuple[str, Node]] = [
        ("processor", machine.cpu),
        ("threads", str(machine.threads)),
        ("memory", units.size(machine.memory)),
        ("instructions", machine.isa),
        ("GPU", machine.gpu or "none used"),
    ]
    place += [(f"kernels, {name}", kind) for name, kind in machine.kernels.items()]
    tool = [] if report.tool in report.versions else [("tool", report.tool)]
    versions: list[tuple[str, Node]] = [*tool, *report.versions.items()]
    columns = [
        el("div", el("h3", "Run"), facts(run)),
        el("div", el("h3", "Machine"), facts(place)),
        el("div", el("h3", "Versions"), facts(versions)),
    ]
    return section("environment", "Environment", el("div", *columns, class_="columns"))


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text or units.MISSING
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M:%S}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def copied(report: Report) -> Html | None:
    """Tensors and files that the run did not touch, folded away."""
    lists = [
        ("tensor", "copied unchanged", report.copied_tensors),
        ("file", "copied", report.copied_files),
        ("file", "left behind", report.skipped_files),
    ]
    shown = [
        el(
            "details",
            el("summary", f"{units.counted(len(names), noun)} {fate}"),
            el("ul", *[el("li", el("code", name)) for name in names], class_="names"),
        )
        for noun, fate, names in lists
        if names
    ]
    return section("copied", "Carried over", *shown) if shown else None
