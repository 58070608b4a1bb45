"""What decoders are in onnxruntime-genai's words."""

from dataclasses import replace
from types import MappingProxyType

from compress.arch.forward.forward import describe_forward
from compress.arch.forward.table import FORWARDS
from compress.arch.text_config import config_at
from compress.errors import RecipeError
from compress.formats.weights import Weights
from compress_exporters.exporter import Options
from compress_exporters.genai.attention import attend, attention, needs_positions, require_heads
from compress_exporters.genai.config import LENGTH
from compress_exporters.genai.ends import embedding, head
from compress_exporters.genai.mlp import mlp
from compress_exporters.genai.norms import add_norm, norm
from compress_exporters.genai.product import CONTRIB, linear
from compress_exporters.onnx.graph.build import Build, Lowering
from compress_exporters.onnx.graph.decoder import build_decoder
from compress_exporters.onnx.graph.rotary import context
from compress_exporters.onnx.graph.rounding import as_rounded

# Files that onnxruntime-genai's tokenizer is made of.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
GENAI = Lowering(
    opsets=MappingProxyType({"": 23, CONTRIB: 1}),
    positions=True,
    embedding=embedding,
    norm=norm,
    add_norm=add_norm,
    attention=attention,
    attend=attend,
    mlp=mlp,
    linear=linear,
    rounded=as_rounded,
    head=head,
)


def build(source: Weights, options: Options) -> Build:
    """The graph. RecipeError and CheckpointError for what it cannot say."""
    _refuse_latent(source)
    how = describe_forward(source.checkpoint.config, source.spec)
    require_heads(how)
    length = options.max_context or source.spec.context
    lowering = replace(GENAI, positions=needs_positions(how, options, length))
    return build_decoder(source, options, lowering)


def _refuse_latent(source: Weights) -> None:
    text = config_at(source.checkpoint.config, source.spec.text_config)
    if text.get("kv_lora_rank"):
        known = source.spec.family in FORWARDS
        remedy = "export to onnx" if known else "keep a checkpoint format, such as --to"
        remedy += "" if known else " compressed-tensors"
        raise RecipeError(
            f"kv_lora_rank is {text['kv_lora_rank']}: latent attention (MLA) has no operator in"
            f" onnx-genai, whose keys and values are of one width; {remedy}"
        )


def notes(graph: Build) -> tuple[str, ...]:
    """What was converted, and what a user of the folder has to know."""
    lines = list(graph.notes)
    lines.append("texts of a batch are padded on the right; on the left results are silently wrong")
    if context(graph) > LENGTH:
        lines.append(
            f"max_length is {LENGTH} in genai_config.json, for which keys and values take memory at"
            f" once; a text can have up to {context(graph)} tokens"
        )
    beside = {path.name for path in graph.weights.checkpoint.side_files()}
    missing = [name for name in TOKENIZER if name not in beside]
    if missing:
        lines.append(
            f"the source has no {' and no '.join(missing)}, and onnxruntime-genai makes no"
            " tokenizer without: it takes and gives numbers of tokens only"
        )
    return tuple(lines)
