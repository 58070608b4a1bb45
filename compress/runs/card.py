"""The small files beside the weights: config.json, model card, recipe."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from compress.checkpoint.jsonfile import as_json
from compress.formats import FORMATS
from compress.formats.runtimes.snippets import for_card
from compress.plan.plan import Plan
from compress.report.units import size


def config_files(
    plan: Plan, source: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, bytes]:
    """The source's config.json with the quantization_config of the plan's format, and the files
    that repeat that for some loaders, by name."""
    config, files = dict(source), FORMATS[plan.format].files
    block = FORMATS[plan.format].config(
        plan.spec,
        shapes,
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
    """README.md of the result. Holds nothing that differs between two equal runs."""
    schemes = Counter((m.method, m.scheme.describe()) for m in plan.modules)
    rows = "\n".join(f"| {method} | {scheme} | {n} |" for (method, scheme), n in schemes.items())
    runtimes = "\n".join(
        f"- {v.runtime}: {v.verdict}{f' ({v.reason})' if v.reason else ''}" for v in plan.runtimes
    )
    return f"""---
library_name: transformers
tags: [compress-model, {plan.format}]
---
# {name}, compressed

Made by compress-model {version} with the recipe `{plan.recipe.name}` (recipe.yaml here).

| method | scheme | layers |
|---|---|---|
{rows}

{size(plan.source_bytes)} became {size(plan.shards.total_bytes)}; the compressed layers take
{plan.bits_per_weight:.2f} bits a weight, scales included. {_quality(plan)}

## Where it loads
{runtimes or "- any loader of the original"}

{for_card(plan.format, plan.runtimes)}""".encode()


def _quality(plan: Plan) -> str:
    if plan.recipe.evaluation is None:
        return "What that cost in\nquality was not measured; `compress-model eval` does."
    return "What that cost in\nquality is in `report/report.html`."
