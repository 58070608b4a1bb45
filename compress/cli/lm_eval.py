"""`python -m compress.cli.lm_eval …`: lm-evaluation-harness' own command, knowing compress_model.

Releases of the harness up to 0.4.13 look for models in their own tree only. Later ones find the
entry point `lm_eval.models` of this package, and `lm_eval …` does the same.
"""

import importlib
import sys

from compress.errors import CompressError, DependencyError

MODEL = "compress_model"
PLACE = "compress.serve.harness:HarnessModel"


def register() -> None:
    """Tells the harness of compress_model. DependencyError where it is not installed."""
    try:
        # Its own models first: it looks for them only while nothing is registered.
        importlib.import_module("lm_eval.models")
        registry = importlib.import_module("lm_eval.api.registry").model_registry
    except ImportError as error:
        raise DependencyError(
            f"lm-evaluation-harness is missing ({error}); pip install compress-model[harness]"
        ) from error
    except AttributeError as error:
        raise DependencyError(
            "this lm-evaluation-harness is too old; pip install -U compress-model[harness]"
        ) from error
    if MODEL not in registry:
        registry.register(MODEL, target=PLACE)


def main() -> int:
    """Runs the harness on this process's arguments; a user's mistake is one line and exit code 2.

    Only mistakes about the checkpoint and model_args are; the harness speaks for itself otherwise.
    """
    try:
        register()
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
