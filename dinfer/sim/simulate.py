"""From plan and trace to a simulated run."""

from collections.abc import Iterator

import numpy as np

from dinfer.errors import InputError
from dinfer.machine import Factors, LayerCosts, Machine, layer_costs, prefill_seconds
from dinfer.plan import Plan
from dinfer.policies.words import scratch_sets
from dinfer.sim.decode import OPS_PER_LAYER, Log, Memory, Rules, replay
from dinfer.sim.engine import NO_LOAD, Load, empty_ops
from dinfer.sim.predictor import Predictor
from dinfer.timeline import SPAN_DTYPE, STEPS, Run, Timeline
from dinfer.trace import Trace


def simulate(
    plan: Plan,
    trace: Trace,
    machine: Machine | None = None,
    *,
    load: Load = NO_LOAD,
    spans: bool = True,
    decisions: bool = True,
    predictor: Predictor | None = None,
    asynchronous: bool = False,
    believed: np.ndarray | None = None,
) -> Run:
    """Replay the decode tokens of ``trace`` under ``plan`` and time them.

    ``machine`` has the true costs; the plan's own are what its decisions believe (and the default). ``load`` is other
    load on the machine. ``spans=False`` keeps the sums of the steps but not each span, ``decisions=False`` how many
    neurons each step fetched but not which ones. The cache's state and the placement start afresh at the trace's first
    token and carry on over its sequences. The plan's ``batch`` of sequences is decoded together (``Trace.batched``; a
    trace that is batched already is replayed as it is), each step counts as many tokens. ``predictor`` predicts in the
    place of the plan's ``prediction``, and costs what it says. ``asynchronous`` is DynamicInfer's way: a scheduler
    thread steps the policy beside the decoding thread, and the CPU's partial sum never queues behind prefetches, which
    have a stream of their own. ``believed`` (``Timeline.believed`` of a run) makes the decisions depend on what that
    run believed at each token. Raises InputError when the trace is of another model or has no decode token, or when the
    predictor is not of its decode tokens.
    """
    plan.check_model(trace.spec, trace.meta.get("weights", ""))
    decoded = trace.phase("decode")
    if not len(decoded):
        raise InputError("the trace has no decode token; record with --tokens 1 or more")
    if plan.batch > 1 and "batch" not in trace.meta:
        decoded = decoded.batched(plan.batch)
    batch = int(decoded.meta.get("batch", 1))
    machine = machine or plan.machine
    if plan.prediction == "trained" and predictor is None:
        raise InputError("plan predicts by a trained predictor; give what it predicts of the trace, or --predictor DIR")
    given = predictor is not None
    predictor = predictor or Predictor(np.ascontiguousarray(decoded.active))
    if predictor.predictions.shape != decoded.active.shape:
        raise InputError(
            f"predictions have shape {predictor.predictions.shape}; they must be {decoded.active.shape}, of the "
            "decode tokens"
        )
    costs = layer_costs(plan.spec, machine, plan.activation, plan.issue, predictor.rank, batch, plan.group)
    lag = plan.prediction == "previous" and not given
    log, seconds = _replay(plan, decoded, costs, load, (spans, decisions), predictor, lag, asynchronous, believed)
    timeline = Timeline(
        _spans(log),
        tokens=len(decoded) * batch,
        seconds=seconds,
        meta={
            "source": "simulated",
            "machine": machine.name,
            "plan": plan.fingerprint(),
            "model": plan.spec.name,
            "prefills": _prefills(plan, machine, decoded),
        },
        totals=log.step_seconds,
    )
    moved = log.used[0]
    return Run(timeline, log.work, log.fetch[:moved], log.evict[:moved])


def _prefills(plan: Plan, machine: Machine, decoded: Trace) -> list[list[float]]:
    """Tokens and seconds of each sequence's prompt: what stands before its first decode token."""
    prompts = decoded.tokens["position"][first_tokens(decoded)].tolist()
    resident = int(plan.placement.slots.sum())
    return [[prompt, prefill_seconds(plan.spec, machine, prompt, resident)] for prompt in prompts]


