"""The small files beside the weights: config.json, model card, recipe."""

from collections import Counter

from compress.arch.cache_size import CacheSize
from compress.checkpoint.jsonfile import as_json
from compress.checkpoint.outline import Outline
from compress.formats import FORMATS
from compress.formats.runtimes.snippets import for_card
from compress.inspect.facts import architecture_of
from compress.plan.plan import Plan
from compress.report.markdown import code, words
from compress.report.units import count, size


def config_files(plan: Plan) -> dict[str, bytes]:
    """config.json of the model whose layers were rounded, with the quantization_config of the
    plan's format, and the files that repeat that for some loaders, by name."""
    model = plan.rounded
    config, files = dict(model.config), FORMATS[plan.format].files
    block = FORMATS[plan.format].config(
        plan.spec,
        model.shapes,
        {m.linear.tensor: m.scheme for m in plan.modules},
        with_g_idx=[m.linear.tensor for m in plan.modules if m.g_idx],
        kv_cache=plan.kv_cache,
    )
    if block is None:
        return {"config.json": as_json(config)}
    config["quantization_config"] = block
    others = {name: as_json(follows(block)) for name, follows in files.items()}
    return {"config.json": as_json(config), **others}


def model_card(plan: Plan, name: str, version: str) -> bytes:
    """README.md of the result: names and reasons in it are words, never markup. Holds nothing that
    differs between two equal runs."""
    runtimes = "\n".join(
        f"- {words(v.runtime)}: {words(v.verdict)}{f' ({words(v.reason)})' if v.reason else ''}"
        for v in plan.runtimes
    )
    return f"""---
library_name: transformers
tags: [compress-model, {plan.format}]
---
# {words(name)}, compressed

Made by compress-model {version} with the recipe {code(plan.recipe.name)} (recipe.yaml here).

{_edits(plan)}{_schemes(plan)}{_quality(plan)}

## Where it loads
{runtimes or "- any loader of the original"}

{for_card(plan.format, plan.runtimes)}""".encode()


def _edits(plan: Plan) -> str:
    """A line for each change of the model itself, and what it was and is; nothing without."""
    if not plan.edits:
        return ""
    was, becomes = plan.caches
    lines = [
        *(f"- {words(stage.describe())}" for stage in plan.recipe.edits),
        "",
        f"- before: {_model(plan.source, was)}",
        f"- after: {_model(plan.rounded, becomes)}",
        "",
    ]
    return "\n".join(lines) + "\n"


def _model(model: Outline, cache: CacheSize) -> str:
    """cache: of its keys and values."""
    params = f"{count(model.params)} parameters in {model.main_dtype}"
    kept = f"{size(cache.token)} of KV cache a token"
    if cache.windowed and cache.context is not None:
        kept += f", {size(cache.context)} a context of {cache.tokens}"
    return f"{words(architecture_of(model.spec))}; {params}, {kept}"


def _schemes(plan: Plan) -> str:
    """How layers are stored, and the sizes."""
    became = f"{size(plan.source_bytes)} became {size(plan.shards.total_bytes)}"
    if not plan.compressed:
        return f"{became}. "
    schemes = Counter((m.method, m.how) for m in plan.compressed)
    rows = "\n".join(
        f"| {words(method)} | {words(scheme)} | {n} |" for (method, scheme), n in schemes.items()
    )
    return f"""| method | scheme | layers |
|---|---|---|
{rows}

{became}; the compressed layers take
{plan.bits_per_weight:.2f} bits a weight, scales included. """


def _quality(plan: Plan) -> str:
    if plan.recipe.evaluation is None:
        return "What that cost in\nquality was not measured; `compress-model eval` does."
    return "What that cost in\nquality is in `report/report.html`."
