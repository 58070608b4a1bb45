"""What a notebook shows of a plan, and the line that a prompt does."""

from collections.abc import Iterator

from compress.plan.plan import Plan
from compress.plan.table import plan_table
from compress.report.notebook.show import block
from compress.report.units import counted, size


def plan_line(plan: Plan) -> str:
    """<Plan int4-gptq: llama, 6 blocks, 12.3 MB -> 4.76 MB, 4.13 bits a weight>"""
    model = f"{plan.spec.model_type}, {counted(len(plan.spec.blocks), 'block')}"
    sizes = f"{size(plan.source_bytes)} -> {size(plan.shards.total_bytes)}"
    stops = f", {counted(len(plan.problems), 'problem')}" if plan.problems else ""
    return (
        f"<Plan {plan.recipe.name}: {model}, {sizes}, {plan.bits_per_weight:.2f} bits a weight"
        f"{stops}>"
    )


def plan_html(plan: Plan) -> str:
    """What matters as a table, what would stop the run, and the whole plan behind a click."""
    title = f"{plan.recipe.name}: {plan.recipe.description or plan.spec.model_type}"
    rows = [("", ""), *_facts(plan)]
    lines = (*plan.problems, *plan.warnings)
    return block(title, rows, lines, plan_table(plan))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """The first lines of the plan, up to its table of layers: a word, and what it says."""
    for line in plan_table(plan).split("\n"):
        if not line:
            return
        name, _, said = line.partition(" ")
        yield name, said.strip()
