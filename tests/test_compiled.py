"""numba's cache notices a change in any source."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dinfer import compiled
from dinfer.compiled import Announcement, sources_digest

PROBE_TOLD = """
from dinfer import compiled
from numba import njit
from numba.core import event

announcement = compiled.Announcement()
event.register("numba:compile", announcement)

@njit(cache=True)
def twice(x):
    return 2 * x

twice(1)
print(announcement.seconds > 0)
"""
PROBE = "import dinfer.policies, numba; print(numba.config.CACHE_DIR)"


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # into an empty cache it would take a minute


def test_the_digest_changes_with_any_compiled_file_and_name(tmp_path):
    (tmp_path / "a.py").write_text("import numba\n")
    (tmp_path / "b.py").write_text("from numba import njit\n")
    (tmp_path / "plain.py").write_text("x = 1\n")
    first = sources_digest(tmp_path)
    (tmp_path / "plain.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) == first
    (tmp_path / "b.py").write_text("from numba import njit  # changed\n")
    second = sources_digest(tmp_path)
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert len({first, second, sources_digest(tmp_path)}) == 3


def test_compiled_code_lies_under_the_cache_of_these_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("DINFER_HOME", str(tmp_path))
    import dinfer

    digest = sources_digest(Path(dinfer.__file__).parent)
    shown = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(tmp_path / "compiled" / digest)


def test_the_users_own_cache_setting_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    shown = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(tmp_path)


@pytest.mark.parametrize(("seconds", "said"), [((0.4, 0.4, 0.1), False), ((0.4, 0.7, 0.1, 0.1), True)])
def test_long_compiling_is_announced_once(monkeypatch, capsys, seconds, said):
    """Nobody waits a minute without a word; a function within another is a part of its time."""
    clock = iter(np.cumsum([[0, part] for part in seconds]).tolist())
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: next(clock))
    announcement = Announcement()
    for _ in seconds:
        for tell in (announcement.on_start, announcement.on_start, announcement.on_end, announcement.on_end):
            tell(None)
    line = "compiling for this CPU, the first time only: up to a minute\n"
    assert capsys.readouterr().err == (line if said else "")


def test_numba_tells_of_what_it_compiles_and_not_of_what_lies_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_DISABLE_JIT")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "probe.py").write_text(PROBE_TOLD)
    told = [
        subprocess.run([sys.executable, tmp_path / "probe.py"], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert told == ["True\n", "False\n"]
