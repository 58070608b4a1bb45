"""The load of the engine's benchmarks: requests that are all there at the start."""

import math
import random

from compress.speed.load import LoadRequest

SHORTEST, LONGEST = 16, 256


def make_load(count: int, vocabulary: int, seed: int = 0) -> list[LoadRequest]:
    """Lengths of prompts and outputs are log-uniform in 16 to 256 tokens, each by itself."""
    generator = random.Random(seed)

    def length() -> int:
        return round(math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST))))

    sizes = [(length(), length()) for _ in range(count)]
    return [
        LoadRequest(tuple(generator.randrange(1, vocabulary) for _ in range(prompt)), output)
        for prompt, output in sizes
    ]
