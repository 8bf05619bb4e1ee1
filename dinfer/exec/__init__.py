"""The executor: runs a plan on a real model and writes the same timeline as the simulator."""

import dinfer.compiled  # noqa: F401 - sets numba's cache before anything is compiled
from dinfer.exec.conversation import Conversation
from dinfer.exec.execute import Session, execute
from dinfer.exec.profile import measure_machine
from dinfer.exec.quality import quality

__all__ = ["Conversation", "Session", "execute", "measure_machine", "quality"]
