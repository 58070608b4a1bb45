"""A recipe's text as a Recipe: every mistake is one line with its place."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from compress.errors import RecipeError
from compress.quant.scheme import PRESETS, QuantScheme
from compress.recipe.reading.budget import check_budget, check_shared, check_types
from compress.recipe.reading.data import read_calibration, read_evaluation
from compress.recipe.reading.exports import any_rounds, check_exports, read_exports, with_signs
from compress.recipe.reading.lost import refuse_lost
from compress.recipe.reading.overrides import apply_overrides
from compress.recipe.reading.reader import (
    check_keys,
    field_names,
    given,
    mapping,
    missing,
    read,
    read_fields,
)
from compress.recipe.reading.stages import as_bytes, check_edits, read_stages
from compress.recipe.reading.tree import Node, Origin, problem, read_tree, walk
from compress.recipe.schema import (
    EditStage,
    KvCache,
    OutputConfig,
    Places,
    Recipe,
    Stage,
)
from compress.recipe.seen_texts import evaluated_too

RECIPE_KEYS = (
    "name",
    "description",
    "seed",
    "stages",
    "calibration",
    "evaluation",
    "output",
    "kv_cache",
    "export",
)
# What null takes out, as if the key was not there.
SECTIONS = ("calibration", "evaluation", "output", "kv_cache", "export")
MAX_SEED = (1 << 63) - 1
LONGEST_NAME = 200  # characters: it stands in tables, titles and commands


def parse(
    text: str,
    *,
    label: str = "recipe",
    folder: Path | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """The Recipe that a YAML text describes, with `overrides` ("key=value") in place.

    label: what messages call the text, usually the file's path.
    folder: where relative paths in the text start; the current folder when None. Relative paths
        in overrides always start at the current folder.
    Raises RecipeError, in one line with file:line and key path, for any mistake.
    """
    overrides = tuple(overrides)
    here = Path.cwd()
    root = read_tree(text, Origin(label, here if folder is None else folder.absolute()))
    root = apply_overrides(root, overrides, here)
    if root.is_null:
        raise problem(root, "is empty; a recipe has at least a name and stages")
    return _read_recipe(root, text, overrides)


def _read_recipe(root: Node, text: str, overrides: tuple[str, ...]) -> Recipe:
    keys = given(root, SECTIONS)
    refuse_lost(keys, RECIPE_KEYS)
    check_keys(root, keys, RECIPE_KEYS)
    places = Places(MappingProxyType({node.path: node.place for node in walk(root)}))
    name = _read_name(root, keys)
    seed = _read_seed(keys)
    found = read_stages(root, keys, places)
    recipe = Recipe(
        name=name,
        stages=tuple(found.rounding),
        description=read(str, keys["description"]) if "description" in keys else "",
        seed=seed,
        calibration=read_calibration(keys.get("calibration"), seed),
        evaluation=read_evaluation(keys.get("evaluation"), seed),
        output=_read_output(keys.get("output")),
        kv_cache=read(KvCache, keys["kv_cache"]) if "kv_cache" in keys else None,
        export=read_exports(keys.get("export")),
        edits=tuple(found.edits),
        tuning=tuple(found.tuning),
        text=text,
        overrides=overrides,
        places=places,
    )
    check(recipe)
    return with_signs(recipe)


def check(recipe: Recipe) -> None:
    """Refuse what no single key shows: parts of a recipe that do not go together."""
    from compress.methods import METHODS

    stages = recipe.stages
    if not isinstance(stages, tuple) or not all(isinstance(stage, Stage) for stage in stages):
        raise RecipeError(f"{recipe.at('stages')}: is {stages!r}; it takes a tuple of Stage")
    check_edits(recipe)
    for stage in stages:
        if stage.method not in METHODS:
            known = ", ".join(METHODS)
            raise RecipeError(f"{stage.at('method')}: is {stage.method!r}; allowed: {known}")
        _check_scheme(stage)
    if not recipe.stages and not recipe.edits:
        raise RecipeError(f"{recipe.at('stages')}: is empty; a recipe has one stage or more")
    needing = _needing_data(recipe)
    if needing and recipe.calibration is None:
        raise RecipeError(
            f"{needing[0]} needs calibration data; add 'calibration: {{sources: self}}' or name"
            " your own texts"
        )
    if recipe.calibration is not None and not needing and not _may_look(recipe):
        raise RecipeError(
            f"{recipe.at('calibration')}: no stage looks at calibration data; take it out"
        )
    _check_held_out(recipe)
    check_shared(recipe)
    _check_rows(recipe)
    _check_trained(recipe)
    if recipe.export:
        check_exports(recipe)


def _may_look(recipe: Recipe) -> bool:
    """Whether an edit may have been settled by the data, as the recipe of a result says it, or an
    export rounds by them."""
    return any(map(_copies, recipe.edits)) or any_rounds(recipe.export)


def _copies(edit: EditStage) -> bool:
    """Whether an edit changes config.json alone."""
    from compress.edits import EDITS
    from compress.edits.edit import ByConfig

    return isinstance(EDITS[edit.method].work, ByConfig)


def _needing_data(recipe: Recipe) -> list[str]:
    """Every place that asks for calibration data, as the front of a message."""
    from compress.edits import reads_calibration
    from compress.methods import METHODS

    places = [
        f"{edit.at('method')}: {edit.method!r}"
        for edit in (*recipe.edits, *recipe.tuning)
        if reads_calibration(edit.method, edit.config)
    ]
    for stage in recipe.stages:
        if stage.target is not None:
            places.append(f"{stage.at('target')}: measuring what each layer loses")
        elif METHODS[stage.method].needs(stage.config).data:
            places.append(f"{stage.at('method')}: {stage.method!r}")
        elif METHODS[stage.method].needs_calibration(stage.config, stage.scheme):
            assert stage.scheme is not None, "only a scheme fixes anything beforehand"
            places.append(f"{stage.at('scheme')}: {stage.scheme.describe()}")
    if recipe.kv_cache is not None:
        places.append(f"{recipe.at('kv_cache')}: {recipe.kv_cache!r}")
    return places


def _check_scheme(stage: Stage) -> None:
    from compress.methods import METHODS

    method = METHODS[stage.method]
    if method.whole and stage.scheme is None and not stage.candidates:
        check_types(stage)
    elif stage.candidates or stage.target is not None:
        check_budget(stage)
    elif stage.scheme is None:
        if method.fold is None:
            raise RecipeError(f"{stage.at('scheme')}: is missing; {stage.method} rounds to one")
    elif (reason := method.why_not(stage.scheme)) is not None:
        message = f"{stage.at('scheme')}: is {stage.scheme.describe()}, but {stage.method} "
        raise RecipeError(message + (_as_a_stage(stage, stage.scheme, reason) or reason))


def _as_a_stage(stage: Stage, scheme: QuantScheme, reason: str) -> str | None:
    """What to write where an override gives its layers a scheme of another method; None where that
    is not the trouble."""
    from compress.methods import METHODS

    takers = (k for k, m in METHODS.items() if m.fold is None and m.why_not(scheme) is None)
    taker = next(takers, None)
    if not stage.within or taker is None:
        return None
    preset = next((name for name, known in PRESETS.items() if known == scheme), "as here")
    layers = ", ".join(map(repr, stage.targets))
    return (
        f"{reason.partition(';')[0]}, and an override keeps the method of its stage; write skip:"
        f" true in its place and add a stage {{method: {taker}, scheme: {preset}, targets:"
        f" [{layers}]}}"
    )


def _check_held_out(recipe: Recipe) -> None:
    calibration, evaluation = recipe.calibration, recipe.evaluation
    if calibration is None or evaluation is None:
        return
    if all(source.kind != "self" for source in calibration.sources):
        return
    for i, text in enumerate(evaluation.texts):
        if text.kind == "self" and text.seed == calibration.seed:
            raise RecipeError(
                f"{recipe.at(f'evaluation.texts[{i}].seed')}: is {text.seed}, the seed of the"
                " calibration's self-generated text; give another, so that it is held out"
            )


def _check_rows(recipe: Recipe) -> None:
    """An edit that looks at data holds rows out of what it fits by."""
    from compress.edits import reads_calibration

    calibration = recipe.calibration
    every = (*recipe.edits, *recipe.tuning)
    edit = next((x for x in every if reads_calibration(x.method, x.config)), None)
    if edit is not None and calibration is not None and calibration.samples < 2:
        raise RecipeError(
            f"{recipe.at('calibration.samples')}: is {calibration.samples}; {edit.method} holds a"
            " row out of what it fits by, so give it 2 or more"
        )


def _check_trained(recipe: Recipe) -> None:
    """There is something to train, and what is evaluated on is no text to train on."""
    from compress.edits.distill import DistillConfig

    for place, edit in enumerate((*recipe.edits, *recipe.tuning)):
        if not isinstance(edit.config, DistillConfig):
            continue
        if edit.config.train == ("changed",) and all(map(_copies, recipe.edits[:place])):
            what = "changes a tensor" if place else "stands"
            raise RecipeError(
                f"{edit.at('train')}: is changed, and no edit {what} before it; set train: all, or"
                " put an edit before it"
            )
        calibrated = () if recipe.calibration is None else recipe.calibration.sources
        own = edit.config.sources
        both = evaluated_too(recipe, calibrated if own is None else own)
        if both is not None:
            raise RecipeError(
                f"{edit.at('method')}: distill trains on {both}, which is also evaluated on;"
                " give it another text (sources), or evaluate on another"
            )


def _read_name(root: Node, keys: Mapping[str, Node]) -> str:
    if "name" not in keys:
        raise missing(root, "name", "a word for the report, for example int4-gptq")
    name = str(read(str, keys["name"]))
    if not name.strip() or len(name.splitlines()) != 1:
        raise problem(keys["name"], f"is {name!r}; a name is one line of text")
    if len(name) > LONGEST_NAME:
        raise problem(
            keys["name"], f"has {len(name):,} characters; a name has {LONGEST_NAME} at most"
        )
    return name


def _read_seed(keys: Mapping[str, Node]) -> int:
    if "seed" not in keys:
        return 0
    seed = int(read(int, keys["seed"]))
    if not 0 <= seed <= MAX_SEED:
        raise problem(keys["seed"], f"is {seed}; a seed is 0 to {MAX_SEED}")
    return seed


def _read_output(node: Node | None) -> OutputConfig:
    if node is None:
        return OutputConfig()
    keys = dict(mapping(node))
    check_keys(node, keys, field_names(OutputConfig))
    if "shard_size" in keys:
        keys["shard_size"] = as_bytes(keys["shard_size"])
    return OutputConfig(**read_fields(OutputConfig, node, keys))
