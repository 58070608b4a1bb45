import pytest

from compress.arch.text_config import TEXT_CONFIGS, config_at, text_config, with_config_at

INNER = {"model_type": "llama", "hidden_size": 8}


@pytest.mark.parametrize("key", TEXT_CONFIGS)
def test_below_a_key(key: str) -> None:
    config = {"model_type": "some_vlm", key: INNER, "vision_config": {"hidden_size": 4}}
    path, inner = text_config(config)
    assert (path, inner) == ((key,), INNER)
    assert config_at(config, path) is inner
    other = with_config_at(config, path, {"a": 1})
    assert other == {**config, key: {"a": 1}}
    assert list(other) == list(config)
    assert config[key] is INNER


@pytest.mark.parametrize("nothing", [{}, None, 5, "llama"])
def test_at_the_top(nothing: object) -> None:
    """Also where a key is there and holds no config."""
    config = {**INNER, "text_config": nothing}
    assert text_config(config) == ((), config)
    assert config_at(config, ()) is config
    assert with_config_at(config, (), {"a": 1}) == {"a": 1}


def test_what_holds_something_counts() -> None:
    assert text_config({"text_config": {}, "llm_config": INNER}) == (("llm_config",), INNER)
