"""Measure this machine: run the executor's own decoding under calibration plans and fit each step's cost.

As the paper does with its first decoding steps. Each fit is affine in neurons (or positions) and states its
residual; the plans used here hold other shares of neurons than a user asks for, so that predicting is not recalling.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.optimize import nnls

from dinfer import bits
from dinfer.exec.execute import Session
from dinfer.exec.kernels_cpu import read_rows
from dinfer.families import open_checkpoint
from dinfer.machine import Cost, Device, Link, Machine
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.timeline import Run
from dinfer.trace import Trace

SHARES = (0.08, 0.33, 0.58, 0.83)
"""Resident shares of the calibration plans."""

MOVED_SHARES = (0.02, 0.05, 0.1, 0.2)
"""Windows of the calibration plans that move neurons, as shares of a layer's neurons."""

EMULATED_LINK = Link("emulated PCIe", 10e-6, 4e9)
"""What a CPU device takes for a link when none is given: ours."""

SILENT = 3e38
"""A magnitude threshold that silences every neuron, so that only the cost of the gates is left."""

WARM_TOKENS, TOKENS = 2, 16
SHORT_PROMPT, LONG_PROMPT = 8, 384


class Fit(NamedTuple):
    """One fit: seconds = fixed + units * per_unit; ``residual`` is the mean over levels of |fit / measured - 1|."""

    step: str
    fixed_us: float
    per_unit_ns: float
    unit: str
    residual: float
    points: int


