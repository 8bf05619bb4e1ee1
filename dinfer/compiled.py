"""numba's cache for this package: one folder for each state of the sources.

numba compares only the file of a compiled function, not those of the functions that it calls: after an update a
stale replay would go on calling yesterday's policies. Import this before decorating anything.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from numba import config
from numba.core import event


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


class Announcement(event.Listener):
    """Says on stderr, once, that numba compiles: when it has done so for a second, and nothing lay in its cache."""

    def __init__(self) -> None:
        self.depth, self.seconds, self.said = 0, 0.0, False

    def on_start(self, event: Any) -> None:
        """A function begins to be compiled, perhaps for another that is."""
        if not self.depth:
            self.begun = time.perf_counter()
            if self.seconds > 1 and not self.said:
                print("compiling for this CPU, the first time only: up to a minute", file=sys.stderr, flush=True)
                self.said = True
        self.depth += 1

    def on_end(self, event: Any) -> None:
        """It is compiled."""
        self.depth -= 1
        if not self.depth:
            self.seconds += time.perf_counter() - self.begun


event.register("numba:compile", Announcement())
if not config.CACHE_DIR:  # NUMBA_CACHE_DIR, where the user set it, stays
    config.CACHE_DIR = str(cache_directory() / "compiled" / sources_digest(Path(__file__).parent))
