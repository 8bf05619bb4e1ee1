"""Traces from real models and from statistics, what they show, and the predictors trained on them.

Import from the modules: ``fetch``, ``recorder``, ``calibrate``, ``stats``. The room itself exports only
``record_trace``, when it is first used: its other names are its modules' names, and ``stats`` loads no torch.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "record_trace":
        raise AttributeError(f"module 'dinfer.record' has no attribute {name!r}")
    from dinfer.record.recorder import record

    return record
