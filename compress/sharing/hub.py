"""A result on the Hugging Face hub: what can be known of it before the work, and the upload."""

import os
import re
from pathlib import Path
from typing import Any

from compress.errors import OutputError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PROBE_SECONDS = 5.0
_OFFLINE = ("1", "ON", "YES", "TRUE")


def check_push(repo: str) -> None:
    """OutputError, before any work, for a name that is none, without a token and without a net."""
    if _REPO.fullmatch(repo) is None:
        raise OutputError(f"push is {repo!r}; it is a repository of the hub, such as you/small")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _OFFLINE:
        raise OutputError(f"cannot push to {repo}: HF_HUB_OFFLINE is set; unset it, or do not push")
    hub = _hub()
    if not hub.get_token():
        raise OutputError(
            f"cannot push to {repo}: there is no token of the hub; run `hf auth login`, or set"
            " HF_TOKEN"
        )
    try:
        _whoami(hub)
    except Exception as error:  # types differ between versions of the hub's HTTP client
        raise OutputError(
            f"cannot push to {repo}: the hub does not answer, or refuses the token"
            f" ({_one_line(error)}); check both, or do not push"
        ) from error


def push(repo: str, folder: Path) -> str:
    """Upload a folder into the repository, made private where there is none; returns its address.

    OutputError where that fails: the folder stays, and the line that uploads it is in the message.
    """
    again = f"the result is whole in {folder}; `hf upload {repo} {folder}` uploads it"
    try:
        api = _hub().HfApi()
        address = api.create_repo(repo, private=True, exist_ok=True)
        message = "A checkpoint made by compress-model"
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message=message)
    except KeyboardInterrupt:
        raise OutputError(f"stopped while {folder} was pushed to {repo}; {again}") from None
    except Exception as error:  # as above
        raise OutputError(f"cannot push to {repo}: {_one_line(error)}; {again}") from error
    return str(address)


def _hub() -> Any:
    """Late: it loads an HTTP client. It comes with transformers."""
    import huggingface_hub

    return huggingface_hub


def _whoami(hub: Any) -> None:
    """Raises unless the hub knows the token, within seconds."""
    import concurrent.futures

    # The call has no limit of its own, and a net that swallows packets would hold it for minutes.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        pool.submit(hub.HfApi().whoami).result(timeout=_PROBE_SECONDS)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
