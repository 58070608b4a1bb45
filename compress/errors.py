"""The few exception types a user's mistake can raise.

Every message is one line that says what is wrong (with the value), where, and what would be right.
The command line prints it and exits non-zero; a traceback means a fault of ours.
"""


class CompressError(Exception):
    """Base of everything that a user can cause and can mend."""


class CheckpointError(CompressError):
    """The input checkpoint cannot be used as it is."""


class RecipeError(CompressError):
    """The recipe is malformed, or does not fit this checkpoint."""


class DataError(CompressError):
    """Calibration or evaluation text cannot be read or is too little."""


class OutputError(CompressError):
    """The output folder, the disk or a journal to resume from is in the way."""


class DependencyError(CompressError):
    """An optional package or a compiler is missing; the message names the extra to install."""


class RequestError(CompressError):
    """The engine cannot serve this request, or cannot run within these limits."""
