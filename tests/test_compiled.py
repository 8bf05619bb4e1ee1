"""numba's cache notices a change in any source."""

import subprocess
import sys
from pathlib import Path

from dinfer.compiled import sources_digest

PROBE = "import dinfer.policies, numba; print(numba.config.CACHE_DIR)"


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
