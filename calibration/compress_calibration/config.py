"""What a recipe says about calibration data. No torch here: `compress-model --help` reads this."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from compress.errors import RecipeError

SourceKind = Literal["text", "jsonl", "parquet", "dataset", "hub", "self"]
Packing = Literal["pack", "pad"]

DEFAULT_SEPARATOR = "<|endoftext|>"

# Which fields of SourceConfig mean something for a kind, beside `kind` and `weight`.
FIELDS_OF_KIND: dict[str, frozenset[str]] = {
    "text": frozenset({"path", "separator"}),
    "jsonl": frozenset({"path", "field"}),
    "parquet": frozenset({"path", "field"}),
    "dataset": frozenset({"path", "field", "split"}),
    "hub": frozenset({"id", "subset", "field", "split"}),
    "self": frozenset(),
}


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One place documents come from.

    kind       "text", "jsonl", "parquet": files; "dataset": a folder written by
               `Dataset.save_to_disk`; "hub": a data set id; "self": text the model itself writes.
    path       one file, folder or glob pattern, or several (`~` is expanded).
    id         "owner/name" on the hub; `subset` is its configuration name, where it has several.
    field      column with the text (a string) or the chat (a list of messages, rendered with the
               chat template). Empty: `text` where the row has it, otherwise `messages`.
    split      "train", "test" ...; may be left out where there is only one.
    weight     share of the tokens in a mixture, relative to the other sources.
    separator  parts a text file into documents; a file without it is one document.

    Raises RecipeError for an unknown kind, a missing path or id, a weight that is not above 0,
    and a field that its kind would ignore.
    """

    kind: SourceKind
    path: str | tuple[str, ...] = ()
    id: str = ""
    subset: str = ""
    field: str = ""
    split: str = ""
    weight: float = 1.0
    separator: str = DEFAULT_SEPARATOR

    def __post_init__(self) -> None:
        if self.kind not in FIELDS_OF_KIND:
            known = ", ".join(FIELDS_OF_KIND)
            raise RecipeError(f"source kind is {self.kind!r}; it is one of {known}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise RecipeError(f"weight of a source is {self.weight}; it is a number above 0")
        if not self.separator:
            raise RecipeError(
                "separator is empty; leave it out, or give the text that parts documents"
            )
        self._check_fields()

    def _check_fields(self) -> None:
        means = FIELDS_OF_KIND[self.kind]
        given = {name for name in ("path", "id", "subset", "field", "split") if getattr(self, name)}
        if self.separator != DEFAULT_SEPARATOR:
            given.add("separator")
        for name in sorted(given - means):
            raise RecipeError(
                f"{name} is {getattr(self, name)!r}, which a source of kind {self.kind!r}"
                " does not use; take it out"
            )
        for name in sorted({"path", "id"} & means - given):
            raise RecipeError(f"{name} is missing; a source of kind {self.kind!r} needs it")

    @property
    def paths(self) -> tuple[str, ...]:
        """`path`, always as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """How messages and the report call this source."""
        if self.kind == "hub":
            return "/".join(part for part in (self.id, self.subset) if part)
        return ", ".join(self.paths) or self.kind


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """Which tokens calibration sees: `samples` rows of `length` tokens.

    "pack" joins documents and cuts the stream into full rows; "pad" gives each document a row of
    its own, cut at `length` and padded on the right under a mask. Another `seed` draws other
    documents. `spill_bytes` bounds the hidden states of one batch in memory; all of them lie in
    files beside the output. Raises RecipeError for values out of range.
    """

    sources: tuple[SourceConfig, ...]
    samples: int = 128
    length: int = 512
    packing: Packing = "pack"
    seed: int = 0
    spill_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not self.sources:
            raise RecipeError("sources is empty; name a source, for example {kind: self}")
        if self.samples < 1:
            raise RecipeError(f"samples is {self.samples}; calibration takes 1 row or more")
        if self.length < 2:
            raise RecipeError(f"length is {self.length}; a row holds 2 tokens or more")
        if self.packing not in get_args(Packing):
            raise RecipeError(f"packing is {self.packing!r}; it is one of pack, pad")
        if self.spill_bytes < 1 << 20:
            raise RecipeError(f"spill_bytes is {self.spill_bytes}; it is 1048576 (1 MiB) or more")
        if self.seed < 0:
            raise RecipeError(f"seed is {self.seed}; it is 0 or more")
        if sum(source.kind == "self" for source in self.sources) > 1:
            raise RecipeError("sources names 'self' twice; one is enough, with the summed weight")
