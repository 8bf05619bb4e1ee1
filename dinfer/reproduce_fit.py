"""The constants that the paper leaves out, fitted to the columns of Transformers, llama.cpp and PowerInfer.

No figure of DynamicInfer is read here. The results stand in catalog/paper.toml.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dinfer.machine import LayerCosts, layer_costs, load_machine
from dinfer.model import ModelSpec, load_model
from dinfer.reproduce import (
    TOKENS,
    Constants,
    Workload,
    capacity_bytes,
    family_models,
    neuron_machine,
    paper,
    workload,
)
from dinfer.systems import SYSTEMS

WITHIN = 0.03
"""One unit of error in the fit of the neuron-level constants, of a speed and of a share alike. Ours."""

FITTED = {
    "pageable_share": "Transformers column, fp16 rows",
    "dequantise_bytes_per_second": "Transformers column, int4 row",
    "cpu_dense_bytes_per_second": "llama.cpp column, fp16 rows",
    "cpu_dense_int4_bytes_per_second": "llama.cpp column, int4 row",
    "cpu_sparse_bytes_per_second": "PowerInfer columns of speeds and shares",
    "cpu_sparse_int4_bytes_per_second": "PowerInfer columns of speeds and shares, int4 row",
    "sync_seconds": "PowerInfer columns of speeds and shares: t_sync of a layer",
    "filled_share": "PowerInfer columns of speeds and shares: useful part of the memory left for neurons",
}
"""Fitted constants and the columns they are fitted to; int4 ones only where the paper has such a row."""


def calibrate(figures: Mapping[str, Any] | None = None, tokens: int = TOKENS) -> dict[str, dict[str, float]]:
    """The fitted constants by machine and name, four significant digits; deterministic.

    Reads the columns of CALIBRATED in the tables of speeds and shares and nothing else that was measured.
    """
    figures = paper() if figures is None else figures
    loads = {row["model"]: workload(figures, row["model"], tokens) for row in figures["speeds"]}
    fitted = {}
    for machine in dict.fromkeys(row["machine"] for row in figures["speeds"]):
        rows = [row for row in figures["speeds"] if row["machine"] == machine]
        published = {
            name: float(entry["value"])
            for name, entry in figures["constants"][machine].items()
            if entry["kind"] == "published"
        }
        found = fit_transformers(machine, rows, loads, figures) | fit_llama_cpp(machine, rows, loads, figures)
        found |= fit_neuron_level(machine, rows, loads, figures, published)
        fitted[machine] = {name: float(f"{value:.4g}") for name, value in found.items()}
    return fitted


def fit_transformers(
    machine: str, rows: list[dict[str, Any]], loads: Mapping[str, Workload], figures: Mapping[str, Any]
) -> dict[str, float]:
    """Share of the link's rate, least squares of the fp16 rows' log errors; then the dequantising rate of
    int4."""
    from scipy.optimize import minimize_scalar

    where, context = load_machine(machine), sum(figures["tokens"])

    def seconds(row: dict[str, Any], pageable: float, rate: float = np.inf) -> float:
        run = SYSTEMS["transformers"](
            loads[row["model"]].trace, where, where.gpu.memory_bytes, context=context, pageable=pageable,
            dequantise_bytes_per_second=rate,
        )  # fmt: skip
        return 1 / run.timeline.tokens_per_second

    floats, integers = _by_dtype(rows)

    def miss(share: float) -> float:
        return sum(np.log(seconds(row, share) * row["transformers"]) ** 2 for row in floats)

    share = float(minimize_scalar(miss, bounds=(0.05, 1.0), method="bounded", options={"xatol": 1e-5}).x)
    found = {"pageable_share": share}
    for row in integers:
        spec = load_model(row["model"])
        left = 1 / row["transformers"] - seconds(row, share)
        found["dequantise_bytes_per_second"] = (spec.ffn_bytes + spec.layers * spec.attention_bytes) / left
    return found


def fit_llama_cpp(
    machine: str, rows: list[dict[str, Any]], loads: Mapping[str, Workload], figures: Mapping[str, Any]
) -> dict[str, float]:
    """The CPU's rate for dense matrices of each dtype: least squares of the log errors."""
    from scipy.optimize import minimize_scalar

    where, context = load_machine(machine), sum(figures["tokens"])

    def miss(rate: float, rows: list[dict[str, Any]]) -> float:
        cpu = where.cpu
        changed = replace(
            where, cpu=replace(cpu, attention=replace(cpu.attention, bytes_per_second=rate * 1e9))
        )
        total = 0.0
        for row in rows:
            trace = loads[row["model"]].trace
            run = SYSTEMS["llama.cpp"](trace, changed, where.gpu.memory_bytes, context=context)
            total += np.log(run.timeline.tokens_per_second / row["llama.cpp"]) ** 2
        return total

    floats, integers = _by_dtype(rows)
    names = {"cpu_dense_bytes_per_second": floats, "cpu_dense_int4_bytes_per_second": integers}
    return {
        name: 1e9 * float(minimize_scalar(miss, bounds=(1.0, 1000.0), args=(part,), method="bounded").x)
        for name, part in names.items()
        if part
    }


