"""Fitting gives back the costs of a simulated machine, and what a moving cache adds to both sides."""

import numpy as np
import pandas as pd
import pytest

from dinfer.exec.profile import EMULATED_LINK, _blank_machine, _calibration_plans, _random_activity, _samples
from dinfer.exec.profile_fit import (
    Sides,
    _fit_delay,
    _fit_gpu_delay,
    _handoff,
    _levels,
    _side_seconds,
    fit_machine,
)
from dinfer.machine import Cost, Device, Link, Machine, layer_costs
from dinfer.model import ModelSpec, load_model
from dinfer.sim import simulate


def known_machine(spec: ModelSpec) -> Machine:
    """An emulated one in which every step has its price and the sides never want more than the DRAM gives."""
    gpu = Device(
        "gpu", 2**40, attention=Cost(4e-4, 8e9), kv=Cost(0, 9e9), gate=Cost(6e-5, 7e9), head=Cost(1e-3, 8e9),
        merge=Cost(3e-5),
    )  # fmt: skip
    cpu = Device("cpu", 2**40, gate=Cost(5e-5, 8e9), neuron=Cost(0, 6e9), hand=Cost(4e-5), schedule=Cost(1e-4))
    return Machine("known", gpu, cpu, EMULATED_LINK, Link("down", 7e-5, float("inf")), 1e11, EMULATED_LINK)


def simulated_runs(spec: ModelSpec, known: Machine, blank: Machine) -> pd.DataFrame:
    frames = []
    for number, (plan, prompt) in enumerate(_calibration_plans(spec, blank, ())):
        run = simulate(plan, _random_activity(spec, prompt), known)
        frames.append(_samples(run, plan, number, prompt))
    return pd.concat(frames, ignore_index=True)


def test_a_simulated_machines_costs_come_back():
    """The simulator's spans, fitted as the executor's are, give the costs that they were made with."""
    spec, blank = load_model("smollm2-135m").as_run("float32"), _blank_machine("cpu", EMULATED_LINK)
    known = known_machine(spec)
    fitted, fits = fit_machine(spec, blank, simulated_runs(spec, known, blank), 2e10)
    made, true = layer_costs(spec, fitted), layer_costs(spec, known)
    for name in (
        "attention_seconds", "attention_token_seconds", "gpu_fixed_seconds", "gpu_gate_seconds", "cpu_fixed_seconds",
        "cpu_gate_seconds", "cpu_neuron_seconds", "prefetch_fixed_seconds", "prefetch_neuron_seconds", "hand_seconds",
        "head_seconds",
    ):  # fmt: skip
        assert getattr(made, name) == pytest.approx(getattr(true, name), rel=1e-4), name
    # beside what the link takes for a state, which the spans hold already
    assert made.state_down_seconds == pytest.approx(true.state_down_seconds, rel=0.01)
    assert made.merge_seconds == pytest.approx(true.merge_seconds, rel=0.02)
    assert all(fit.residual < 1e-4 for fit in fits if fit.step in ("attention", "ffn_gpu", "ffn_cpu", "prefetch"))


@pytest.mark.parametrize("each", [0.0, 1.5e-6])
def test_what_a_copy_adds_to_both_sides_comes_back(each):
    """Runs that copy 50, 100 and 200 neurons a layer: both sides lose 0.2 ms and ``each`` of what moves."""
    spec, blank = load_model("smollm2-135m").as_run("float32"), _blank_machine("cpu", EMULATED_LINK)
    sides = Sides(6e-5, 7e-7, 5e-5, 6e-7, 4e-7, 2e10, 4e-5)
    rows = [row for run, copied in enumerate((50, 100, 200)) for row in layer_spans(spec, run, copied, each)]
    frame = pd.DataFrame(rows)
    frame["seconds"] = frame["end_seconds"] - frame["start_seconds"]
    lost = 2e-4 + each * np.array([50, 100, 200])
    alone = _side_seconds(spec, blank, sides, _levels(frame), 7e-5 + lost)[0]
    frame.loc[frame["step"] == "ffn_gpu", "seconds"] = alone + lost
    begun = _handoff(frame)
    assert _fit_delay(frame, begun, 7e-5)[0] == pytest.approx([2e-4, each], rel=1e-3, abs=1e-12)
    assert _fit_gpu_delay(spec, blank, frame, begun, sides)[0] == pytest.approx([2e-4, each], rel=1e-3, abs=1e-12)


def layer_spans(spec: ModelSpec, run: int, copied: int, each: float) -> list[dict]:
    """One layer's spans of one token: the CPU begins 0.07 ms after it is asked, and later by what the copy takes."""
    work = {"slots": 600, "cold": spec.neurons - 600, "gpu_active": 200, "cpu_active": 300}
    spans = [
        ("ffn_gpu", "gpu", 0.0, 1e-3, 0),
        ("ffn_cpu", "cpu", 7e-5 + 2e-4 + each * copied, 2e-3, 300),
        ("prefetch", "h2d", 0.0, 1e-4, copied),
    ]
    return [
        {"run": run, "token": 0, "layer": 0, "step": step, "stream": stream, "start_seconds": start, "end_seconds": end,
         "neurons": neurons, "moves": True, **work}
        for step, stream, start, end, neurons in spans
    ]  # fmt: skip
