"""From a model's name to its folder: the bundled model, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import re
import reprlib
from pathlib import Path

from herald.errors import ModelNotFound, WeightsError
from herald.models.weights import weight_files

BUNDLED_NAME = "tiny"
BUNDLED_FOLDER = Path(__file__).parent / "tiny_weights"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# weights, configuration and tokenizer; never code, never another weight format
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]


def resolve_model(name: str | Path) -> Path:
    """The folder of a model.

    Args:
        name: ``"tiny"`` for the bundled model, a folder, or a hub id such as ``JetLM/SDAR-1.7B-Chat``.
            A complete snapshot in the local hub cache is used without asking the network.

    Raises:
        ModelNotFound: says what was looked for and what can be done.
    """
    if str(name) == BUNDLED_NAME:
        return _bundled()
    folder = local_path(name)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        raise ModelNotFound(
            f"the folder {folder} has no config.json", "pass the folder that holds a checkpoint"
        )
    if folder.exists():
        raise ModelNotFound(f"{folder} is a file, not a folder", f"pass its folder, {folder.parent}")
    if not HUB_ID.fullmatch(str(name)):
        raise ModelNotFound(
            f"there is no model {str(name)!r}",
            f"pass a folder, a hub id such as 'JetLM/SDAR-1.7B-Chat', or {BUNDLED_NAME!r}",
        )
    return _from_hub(str(name))


def local_path(name: str | Path) -> Path:
    """``name`` as a path, ``~`` replaced, whether something is there or not.

    Raises:
        ModelNotFound: it cannot be a path.
    """
    try:
        folder = Path(name).expanduser()
        folder.exists()
    except (OSError, ValueError, RuntimeError) as error:
        # too long, a NUL in it, an unknown home
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFound(
            f"there is no model {reprlib.repr(str(name))} ({reason})",
            f"pass a folder, a hub id, or {BUNDLED_NAME!r}",
        ) from error
    return folder


def _bundled() -> Path:
    if not (BUNDLED_FOLDER / "config.json").is_file():
        raise ModelNotFound(
            f"the bundled model {BUNDLED_NAME!r} is not in this installation ({BUNDLED_FOLDER})",
            "install a released herald-dllm, or pass a folder or a hub id",
        )
    return BUNDLED_FOLDER


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        cached = Path(snapshot_download(repo_id, allow_patterns=HUB_PATTERNS, local_files_only=True))
        if _is_complete(cached):
            return cached
    except (OSError, ValueError):
        # not there, not readable, or no valid name: the second attempt says which
        pass

    by_hand = f"run `hf download {repo_id}` where there is a network and pass the folder"
    try:
        return Path(snapshot_download(repo_id, allow_patterns=HUB_PATTERNS))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{repo_id} on the hub needs its terms accepted",
            f"accept them there and run `hf auth login`, or {by_hand}",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"there is no folder and no public hub model {repo_id!r}",
            "check the spelling, or run `hf auth login` for a private model",
        ) from error
    # whatever the network stack raises, the user needs one answer
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFound(
            f"{repo_id} is not in the local hub cache and cannot be downloaded ({reason[0]})",
            f"connect and unset HF_HUB_OFFLINE, or {by_hand}",
        ) from error


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    try:
        return bool(weight_files(folder))
    except WeightsError:
        return False
