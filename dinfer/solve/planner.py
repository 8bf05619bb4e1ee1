"""From a trace, a machine and a budget to a plan."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dinfer.errors import InputError
from dinfer.machine import LayerCosts, Machine, layer_costs
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import EARLY, Plan, early_layers
from dinfer.policies import THRESHOLDS, cache_from_dict, cache_to_dict
from dinfer.policies.balanced import Balanced, Levels
from dinfer.predictors import Predictors
from dinfer.solve.budget import memory_breakdown, neuron_capacity, warn_when_everything_fits
from dinfer.solve.greedy import greedy, served_frequency
from dinfer.solve.ilp import Solution, ilp
from dinfer.solve.levels import recorded_levels
from dinfer.trace import Trace

SOLVERS = ("greedy", "ilp")


def make_plan(
    trace: Trace,
    machine: Machine,
    vram_bytes: int,
    *,
    context: int = 512,
    batch: int = 1,
    solver: str = "greedy",
    solver_options: Mapping[str, Any] | None = None,
    cache: str = "hot_predicted",
    cache_parameters: Mapping[str, Any] | None = None,
    lookahead: int = 1,
    window: int | None = None,
    activation: str = "exact",
    prediction: str = "previous",
    threshold: str = "fixed",
    issue: str | None = None,
    group: int = 1,
    spec: ModelSpec | None = None,
    frequency: np.ndarray | None = None,
    predictor_bytes: int = 0,
    predictor: Predictors | None = None,
    early: str = "predicted",
) -> Plan:
    """The plan for ``vram_bytes`` of GPU memory, from the frequencies of the whole trace.

    With a ``batch`` the frequencies are those of that many sequences' unions.

    ``solver`` is one of SOLVERS; ``solver_options`` are keyword arguments of ``greedy`` or
    ``ilp``. ``spec`` may give the trace's model another dtype. ``frequency`` [layer, neuron] is an
    offline profile to place by instead of the trace's own; ``predictor_bytes`` of the budget go
    to a predictor that is only counted. A trained ``predictor`` makes the prediction "trained",
    and its bytes count; ``early``, one of plan.EARLY, is what becomes of the layers that it cannot
    predict ``lookahead`` layers ahead: with "resident" all of their neurons stay on the GPU. The
    other arguments are those of Plan; ``window`` bounds one prefetch and is not the solver's. When
    everything fits, every neuron is resident whatever the solver, with a PlanWarning.
    ``threshold`` is one of THRESHOLDS; balanced ones are made from the trace's scores and
    contributions. Raises InputError for a budget below the dense part, an empty trace, a trace of
    another model, or one of a magnitude kind without thresholds.
    """
    spec = _spec_of(trace, spec)
    thresholds = _thresholds(trace, spec)
    if solver not in SOLVERS:
        raise InputError(f"solver {solver!r} is not one of {', '.join(SOLVERS)}")
    held = _held(early, lookahead, predictor)
    if predictor is not None:
        _check_predictor(predictor, trace, thresholds)
        prediction, predictor_bytes = "trained", predictor.bytes
    rank = 0 if predictor is None else predictor.rank
    policy = cache_to_dict(cache_from_dict({**(cache_parameters or {}), "name": cache}))
    memory = memory_breakdown(spec, machine, context, vram_bytes, predictor_bytes, batch=batch)
    capacity = neuron_capacity(spec, memory)
    if frequency is None:
        frequency = trace.frequency if batch == 1 else trace.batched(batch).frequency
    issue = issue or ("gather" if machine.emulated else "block")
    costs = layer_costs(spec, machine, activation, issue, rank, batch, group)
    if warn_when_everything_fits(spec, machine, memory):
        solution = _greedy_solution(frequency, capacity)
    else:
        _check_held(held, spec, capacity)
        rest = capacity - held * spec.neurons
        solution = _solve(solver, frequency[held:], rest, costs, solver_options or {})
        solution = solution._replace(slots=np.concatenate([np.full(held, spec.neurons), solution.slots]))
    placement = Placement.hottest(frequency, solution.slots)
    return Plan(
        spec=spec,
        machine=machine,
        placement=placement,
        frequency=frequency,
        cache=policy,
        lookahead=lookahead,
        window=window,
        activation=activation,
        prediction=prediction,
        predictor={} if predictor is None else {**predictor.tag(), "early": early_layers(lookahead, early)},
        issue=issue,
        group=group,
        vram_bytes=vram_bytes,
        context=context,
        batch=batch,
        memory=memory,
        thresholds=thresholds,
        threshold={"name": threshold},
        levels=_levels(trace, placement, threshold),
        solver=_record(solution),
        trace=trace.fingerprint,
        weights=trace.meta.get("weights", ""),
    )


def _held(early: str, lookahead: int, predictor: Predictors | None) -> int:
    """How many of the first layers stay resident as they cannot be predicted ahead."""
    if early not in EARLY:
        raise InputError(f"early {early!r} is not one of {', '.join(EARLY)}")
    if early == "predicted":
        return 0
    if predictor is None:
        raise InputError(
            f"early is {early!r}, but there is no trained predictor that looks ahead; give --predictor DIR or leave "
            "--early out"
        )
    return lookahead


def _check_held(held: int, spec: ModelSpec, capacity: int) -> None:
    if held * spec.neurons > capacity:
        raise InputError(
            f"early layers 0 to {held - 1} have {held * spec.neurons:,} neurons that are to stay resident, the budget "
            f"holds {capacity:,}; raise --vram or plan with --early predicted"
        )


def _spec_of(trace: Trace, spec: ModelSpec | None) -> ModelSpec:
    made = trace.spec
    if not len(trace):
        raise InputError(f"trace of {made.name} holds no tokens; record some before planning")
    if spec is None or spec.fingerprint() == made.fingerprint():
        return spec or made
    raise InputError(
        f"trace is of {made.name} ({made.fingerprint()}), the model is {spec.name} "
        f"({spec.fingerprint()}); record a trace of this model"
    )


def _check_predictor(predictor: Predictors, trace: Trace, thresholds: tuple[float, ...]) -> None:
    predictor.check_model(trace.spec, trace.meta.get("weights", ""))
    learnt = predictor.activity
    if len(thresholds) != len(learnt) or not np.allclose(thresholds, learnt, rtol=1e-5):
        raise InputError(
            "predictor learnt other activity thresholds than the trace's; plan with the trace that it was trained on, "
            "or one recorded with the same thresholds"
        )


def _thresholds(trace: Trace, spec: ModelSpec) -> tuple[float, ...]:
    given = trace.meta.get("thresholds", ())
    if spec.sparsity_kind == "relu":
        return tuple(max(float(value), spec.gate_threshold) for value in given) if spec.raised(given) else ()
    if len(given) != spec.layers:
        raise InputError(
            f"{spec.name} is a {spec.activation} model, in which no neuron is inactive by itself, "
            f"and its trace has no magnitude threshold for each of its {spec.layers} layers; "
            "record it with a wanted sparsity"
        )
    return tuple(float(value) for value in given)


def _levels(trace: Trace, placement: Placement, threshold: str) -> Levels | None:
    if threshold not in THRESHOLDS:
        raise InputError(f"threshold {threshold!r} is not one of {', '.join(THRESHOLDS)}")
    policy = THRESHOLDS[threshold]()
    return recorded_levels(trace, placement, policy) if isinstance(policy, Balanced) else None


def _solve(
    solver: str,
    frequency: np.ndarray,
    capacity: int,
    costs: LayerCosts,
    options: Mapping[str, Any],
) -> Solution:
    if solver == "ilp":
        return ilp(frequency, capacity, costs, **options)
    return _greedy_solution(frequency, capacity, **options)


def _greedy_solution(frequency: np.ndarray, capacity: int, group: int = 1) -> Solution:
    # the bound is the sum of the highest frequencies, which single neurons reach
    def served(slots: np.ndarray) -> float:
        sums = served_frequency(frequency, np.arange(frequency.shape[1] + 1))
        return float(sums[np.arange(len(slots)), slots].sum())

    slots = greedy(frequency, capacity, group=group)
    objective = served(slots)
    bound = objective if group == 1 else served(greedy(frequency, capacity))
    gap = (bound - objective) / bound if bound else 0.0
    status = "optimal" if group == 1 else "heuristic"
    return Solution(slots, objective, bound, gap, status, "greedy")


def _record(solution: Solution) -> dict[str, Any]:
    record = solution._asdict()
    del record["slots"]
    return {"name": record.pop("solver"), **record}
