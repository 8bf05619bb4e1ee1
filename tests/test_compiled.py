"""numba's cache notices a change in any source."""

import subprocess
import sys
from pathlib import Path

import pytest

from dinfer.compiled import sources_digest

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


@pytest.mark.parametrize(("jit", "there", "said"), [(True, False, True), (True, True, False), (False, False, False)])
def test_the_first_time_is_announced(tmp_path, monkeypatch, jit, there, said):
    """Nobody waits a minute without a word; where all is compiled already, or nothing is to be, there is none."""
    import dinfer

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", str(int(not jit)))
    monkeypatch.setenv("DINFER_HOME", str(tmp_path))
    if there:
        (tmp_path / "compiled" / sources_digest(Path(dinfer.__file__).parent)).mkdir(parents=True)
    command = [sys.executable, "-c", "import dinfer.compiled"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert shown == ("compiling for this CPU, the first time only: up to a minute\n" if said else "")
