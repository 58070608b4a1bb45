"""The checkpoint that a run reads: dense, and with a head of its own where the recipe wants one."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint import Checkpoint
from compress.checkpoint.detect import detect
from compress.checkpoint.outline import outline_of
from compress.checkpoint.ties import head_name, settled, tied_config
from compress.errors import CheckpointError
from compress.formats.open_weights import refuse_gguf
from compress.plan.passes import EditedModel, edited
from compress.plan.training.teachers import open_teachers
from compress.recipe import Recipe
from compress.recipe.matching import of_stage


def open_source(recipe: Recipe, folder: Path) -> tuple[Checkpoint, EditedModel]:
    """The checkpoint in `folder`, and its outline with the recipe's edits planned: untied when a
    stage means the head of a model whose head is the embedding, and with a config that says whether
    it is. CheckpointError for one that is compressed already."""
    checkpoint = Checkpoint.open(folder)
    refuse_quantized(checkpoint)
    teachers = open_teachers(recipe, checkpoint)
    model = edited(recipe, outline_of(checkpoint), teachers)
    # An edit may give the model a head of its own, which is then the one that stages mean.
    spec, rounded = model.source.spec, model.rounded.spec
    apart = _names_head(recipe, rounded)
    if spec.tied and rounded.tied and apart:
        checkpoint = untied(checkpoint, spec)
        return checkpoint, edited(recipe, outline_of(checkpoint), teachers)
    found = settled(checkpoint, spec, apart)
    same = found is checkpoint
    return found, model if same else edited(recipe, outline_of(found, spec), teachers)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """CheckpointError for a source that is compressed already, and for a GGUF file."""
    refuse_gguf(checkpoint)
    found = detect(checkpoint.config, checkpoint.tensors)
    if found is not None:
        raise CheckpointError(
            f"{checkpoint.path} is already quantized ({found}); give the original checkpoint"
        )


def untied(checkpoint: Checkpoint, spec: DecoderSpec) -> Checkpoint:
    """The same model with the head as a tensor of its own: the embedding's bytes under a second
    name, and a config that says so. Nothing is copied; what is written has both."""
    name = head_name(spec)
    info = replace(checkpoint.tensors[spec.embedding], name=name)
    tensors = MappingProxyType({**checkpoint.tensors, name: info})
    return replace(checkpoint, tensors=tensors, config=tied_config(checkpoint.config, tied=False))


def _names_head(recipe: Recipe, spec: DecoderSpec) -> bool:
    """Whether a target that is not ignored means the head in particular ("lm_head"; not "*")."""
    name = head_name(spec)
    head = LinearSpec(name.removesuffix(".weight"), name, spec.embedding_shape, "head", "", "")
    return any(
        means(head) and not any(map(means, spec.linears()))
        for stage in recipe.stages
        if not any(means(head) for _, means in of_stage(stage, "ignore"))
        for _, means in of_stage(stage, "targets")
    )
