"""Short runs on tiny models: recipes in one line, models made once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from compress.recipe import Recipe
from compress.recipe.reading.parse import parse

W4 = {"scheme": "W4A16", "group_size": 32}
RTN: Mapping[str, Any] = {"method": "rtn", **W4}
GPTQ: Mapping[str, Any] = {"method": "gptq", **W4}
SELF = {"sources": "self", "samples": 4, "length": 16}
WORDS = "once upon a time a small dog and an old cat sat by the door in the rain . "


def recipe(*stages: Mapping[str, Any], **rest: Any) -> Recipe:
    """A recipe of these stages, through the parser as a user's would be."""
    content = {"name": "test", "stages": [dict(stage) for stage in stages], **rest}
    return parse(yaml.safe_dump(content))


def recipe_file(folder: Path, *stages: Mapping[str, Any], **rest: Any) -> Path:
    """The same as a file."""
    path = folder / "recipe.yaml"
    content = {"name": "test", "stages": [dict(stage) for stage in stages], **rest}
    path.write_text(yaml.safe_dump(content))
    return path


def text_source(folder: Path, samples: int = 4, length: int = 16) -> dict[str, Any]:
    """A calibration on a text file of `folder`, quicker than sampling."""
    path = folder / "words.txt"
    if not path.exists():
        path.write_text("".join(WORDS[i:] + WORDS[:i] for i in range(0, 60, 3)))
    return {"sources": [{"text": str(path)}], "samples": samples, "length": length}
