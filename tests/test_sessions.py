"""The folder of session files: private, one proxy's own, and empty when nobody holds a ticket."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from splitproxy.books import sessions
from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "sessions"


@pytest.fixture
def store(folder: Path) -> Iterator[SessionStore]:
    with SessionStore(folder) as opened:
        yield opened


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def written(store: SessionStore, data: bytes = b"text", *, permissions: int = 0o644) -> str:
    name = store.new_name()
    (store.folder / name).write_bytes(data)
    (store.folder / name).chmod(permissions)
    return name


# --- the folder


def test_a_new_folder_is_private(store: SessionStore) -> None:
    """The folder is made with all above it, and nobody else can look into it."""
    assert mode(store.folder) == 0o700


@pytest.mark.parametrize("permissions", [0o755, 0o777, 0o750, 0o701])
def test_a_folder_that_others_can_read_is_made_private(folder: Path, permissions: int) -> None:
    """Our own folder that stood open is closed before anything is written."""
    folder.mkdir(parents=True)
    folder.chmod(permissions)
    with SessionStore(folder):
        assert mode(folder) == 0o700


def test_another_users_open_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others can read and that is not ours cannot be made private, so it is not used."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        SessionStore(folder).open()
    assert mode(folder) == 0o755


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A file, or a link to a folder that may be anybody's, is not taken for the session folder."""
    file, real, link = tmp_path / "file", tmp_path / "real", tmp_path / "link"
    file.touch()
    real.mkdir()
    link.symlink_to(real)
    faults = {
        file: "it is not a folder",
        Path("/dev/null"): "it is not a folder",
        file / "below": "something above it is not a folder",
        link: "it is a link",
    }
    for path, fault in faults.items():
        with pytest.raises(ConfigError, match=f"cannot be used: {fault}"):
            SessionStore(path).open()
    assert list(real.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_fault_in_words() -> None:
    """The sentence names the key, the folder and the system's reason."""
    with pytest.raises(ConfigError, match=r"split\.dir = '/proc/nowhere': cannot be used: "):
        SessionStore(Path("/proc/nowhere")).open()


# --- one proxy's own


def test_a_folder_has_one_owner_at_a_time(store: SessionStore, folder: Path) -> None:
    """A second proxy is refused, removes nothing of the first, and gets the folder when that one is done."""
    name = written(store)
    with pytest.raises(ConfigError, match="another splitproxy is using"):
        SessionStore(folder).open()
    assert (folder / name).exists()
    store.close()
    with SessionStore(folder):
        assert not (folder / name).exists()


def test_a_killed_owner_owns_nothing(folder: Path) -> None:
    """The lock ends with its process, however that ends; what it left is swept."""
    script = (
        "import os, sys; from pathlib import Path; from splitproxy.books.sessions import SessionStore\n"
        f"store = SessionStore(Path({str(folder)!r})).open()\n"
        "(store.folder / store.new_name()).write_bytes(b'text'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert len(list(folder.iterdir())) == 1
    with SessionStore(folder):
        assert list(folder.iterdir()) == []


# --- files


def test_names_are_ours_alone(store: SessionStore) -> None:
    """Names are random, and such that an engine takes them for plain file names."""
    names = {store.new_name() for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("splitproxy-") and name.endswith(".session") and "/" not in name for name in names)
    assert all(len(name) < 100 and name.isascii() for name in names)


async def test_a_file_is_made_private_before_it_is_read(store: SessionStore) -> None:
    """Engines leave files open to all; whoever looks at one closes it first."""
    name = written(store, b"the text")
    seen = await store.read(name, lambda path: (path.read_bytes(), mode(path)))
    assert seen == (b"the text", 0o600)


async def test_a_file_of_another_user_is_read_as_it_is(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's file that is not ours keeps its mode; the folder around it is private."""
    name = written(store)
    monkeypatch.setattr(os, "geteuid", lambda: store.folder.stat().st_uid + 1)
    assert await store.read(name, mode) == 0o644


async def test_a_missing_file_is_told_from_a_bad_one(store: SessionStore) -> None:
    """No file is an OSError; the reader's own ValueError comes through."""

    def refuse(path: Path) -> None:
        raise ValueError("bad")

    with pytest.raises(FileNotFoundError):
        await store.read(store.new_name(), refuse)
    with pytest.raises(ValueError, match="bad"):
        await store.read(written(store), refuse)


async def test_a_link_is_not_followed(store: SessionStore, tmp_path: Path) -> None:
    """A link in the place of a session file is not read, does not change its target's mode, and is removed alone."""
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    target.chmod(0o644)
    name = store.new_name()
    (store.folder / name).symlink_to(target)
    with pytest.raises(ValueError, match="no regular file"):
        await store.read(name, Path.read_bytes)
    await store.remove(name)
    assert not (store.folder / name).is_symlink()
    assert (target.read_bytes(), mode(target)) == (b"mine", 0o644)


async def test_removing_twice_is_removing(store: SessionStore) -> None:
    """A file that is gone, or never was, is as good as removed."""
    name = written(store)
    await store.remove(name)
    assert list(store.folder.iterdir()) == []
    await store.remove(name)
    await store.remove(store.new_name())


async def test_a_removal_that_fails_is_logged(store: SessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be removed is no exception, and leaves its name in the log."""
    name = store.new_name()
    (store.folder / name).mkdir()
    await store.remove(name)
    assert f"cannot remove the session file {store.folder / name}" in caplog.text
    (store.folder / name).rmdir()


# --- sweeping


async def test_a_sweep_keeps_what_a_ticket_stands_for(store: SessionStore, tmp_path: Path) -> None:
    """Late and forgotten session files go, links with them; live ones and other people's files stay."""
    live, gone = written(store), written(store)
    await store.remove(gone)
    (store.folder / gone).write_bytes(b"late")
    stray = store.folder / "splitproxy-old.session"
    stray.symlink_to(tmp_path / "precious")
    (tmp_path / "precious").touch()
    (store.folder / "notes.txt").touch()
    assert store.sweep() == 2
    assert {path.name for path in store.folder.iterdir()} == {live, "notes.txt"}
    assert (tmp_path / "precious").exists()
    assert store.sweep() == 0


def test_opening_sweeps_what_an_earlier_run_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transcripts of a run that was killed do not stay, and the log says how many there were."""
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"splitproxy-{number}.session").touch()
    with SessionStore(folder):
        assert list(folder.iterdir()) == []
    assert "removed 3 session files" in caplog.text


def test_closing_removes_live_files_too(folder: Path) -> None:
    """After the end no session file is left; a folder that was named stays."""
    with SessionStore(folder) as store:
        written(store)
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_closing_removes_a_folder_of_its_own(folder: Path) -> None:
    """A folder that was made for this run goes with it."""
    with SessionStore(folder, remove_at_close=True) as store:
        written(store)
    assert not folder.exists()


def test_closing_leaves_what_others_put_there(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is not ours is not removed, and keeps the folder; the end goes on."""
    store = SessionStore(folder, remove_at_close=True).open()
    (folder / "core").touch()
    store.close()
    assert (folder / "core").exists()
    assert "cannot remove the session folder" in caplog.text
    with SessionStore(folder):
        pass


# --- where it is


@pytest.mark.parametrize(
    ("free", "writable", "in_ram"),
    [(6 * 2**30 + 1, True, True), (6 * 2**30, True, False), (2**40, False, False)],
)
def test_where_a_fresh_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, writable: bool, in_ram: bool
) -> None:
    """In RAM when that is writable and has more than 6 GiB free, else in the temp folder; private in both."""
    ram, temp = tmp_path / "shm", tmp_path / "tmp"
    ram.mkdir()
    temp.mkdir()
    monkeypatch.setattr(sessions, "SHARED_MEMORY", ram)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    monkeypatch.setattr(os, "access", lambda _path, _how: writable)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    found = fresh_dir()
    assert found.parent == (ram if in_ram else temp)
    assert mode(found) == 0o700


def test_free_bytes_are_those_of_the_folder(store: SessionStore) -> None:
    """The room for session files is what is free where they go."""
    assert 0 < store.free_bytes() <= shutil.disk_usage(store.folder).total


def test_a_full_folder_is_told_once(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies there already counts as space for session files; each change is one line in the log."""
    caplog.set_level("INFO")
    written(store, b"x" * 2**20)
    store.new_name()  # not written yet
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2**20))
    assert store.can_hold(2 * 2**20)
    assert not store.can_hold(2 * 2**20 + 4096)
    assert not store.can_hold(3 * 2**20)
    assert store.can_hold(0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has space for 2 MiB of session files" in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2 * 2**20))
    assert store.can_hold(3 * 2**20)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.parametrize(("age_s", "owned", "stays"), [(120, False, False), (120, True, True), (0, False, True)])
def test_a_folder_that_a_killed_proxy_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, age_s: float, owned: bool, stays: bool
) -> None:
    """The next start removes a private folder that nobody owns, and no other."""
    monkeypatch.setattr("splitproxy.books.sessions.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("splitproxy.books.sessions.MEMORY_NEEDED_BYTES", 0)
    left = fresh_dir()
    (left / f"splitproxy-{'0' * 32}.session").write_text("transcript")
    store = SessionStore(left)
    if owned:
        store.open()
    os.utime(left, (time.time() - age_s,) * 2)
    fresh_dir()
    assert left.exists() is stays
    if owned:
        store.close()


async def test_what_an_engine_had_begun_to_write_goes_too(tmp_path: Path) -> None:
    """A hidden file that an engine left behind when it died holds a transcript as well."""
    with SessionStore(tmp_path / "sessions") as store:
        name, other = store.new_name(), store.new_name()
        begun = [store.folder / f".{found}.0123456789abcdef.tmp" for found in (name, other)]
        for path in begun:
            path.touch()
        await store.remove(name)
        assert [path.exists() for path in begun] == [False, True]
        assert store.sweep() == 0  # the other is being written
        late = store.folder / f".{name}.0123456789abcdef.tmp"
        late.touch()
        assert (store.sweep(), late.exists(), begun[1].exists()) == (1, False, True)
