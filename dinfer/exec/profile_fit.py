"""Fit each step's cost from the spans of the calibration plans' runs; see profile.py, which measures them."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from dinfer.exec.profile_link import Fit
from dinfer.machine import Cost, Link, Machine
from dinfer.model import ModelSpec


def fit_machine(
    spec: ModelSpec, blank: Machine, frame: pd.DataFrame, read_bytes_per_second: float
) -> tuple[Machine, list[Fit]]:
    """``blank`` with the costs that the spans in ``frame`` tell, and the fits; a row is a span of profile.py's runs.

    ``read_bytes_per_second`` is what all cores together read of memory, which no side passes. Columns: run, token,
    layer, step, stream, start_seconds, end_seconds, seconds, neurons, position, slots, cold, gpu_active, cpu_active,
    moves.
    """
    still, moving = frame[~frame["moves"]], frame[frame["moves"]]
    values: dict[str, list[float]] = {}
    values["attention"], fits = _affine("attention", _stream(still, "attention", "gpu"), ["position"])
    values["handoff"] = [_mean(_handoff(still))]
    sides, residuals = _fit_sides(spec, blank, still, values["handoff"][0], read_bytes_per_second)
    fits += [
        Fit("ffn_gpu", sides.gpu_fixed * 1e6, sides.gpu_slot * 1e9, "slot", residuals[0], residuals[2]),
        *([] if blank.emulated else [
            Fit("ffn_gpu", 0.0, sides.gpu_active * 1e9, "active slot", residuals[0], residuals[2])
        ]),
        Fit("hand", sides.hand * 1e6, 0.0, "", residuals[0], residuals[2]),
        Fit("ffn_cpu", sides.cpu_fixed * 1e6, sides.cpu_cold * 1e9, "cold neuron", residuals[1], residuals[2]),
        Fit("ffn_cpu", 0.0, sides.cpu_active * 1e9, "active neuron", residuals[1], residuals[2]),
    ]
    values["prefetch"], described = _fit_prefetch(spec, blank, _stream(frame, "prefetch", "h2d"))
    fits.append(described)
    values["delay"] = values["gpu delay"] = [0.0, 0.0]
    if blank.emulated:
        begun = _handoff(moving)
        values["delay"], described = _fit_delay(moving, begun, values["handoff"][0])
        fits.append(described)
        values["gpu delay"], described = _fit_gpu_delay(spec, blank, moving, begun, sides)
        fits.append(described)
    moved = _stream(moving, "attention", "gpu")
    at_rest, per_position = values["attention"]
    expected = at_rest + per_position * moved["position"].mean() if len(moved) else 0.0
    slowed = max(0.0, _mean(moved["seconds"]) - expected)
    values["wake"] = [_mean(_wake(still))]
    values["merge"] = [_mean(_stream(still, "merge", "gpu")["seconds"])]
    values["schedule"] = [_mean(_schedule(moving)) + slowed]
    values["head"] = [_mean(_stream(frame, "head", "gpu")["seconds"])]
    for step in ("handoff", "wake", "merge", "schedule", "head"):
        fits.append(Fit(step, values[step][0] * 1e6, 0.0, "", float("nan"), len(still)))
    return _machine(spec, blank, values, sides), fits


class Sides(NamedTuple):
    """Both sides of an FFN alone: fixed seconds, seconds for each neuron, and the DRAM rate that they share.

    ``hand`` is what handing its part to the CPU takes from the GPU's thread.
    An emulated GPU computes its slots densely: an active one costs it nothing more.
    """

    gpu_fixed: float
    gpu_slot: float
    cpu_fixed: float
    cpu_cold: float
    cpu_active: float
    dram_bytes_per_second: float
    hand: float
    gpu_active: float = 0.0


def _fit_sides(
    spec: ModelSpec, blank: Machine, frame: pd.DataFrame, handoff: float, read: float
) -> tuple[Sides, tuple[float, float, int]]:
    """Least squares of both sides' mean seconds at once: they overlap, and share the DRAM as the simulator says."""
    levels = _levels(frame)

    def predict(sides: Sides) -> tuple[np.ndarray, np.ndarray]:
        return _side_seconds(spec, blank, sides, levels, handoff)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        gpu_seconds, cpu_seconds = predict(Sides(*np.exp(logarithms)))
        errors = np.log(np.concatenate([gpu_seconds / levels["gpu"], cpu_seconds / levels["cpu"]]))
        return errors[np.isfinite(errors)]

    gate_bytes = spec.neuron_bytes * spec.examined_share
    rest_bytes = spec.neuron_bytes - gate_bytes
    # no side reads faster than all cores together read memory that nothing computes on
    fastest = Sides(1e-7, spec.neuron_bytes / 1e13, 1e-7, gate_bytes / read, rest_bytes / read, read / 8, 1e-7)
    start = Sides(3e-5, spec.neuron_bytes / 1e10, 1e-5, 3 * gate_bytes / read, 3 * rest_bytes / read, read, 2e-5)
    slowest = Sides(1e-2, spec.neuron_bytes / 1e7, 1e-2, gate_bytes / 1e7, rest_bytes / 1e7, 2 * read, 1e-3)
    if not blank.emulated:
        slot = {"gpu_slot": gate_bytes / 1e13, "gpu_active": rest_bytes / 1e13}
        fastest, slowest = fastest._replace(**slot), slowest._replace(gpu_active=rest_bytes / 1e7)
        start = start._replace(gpu_slot=gate_bytes / 1e11, gpu_active=rest_bytes / 1e11)
    known = len(start) if start.gpu_active else len(start) - 1
    low, first, high = (np.log(each[:known]) for each in (fastest, start, slowest))
    solved = least_squares(residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale="jac")
    sides = Sides(*np.exp(solved.x).tolist())
    by_run = levels.assign(gpu_fit=predict(sides)[0], cpu_fit=predict(sides)[1]).groupby("run").mean()
    errors = [float((by_run[f"{side}_fit"] / by_run[side] - 1).abs().mean()) for side in ("gpu", "cpu")]
    return sides, (errors[0], errors[1], len(levels))


