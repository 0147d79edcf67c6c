"""The folder of session files: names, checks of what lies there, removal, sweep.

Session files are transcripts. The folder is private, one proxy owns it, file names are random and made here alone, and
a file lives no longer than its ticket.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from splitproxy.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - session files belong in RAM
DEFAULT_DIR = SHARED_MEMORY / "splitproxy"
MEMORY_NEEDED_BYTES = 6 * 1024**3
FRESH_S = 60.0
_FRESH_PREFIX = "splitproxy-run-"
_PREFIX, _SUFFIX = "splitproxy-", ".session"
_UNFINISHED = ".{}.*.tmp"  # how a Strata engine names a file that it writes; one that dies leaves it behind


def fresh_dir(*, needed_bytes: int = MEMORY_NEEDED_BYTES) -> Path:
    """A new private folder: in RAM when more than `needed_bytes` are free there, else in the temp folder.

    Folders of this kind that a killed proxy has left behind are removed first: each holds transcripts, and its name is
    known to nobody else.
    """
    roomy = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > needed_bytes
    parent = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
    for folder in parent.glob(f"{_FRESH_PREFIX}*"):
        if _is_abandoned(folder):
            log.warning("removed %s, which a killed proxy had left behind", folder)
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_FRESH_PREFIX, dir=parent))


def _is_abandoned(folder: Path) -> bool:
    """Whether a fresh folder of this user has no owner any more. One that was just made may not be locked yet."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return time.time() - status.st_mtime > FRESH_S
    finally:
        os.close(lock)


def hold(folder: Path) -> int:
    """Make a folder ours while the returned descriptor is open. Raises OSError."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


class SessionStore:
    """One folder of session files, owned by this process while the store is open.

    Raises ConfigError when the folder cannot be made, is not private, or belongs to another proxy that runs.
    """

    def __init__(self, folder: Path, *, remove_at_close: bool = False) -> None:
        self.folder = folder
        self._remove_at_close = remove_at_close
        self._live: set[str] = set()
        self._lock: int | None = None
        self._refused_bytes: int | None = None  # the least that the folder could not take; None: it is not full

    def open(self) -> Self:
        """Make the folder private and ours, and remove what an earlier run has left in it."""
        try:
            self._make()
            self._make_private()
            self._lock = hold(self.folder)
        except BlockingIOError:
            self._unlock()
            raise ConfigError([f"split.dir = {str(self.folder)!r}: another splitproxy is using this folder"]) from None
        except OSError as error:
            self._unlock()
            raise ConfigError([f"split.dir = {str(self.folder)!r}: cannot be used: {error.strerror}"]) from None
        if swept := self.sweep():
            log.warning("removed %d session files that an earlier run had left in %s", swept, self.folder)
        return self

    def _make(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(20, "it is not a folder") from None
        except NotADirectoryError:
            raise NotADirectoryError(20, "something above it is not a folder") from None

    def _make_private(self) -> None:
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(20, "it is a link; name the folder itself")
        if status.st_mode & 0o077:
            if status.st_uid != os.geteuid():
                raise PermissionError(13, "others can read it, and it belongs to another user")
            # A folder with other things in it is somebody's, /tmp for example: its mode is not ours to change.
            if any(not path.name.startswith(_PREFIX) for path in self.folder.iterdir()):
                raise PermissionError(13, "others can read it, and it holds other files; make one with mkdir -m 700")
            self.folder.chmod(0o700)

    def new_name(self) -> str:
        """A name for a session file that is about to be written."""
        name = f"{_PREFIX}{secrets.token_hex(16)}{_SUFFIX}"
        self._live.add(name)
        return name

    async def read(self, name: str, reader: Callable[[Path], T]) -> T:
        """Look at a file in a thread, after making sure that only its owner can read it. Raises OSError, ValueError."""

        def work() -> T:
            path = self.folder / name
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no regular file")
            if status.st_uid == os.geteuid():
                path.chmod(0o600)  # engines create it for everybody to read
            return reader(path)

        return await asyncio.to_thread(work)

    async def remove(self, name: str) -> None:
        """Remove a file if it is there. A failure is logged; the next sweep tries again."""
        try:
            # Until then it is no stray file.
            await asyncio.to_thread(self._take_away, self.folder / name)
            for path in self.folder.glob(_UNFINISHED.format(name)):
                self._unlink(path)
        finally:
            self._live.discard(name)

    def _take_away(self, path: Path) -> None:
        """Remove a file's name, and let its memory go behind the caller's back: for 57 MB that takes 8 ms."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it is not there, or not ours to read
            self._unlink(path)
            return
        self._unlink(path)
        threading.Thread(target=os.close, args=(handle,), name="free a session file").start()

    def sweep(self) -> int:
        """Remove every session file that no ticket stands for, such as one written after its deadline."""
        stray = [path for path in self.folder.glob(f"{_PREFIX}*{_SUFFIX}") if path.name not in self._live]
        unfinished = self.folder.glob(_UNFINISHED.format(f"{_PREFIX}*{_SUFFIX}"))
        stray += [path for path in unfinished if f"{path.name[1:].partition(_SUFFIX)[0]}{_SUFFIX}" not in self._live]
        return sum(self._unlink(path) for path in stray)

    def _unlink(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.error("cannot remove the session file %s: %s", path, error.strerror)
            return False
        return True

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def can_hold(self, session_bytes: int) -> bool:
        """Whether the folder has space for so many bytes of session files, those counted in that lie there already.

        Others may fill it as well: what was free at the start tells little. A change is logged once.
        """
        space = self.free_bytes() + sum(self._size(name) for name in self._live)
        fits = session_bytes <= space
        if not fits and self._refused_bytes is None:
            log.warning(
                "%s has space for %.0f MiB of session files and would need %.0f: prompts are not handed over",
                self.folder, space / 2**20, session_bytes / 2**20,
            )  # fmt: skip
        if not fits:
            self._refused_bytes = min(session_bytes, self._refused_bytes or session_bytes)
        elif self._refused_bytes is not None and session_bytes >= self._refused_bytes:
            log.info("%s has space for session files again", self.folder)
            self._refused_bytes = None
        return fits

    def _size(self, name: str) -> int:
        """What a session file takes on its device; nothing when it is not written yet, or gone."""
        try:
            return 512 * (self.folder / name).lstat().st_blocks
        except OSError:
            return 0

    def close(self) -> None:
        """Remove all session files, and the folder where it was made for this run."""
        self._live.clear()
        self.sweep()
        if self._remove_at_close:
            try:
                self.folder.rmdir()
            except OSError as error:
                log.error("cannot remove the session folder %s: %s", self.folder, error.strerror)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
