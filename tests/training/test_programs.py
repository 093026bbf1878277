"""The cache of compiled programs: what JAX finds in it again, and the effects of damage."""

import os
import threading

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache  # private, as in training/programs.py

from tests.trainer import reports, train
from training import programs
from training.programs import Programs

VALUE = bytes(range(256)) * 40


def silent(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches" / "programs"


def test_a_program_is_found_again_and_no_other(folder):
    Programs(str(folder), silent).put("a", VALUE)
    again = Programs(str(folder), silent)
    assert again.get("a") == VALUE and again.get("b") is None
    assert folder.stat().st_mode & 0o077 == 0, "others could have this user run their code"


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:-1] + b"?"])
def test_a_damaged_program_is_removed_and_written_again(folder, damage):
    kept = Programs(str(folder), silent)
    kept.put("a", VALUE)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert kept.get("a") is None and not list(folder.iterdir())
    kept.put("a", VALUE)
    assert kept.get("a") == VALUE


def test_a_reader_never_sees_half_a_program(folder):
    """One process writes over and over what another reads."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            Programs(str(folder), silent).put("a", VALUE)

    Programs(str(folder), silent).put("a", VALUE)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(Programs(str(folder), silent).get("a") == VALUE for _ in range(300))
    finally:
        done.set()
        writer.join()
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_is_a_file_costs_one_line(folder):
    folder.parent.mkdir()
    folder.write_text("")
    lines: list[str] = []
    kept = Programs(str(folder), lines.append)
    for key in "ab":
        kept.put(key, VALUE)
        assert kept.get(key) is None
    assert (
        len(lines) == 1 and lines[0].startswith(f"{folder}: ") and "compilation_cache" in lines[0]
    )


def test_a_full_disk_costs_one_line_and_leaves_nothing(folder, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    lines: list[str] = []
    kept = Programs(str(folder), lines.append)
    monkeypatch.setattr(programs.os, "replace", full)
    kept.put("a", VALUE)
    kept.put("b", VALUE)
    assert len(lines) == 1 and "No space left on device" in lines[0]
    assert not list(folder.iterdir())


def test_a_folder_that_can_only_be_read_is_read(folder, monkeypatch):
    def refuse(*arguments, **_):
        raise PermissionError(13, "Permission denied")

    lines: list[str] = []
    kept = Programs(str(folder), lines.append)
    kept.put("a", VALUE)
    monkeypatch.setattr(programs.os, "utime", refuse)
    monkeypatch.setattr(programs.tempfile, "mkstemp", refuse)
    kept.put("b", VALUE)
    assert kept.get("a") == VALUE and kept.get("b") is None and len(lines) == 1


def test_the_programs_used_longest_ago_make_room(folder):
    kept = Programs(str(folder), silent, most_bytes=3 * (len(VALUE) + 32))
    for age, key in enumerate("abc"):
        kept.put(key, VALUE)
        os.utime(folder / f"{key}.program", (age, age))
    assert kept.get("a")  # used now
    kept.put("d", VALUE)
    assert [bool(kept.get(key)) for key in "abcd"] == [True, False, True, True]


@pytest.fixture
def kept_by_jax(folder, monkeypatch):
    """JAX caches even the fastest compilation there; its settings are restored after the test."""
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    monkeypatch.setattr(programs, "LEAST_SECONDS", 0.0)
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    programs.keep(str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    compilation_cache.reset_cache()


def test_jax_reads_our_folder_and_its_key_knows_devices_and_options(kept_by_jax):
    def compiled(device: int = 0, level: int = 0) -> int:
        """Programs that are new."""
        before = set(kept_by_jax.iterdir()) if kept_by_jax.exists() else set()
        jax.clear_caches()
        options = {"xla_backend_optimization_level": level}
        x = jax.device_put(jnp.arange(4.0), jax.devices()[device])
        assert jax.jit(lambda x: x * 2 + 1, compiler_options=options)(x)[3] == 7.0
        return len(set(kept_by_jax.iterdir()) - before)

    assert compiled() > 0
    assert compiled() == 0
    assert compiled(level=3) > 0
    assert compiled(device=1) > 0


def test_the_users_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for given, folder in (
        ("/caches", "/caches/kda-trainer"),
        ("", "/home/someone/.cache/kda-trainer"),
        ("relative", "/home/someone/.cache/kda-trainer"),  # to be ignored, says the standard
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert programs.default_folder() == folder


@pytest.mark.slow
def test_a_resumed_run_with_kept_programs_has_the_same_bits(tmp_path):
    """Compiled afresh, then halfway with programs from the folder: all reported values that do not
    depend on time are equal, including the compiled peak."""
    train(tmp_path / "whole", "--config.train.compilation_cache=")
    mine = f"--config.train.compilation_cache={tmp_path / 'programs'}"
    train(tmp_path / "fill", mine, "--config.train.steps=1")
    kept = sorted((tmp_path / "programs").iterdir())
    train(tmp_path / "halves", mine, "--config.train.steps=10")
    train(tmp_path / "halves", mine)
    assert any(file.name.startswith("jit_step-") for file in kept)
    assert sorted((tmp_path / "programs").iterdir()) == kept, "nothing was compiled twice"
    for name in ("learning/loss", "learning/grad_norm", "memory/compiled_peak_bytes"):
        whole, halves = (
            [values[name] for values in reports(tmp_path / run).values()]
            for run in ("whole", "halves")
        )
        assert whole == halves, name
