"""Tasks for lm-evaluation-harness that need no network: YAML and lines of JSON in a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_STORY = (
    "Once upon a time, there was a little girl named Lily. She had a dog named Max. One day they"
    " went to the park and saw a big tree. Lily wanted to climb it, but her mom said no. "
)
_CHOICES = (
    ("Lily was hungry, so she ate", ("an apple.", "a big house.", "the sky."), 0),
    ("The sun was shining and the sky was", ("blue.", "in the box with a toy."), 0),
    ("Tom had a red ball. He liked to", ("eat the moon.", "play with it.", "sleep on a car."), 1),
    # A choice that begins as another one does, and a context that ends with a space.
    ("The cat sat on the ", ("mat.", "mat and slept.", "mat and slept all day."), 0),
    ("It was dark. The boy was scared, so he ran to his", ("mom.", "spoon.", "mom!"), 0),
)
_LAST_WORDS = (
    ("Sara had a toy. The toy was a bear. Sara loved her", "bear"),
    ("Ben and Mia were friends. They liked to play. One day Ben said, Let us go and", "play"),
    ("", "Once upon a time"),
    ("Once upon a", "time"),
    # Longer than max_length in some of the tests: cut at its beginning.
    (_STORY * 3 + "Lily and Max were very", "happy"),
)
_TEXTS = (_STORY, _STORY * 4, "The end.", "Tom saw a cat.\n\nThe cat said: <hello>\tto Tom. 😀")
_BEGINNINGS = (
    ("Once upon a time, there was a", "little girl named Lily"),
    ("Lily and Tom went to the park. They saw a big", "dog"),
    ("The dog was happy. The", "end"),
    # The same question again, and one that is longer than what may be read.
    ("The dog was happy. The", "end"),
    (_STORY * 4 + "Then Max", "ran"),
)

_ROWS: Mapping[str, list[dict[str, Any]]] = {
    "local_choices": [{"query": q, "choices": list(c), "gold": g} for q, c, g in _CHOICES],
    "local_last_word": [{"context": c, "continuation": w} for c, w in _LAST_WORDS],
    "local_texts": [{"text": text} for text in _TEXTS],
    "local_stories": [{"context": c, "answer": a} for c, a in _BEGINNINGS],
}
_MEAN = {"aggregation": "mean", "higher_is_better": True}
_TASKS: Mapping[str, Mapping[str, Any]] = {
    "local_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "fewshot_split": "test",
        "num_fewshot": 2,
        "metric_list": [{"metric": "acc", **_MEAN}, {"metric": "acc_norm", **_MEAN}],
    },
    "local_last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{continuation}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", **_MEAN},
        ],
    },
    "local_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_stories": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{answer}}",
        "generation_kwargs": {"until": [".", "\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **_MEAN}],
    },
}
NAMES = tuple(_TASKS)


def write(folder: Path) -> Path:
    """The tasks NAMES in `folder`, and the data beside them; what it caches stays there too."""
    for name, task in _TASKS.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in _ROWS[name]))
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(rows)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "metadata": {"version": 1},
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder
