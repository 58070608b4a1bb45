"""Pairs and prompts of lm-evaluation-harness on the engine, without the harness."""

import pytest

from compress.errors import RequestError
from compress.runtime.loading.model import Model
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Sampling
from compress.serve.harness_requests import continue_prompts, sampling_of, window
from compress.serve.questions import score_pairs
from compress.verbs import open_model
from helpers import tiny_models

CONTEXT = tuple(range(1, 41))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_models.make("llama", tmp_path_factory.mktemp("model"), dtype="fp32")
    return open_model(folder, limits=Limits(tokens_per_step=64, sequences=4))


def scores(model: Model, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[object]:
    found: dict[int, tuple[float, bool]] = {}

    def tell(place: int, score: float, greedy: bool) -> None:
        assert place not in found
        found[place] = (score, greedy)

    score_pairs(model, pairs, tell)
    return [found[place] for place in range(len(pairs))]


def test_a_window_reads_as_much_as_fits() -> None:
    assert window((1, 2, 3), (4, 5), 4, "") == ((1, 2, 3), (4, 5))  # 5 is not read
    assert window((1, 2, 3), (4, 5), 3, "") == ((2, 3), (4, 5))
    assert window((1, 2, 3), (4, 5), 2, "") == ((3,), (4, 5))


@pytest.mark.parametrize(
    ("context", "continuation", "said"),
    [
        ((1,), (2, 3, 4), "the continuation ' text' has 3 tokens: max_length is 2; cut the text"),
        ((), (2,), "the context of a task's pair has no token of its own, the continuation being"),
        ((1,), (), "the continuation of a task's pair has no token of its own"),
    ],
)
def test_a_pair_that_fits_no_window(
    context: tuple[int, ...], continuation: tuple[int, ...], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        window(context, continuation, 2, " text")
    assert said in str(caught.value)
    assert "' text'" in str(caught.value)


def test_scores_come_back_in_place(model: Model) -> None:
    """Each pair as alone, to the bit, whatever stands beside it; equal ones too."""
    pairs = [
        (CONTEXT, (5, 6)),
        ((7,), (8, 9, 10)),
        (CONTEXT, (6,)),
        (CONTEXT, (5, 6, 7)),
        ((7,), (8, 9, 10)),
        (CONTEXT[:20], CONTEXT[20:]),
    ]
    together = scores(model, pairs)
    assert together == [scores(model, [pair])[0] for pair in pairs]
    assert together[1] == together[4]
    assert model.engine.idle


def test_a_context_is_read_once_for_its_choices(model: Model) -> None:
    context = tuple(reversed(CONTEXT))  # no other test has had it
    before = model.engine.stats.computed
    scores(model, [(context, (token, token + 1)) for token in range(1, 5)])
    # The last token of a choice is not read, so each of the four adds one.
    assert model.engine.stats.computed - before == len(context) + 4


def test_a_greedy_continuation_is_called_so(model: Model) -> None:
    result = model.engine.generate(
        [model._request(CONTEXT, Sampling(max_tokens=3, ignore_eos=True))]
    )[0]
    other = (*result.tokens[:2], (result.tokens[2] + 1) % tiny_models.VOCAB)
    found = scores(model, [(CONTEXT, result.tokens), (CONTEXT, other)])
    assert [greedy for _, greedy in found] == [True, False]  # type: ignore[misc]


def test_outputs_of_repeated_prompts_differ(model: Model) -> None:
    found: dict[int, tuple[int, ...]] = {}
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=2**64 - 1, ignore_eos=True)
    prompts = [(CONTEXT, sampling), ((3,), sampling), (CONTEXT, sampling)]
    for _ in range(2):  # and are the same in every run
        before = dict(found)
        continue_prompts(model, prompts, found.__setitem__)
        assert before in ({}, found)
    assert len({found[0], found[2]}) == 2
    alone: dict[int, tuple[int, ...]] = {}
    continue_prompts(model, prompts[:1], alone.__setitem__)
    assert alone[0] == found[0]


def test_what_cannot_be_served_ends_all(model: Model) -> None:
    pairs = [(CONTEXT, (5,)), (CONTEXT, (tiny_models.VOCAB,))]
    with pytest.raises(RequestError, match="an id from 0 to 255 is needed"):
        scores(model, pairs)
    assert model.engine.idle
    assert len(scores(model, pairs[:1])) == 1  # the engine goes on


def test_settings_become_sampling() -> None:
    settings = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": None,
        "min_new_tokens": 2,
        "num_beams": 1,
    }
    assert sampling_of(settings, ["\n", ""], 9, 3) == Sampling(
        temperature=0.7, top_p=0.9, min_tokens=2, max_tokens=9, stop=("\n",), seed=3
    )
    greedy = sampling_of({"do_sample": False, "temperature": 0.7}, [], 9, 0)
    assert greedy == Sampling(max_tokens=9)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 4}, "the generation setting num_beams=4 is not one of this engine; it has"),
        ({"typical_p": 0.5}, "typical_p=0.5 is not one of this engine"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=True needs a temperature above 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        sampling_of(settings, [], 9, 0)
    assert said in str(caught.value)