def _replay(
    plan: Plan,
    trace: Trace,
    costs: LayerCosts,
    load: Load,
    keep: tuple[bool, bool],
    predictor: Predictor,
    lag: bool,
    apart: bool,
    believed: np.ndarray | None,
) -> tuple[Log, float]:
    policy, spec = plan.policy, plan.spec
    rules = Rules(
        neurons=spec.neurons,
        lookahead=plan.lookahead,
        window=-1 if plan.window is None else plan.window,
        lag=lag,
        exact=plan.activation == "exact",
        moves=policy.moves or plan.activation == "predicted",
        clairvoyant=policy.clairvoyant,
        merge_in_queue=plan.issue != "gather" and not apart,
        scheduler_thread=apart,
    )
    beliefs = plan.beliefs._replace(lag=int(lag))
    memory = Memory(
        resident=plan.placement.resident.copy(),
        slots=plan.placement.slots,
        state=policy.init(spec, plan.placement, plan.frequency),
        parameters=policy.parameters(beliefs),
        stepped=np.full(spec.layers, -1, np.int32),
        ready=np.full(spec.layers, -1, np.int32),
        nothing=np.zeros((spec.layers, spec.words), np.uint64),
        fetch=scratch_sets(1, spec.words)[0][: spec.words],
        evict=scratch_sets(1, spec.words)[0][: spec.words],
        thresholds=_tables(plan, predictor),
        expected=np.zeros((spec.layers, 4), np.int64) if plan.levels is None else plan.levels.expected,
        held=plan.held,
    )
    log = _empty_log(plan, trace, *keep)
    active, predictions = (np.require(a, np.uint64, ["C", "W"]) for a in (trace.active, predictor.predictions))
    positions = trace.tokens["position"].to_numpy(np.int64, copy=True)
    start = np.zeros(1)
    token = np.zeros(2, np.int32)
    for token[1], factors in _beliefs(believed, len(trace)):
        believes = plan.costs.scaled(factors)
        memory = memory._replace(parameters=policy.parameters(beliefs._replace(costs=believes)))
        while token[0] < token[1]:
            token[0] = replay(
                policy.step, empty_ops(OPS_PER_LAYER * spec.layers + 1), costs, believes, Rules(*map(int, rules)),
                memory, log, load, active, predictions, first_tokens(trace), positions, start, token,
            )  # fmt: skip
            if token[0] < token[1]:
                log = log._replace(fetch=_doubled(log.fetch), evict=_doubled(log.evict))
    return log, float(start[0])


def _tables(plan: Plan, predictor: Predictor) -> np.ndarray:
    if plan.levels is not None:
        return np.ascontiguousarray(plan.levels.tables)
    # exact activation makes no error that a threshold could trade but that of the plan's own thresholds
    if plan.activation == "exact" or not predictor.thresholds.shape[2]:
        return np.zeros((plan.spec.layers, 5, 0))
    return np.ascontiguousarray(predictor.thresholds, np.float64)


def first_tokens(trace: Trace) -> np.ndarray:
    """Which tokens are the first of their sequence: bool [token]."""
    sequence = trace.tokens["sequence"].to_numpy()
    return np.concatenate([[True], sequence[1:] != sequence[:-1]])


def _beliefs(believed: np.ndarray | None, tokens: int) -> Iterator[tuple[int, Factors]]:
    """Where each of the beliefs that hold one after the other ends, and its factors on the plan's costs."""
    factors = Factors()
    for token, *changed in () if believed is None else believed.tolist():
        yield min(int(token), tokens), factors
        factors = Factors(*changed)
    yield tokens, factors


def _empty_log(plan: Plan, trace: Trace, spans: bool, decisions: bool) -> Log:
    layers, tokens = plan.spec.layers, len(trace)
    room = (OPS_PER_LAYER + 3) * layers * tokens + 2 * tokens if spans else 0
    moves = 2 * 64 * plan.spec.words * layers if decisions else 0
    return Log(
        end_seconds=np.zeros(tokens),
        work=np.zeros((tokens, layers, 4), np.int32),
        fetch=np.empty(moves, np.int32),
        evict=np.empty(moves, np.int32),
        step_seconds=np.zeros(len(STEPS)),
        used=np.zeros(2, np.int64),
        span_codes=np.zeros((room, 5), np.int32),
        span_seconds=np.zeros((room, 2)),
        span_bytes=np.zeros(room),
    )


def _doubled(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, np.empty_like(array)])


def _spans(log: Log) -> np.ndarray:
    used = log.used[1]
    spans = np.empty(used, SPAN_DTYPE)
    for column, name in enumerate(("token", "layer", "step", "stream", "neurons")):
        spans[name] = log.span_codes[:used, column]
    spans["start_seconds"], spans["end_seconds"] = log.span_seconds[:used].T
    spans["bytes"] = log.span_bytes[:used]
    return spans
