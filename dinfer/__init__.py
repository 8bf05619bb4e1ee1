"""dinfer: plan and run LLMs that do not fit on the GPU; one Plan, two readers.

Names are loaded when first used, so that ``import dinfer`` stays light: simulating loads no torch.
"""

import importlib

_HOMES = {
    "InputError": "errors",
    "Machine": "machine",
    "ModelSpec": "model",
    "Placement": "placement",
    "Plan": "plan",
    "PlanWarning": "errors",
    "Run": "timeline",
    "Timeline": "timeline",
    "Trace": "trace",
    "execute": "exec",
    "load_machine": "machine",
    "load_model": "model",
    "make_plan": "solve",
    "measure_machine": "exec",
    "record_trace": "record",
    "simulate": "sim",
}

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "Machine",
    "ModelSpec",
    "Placement",
    "Plan",
    "PlanWarning",
    "Run",
    "Timeline",
    "Trace",
    "execute",
    "load_machine",
    "load_model",
    "make_plan",
    "measure_machine",
    "record_trace",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dinfer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