def _levels(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each run and layer the mean work, and both sides' mean ``gpu`` and ``cpu`` seconds (NaN: nothing to do)."""
    keys = ["run", "layer"]
    gpu = _stream(frame, "ffn_gpu", "gpu").groupby([*keys, "token"])["seconds"].sum().groupby(keys).agg(_mean)
    cpu = _stream(frame, "ffn_cpu", "cpu").groupby(keys)["seconds"].agg(_mean).rename("cpu")
    work = frame[frame["layer"] >= 0].groupby(keys)[["slots", "cold", "gpu_active", "cpu_active"]].mean()
    levels = work.join(gpu.rename("gpu")).join(cpu)
    levels.loc[levels["slots"] == 0, "gpu"] = np.nan
    return levels


def _side_seconds(
    spec: ModelSpec, blank: Machine, sides: Sides, levels: pd.DataFrame, begun: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [level] of the GPU's and the CPU's part of ``levels``; the CPU's begins ``begun`` seconds later."""
    slots, cold, active, gpu_active = (levels[n].to_numpy() for n in ("slots", "cold", "cpu_active", "gpu_active"))
    gate_bytes = spec.neuron_bytes * spec.examined_share
    gpu_end, cpu_end = overlap(
        (
            sides.gpu_fixed + sides.hand * (cold > 0),
            slots * sides.gpu_slot + gpu_active * sides.gpu_active,
            slots * spec.neuron_bytes if blank.emulated else np.zeros_like(slots),
        ),
        (
            begun + sides.cpu_fixed,
            cold * sides.cpu_cold + active * sides.cpu_active,
            cold * gate_bytes + active * (spec.neuron_bytes - gate_bytes),
        ),
        sides.dram_bytes_per_second,
    )
    return gpu_end, cpu_end - begun


Flow = tuple[Any, np.ndarray, np.ndarray]
"""One side: when it starts to move bytes, how long that takes it alone, and how many bytes."""


def overlap(first: Flow, second: Flow, dram: float) -> tuple[np.ndarray, np.ndarray]:
    """When two flows end that share the DRAM max-min fairly while both run, as sim/engine.py times them; seconds."""
    (start_a, alone_a, bytes_a), (start_b, alone_b, bytes_b) = first, second
    rate_a, rate_b = bytes_a / np.maximum(alone_a, 1e-12), bytes_b / np.maximum(alone_b, 1e-12)
    half = dram / 2
    slow = rate_a + rate_b > dram
    shared_a = np.where(slow, np.where(rate_a <= half, rate_a, np.maximum(half, dram - rate_b)), rate_a)
    shared_b = np.where(slow, np.where(rate_b <= half, rate_b, np.maximum(half, dram - rate_a)), rate_b)
    later = np.maximum(start_a, start_b)
    left_a = np.maximum(bytes_a - rate_a * (later - start_a), 0)
    left_b = np.maximum(bytes_b - rate_b * (later - start_b), 0)
    both = np.minimum(left_a / np.maximum(shared_a, 1e-12), left_b / np.maximum(shared_b, 1e-12))
    end_a = later + both + (left_a - shared_a * both) / np.maximum(rate_a, 1e-12)
    end_b = later + both + (left_b - shared_b * both) / np.maximum(rate_b, 1e-12)
    return np.where(left_a > 0, end_a, start_a + alone_a), np.where(left_b > 0, end_b, start_b + alone_b)


def _fit_prefetch(spec: ModelSpec, blank: Machine, rows: pd.DataFrame) -> tuple[list[float], Fit]:
    """Affine in neurons; an emulated link's own rate is given, and only what waking up adds is measured."""
    if not blank.emulated:
        values, fits = _affine("prefetch", rows, ["neurons"])
        return values, fits[0]
    per_neuron = spec.neuron_bytes / blank.h2d.bytes_per_second
    fixed = _mean(rows["seconds"] - rows["neurons"] * per_neuron)
    residual = float(((fixed + rows["neurons"] * per_neuron) / rows["seconds"] - 1).abs().mean())
    return [fixed, per_neuron], Fit("prefetch", fixed * 1e6, per_neuron * 1e9, "neuron", residual, len(rows))


def _fit_delay(moving: pd.DataFrame, begun: pd.Series, handoff: float) -> tuple[list[float], Fit]:
    """How much later than ``handoff`` the CPU begins while an emulated link copies, affine in the copied neurons."""
    return _by_copied("delay", moving, begun.groupby(level=0).agg(_mean) - handoff)


def _fit_gpu_delay(
    spec: ModelSpec, blank: Machine, moving: pd.DataFrame, begun: pd.Series, sides: Sides
) -> tuple[list[float], Fit]:
    """How much longer the GPU's part takes meanwhile than ``sides`` say; before it waits for its copy and after."""
    later = begun.groupby(level=[0, 2]).agg(_mean)
    levels = _levels(moving).loc[later.index]
    expected = _side_seconds(spec, blank, sides, levels, later.to_numpy())[0]
    return _by_copied("gpu delay", moving, (levels["gpu"] - expected).groupby(level=0).mean())


def _by_copied(step: str, moving: pd.DataFrame, seconds: pd.Series) -> tuple[list[float], Fit]:
    """``seconds`` [run], affine in the neurons that the run's layers copy."""
    neurons = _stream(moving, "prefetch", "h2d").groupby("run")["neurons"].mean().reindex(seconds.index, fill_value=0)
    fixed, each = nnls(np.column_stack([np.ones(len(seconds)), neurons]), seconds.to_numpy())[0]
    residual = float((fixed + each * neurons - seconds).abs().mean() / seconds.abs().mean())
    return [float(fixed), float(each)], Fit(step, fixed * 1e6, each * 1e9, "neuron", residual, len(seconds))


def _machine(spec: ModelSpec, blank: Machine, values: dict[str, list[float]], sides: Sides) -> Machine:
    gate_bytes = spec.neuron_bytes * spec.examined_share
    rest_bytes = spec.neuron_bytes - gate_bytes
    kv_token_bytes = spec.kv_bytes(1) / spec.layers
    attention, per_position = values["attention"]
    copy_fixed, copy_neuron = values["prefetch"]
    delay_fixed, delay_neuron = values["delay"]
    gpu_delay_fixed, gpu_delay_neuron = values["gpu delay"]
    dense_rate = spec.neuron_bytes / (sides.gpu_slot + sides.gpu_active)
    gpu = replace(
        blank.gpu,
        attention=_split(attention, spec.attention_bytes, dense_rate),
        kv=Cost(0.0, rate(kv_token_bytes, per_position)),
        gate=Cost(sides.gpu_fixed, gate_bytes / sides.gpu_slot),
        neuron=Cost(0.0, rate(rest_bytes, sides.gpu_active)),
        head=_split(values["head"][0], spec.head_bytes, dense_rate),
        merge=Cost(values["merge"][0]),
        delay=Cost(gpu_delay_fixed, rate(spec.neuron_bytes, gpu_delay_neuron)),
    )
    cpu = replace(
        blank.cpu,
        gate=Cost(sides.cpu_fixed, gate_bytes / sides.cpu_cold),
        neuron=Cost(0.0, rest_bytes / sides.cpu_active),
        schedule=Cost(values["schedule"][0]),
        hand=Cost(sides.hand),
        wake=Cost(values["wake"][0]),
        delay=Cost(delay_fixed, rate(spec.neuron_bytes, delay_neuron)),
    )
    return replace(
        blank,
        gpu=gpu,
        cpu=cpu,
        h2d=Link(blank.h2d.name, copy_fixed, rate(spec.neuron_bytes, copy_neuron)),
        d2h=Link(blank.d2h.name, values["handoff"][0], blank.d2h.bytes_per_second),
        dram_bytes_per_second=sides.dram_bytes_per_second,
    )


def _stream(frame: pd.DataFrame, step: str, stream: str) -> pd.DataFrame:
    return frame[(frame["step"] == step) & (frame["stream"] == stream)]


def _affine(step: str, rows: pd.DataFrame, units: list[str]) -> tuple[list[float], list[Fit]]:
    """Non-negative least squares of the mean seconds at each level of the units, each level weighing the same."""
    levels = rows.groupby(["run", "layer"])[["seconds", *units]].agg({"seconds": _mean, **dict.fromkeys(units, "mean")})
    levels = levels.reset_index()
    design = np.column_stack([np.ones(len(levels)), levels[units].to_numpy(float)])
    scale = design.max(axis=0)
    target = levels["seconds"].to_numpy()
    fitted = np.full(len(target), target.mean())
    for _ in range(3):  # relative to what is fitted: relative to what is measured, noise would pull the fit down
        solution = nnls(design / scale / fitted[:, None], target / fitted)[0] / scale
        fitted = np.maximum(design @ solution, 0.1 * target)
    by_run = levels.assign(fit=design @ solution).groupby("run")[["seconds", "fit"]].mean()
    residual = float((by_run["fit"] / by_run["seconds"] - 1).abs().mean())
    fits = [Fit(step, solution[0] * 1e6, solution[1] * 1e9, units[0], residual, len(rows))]
    fits += [
        Fit(step, 0.0, value * 1e9, unit, residual, len(rows))
        for unit, value in zip(units[1:], solution[2:], strict=True)
    ]
    return solution.tolist(), fits


def _of_layer(rows: pd.DataFrame, number: int) -> pd.DataFrame:
    """Of the spans that each layer has in each token, the first (0), second (1) or last (-1)."""
    place = rows.groupby(["run", "token", "layer"]).cumcount(ascending=number >= 0)
    return rows[place == (number if number >= 0 else -1 - number)]


def _keyed(rows: pd.DataFrame, column: str, lag: int = 0) -> pd.Series:
    keys = [rows["run"], rows["token"], rows["layer"] + lag]
    return pd.Series(rows[column].to_numpy(), index=pd.MultiIndex.from_arrays(keys))


def _handoff(frame: pd.DataFrame) -> pd.Series:
    """From the moment that the FFN's input is asked for to the CPU's start."""
    begun = _keyed(_stream(frame, "ffn_cpu", "cpu"), "start_seconds")
    asked = _keyed(_of_layer(_stream(frame, "ffn_gpu", "gpu"), 0), "start_seconds")
    return (begun - asked).dropna().clip(lower=0)


def _wake(frame: pd.DataFrame) -> pd.Series:
    """From the end of the CPU's part, where the GPU's has ended before, until the decoding thread goes on."""
    cpu = _keyed(_stream(frame, "ffn_cpu", "cpu"), "end_seconds")
    gpu = _keyed(_of_layer(_stream(frame, "ffn_gpu", "gpu"), -1), "end_seconds").reindex(cpu.index)
    passed = _keyed(_of_layer(_stream(frame, "wait", "gpu"), -1), "end_seconds").reindex(cpu.index)
    return (passed - cpu)[~(gpu >= cpu)].dropna().clip(lower=0)


def _schedule(frame: pd.DataFrame) -> pd.Series:
    """What moving takes besides the copy: the policy's step, the swap, issuing it, and waking up when it has landed."""
    moving = frame[frame["layer"] > 0]
    waits = _stream(moving, "wait", "gpu")
    step, arrival = _of_layer(waits, 0), _of_layer(waits, 1)
    landed = _keyed(_stream(moving, "prefetch", "h2d"), "end_seconds")
    begun, passed = _keyed(arrival, "start_seconds"), _keyed(arrival, "end_seconds")
    woken = (passed - np.maximum(begun, landed.reindex(begun.index))).dropna().clip(lower=0)
    return (_keyed(step, "seconds").reindex(woken.index) + woken).dropna()


def _mean(seconds: pd.Series) -> float:
    """Mean with the rare stalls (above five times the median) left out."""
    kept = seconds[seconds <= 5 * seconds.median()]
    return float(kept.mean()) if len(kept) else 0.0


def rate(count_bytes: float, seconds: float) -> float:
    """Bytes per second; infinite where they take no time."""
    return count_bytes / seconds if seconds > 1e-15 else float("inf")


def _split(seconds: float, count_bytes: int, rate: float) -> Cost:
    """``seconds`` as a fixed part and bytes at ``rate``, or at a lower rate when that alone would take longer."""
    fixed = seconds - count_bytes / rate
    return Cost(fixed, rate) if fixed >= 0 else Cost(0.0, count_bytes / seconds)
