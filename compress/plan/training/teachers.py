"""Other models that a recipe trains by: opened like a source, and held to what teaching takes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compress.checkpoint import Checkpoint, resolve_model
from compress.checkpoint.detect import detect
from compress.checkpoint.outline import Outline, outline_of
from compress.checkpoint.ties import settled
from compress.edits.distill import SOURCE, DistillConfig
from compress.edits.writers import check_roles
from compress.errors import CheckpointError, RecipeError
from compress.formats.open_weights import refuse_gguf
from compress.recipe import Recipe
from compress.recipe.placing import placed
from compress.text.tokenizer import Tokenizer, load_tokenizer

# Of several scripts, with runs of spaces and digits: where tokenizers differ that know one another.
PROBES = (
    "Once upon a time, there was a dog named O'Neill; it's 3.14 or 1234567.",
    "  def f(x):\n\treturn x  # tabs\r\n\n",
    "Größe, naïve, 你好世界, こんにちは, Привет, مرحبا, 🙂🙃 e\u0301",
)
SHOWN = 8  # ids that a message shows


@dataclass(frozen=True, slots=True, eq=False)
class TeacherModel:
    """A model that a stage names as its teacher, and its outline."""

    checkpoint: Checkpoint
    outline: Outline


Teachers = Mapping[str, TeacherModel]  # by the words of the recipe
NO_TEACHERS: Teachers = MappingProxyType({})


def open_teachers(recipe: Recipe, source: Checkpoint) -> Teachers:
    """The models that stages name in place of the source.

    CheckpointError, with the stage's place, for what is no dense checkpoint of a family in the
    tables; RecipeError for one whose tokenizer is another than the source's.
    """
    found: dict[str, TeacherModel] = {}
    for label, config in _trainings(recipe):
        if config.teacher not in (SOURCE, *found):
            with placed(recipe, f"{label}.teacher"):
                found[config.teacher] = _opened(config.teacher, source)
    return found


def sealed(teachers: Teachers) -> Teachers:
    """The same as they are from now on: what is read of them is what is hashed here."""
    return {
        name: TeacherModel(settled(x.checkpoint.sealed(), x.outline.spec), x.outline)
        for name, x in teachers.items()
    }


def marks_of(teachers: Teachers) -> dict[str, str]:
    """What the bytes of a result depend on of its teachers, which are read where not sealed."""
    return {f"teacher {name}": x.checkpoint.sha256() for name, x in teachers.items()}


def check_teacher(
    config: DistillConfig, teacher: Outline, given: Outline, length: int, *, narrowed: bool
) -> None:
    """RecipeError for a model that cannot teach in this scope.

    given: the model that the run was given, whose blocks the student's stand for. length: tokens of
    a row. narrowed: the student's residual stream is not the source's.
    """
    context = teacher.spec.context
    if 0 < context < length:
        raise RecipeError(
            f"teacher has a context of {context} tokens, and rows have {length}; set length to that"
        )
    if config.scope != ("block",) and not config.blocks:
        return
    why = "scope block holds each block to the same block of the teacher, so take scope [model]"
    if config.blocks:
        why = "blocks compares outputs with those of the same blocks, so leave it out"
    for word, theirs, ours in (
        ("hidden", teacher.spec.hidden, given.spec.hidden),
        ("layers", len(teacher.spec.blocks), len(given.spec.blocks)),
    ):
        if theirs != ours:
            raise RecipeError(f"teacher has {word} {theirs} and the source {ours}; {why}")
    if narrowed:
        raise RecipeError(
            f"teacher has the source's residual stream, and the student another; {why}"
        )


def _trainings(recipe: Recipe) -> Iterator[tuple[str, DistillConfig]]:
    """The stages that train, each with its place."""
    for stage in (*recipe.edits, *recipe.tuning):
        if isinstance(stage.config, DistillConfig):
            yield stage.label, stage.config


def _opened(name: str, source: Checkpoint) -> TeacherModel:
    checkpoint = Checkpoint.open(resolve_model(name))
    refuse_gguf(checkpoint)
    quantized = detect(checkpoint.config, checkpoint.tensors)
    if quantized is not None:
        raise CheckpointError(
            f"is {name}, which is quantized ({quantized}); give a dense checkpoint"
        )
    outline = outline_of(checkpoint)
    check_roles(outline.spec)
    outline = outline_of(settled(checkpoint, outline.spec))
    _refuse_other_tokens(name, checkpoint, source)
    ours, rows = load_tokenizer(source.small).vocab_size, outline.spec.embedding_shape[0]
    if rows < ours:
        raise RecipeError(
            f"is {name}, which knows {rows} tokens of the tokenizer's {ours}; take one that"
            " knows them all"
        )
    return TeacherModel(checkpoint, outline)


def _refuse_other_tokens(name: str, teacher: Checkpoint, source: Checkpoint) -> None:
    """RecipeError unless the ids of all texts are the same; the teacher may have more tokens."""
    theirs, ours = load_tokenizer(teacher.small), load_tokenizer(source.small)
    differ = next(_differences(theirs, ours), None)
    if differ is not None:
        raise RecipeError(
            f"is {name}, which has another tokenizer than the source: {differ}; take a"
            " model that reads the same ids"
        )


def _differences(theirs: Tokenizer, ours: Tokenizer) -> Iterator[str]:
    if theirs.vocab_size < ours.vocab_size:
        yield f"{theirs.vocab_size} tokens, not {ours.vocab_size}"
    for token in range(min(theirs.vocab_size, ours.vocab_size)):
        there, here = theirs.decode([token]), ours.decode([token])
        if there != here:
            yield f"token {token} is {there!r}, not {here!r}"
    for text in PROBES:
        ids, own = theirs.encode(text), ours.encode(text)
        if ids != own:
            yield f"{text!r} begins with {ids[:SHOWN]}, not {own[:SHOWN]}"
