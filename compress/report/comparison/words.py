"""What the table and the page both say of a comparison."""

from compress.report import units
from compress.report.comparison.records import Comparison, Contender, Wanted


def asked(wanted: Wanted) -> str:
    """What was asked for, as the end of a sentence: "the smallest for llama.cpp with KL of 0.05 or
    less, within 5 MB"."""
    goal = "smallest" if wanted.kl is not None else "lowest KL"
    parts = [f"the {'fastest in this engine' if wanted.fastest else goal}"]
    parts += [f"for {wanted.runtime}"] if wanted.runtime else []
    parts += [f"within {units.size(wanted.within)}"] if wanted.within is not None else []
    parts += [f"with KL of {wanted.kl:g} or less"] if wanted.kl is not None else []
    return " ".join(parts)


def verdict(found: Comparison) -> str:
    """One sentence: who won, or why nobody did."""
    best, wanted = found.best, found.wanted
    if best is not None:
        return (
            f"{best.name} is {asked(wanted)}: {units.size(best.bytes)}, KL"
            f" {units.significant(best.kl, 2)}."
        )
    if wanted.is_any:
        return ""
    if not found.contenders:
        return f"Nothing is left to be {asked(wanted)}."
    return f"None is {asked(wanted)}; {_nearest(found)}."


def _nearest(found: Comparison) -> str:
    """What would have fitted."""
    wanted = found.wanted
    fits = [x for x in found.contenders if wanted.fits(x)]
    if fits:
        return "no speed could be predicted"
    small, near = found.contenders[0], min(found.contenders, key=lambda x: x.kl)
    if small is near:
        return f"the smallest and nearest to the source is {_shown(small)}"
    said = [f"the smallest is {_shown(small)}"] if wanted.within is not None else []
    said += [f"the lowest KL has {_shown(near)}"] if wanted.kl is not None else []
    return ", ".join(said)


def _shown(one: Contender) -> str:
    return f"{one.name} ({units.size(one.bytes)}, KL {units.significant(one.kl, 2)})"


def title(found: Comparison) -> str:
    """The last part of the source's path."""
    return found.source.path.replace("\\", "/").rstrip("/").rpartition("/")[2] or "model"


def measured(found: Comparison) -> str:
    """On what, as a sentence."""
    text = found.measured
    name = "text that the source wrote" if "sampled_with_seed" in text.settings else text.text
    return (
        f"All measured on the same {units.counted(text.tokens, 'token')} of {name}; the source is"
        f" {units.size(found.source.bytes)} and has perplexity"
        f" {units.significant(text.perplexity, 4)} there."
    )


def of_files(found: Comparison) -> str:
    """Whose sizes and losses the numbers are, as a sentence; nothing of checkpoints."""
    files = {one.file for one in found.contenders}
    if len(files) != 1 or files == {"checkpoint"}:
        return ""
    (file,) = files
    if file == "gguf":
        return "Sizes and losses are those of the GGUF files."
    return f"Sizes are those of the {file} files, losses those of the checkpoints."
