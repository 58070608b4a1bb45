"""All results measured on the same tokens; what llama.cpp loads as another file, as that file.

What it rounds beyond the checkpoint counts: of tale-6m embedding and head in Q8_0 cost 0.0002 nats
a token, and 3-bit codes become those of Q4_0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint import Checkpoint, resolve_model
from compress.checkpoint.gguf_file import GGUF_FILE
from compress.checkpoint.in_memory import require_files
from compress.checkpoint.sidefiles import parsed
from compress.comparison.options import CompareOptions
from compress.comparison.results import Finished, loaded_file
from compress.errors import CompressError, RequestError
from compress.evaluation.compared import Compared
from compress.evaluation.evaluate_checkpoint import EvaluationOptions, evaluate_checkpoint
from compress.evaluation.quality import measure
from compress.evaluation.workspace import Workspace
from compress.events import Progress, note
from compress.formats import open_weights
from compress.inspect.facts import result_of
from compress.recipe import load
from compress.recipe.evaluation_config import EvaluationConfig, SampleConfig
from compress.report.records.quality import TextQuality
from compress.report.schema import Export
from compress.report.summary import headline
from compress.runs.options import RunOptions
from compress.usercache.cache import user_cache

_READ = "gguf"  # of the files that runtimes load, the one that our decoder reads


@dataclass(frozen=True, slots=True)
class Ruler:
    """What results are measured with anew: the text that is asked for, else text of their source's
    own, as built-in recipes have it. scratch: a folder for links to files, which the results open
    as for as long as it is there."""

    asked: CompareOptions
    options: RunOptions
    progress: Progress
    scratch: Path

    def alike(
        self, results: Sequence[Finished], *, settled: bool
    ) -> list[tuple[Finished, TextQuality]]:
        """Each with its quality on the same tokens. settled: they were run on the text that is
        asked for.

        RequestError for one that is to be measured and whose source is gone or changed.
        """
        laid = [self._laid(each) for each in results]
        others = self.asked.text is not None and not settled
        if not others:
            laid = [self._of_its_file(each) for each in laid]
        return self._on_one_text(laid, others=others)

    def _on_one_text(
        self, results: Sequence[Finished], *, others: bool
    ) -> list[tuple[Finished, TextQuality]]:
        """others: another text is asked for than the results were run on."""
        tokens = [None if each.text is None else each.text.sha256 for each in results]
        if len(set(tokens)) == 1 and tokens[0] is not None and not others:
            return [(each, _quality(each)) for each in results]
        # What most have may be what the ruler says: then only the others are measured.
        most = max(tokens, key=tokens.count)
        odd = next((i for i, sha256 in enumerate(tokens) if sha256 != most), 0)
        anew = {odd: self._measured(results[odd])}
        for i, each in enumerate(results):
            if i not in anew and tokens[i] != anew[odd].sha256:
                anew[i] = self._measured(each)
        return [(each, anew.get(i) or _quality(each)) for i, each in enumerate(results)]

    def _laid(self, each: Finished) -> Finished:
        """The result with a folder that opens as the file that is judged."""
        made = loaded_file(each, self.asked)
        if not isinstance(made, Export) or made.target != _READ:
            return each
        place = _linked(each.folder, made, self.scratch / each.name)
        bits = result_of(open_weights(Checkpoint.open(place))).bits_per_weight
        return replace(each, opens=place, bits=bits)

    def _of_its_file(self, each: Finished) -> Finished:
        """The result with what its file cost on the text of its run, where there is a file."""
        if each.opens is None:
            return each
        config = _config(each)
        if config is None:
            return each
        self.progress(note("compare", f"the GGUF file of {each.name} is measured"))
        source = Checkpoint.open(_source(each, "its GGUF file is to be measured")).sealed()
        sides = Compared(open_weights(Checkpoint.open(each.opens)), open_weights(source))
        kept = user_cache(self.options.cache)
        folder = each.opens / "evaluation"
        work = Workspace(folder, self.options.device, self.progress, kept=kept)
        found = measure(sides, config, work, all_or_none=True).quality
        assert found is not None, "an evaluation has all texts or fails"
        return replace(each, of_file=found.texts[0])

    def _how(self, text: str, most: int | None) -> EvaluationOptions:
        place, kept = self.options.device, self.options.cache
        return EvaluationOptions((text,), max_tokens=most, device=place, cache=kept)

    def _measured(self, each: Finished) -> TextQuality:
        """Measured anew, against the source that its report names."""
        self.progress(note("compare", f"{each.name} is measured on the tokens of the others"))
        text, most = self.asked.text or "self", self.asked.max_tokens
        report = evaluate_checkpoint(
            each.opens or each.folder,
            self._how(text, most),
            against=_source(each, "it was measured on other tokens"),
            progress=self.progress,
        )
        found = headline(report)
        assert found is not None, "an evaluation has all texts or fails"
        return found


def _linked(folder: Path, made: Export, place: Path) -> Path:
    """A folder of links: to the file, and to the config and the tokenizer of its result."""
    place.mkdir()
    (place / GGUF_FILE).symlink_to(folder / made.path / made.files[0])
    for name in ("config.json", *parsed(folder)):
        (place / name).symlink_to(folder / name)
    return place


def _config(each: Finished) -> EvaluationConfig | None:
    """How the run was measured on the text that stands for it, and nothing else; None where it was
    not, and where nobody knows any more."""
    text, path = headline(each.report), each.folder / "recipe.yaml"
    if text is None or not path.is_file():
        return None
    asked = load(path).evaluation
    if asked is None:
        return None
    texts = tuple(x for x in asked.texts if x.name == text.name)
    return replace(asked, texts=texts, tasks=(), samples=SampleConfig(), plain=False)


def _quality(each: Finished) -> TextQuality:
    text = each.text
    assert text is not None, "only results that tell their tokens come here"
    return text


def _source(each: Finished, why: str) -> Path:
    """The source of a result. RequestError where it is gone, or another model by now, and where it
    was in memory."""
    path, before = each.report.source.path, each.report.source.sha256
    require_files(path, f"{each.folder}: {why}, and its source")
    try:
        found = Checkpoint.open(resolve_model(path))
        changed = found.sha256() != before
    except CompressError as error:
        raise RequestError(
            f"{each.folder}: {why}, and its source cannot be read: {error}"
        ) from None
    if changed:
        raise RequestError(
            f"{each.folder}: {why}, and its source {path} has changed since; make it anew"
        )
    return found.path
