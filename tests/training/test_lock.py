"""One run per folder, and the names of runs."""

import fcntl

import pytest

from training.lock import LockError, lock, owner


def test_a_second_lock_is_refused_until_the_first_is_closed(tmp_path):
    with lock(str(tmp_path / "a"), "--workdir"):
        with pytest.raises(LockError, match=r"^--workdir=.*/a: another run is using it"):
            lock(str(tmp_path / "a"), "--workdir")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        with pytest.raises(LockError):
            lock(str(tmp_path / "b"), "--workdir")
    lock(str(tmp_path / "a"), "--workdir").close()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(LockError, match="its file system has no locks"):
        lock(str(tmp_path), "--workdir")
    lock(str(tmp_path), "config.checkpoint.directory", needed=False).close()


@pytest.mark.parametrize("content", [b"", b"\xff\x00\n", b"0123456789ab more", "é".encode() * 12])
def test_a_damaged_id_is_replaced(tmp_path, content):
    (tmp_path / ".run_id").write_bytes(content)
    first = owner(str(tmp_path))
    assert first == owner(str(tmp_path)) and len((tmp_path / ".run_id").read_bytes()) == 12


def test_a_run_keeps_its_name_and_no_other_has_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, other = owner(str(tmp_path / "a")), owner(str(tmp_path / "b"))
    assert first == owner(str(tmp_path / "a")) != other
    moved = tmp_path / "a"
    assert first.split("run ")[1] == owner(str(moved)).split("run ")[1] != other.split("run ")[1]
    assert first.isascii() and "\n" not in first
