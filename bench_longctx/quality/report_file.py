"""The file of a report: that it can be written at all, and by one run at a time."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from herald.errors import HeraldError, UsageError

_OTHER = "name another --json file"


class ReportLost(HeraldError):
    """Finished cells cannot be written."""


class ReportFile:
    """A JSON file that this run alone writes, from its beginning to `close`.

    A file beside it, with ".lock" at its end, is locked meanwhile and is gone afterwards; that of a run that
    was killed stays and holds nothing up.

    Args:
        path: of the file; its folder is made.

    Raises:
        UsageError: it is a folder or a device, cannot be written, or another run writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beside = path.with_name(path.name + ".lock")
        check_regular(path)
        _check_folder(path.absolute().parent)
        self._lock: int | None = self._taken()

    def write(self, content: dict[str, Any]) -> None:
        """Put ``content`` in the place of what is there, whole or not at all.

        Raises:
            ReportLost: it cannot be written, for want of room say.
        """
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ReportLost(
                f"{self.path} cannot be written ({error})",
                "make room and run again: it goes on with the cells in it",
            ) from error

    def close(self) -> None:
        """Let others write the file."""
        if self._lock is not None:
            self._beside.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _taken(self) -> int:
        try:
            while True:
                lock = os.open(self._beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # another run may have removed it between the two lines above
                    if _same(os.fstat(lock), self._beside):
                        return lock
                except BaseException:
                    os.close(lock)
                    raise
                os.close(lock)
        except BlockingIOError as error:
            raise UsageError(
                f"another run is writing {self.path}", f"wait for its end, or {_OTHER}"
            ) from error
        except OSError as error:
            raise UsageError(f"{self.path} cannot hold the report ({error})", _OTHER) from error


def _same(opened: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(opened, path.stat())
    except FileNotFoundError:
        return False


def check_regular(path: Path) -> None:
    """Refuse what is there and is no regular file, without reading from it.

    Raises:
        UsageError: it is a folder, a device or a pipe, or the name cannot be one of a file.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)[:60]!r} cannot be a report ({_reason(error)})", "name a JSON file"
        ) from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise UsageError(f"{path} is {what}", "name a JSON file")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _check_folder(folder: Path) -> None:
    """Make the folder of a report, before anything is computed that it is for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no right to write to {folder}")
    except OSError as error:
        raise UsageError(f"{folder} cannot hold the report ({error})", _OTHER) from error
