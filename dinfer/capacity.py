"""What runs on a given GPU with a given memory beside it, and how fast: the catalogue's models, one row each.

Models with published activity are simulated on a synthetic trace drawn from it; the others are dense, in closed form.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dinfer import bits
from dinfer.errors import InputError, PlanWarning
from dinfer.machine import Machine
from dinfer.model import BITS_PER_WEIGHT, ModelSpec, catalogue_models
from dinfer.record.presets import PRESETS, preset
from dinfer.record.synth import profile, synth
from dinfer.sim import simulate
from dinfer.solve import make_plan
from dinfer.systems import llama_cpp
from dinfer.timeline import Run
from dinfer.trace import Trace
from dinfer.units import format_bytes

DTYPES = ("float16", "int8", "int4")
"""Precisions that are tried, the best first."""

LENT = {"opt-13b": "opt-6.7b", "opt-30b": "opt-6.7b", "opt-66b": "opt-6.7b"}
"""Models without published statistics of their own -> the sibling whose statistics they are given."""

SYSTEM_PARTS = 10
"""One part in this many of the host's memory stays with the operating system and everything else. Ours."""

TOKENS = 8
"""Decode tokens that are simulated: the placement does not move, so that few will do."""

COLUMNS = (
    *("model", "dtype", "way", "tokens_per_second", "gpu_share", "vram_bytes", "ram_bytes", "bound_by", "verdict"),
    "note",
)


