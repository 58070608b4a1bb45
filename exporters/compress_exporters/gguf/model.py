"""A decoder's sizes and settings as keys of GGUF; what GGUF has no key for is refused."""

from collections.abc import Iterator

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.table import FORWARDS
from compress.arch.resize.windowed import windows_within
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError
from compress.formats.gguf.arches import ARCHES, Arch
from compress.formats.gguf.fields import Field, Fields
from compress.formats.weights import Weights
from compress_exporters.heads import shared_heads


def arch_of(spec: DecoderSpec) -> Arch:
    """The family's row of ARCHES; CheckpointError for a family that has none."""
    found = ARCHES.get(spec.family)
    if found is None and any(block.sizes.latent for block in spec.blocks):
        raise CheckpointError(
            f"model type {spec.model_type!r} has latent attention, which is written into no GGUF"
            " file (architecture deepseek2 is untried); export to onnx, serve the checkpoint with"
            " transformers or compress-model, or export the model that a stage mla made it of"
        )
    if found is None:
        remedy = "; take onnx" if spec.family in FORWARDS else ""
        raise CheckpointError(
            f"model type {spec.model_type!r} has no architecture in GGUF that is known here; known"
            f" are {', '.join(ARCHES)}{remedy}"
        )
    return found


def check_model(
    source: Weights, how: ForwardSpec, arch: Arch, most: int | None = None
) -> tuple[str, ...]:
    """Refuse a decoder that llama.cpp's architecture would compute differently; return the notes.

    most: as `settings` has it. Raises CheckpointError.
    """
    spec = source.spec
    _check_layers(spec, how, arch)
    _check_windows(source, arch, most)
    _check_activation(how, arch)
    _check_scale(spec, how, arch)
    _check_softcaps(how, arch)
    _check_biases(source, arch)
    _check_experts(spec, how, arch)
    _check_sizes(spec, how, arch)
    notes = []
    if how.activation in arch.approximate:
        notes.append(f"llama.cpp computes {how.activation} by its tanh approximation")
    context = context_length(spec, how, arch)
    if _loses_windows(how, arch):
        notes.append(
            f"GGUF's {arch.name} has no window; the file is for {context} positions, for which"
            " none is needed"
        )
    return tuple(notes)


def settings(
    spec: DecoderSpec, how: ForwardSpec, arch: Arch, most: int | None = None
) -> Iterator[Field]:
    """The architecture's keys, without its name in front, and their values.

    most: positions that the user asks for, where they are fewer than the model's.
    """
    context, heads = context_length(spec, how, arch), how.grouped(0)
    # llama.cpp loads a table of learned positions only with exactly this many rows.
    yield "context_length", context if how.positions or not most else min(most, context)
    yield "embedding_length", spec.hidden
    yield "block_count", len(spec.blocks)
    yield "feed_forward_length", spec.intermediate
    yield "vocab_size", spec.embedding_shape[0]
    yield "attention.head_count", heads.heads
    yield "attention.head_count_kv", heads.kv_heads
    yield "attention.key_length", heads.key_width
    yield "attention.value_length", heads.value_width
    eps = "layer_norm_rms_epsilon" if how.norm == "rms" else "layer_norm_epsilon"
    yield f"attention.{eps}", how.eps
    if arch.experts:
        yield "expert_count", spec.experts
        yield "expert_used_count", how.experts_per_token
        yield "expert_feed_forward_length", _expert_width(spec)
    if how.norm == "layer" and how.positions is None:
        yield "use_parallel_residual", how.parallel
    yield from _windows(how, arch)
    yield from _caps(how, arch)


def context_length(spec: DecoderSpec, how: ForwardSpec, arch: Arch) -> int:
    """Number of positions that the file is for: the model's, or no more than its narrowest window
    where the architecture has no windows. CheckpointError where config.json does not say."""
    if not spec.context:
        raise CheckpointError(
            "config.json does not say how many positions the model reads; GGUF needs"
            " max_position_embeddings"
        )
    windows = [x.window for x in how.layers if x.window is not None]
    return min(spec.context, *windows) if _loses_windows(how, arch) else spec.context


def _loses_windows(how: ForwardSpec, arch: Arch) -> bool:
    """Whether the model has windows and the architecture has none."""
    return arch.period is None and any(x.window is not None for x in how.layers)


def _check_windows(source: Weights, arch: Arch, most: int | None) -> None:
    """CheckpointError where some layers have windows and the architecture has none: a file for as
    many positions as a window is no file of a model whose other layers see more."""
    windows = windows_within(source.checkpoint.config, source.spec)
    least = min((x for x in windows if x is not None), default=0)
    if arch.period is None and least and None in windows and not 0 < (most or 0) <= least:
        raise CheckpointError(
            f"windows of the layers are {windows}; GGUF's {arch.name} has none, take onnx, or"
            f" --max-context {least}, for which none is needed"
        )


