"""Whether compiled code may run as COMPRESS_MODEL_ISA says."""

import os

from compress.errors import RequestError


def check_instruction_set() -> None:
    """RequestError, before anything is read, where COMPRESS_MODEL_ISA cannot run here."""
    if not os.environ.get("COMPRESS_MODEL_ISA"):
        return  # and torch need not be imported
    from compress_kernels.cpu import levels

    try:
        levels.chosen()
    except levels.InstructionSetError as error:
        raise RequestError(str(error)) from None