def capacity(
    machine: Machine,
    models: Sequence[str] = (),
    *,
    target: float | None = None,
    context: int = 512,
    dtypes: Sequence[str] = DTYPES,
    tell: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """One row a catalogue model (default: all) on ``machine``, columns COLUMNS, the fastest first.

    ``dtype`` is the first of ``dtypes`` that fits and reaches ``target`` tokens/s; where none does, the fastest that
    fits. ``way``: ``neurons`` places neurons and computes the rest on the CPU, exactly (a static plan, no predictor);
    ``layers`` splits a dense model as llama.cpp does; ``gpu`` holds all. ``gpu_share`` is of the FFN's bytes.
    ``bound_by``: the stream that is busiest, or what there is too little of. Speeds are simulated: of ``neurons`` on
    ``TOKENS`` synthetic tokens, of the others in closed form at ``context`` tokens. ``tell`` is told models done and
    models in all. Raises InputError for an unknown model or dtype, a target of 0 or less, or a context below 1.
    """
    chosen = _check(models, target, context, dtypes)
    rows = []
    for number, spec in enumerate(chosen, start=1):
        rows.append(_row(spec, machine, target, context, dtypes))
        if tell is not None:
            tell(number, len(chosen))
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values("tokens_per_second", ascending=False, kind="stable", ignore_index=True)


def _check(models: Sequence[str], target: float | None, context: int, dtypes: Sequence[str]) -> list[ModelSpec]:
    catalogue = catalogue_models()
    for name in models:
        if name not in catalogue:
            raise InputError(f"model {name!r} is not in the catalogue ({', '.join(catalogue)})")
    for dtype in dtypes:
        if dtype not in BITS_PER_WEIGHT:
            raise InputError(f"dtype {dtype!r} is not one of {', '.join(BITS_PER_WEIGHT)}")
    if not dtypes:
        raise InputError(f"no dtype given; name some of {', '.join(BITS_PER_WEIGHT)}")
    if target is not None and not 0 < target < float("inf"):
        raise InputError(f"target is {target:g} tokens/s; it must be above 0")
    if context < 1:
        raise InputError(f"context is {context}; it must be at least 1 token")
    return [catalogue[name] for name in models or catalogue]


def _row(
    spec: ModelSpec, machine: Machine, target: float | None, context: int, dtypes: Sequence[str]
) -> dict[str, Any]:
    """The model's row: tries the dtypes in order."""
    context = min(context, spec.max_positions)
    load = _activity(spec, context)
    tried = []
    for dtype in dtypes:
        row = _try(spec.with_dtype(dtype) if dtype != spec.dtype else spec, machine, context, load)
        tried.append(row)
        if row["tokens_per_second"] >= (target or 0):
            break
    best = max(tried, key=lambda row: np.nan_to_num(row["tokens_per_second"], nan=-1))
    speed = best["tokens_per_second"]
    if not speed > 0:
        best["verdict"] = "does not fit"
    elif target is None:
        best["verdict"] = "runs"
    else:
        best["verdict"] = "reaches it" if speed >= target else "too slow"
    return best


def _activity(spec: ModelSpec, context: int) -> tuple[Trace, np.ndarray | None, str]:
    """Tokens to decode, the offline profile [layer, neuron] where activity is known, and what is to be said of it."""
    source = LENT.get(spec.name, spec.name)
    prompt = max(1, context - TOKENS)
    if source in PRESETS:
        statistics = preset(source)
        trace = synth(spec, statistics, TOKENS, 1, prompt=prompt)
        sparsity = f"synthetic, {1 - statistics.density:.0%} sparse"
        return trace, profile(spec, statistics), sparsity + (f" as {source}" if source != spec.name else "")
    tokens = pd.DataFrame({"id": 0, "sequence": 0, "position": prompt + np.arange(TOKENS), "phase": "decode"})
    active = bits.pack(np.ones((1, 1, spec.neurons), bool))
    everyone = np.broadcast_to(active, (TOKENS, spec.layers, spec.words))
    return Trace(spec, tokens, everyone), None, "dense: no activity is published"


def _try(spec: ModelSpec, machine: Machine, context: int, load: tuple[Trace, np.ndarray | None, str]) -> dict[str, Any]:
    """One dtype's row; where it does not fit, without a speed and with what lacks."""
    trace, frequency, note = load
    trace = replace(trace, spec=spec)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, np.nan)
    row |= {"model": spec.name, "dtype": spec.dtype, "way": "neurons" if frequency is not None else "layers"}
    row |= {"bound_by": "", "verdict": "", "note": note}
    vram = machine.gpu.memory_bytes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)
            if frequency is None:
                run = llama_cpp(trace, machine, vram, context=context)
                memory = run.timeline.meta["memory"]
            else:
                plan = make_plan(trace, machine, vram, context=context, cache="static", frequency=frequency, spec=spec)
                run, memory = simulate(plan, trace, spans=False), plan.memory
    except InputError as error:
        return row | {"bound_by": "VRAM", "note": str(error)}
    on_gpu = min(memory["neurons"] / spec.ffn_bytes, 1.0)
    whole = on_gpu == 1
    row |= {"gpu_share": on_gpu, "vram_bytes": sum(memory.values()) - memory["margin"]}
    if whole:
        row["way"], row["vram_bytes"] = "gpu", row["vram_bytes"] - memory["neurons"] + spec.ffn_bytes
    row["ram_bytes"] = 0 if whole else _host_bytes(spec, on_gpu, row["way"])
    room = machine.cpu.memory_bytes - machine.cpu.memory_bytes // SYSTEM_PARTS
    if row["ram_bytes"] > room:
        short = f"needs {format_bytes(row['ram_bytes'])} of RAM, {format_bytes(room)} are free"
        return row | {"bound_by": "RAM", "note": f"{short}; {note}"}
    return row | {"tokens_per_second": run.timeline.tokens_per_second, "bound_by": _bound(run)}


def _host_bytes(spec: ModelSpec, on_gpu: float, way: str) -> int:
    """Bytes of weights in the host's memory: every neuron where neurons are placed, else the layers that stay there."""
    if way == "neurons":
        return spec.ffn_bytes
    return round((1 - on_gpu) * (spec.ffn_bytes + spec.layers * spec.attention_bytes))


def _bound(run: Run) -> str:
    """The stream that works longest: the one whose speed would help."""
    seconds = run.timeline.step_seconds()
    gpu = seconds[["attention", "predict", "ffn_gpu", "merge", "head"]].sum()
    if run.timeline.totals is None:  # a closed form: its layers on the CPU have their attention there
        gpu = run.timeline.busy("gpu")
        return "CPU" if run.timeline.busy("cpu") > gpu else "GPU"
    return "CPU" if seconds["ffn_cpu"] > gpu else "GPU"


def for_reading(frame: pd.DataFrame) -> pd.DataFrame:
    """``capacity``'s rows with sizes as text."""
    sizes = {f"{name}_bytes": name for name in ("vram", "ram")}
    shown = frame.rename(columns=sizes)
    for name in sizes.values():
        shown[name] = ["" if np.isnan(value) else format_bytes(int(value)) for value in shown[name]]
    return shown
