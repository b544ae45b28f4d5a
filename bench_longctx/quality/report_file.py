"""The file of a report: that it can be written at all, and by one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from bench_longctx import output
from herald.errors import UsageError

_OTHER = "name another --json file"


class ReportLost(OSError):
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
        _make_folder(path)
        output.check_file(path)
        # of the file that a link leads to, so that two names of one file have one lock
        self._target = Path(os.path.realpath(path))
        self._beside = self._target.with_name(self._target.name + ".lock")
        self._lock: int | None = self._taken()

    def write(self, content: dict[str, Any]) -> None:
        """Put ``content`` in the place of what is there, whole or not at all.

        Raises:
            ReportLost: it cannot be written, for want of room say.
        """
        part = self._target.with_name(self._target.name + ".part")
        try:
            part.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(part, self._target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ReportLost(
                f"{self.path} cannot be written ({error}); make room and run again: it goes on with its cells"
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
    """Refuse to read what is no regular file: a device may have no end, and a pipe waits.

    Raises:
        UsageError: it is a folder, a device or a pipe, or the name cannot be one of a file.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{str(path)[:60]!r} cannot be a report ({reason})", "name a JSON file") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise UsageError(f"{path} is {what}", "name a JSON file")


def _make_folder(path: Path) -> None:
    # what is wrong says the check of the file, in its words
    with contextlib.suppress(OSError, ValueError):
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