def fit_neuron_level(
    machine: str, rows: list[dict[str, Any]], loads: Mapping[str, Workload], figures: Mapping[str, Any],
    published: Mapping[str, float],
) -> dict[str, float]:  # fmt: skip
    """CPU rates of scattered neurons, t_sync and the filled share, by least squares of PowerInfer's closed
    form.

    Residuals in units of WITHIN: the speeds' relative errors, and on PC-High the errors of both shares.
    """
    from scipy.optimize import least_squares

    dram = published["dram_bytes_per_second"]
    _, integers = _by_dtype(rows)
    names = ["cpu_sparse_bytes_per_second", "sync_seconds", "filled_share"]
    names += ["cpu_sparse_int4_bytes_per_second"] * bool(integers)
    units = {
        "cpu_sparse_bytes_per_second": dram,
        "cpu_sparse_int4_bytes_per_second": dram,
        "sync_seconds": 2e-3,
    }
    forms = [_Form.of(machine, row["model"], loads[row["model"]], figures, published) for row in rows]
    wanted = [row["powerinfer"] for row in figures["shares"]] if machine == "pc-high" else []
    family = [i for i, row in enumerate(rows) if row["model"] in family_models(figures)]

    def values(point: np.ndarray) -> dict[str, float]:
        return {name: x * units.get(name, 1.0) for name, x in zip(names, point.tolist(), strict=True)}

    def misses(point: np.ndarray) -> np.ndarray:
        constants = values(point)
        parts = [form.parts(constants) for form in forms]
        speed = [1 / part.seconds / row["powerinfer"] - 1 for part, row in zip(parts, rows, strict=True)]
        shares = np.array([parts[i][1:] for i in family]).mean(axis=0) - wanted if wanted else []
        return np.append(speed, shares) / WITHIN

    start = np.array([0.5, 0.2, 0.8, 0.4][: len(names)])
    found = least_squares(misses, start, bounds=(1e-3, 1.0), xtol=1e-10, ftol=1e-10)
    return values(found.x)


class Parts(NamedTuple):
    """PowerInfer's closed form: seconds of a token, GPU's share of active neurons, CPU's share of the FFN
    latency."""

    seconds: float
    gpu_share: float
    cpu_share: float


class _Form(NamedTuple):
    """What the closed form of one row needs: costs without what is fitted, and who is served by how many
    slots."""

    spec: ModelSpec
    costs: LayerCosts
    position: float
    room_neurons: float
    predicted: np.ndarray
    active: np.ndarray

    @classmethod
    def of(
        cls,
        machine: str,
        model: str,
        load: Workload,
        figures: Mapping[str, Any],
        published: Mapping[str, float],
    ) -> "_Form":
        """Sums over the hottest neurons of the profile, all layers together: predicted and active ones a
        token."""
        spec = load.trace.spec
        free = {
            "sync_seconds": 0.0,
            "cpu_sparse_bytes_per_second": 1.0,
            "cpu_sparse_int4_bytes_per_second": 1.0,
        }
        where = neuron_machine(load_machine(machine), {**published, **free}, spec)
        order = np.argsort(-load.frequency, axis=None, kind="stable")
        predicted = replace(load.trace, active=load.predictor.predictions)
        both = replace(load.trace, active=load.predictor.predictions & load.trace.active)
        sums = [np.append(0.0, np.cumsum(t.frequency.ravel()[order], dtype=float)) for t in (predicted, both)]
        room = capacity_bytes(spec, where, figures, model) / spec.neuron_bytes
        costs = layer_costs(spec, where, "predicted", predictor_rank=load.predictor.rank)
        return cls(spec, costs, float(load.trace.tokens["position"].mean()), room, sums[0], sums[1])

    def parts(self, constants: Mapping[str, float]) -> Parts:
        """The closed form, where the CPU is the slower side in every layer."""
        spec, costs = self.spec, self.costs
        rate = constants[
            "cpu_sparse_int4_bytes_per_second" if spec.dtype == "int4" else "cpu_sparse_bytes_per_second"
        ]
        slots = min(constants["filled_share"] * self.room_neurons, spec.layers * spec.neurons)
        at = np.arange(len(self.predicted))
        cold = self.predicted[-1] - np.interp(slots, at, self.predicted)
        cpu = spec.layers * costs.cpu_fixed_seconds + cold * spec.neuron_bytes / rate
        ffn = cpu + spec.layers * (
            costs.state_down_seconds
            + costs.state_up_seconds
            + constants["sync_seconds"]
            + costs.schedule_seconds
        )
        rest = costs.attention_seconds + self.position * costs.attention_token_seconds + costs.predict_seconds
        seconds = spec.layers * rest + ffn + costs.head_seconds
        return Parts(seconds, float(np.interp(slots, at, self.active) / self.active[-1]), cpu / ffn)


def _by_dtype(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    integer = [load_model(row["model"]).dtype == "int4" for row in rows]
    return ([r for r, i in zip(rows, integer, strict=True) if not i],
            [r for r, i in zip(rows, integer, strict=True) if i])  # fmt: skip


def constants_toml(fitted: Constants) -> str:
    """The fitted constants as they stand in catalog/paper.toml."""
    return "\n".join(
        f'[constants.{machine}.{name}]\nvalue = {value:.4g}  # fitted: {FITTED[name]}\nkind = "fitted"\n'
        f'source = "{FITTED[name]}"\n'
        for machine, values in fitted.items()
        for name, value in values.items()
    )
