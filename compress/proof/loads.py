"""Whether plain transformers loads a checkpoint as what it is.

Behind the last stage that changes the model's structure. Our own reading and its reader share code,
so a fresh process loads the folder by `AutoModelForCausalLM`, without code of the folder, and must
give the same logits, and by `AutoTokenizer` the source's ids. Where the memory lacks, names and
shapes of all tensors are compared with the class, and the first block alone is loaded and run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.blocks.model import short_reason
from compress.checkpoint import disk, write_atomic
from compress.checkpoint.outline import outline_of
from compress.checkpoint.small_files import SmallFiles
from compress.errors import CheckpointError, CompressError, OutputError
from compress.formats import Weights, dense
from compress.proof.fresh_process import Killed, ask
from compress.proof.needs import why_not_whole
from compress.proof.own_reading import ids_for, own_logits
from compress.proof.question import Answer, LoadQuestion, Question
from compress.proof.stock import token_ids, tokenizer_of
from compress.report.records.loads import StockLoad

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
)
AGREES = "AutoTokenizer gives the source's ids"
FORM = "names and shapes of all tensors with the class, and the logits behind the first block"
TEXTS = (
    "Once upon a time there was a small dog, who liked to play in the park.\n\n\tIt's 12,345.67 €!",
    "Жил-был пёс. 从前有一只小狗。 كان هناك كلب صغير. एक कुत्ता था। 강아지가 있었다. Ὁ κύων.",
    "def f(x):\n        return {'a': x ** 2}  # ½ naïve ﬁ \u200b\u0301 🐕‍🦺",
)


@dataclass(frozen=True, slots=True)
class SourceTokens:
    """What the source's tokenizer makes of texts. why_not: why there is no such thing."""

    texts: tuple[str, ...] = ()
    ids: tuple[list[int], ...] = ()
    why_not: str | None = None


def prove_load(weights: Weights, source: SmallFiles, work: Path) -> StockLoad:
    """Load a dense checkpoint in a fresh process, and compare it with our own reading of it.

    source: the small files of the model that the run was given. work: a folder that is made for the
    time being; what is asked lies there. Raises CheckpointError, in one line, where transformers
    makes something else of the checkpoint; OutputError where it takes too long or cannot be tried.
    """
    assert weights.format.name == dense.NAME, "the proof is of dense weights"
    lacking = why_not_whole(outline_of(weights.checkpoint, weights.spec))
    tokens = source_tokens(source)
    answer = None
    with _folder(work):
        if lacking is None:
            try:
                answer = _ask(weights, tokens, work)
            except Killed as error:
                lacking = f"the process that loaded all of it {error}"
        if answer is None:
            answer = _ask_of_first_block(weights, tokens, work)
    if answer.why_not is not None:
        raise CheckpointError(
            f"plain transformers {answer.transformers} does not load {weights.checkpoint.path} as"
            f" what was written: {answer.why_not}; run it again, and report the recipe if it stays"
        )
    return _record(answer, lacking, tokens.why_not)


def source_tokens(source: SmallFiles) -> SourceTokens:
    """Of several scripts, and of all special tokens."""
    if not any(source.find(name) for name in TOKENIZER_FILES):
        return SourceTokens(why_not="the source has no tokenizer")
    try:
        with source.in_folder() as folder:
            tokenizer = tokenizer_of(str(folder))
            special = dict.fromkeys([*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()])
            texts = [*TEXTS, " a".join(special)]
            ids = token_ids(tokenizer, texts)
    except CompressError:
        raise
    except Exception as error:  # a dozen types, by the tokenizer's class and the missing package
        return SourceTokens(why_not=f"no tokenizer of the source loads ({short_reason(error)})")
    return SourceTokens(tuple(texts), tuple(ids))


def question_of(weights: Weights, tokens: SourceTokens, *, first_block: bool = False) -> Question:
    """What a fresh process is asked. first_block: of the model cut behind its first block."""
    checkpoint, spec = weights.checkpoint, weights.spec
    asked = LoadQuestion(
        str(checkpoint.path.resolve()),
        first_block,
        {name: list(shape) for name, shape in checkpoint.shapes.items()},
        [*spec.copied, *(name for block in spec.blocks for name in block.unrecognised)],
        list(tokens.texts),
        list(tokens.ids),
    )
    ids = ids_for(spec, [x for text in tokens.ids for x in text])
    return Question(asked, ids, own_logits(weights, ids, 1 if first_block else None))


def _ask(
    weights: Weights, tokens: SourceTokens, work: Path, *, first_block: bool = False
) -> Answer:
    path = work / "question.safetensors"
    write_atomic(path, question_of(weights, tokens, first_block=first_block).to_bytes())
    return ask(path, weights.checkpoint.file_bytes)


def _ask_of_first_block(weights: Weights, tokens: SourceTokens, work: Path) -> Answer:
    try:
        return _ask(weights, tokens, work, first_block=True)
    except Killed as error:
        raise OutputError(
            f"the process that opened {weights.checkpoint.path} in plain transformers {error}; free"
            " memory, then go on with --resume"
        ) from error


def _record(answer: Answer, lacking: str | None, why_not_ids: str | None) -> StockLoad:
    detail = [f"ids not compared: {why_not_ids}" if why_not_ids else AGREES]
    if lacking is not None:
        detail.insert(0, f"{lacking}: compared were {FORM}")
    proof = "logits" if lacking is None else "form"
    return StockLoad(
        answer.transformers, answer.model_class, proof, answer.max_error, tuple(detail)
    )


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """A folder for the time being; what a stopped run left of it is removed."""
    with disk.refusing(f"make {path}"):
        if path.exists():
            disk.remove_tree(path)
        disk.mkdir(path)
    try:
        yield
    finally:
        with disk.refusing(f"remove {path}"):
            disk.remove_tree(path)
