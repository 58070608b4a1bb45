"""Run by vLLM's own python: score and continue one prompt, print one line of JSON.

usage: vllm_scores.py CHECKPOINT DTYPE PROMPT_IDS(json) NEW_TOKENS
"""

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    checkpoint, dtype, prompt, count = sys.argv[1:]
    ids = json.loads(prompt)
    engine = LLM(
        model=checkpoint,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=len(ids) + int(count) + 1,
        skip_tokenizer_init=True,
    )
    settings = SamplingParams(
        temperature=0, max_tokens=int(count), prompt_logprobs=5, ignore_eos=True, detokenize=False
    )
    output = engine.generate([{"prompt_token_ids": ids}], settings)[0]
    scores = [
        {str(token): entry.logprob for token, entry in position.items()}
        for position in output.prompt_logprobs or ()
        if position is not None  # the first token has none
    ]
    result: dict[str, Any] = {"tokens": list(output.outputs[0].token_ids), "logprobs": scores}
    print("SCORES " + json.dumps(result))


if __name__ == "__main__":  # vLLM starts workers by importing this file again
    main()
