"""KL divergence of graphs' logits from those of another graph, in nats a token.

    python -m benchmarks.export.divergence MODEL SOURCE NAME=FOLDER ... --text FILE --windows 100

MODEL has the tokenizer, SOURCE is the folder of the graph that the others are held to; all are
folders of onnxruntime-genai. Prints JSON.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from tokenizers import Tokenizer

LENGTH = 256
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """past: inputs for keys and values of nothing."""

    session: ort.InferenceSession
    past: dict[str, Array]

    @classmethod
    def open(cls, folder: Path) -> "Graph":
        config = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        session = ort.InferenceSession(folder / config["filename"])
        # The builder's inputs do not say how many heads there are.
        empty = np.zeros((1, config["num_key_value_heads"], 0, config["head_size"]), np.float32)
        names = [value.name for value in session.get_inputs()]
        return cls(session, {name: empty for name in names if name.startswith("past")})

    def log_shares(self, ids: Array) -> torch.Tensor:
        """float64 [tokens, vocab] of one text."""
        given = {"input_ids": ids[None], "attention_mask": np.ones((1, ids.size), np.int64)}
        (logits,) = self.session.run(["logits"], given | self.past)
        return torch.from_numpy(logits[0]).double().log_softmax(-1)


def windows(model: Path, text: Path, count: int) -> Array:
    """int64 [windows, LENGTH] of the beginning of a text."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # Enough characters for the tokens, and no more of a large file.
    with text.open(encoding="utf-8") as file:
        ids = tokenizer.encode(file.read(count * LENGTH * 12)).ids
    count = min(count, len(ids) // LENGTH)
    return np.array(ids[: count * LENGTH], np.int64).reshape(count, LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("graphs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, required=True)
    options = parser.parse_args()
    given = dict(pair.split("=", 1) for pair in options.graphs)
    source = Graph.open(options.source)
    graphs = {name: Graph.open(Path(folder)) for name, folder in given.items()}
    ids = windows(options.model, options.text, options.windows)
    sums = dict.fromkeys(graphs, 0.0)
    for row in ids:
        want = source.log_shares(row)
        for name, graph in graphs.items():
            sums[name] += float((want.exp() * (want - graph.log_shares(row))).sum())
    found = {name: round(total / ids.size, 5) for name, total in sums.items()}
    print(json.dumps({"tokens": int(ids.size), "kl_nats_a_token": found}))


if __name__ == "__main__":
    main()