def measure_machine(
    model: str | Path,
    *,
    device: str = "cpu",
    link: Link | None = None,
    dtype: str | None = None,
    thresholds: Sequence[float] = (),
    cpu_threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[Machine, pd.DataFrame]:
    """This machine's costs for the shapes of ``model``, and the table of the fits.

    ``device`` "cpu" emulates the GPU behind ``link`` (default EMULATED_LINK); "cuda" measures the real one.
    ``dtype`` is what the weights are run in, ``thresholds`` [layer] the magnitude thresholds of the runs.
    ``progress`` is called with the share done.
    """
    checkpoint = open_checkpoint(model)
    spec = checkpoint.spec.with_dtype(dtype or ("float32" if device == "cpu" else checkpoint.spec.dtype))
    blank = _blank_machine(device, link or EMULATED_LINK)
    plans = list(_calibration_plans(spec, blank, tuple(thresholds)))
    frames = []
    for number, (plan, prompt_tokens) in enumerate(plans):
        with Session(plan, checkpoint, device, cpu_threads) as session:
            run = session.replay(_random_activity(spec, prompt_tokens))
        frames.append(_samples(run, plan, number, prompt_tokens))
        if progress is not None:
            progress((number + 1) / len(plans))
    return _fit(spec, blank, pd.concat(frames, ignore_index=True))


def _calibration_plans(spec: ModelSpec, machine: Machine, thresholds: tuple[float, ...]) -> Iterator[tuple[Plan, int]]:
    frequency = np.random.default_rng(0).random((spec.layers, spec.neurons), np.float32)
    extremes = [(SILENT,) * spec.layers, (0.0,) * spec.layers] if spec.sparsity_kind == "magnitude" else []
    for number, share in enumerate(SHARES):
        plan = Plan(
            spec=spec,
            machine=machine,
            placement=Placement.hottest(frequency, np.full(spec.layers, int(share * spec.neurons))),
            frequency=frequency,
            vram_bytes=machine.gpu.memory_bytes,
            context=SHORT_PROMPT + WARM_TOKENS + TOKENS + 1,
            thresholds=thresholds,
        )
        yield plan, SHORT_PROMPT
        if extremes:
            yield replace(plan, thresholds=extremes[number % 2]), SHORT_PROMPT
        window = max(1, int(MOVED_SHARES[number] * spec.neurons))
        yield replace(plan, cache={"name": "lru"}, window=window), SHORT_PROMPT
    long = min(LONG_PROMPT, spec.max_positions - WARM_TOKENS - TOKENS - 1)
    yield replace(plan, context=long + WARM_TOKENS + TOKENS + 1), long


def _random_activity(spec: ModelSpec, prompt_tokens: int) -> Trace:
    """Random tokens whose random activity makes a moving plan move; what is computed is the model's own."""
    rng = np.random.default_rng(0)
    count = prompt_tokens + WARM_TOKENS + TOKENS
    position = np.arange(count)
    phase = np.where(position < prompt_tokens, "prefill", "decode")
    ids = rng.integers(0, spec.vocab, count)
    tokens = pd.DataFrame({"id": ids, "sequence": 0, "position": position, "phase": phase})
    active = bits.pack(rng.random((count, spec.layers, spec.neurons), np.float32) < 0.3)
    return Trace(spec, tokens, active)


def _samples(run: Run, plan: Plan, number: int, prompt_tokens: int) -> pd.DataFrame:
    """Spans with what they worked on; each layer's spans of one token share ``run``, ``token`` and ``layer``."""
    frame = run.timeline.to_frame()
    frame["run"] = number
    frame["seconds"] = frame["end_seconds"] - frame["start_seconds"]
    frame["position"] = prompt_tokens + frame["token"]
    layer = frame["layer"].clip(lower=0).to_numpy()
    token = frame["token"].clip(upper=len(run.work) - 1).to_numpy()
    frame["gpu_active"], frame["cpu_active"] = run.work[token, layer, 0], run.work[token, layer, 1]
    frame["slots"] = plan.placement.slots[layer]
    frame["cold"] = plan.spec.neurons - frame["slots"]
    frame["moves"] = plan.policy.moves
    return frame[frame["token"].between(WARM_TOKENS, len(run.work) - 1)]


def _fit(spec: ModelSpec, blank: Machine, frame: pd.DataFrame) -> tuple[Machine, pd.DataFrame]:
    gpu = _stream(frame, "ffn_gpu", "gpu")
    cpu = _stream(frame, "ffn_cpu", "cpu")
    still = _stream(frame, "attention", "gpu").query("layer > 0 and not moves")
    copies = _stream(frame, "prefetch", "h2d")
    heads = _stream(frame, "head", "gpu")
    fits, values = [], {}
    for step, rows, units in (
        ("attention", still, ["position"]),
        ("ffn_gpu", gpu, ["slots", "gpu_active"]),
        ("ffn_cpu", cpu, ["cold", "cpu_active"]),
        ("prefetch", copies, ["neurons"]),
    ):
        values[step], described = _affine(step, rows, units)
        fits.extend(described)
    for step, seconds in (
        ("handoff", _handoff(frame)),
        ("merge", _merge(frame)),
        ("schedule", _schedule(frame)),
        ("head", heads["seconds"]),
    ):
        values[step] = [_mean(seconds)]
        fits.append(Fit(step, values[step][0] * 1e6, 0.0, "", float("nan"), len(seconds)))
    return _machine(spec, blank, values), pd.DataFrame(fits)


def _machine(spec: ModelSpec, blank: Machine, values: dict[str, list[float]]) -> Machine:
    gate_bytes = spec.neuron_bytes * spec.examined_share
    rest_bytes = spec.neuron_bytes - gate_bytes
    kv_token_bytes = spec.kv_bytes(1) / spec.layers
    attention, per_position = values["attention"]
    gpu_fixed, gpu_slot, gpu_active = values["ffn_gpu"]
    cpu_fixed, cpu_cold, cpu_active = values["ffn_cpu"]
    copy_fixed, copy_neuron = values["prefetch"]
    dense_rate = spec.neuron_bytes / max(gpu_slot + gpu_active, 1e-12)
    gpu = replace(
        blank.gpu,
        attention=_split(attention, spec.attention_bytes, dense_rate),
        kv=Cost(0.0, _rate(kv_token_bytes, per_position)),
        gate=Cost(gpu_fixed, _rate(gate_bytes, gpu_slot)),
        neuron=Cost(0.0, _rate(rest_bytes, gpu_active)),
        head=_split(values["head"][0], spec.head_bytes, dense_rate),
        merge=Cost(values["merge"][0]),
    )
    cpu = replace(
        blank.cpu,
        gate=Cost(cpu_fixed, _rate(gate_bytes, cpu_cold)),
        neuron=Cost(0.0, _rate(rest_bytes, cpu_active)),
        schedule=Cost(values["schedule"][0]),
    )
    return replace(
        blank,
        gpu=gpu,
        cpu=cpu,
        h2d=Link(blank.h2d.name, copy_fixed, _rate(spec.neuron_bytes, copy_neuron)),
        d2h=Link(blank.d2h.name, values["handoff"][0], blank.d2h.bytes_per_second),
        dram_bytes_per_second=_read_bytes_per_second(),
    )


def _stream(frame: pd.DataFrame, step: str, stream: str) -> pd.DataFrame:
    return frame[(frame["step"] == step) & (frame["stream"] == stream)]


def _affine(step: str, rows: pd.DataFrame, units: list[str]) -> tuple[list[float], list[Fit]]:
    """Non-negative least squares of the mean seconds at each level of the units, each level weighing the same."""
    levels = rows.groupby(["run", "layer", *units], observed=True)["seconds"].agg(_mean).reset_index()
    design = np.column_stack([np.ones(len(levels)), levels[units].to_numpy(float)])
    scale = design.max(axis=0)
    target = levels["seconds"].to_numpy()
    weight = 1 / target
    solution = nnls(design / scale * weight[:, None], target * weight)[0] / scale
    by_run = levels.assign(fit=design @ solution).groupby("run")[["seconds", "fit"]].mean()
    residual = float((by_run["fit"] / by_run["seconds"] - 1).abs().mean())
    fits = [Fit(step, solution[0] * 1e6, solution[1] * 1e9, units[0], residual, len(rows))]
    fits += [
        Fit(step, 0.0, value * 1e9, unit, residual, len(rows))
        for unit, value in zip(units[1:], solution[2:], strict=True)
    ]
    return solution.tolist(), fits


def _keyed(rows: pd.DataFrame, column: str, lag: int = 0) -> pd.Series:
    keys = [rows["run"], rows["token"], rows["layer"] + lag]
    return pd.Series(rows[column].to_numpy(), index=pd.MultiIndex.from_arrays(keys))


def _handoff(frame: pd.DataFrame) -> pd.Series:
    """From the moment that the FFN's input is asked for to the CPU's start."""
    begun = _keyed(_stream(frame, "ffn_cpu", "cpu"), "start_seconds")
    asked = _keyed(_stream(frame, "ffn_gpu", "gpu"), "start_seconds")
    return (begun - asked).dropna().clip(lower=0)


def _merge(frame: pd.DataFrame) -> pd.Series:
    """From the later end of the two sides to the end of the merge: waking up and adding."""
    merged = _keyed(_stream(frame, "merge", "gpu"), "end_seconds")
    cpu = _keyed(_stream(frame, "ffn_cpu", "cpu"), "end_seconds")
    gpu = _keyed(_stream(frame, "ffn_gpu", "gpu"), "end_seconds")
    later = np.maximum(cpu, gpu.reindex(cpu.index))
    return (merged - later).dropna().clip(lower=0)


def _schedule(frame: pd.DataFrame) -> pd.Series:
    """From the end of attention to the end of the step one layer ahead."""
    moving = frame[frame["moves"] & (frame["layer"] > 1)]
    stepped = _keyed(_stream(moving, "schedule", "scheduler"), "end_seconds")
    ready = _keyed(_stream(moving, "attention", "gpu"), "end_seconds", lag=1)
    return (stepped - ready).dropna().clip(lower=0)


def _mean(seconds: pd.Series) -> float:
    """Mean with the rare stalls (above ten times the median) left out."""
    kept = seconds[seconds <= 10 * seconds.median()]
    return float(kept.mean()) if len(kept) else 0.0


def _rate(count_bytes: float, seconds: float) -> float:
    return count_bytes / seconds if seconds > 1e-15 else float("inf")


def _split(seconds: float, count_bytes: int, rate: float) -> Cost:
    """``seconds`` as a fixed part and bytes at ``rate``, or at a lower rate when that alone would take longer."""
    fixed = seconds - count_bytes / rate
    return Cost(fixed, rate) if fixed >= 0 else Cost(0.0, count_bytes / seconds)


def _blank_machine(device: str, link: Link) -> Machine:
    name = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = Device("torch CPU device", memory)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        context = properties.total_memory - torch.cuda.mem_get_info()[0]
        gpu = Device(properties.name, properties.total_memory, context)
        link = Link("measured", 0.0, float("inf"))
    return Machine(
        name=f"{platform.node() or 'this'}-{'emulated' if device == 'cpu' else device}",
        gpu=gpu,
        cpu=Device(name, memory, threads=os.cpu_count() or 1),
        h2d=link,
        d2h=replace(link, fixed_seconds=0.0),
        dram_bytes_per_second=1e12,
        emulated_link=link if device == "cpu" else None,
    )


def _read_bytes_per_second() -> float:
    """Bytes per second that all cores together read from DRAM, the best of a few passes over 1 GiB."""
    threads = os.cpu_count() or 1
    words = np.ones((threads, 2**14, 2**14 // threads), np.uint32)
    ids = np.arange(2**14, dtype=np.int32)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(lambda part: read_rows(part, ids), words))
            best = max(best, words.nbytes / (time.perf_counter() - start))
    return best
