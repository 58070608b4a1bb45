"""How an export goes; the options of the other verbs lie with their work."""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from compress.sharing.trackers import Hook


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What an export may be told; None is left to the target, and what is not for it is refused.

    round_scales: let scales change that the format cannot hold exactly. Formats of checkpoints:
    shard_size, most bytes of one file, "5GB". Other runtimes: dtype, max_context, accuracy_level
    and in_place as in `compress-model export --help`; of GGUF files embedding, type, and text or
    imatrix; imatrix_out, where what columns multiply in that text goes, for llama-quantize; verify:
    compare what is written with the weights. overwrite: replace an earlier result. dry_run: only
    report what would be written. push, track: as in RunOptions.
    """

    round_scales: bool = False
    shard_size: str | None = None
    dtype: Literal["fp32", "fp16", "bf16"] | None = None
    max_context: int | None = None
    accuracy_level: Literal[0, 4] | None = None
    in_place: bool = False
    embedding: Literal["f16", "q8_0", "q6_k"] | None = None
    type: str | None = None
    imatrix: str | None = None
    text: str | None = None
    imatrix_out: str | None = None
    verify: bool = True
    overwrite: bool = False
    dry_run: bool = False
    push: str | None = None
    track: Sequence[str | Hook] = ()

    def given(self, kind: builtins.type) -> dict[str, Any]:
        """Those that are set and that `kind`, a dataclass of options, has a field for."""
        known = {each.name for each in fields(kind)}
        return {name: value for name, value in self.set_values().items() if name in known}

    def set_values(self) -> dict[str, Any]:
        """All that differ from what they are by default."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {f.name: found[f.name] for f in fields(self) if found[f.name] is not f.default}
