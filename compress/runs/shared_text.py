"""Text that a recipe learns from and is evaluated on, though it lies in two files: copies, found by
what their documents say.

One file that both name is told without reading it (compress/recipe/seen_texts.py). Data sets of the
hub are compared by their names alone.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from compress.checkpoint import Checkpoint
from compress.edits.distill import DistillConfig
from compress.errors import CompressError, RecipeError
from compress.plan.plan import Plan
from compress.recipe import EditStage, Recipe
from compress.recipe.evaluation_config import TextConfig
from compress.text.tokenizer import Tokenizer, load_tokenizer
from compress_calibration.config import SourceConfig
from compress_calibration.fingerprints import READ, fingerprints
from compress_calibration.readers import source_files

MOST = 1 << 18  # documents of an evaluation text that are known at once: 20 MB of memory
# Share of the documents evaluated on from which on another file is a copy. Stories and articles lie
# twice in many a corpus, so a few do not stop a run, whatever their share.
COPIED, FEW = 0.01, 3
CHARS_A_TOKEN = 8  # at most, of a text that is evaluated on up to so many tokens
LEAST = 1 << 12  # characters that are looked at of each of many files
WHY = "what is measured there says little of other text; evaluate on another"


@dataclass(frozen=True, slots=True)
class SharedText:
    """Documents of the file `evaluated` that are in the file `read` too: `count` of `of`."""

    read: Path
    evaluated: Path
    count: int
    of: int

    @property
    def is_copy(self) -> bool:
        return self.count == self.of or self.count >= max(FEW, COPIED * self.of)

    def __str__(self) -> str:
        return (
            f"{self.read}, which shares {self.count:,} of {self.of:,} documents with"
            f" {self.evaluated}, which is evaluated on"
        )


def check_copies(recipe: Recipe, stage: EditStage, checkpoint: Checkpoint) -> None:
    """RecipeError where a training would read a copy of what is evaluated on."""
    found = shared_text(recipe, _trained_on(recipe, stage.config), checkpoint)
    copy = next((x for x in found if x.is_copy), None)
    if copy is not None:
        raise RecipeError(
            f"{stage.at('method')}: distill trains on {copy}; give it another text (sources), or"
            " evaluate on another"
        )


def shared_warnings(plan: Plan, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A line about each file that is learned from and has documents of a text that is evaluated
    on, where that stops no run."""
    recipe, lines = plan.recipe, list[str]()
    if recipe.calibration is not None and plan.looks_at_data:
        found = shared_text(recipe, recipe.calibration.sources, checkpoint)
        lines += [f"calibration reads {x}: {WHY}" for x in found]
    for stage in (*recipe.edits, *recipe.tuning):
        if isinstance(stage.config, DistillConfig) and stage.config.sources is not None:
            found = shared_text(recipe, stage.config.sources, checkpoint)
            lines += [f"distill trains on {x}: {WHY}" for x in found if not x.is_copy]
    return tuple(dict.fromkeys(lines))


def shared_text(
    recipe: Recipe, sources: Sequence[SourceConfig], checkpoint: Checkpoint
) -> list[SharedText]:
    """Files of the sources that have documents of an evaluation text in another file, each with the
    one of which it has the largest part. What cannot be read is passed over, as other checks say
    so."""
    texts = () if recipe.evaluation is None else recipe.evaluation.texts
    if not any(map(_in_files, sources)) or not any(_in_files(x.source()) for x in texts):
        return []
    try:
        tokenizer = load_tokenizer(checkpoint.small)
    except CompressError:
        return []
    evaluated = [known for text in texts for known in _evaluated(text, tokenizer)]
    found: list[SharedText] = []
    for each, most in _by_file(*sources):
        path = os.path.realpath(each.paths[0])
        others = [x for x in evaluated if os.path.realpath(x.path) != path]
        found += _shared(each, others, tokenizer, most)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Evaluated:
    path: Path
    known: frozenset[bytes]


def _evaluated(text: TextConfig, tokenizer: Tokenizer) -> Iterator[_Evaluated]:
    for each, most in _by_file(text.source()):
        if text.max_tokens is not None:
            most = min(most, CHARS_A_TOKEN * text.max_tokens)
        try:
            said = islice(fingerprints(each, tokenizer, text.max_documents, most), MOST)
            known = frozenset(said)
        except CompressError:
            continue
        yield _Evaluated(Path(each.paths[0]), known)


def _shared(
    source: SourceConfig, evaluated: Sequence[_Evaluated], tokenizer: Tokenizer, most: int
) -> Iterator[SharedText]:
    """What one file shares with the text of which it has the largest part. most: characters of it
    that are looked at."""
    found: list[set[bytes]] = [set() for _ in evaluated]
    try:
        for said in fingerprints(source, tokenizer, most=most):
            for text, shared in zip(evaluated, found, strict=True):
                if said in text.known:
                    shared.add(said)
    except CompressError:
        pass
    path, every = Path(source.paths[0]), zip(evaluated, found, strict=True)
    told = [SharedText(path, text.path, len(x), len(text.known)) for text, x in every if x]
    yield from sorted(told, key=lambda x: x.count / x.of)[-1:]


def _trained_on(recipe: Recipe, config: DistillConfig) -> Sequence[SourceConfig]:
    if config.sources is not None:
        return config.sources
    return () if recipe.calibration is None else recipe.calibration.sources


def _in_files(source: SourceConfig) -> bool:
    return source.kind not in ("hub", "self")


def _by_file(*sources: SourceConfig) -> list[tuple[SourceConfig, int]]:
    """A source for each file of theirs that is there, and how much of it is looked at: of many
    files only how each begins."""
    found: list[SourceConfig] = []
    for source in filter(_in_files, sources):
        try:
            found += [replace(source, path=str(file)) for file in source_files(source)]
        except CompressError:  # another check says so
            continue
    return [(each, max(LEAST, READ // len(found))) for each in found]