def _windows(how: ForwardSpec, arch: Arch) -> Fields:
    if arch.window_key:  # 0 is "no window"
        return (("attention.sliding_window", 0),)
    width = next((x.window for x in how.layers if x.window is not None), None)
    if arch.period is None or width is None:
        return ()
    fields: Fields = (("attention.sliding_window", width),)
    period = _period(how, arch)
    if period == arch.period:
        return fields
    return (*fields, ("attention.sliding_window_pattern", period))


def _period(how: ForwardSpec, arch: Arch) -> int:
    """The n for which every layer has the window but each n-th; CheckpointError where none fits."""
    windows = [x.window for x in how.layers]
    usual = 1 if arch.period is None else arch.period
    periods: list[int] = [usual, *range(1, len(windows) + 2)]
    for period in periods:
        if _repeats(windows, period):
            return period
    raise CheckpointError(
        f"windows of the layers are {windows}; GGUF's {arch.name} has one in every layer but each"
        " n-th, take onnx"
    )


def _repeats(windows: list[int | None], period: int) -> bool:
    """Whether every layer has the same window, but each `period`-th has none."""
    width = next(x for x in windows if x is not None)
    return windows == [width if (i + 1) % period else None for i in range(len(windows))]


def _caps(how: ForwardSpec, arch: Arch) -> Fields:
    scores = how.grouped(0).softcap
    if not arch.softcaps or scores is None or how.final_softcap is None:
        return ()
    return (("attn_logit_softcapping", scores), ("final_logit_softcapping", how.final_softcap))


def _check_activation(how: ForwardSpec, arch: Arch) -> None:
    if how.activation not in arch.activations:
        raise CheckpointError(
            f"the activation is {how.activation!r}; GGUF's {arch.name} computes"
            f" {', '.join(arch.activations)}, take onnx"
        )


def _check_scale(spec: DecoderSpec, how: ForwardSpec, arch: Arch) -> None:
    by_width = len(spec.blocks) == arch.by_width_at
    for i in range(len(how.kinds)):
        layer = how.grouped(i)
        want = (spec.hidden // layer.heads if by_width else layer.key_width) ** -0.5
        if abs(layer.scale - want) > 1e-6 * want:
            raise CheckpointError(
                f"scores of layer {i} are multiplied by {layer.scale:.6g}; GGUF's {arch.name}"
                f" computes with {want:.6g} here, take onnx"
            )


def _check_softcaps(how: ForwardSpec, arch: Arch) -> None:
    scores = how.grouped(0).softcap
    if arch.softcaps and None in (scores, how.final_softcap):
        raise CheckpointError(
            f"scores or logits are not capped; GGUF's {arch.name} always caps both, take onnx"
        )
    if not arch.softcaps and (scores, how.final_softcap) != (None, None):
        raise CheckpointError(
            f"scores or logits are capped, at {scores or how.final_softcap:g}; GGUF's {arch.name}"
            " caps none, take onnx"
        )


def _check_biases(source: Weights, arch: Arch) -> None:
    tensors = source.checkpoint.tensors
    for linear in source.spec.linears():
        has = f"{linear.name}.bias" in tensors
        if has and linear.role not in arch.biases:
            raise CheckpointError(
                f"{linear.name} has a bias; GGUF's {arch.name} has none there, take onnx"
            )
        if not has and arch.bias_needed and linear.role in arch.biases:
            raise CheckpointError(
                f"{linear.name} has no bias; GGUF's {arch.name} needs one there, take onnx"
            )


def _check_experts(spec: DecoderSpec, how: ForwardSpec, arch: Arch) -> None:
    if not arch.experts:
        return
    if not how.norm_topk:
        raise CheckpointError(
            f"norm_topk_prob is false; in GGUF's {arch.name} the chosen experts' weights add up to"
            " 1, take onnx"
        )
    for block in spec.blocks:
        if all(x.expert is None for x in block.linears):
            raise CheckpointError(
                f"{block.prefix} has no experts; GGUF's {arch.name} has them in every layer, take"
                " onnx"
            )


def _expert_width(spec: DecoderSpec) -> int:
    return next(x.shape[0] for x in spec.linears() if x.expert is not None and x.role == "up")


def _check_layers(spec: DecoderSpec, how: ForwardSpec, arch: Arch) -> None:
    """CheckpointError where layers differ in heads or inner width: GGUF has one number for all."""
    shared_heads(how, f"GGUF's {arch.name}")
    widths = [block.sizes.intermediate for block in spec.blocks]
    if len(set(widths)) > 1:
        raise CheckpointError(
            f"inner widths of the layers are {widths}; GGUF's {arch.name} has one number for all"
            " layers, export to onnx"
        )


def _check_sizes(spec: DecoderSpec, how: ForwardSpec, arch: Arch) -> None:
    heads = how.grouped(0)
    if arch.wide and heads.widths[0] != spec.hidden:
        raise CheckpointError(
            f"{heads.heads} heads of {heads.key_width} numbers are not the {spec.hidden} of the"
            f" residual; in GGUF's {arch.name} they are, take onnx"
        )
