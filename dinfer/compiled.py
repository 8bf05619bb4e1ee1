"""numba's cache for this package: one folder for each state of the sources.

numba compares only the file of a compiled function, not those of the functions that it calls: after an update a
stale replay would go on calling yesterday's policies. Import this before decorating anything.
"""

import hashlib
import os
import sys
from pathlib import Path

from numba import config


def cache_directory() -> Path:
    """Where dinfer keeps what it can make again: ``$DINFER_HOME``, or ``~/.cache/dinfer``."""
    return Path(os.environ.get("DINFER_HOME") or Path.home() / ".cache" / "dinfer")


def sources_digest(package: Path) -> str:
    """First 16 hex digits of the SHA-256 of the Python files under ``package`` that speak of numba, names included."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if b"numba" in source:
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + source + b"\0")
    return digest.hexdigest()[:16]


if not config.CACHE_DIR:  # NUMBA_CACHE_DIR, where the user set it, stays
    config.CACHE_DIR = str(cache_directory() / "compiled" / sources_digest(Path(__file__).parent))
    if not config.DISABLE_JIT and not Path(config.CACHE_DIR).exists():
        print("compiling for this CPU, the first time only: up to a minute", file=sys.stderr, flush=True)
