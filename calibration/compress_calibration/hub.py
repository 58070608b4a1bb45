"""Documents of a data set on the Hugging Face hub, streamed without a download of the whole."""

from collections.abc import Iterator
from typing import Any

from compress.errors import DataError, DependencyError
from compress.text.tokenizer import Tokenizer
from compress_calibration.config import SourceConfig
from compress_calibration.readers import pick_split
from compress_calibration.rows import row_text

# The libraries' own retries take minutes without a network; one short question comes first.
PROBE_SECONDS = 8.0


def read_hub(source: SourceConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """One document a row, in the order of the hub.

    Raises DataError within seconds when the hub is out of reach or has no such data set.
    """
    rows = _open(source)
    for number in _count_up():
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the network, the file format and the loader each have theirs
            raise DataError(
                f"{source.name}: reading row {number} failed: {_line(error)}"
            ) from error
        yield row_text(row, source.field, f"{source.name} row {number}", tokenizer)


def _count_up() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _open(source: SourceConfig) -> Iterator[Any]:
    probe(source.id)
    from datasets import load_dataset

    try:
        data = load_dataset(source.id, source.subset or None, streaming=True)
    except Exception as error:  # a wrong subset, a script-only data set, the network ...
        raise DataError(f"{source.name} cannot be opened: {_line(error)}") from error
    return iter(data[pick_split(list(data), source.split, source.name)])


def probe(name: str) -> None:
    """Ask the hub once whether it has a data set. Raises DataError when not, or out of reach."""
    try:
        import datasets  # noqa: F401 (said here, before any network)
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise DependencyError(
            "sources of kind 'hub' need an extra: pip install 'compress-model[data]'"
        ) from error
    try:
        HfApi().dataset_info(name, timeout=PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError) as error:
        raise DataError(f"the hub refuses data set {name!r}: {_line(error)}") from error
    except Exception as error:  # the HTTP library's own types differ between hub versions
        raise DataError(
            f"data set {name!r}: the hub is out of reach ({_line(error)});"
            " use a local file, a saved data set folder, or kind: self"
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
