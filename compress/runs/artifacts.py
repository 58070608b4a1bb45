"""The artifacts of a run, which are rounded by its calibration data where they round."""

from functools import partial
from typing import TYPE_CHECKING

from compress.artifacts.recipe_exports import Artifacts, Read, make_artifacts
from compress.passes.journal import Journal
from compress.recipe.reading.exports import any_rounds
from compress.runs.session import Session

if TYPE_CHECKING:
    from compress.artifacts.rounding.prepare import RoundingTokens


def artifacts_of(session: Session, journal: Journal) -> Artifacts:
    """Every artifact that the recipe asks for."""
    recipe, output = session.plan.recipe, session.output
    data = recipe.calibration if any_rounds(recipe.export) else None
    read = None if data is None else Read(data, partial(_tokens, session, journal))
    return make_artifacts(recipe, output.partial, output.out, session.progress, read)


def _tokens(session: Session, journal: Journal) -> "RoundingTokens":
    """Those that a pass has drawn, else drawn now: the same, as the data are the recipe's."""
    # Late: a run without data loads nothing that runs blocks.
    from compress.artifacts.rounding.of_export import scratch_tokens
    from compress.blocks.author import Author
    from compress.blocks.skeleton import Skeleton
    from compress.passes import calibration_tokens

    config, weights, folder = session.plan.recipe.calibration, session.weights, session.output
    assert config is not None, "only a recipe with calibration comes here"

    def skeleton() -> Skeleton:
        given = weights.checkpoint.config
        return Skeleton(given, weights.spec, dtype=session.dtype, device=session.device)

    author = Author(weights, skeleton, session.kept)
    summary = calibration_tokens.of_run(config, author, folder.partial, journal, session.progress)
    ids, mask = calibration_tokens.reload(folder.partial, summary["sha256"])
    return scratch_tokens(ids, mask, config)
