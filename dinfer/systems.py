"""The peers as what they do: each takes a trace, a machine and a budget and answers with a Run.

Dense systems are closed forms, as nothing of theirs overlaps; neuron-level systems are a plan and a replay of
it. On the roof, because a system is a plan (solve) and its replay (sim), and those rooms do not know each
other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dinfer.errors import InputError
from dinfer.machine import Machine, layer_costs
from dinfer.model import ModelSpec
from dinfer.plan import Plan
from dinfer.policies import THRESHOLDS
from dinfer.sim import simulate
from dinfer.sim.predictor import Predictor, false_chance, predictor_bytes, predictor_rank, with_predictor
from dinfer.solve import make_plan
from dinfer.solve.budget import MARGIN_PARTS, activation_bytes
from dinfer.timeline import SPAN_DTYPE, STEPS, STREAMS, Run, Timeline
from dinfer.trace import Trace
from dinfer.units import format_bytes

PAGEABLE = 0.75
"""Share of the link's rate that pageable copies reach: about 25% under, or worse (hardware 5.3)."""

PREDICTOR_SHARE = 0.0671
"""Share of the model's bytes that its predictors take by default: PowerInfer's of OPT-13B."""


def transformers(
    trace: Trace, machine: Machine, vram_bytes: int, *, context: int = 512, pageable: float = PAGEABLE,
    dequantise_bytes_per_second: float = math.inf, **_: Any,
) -> Run:  # fmt: skip
    """accelerate's offload: the first layers that fit stay, the others are streamed each token; all is dense.

    Copies come from pageable memory, one layer after the other, and nothing overlaps. Integer weights are
    first turned into floats, ``dequantise_bytes_per_second`` of them. Seconds of a token = layers x
    (attention + FFN) + bytes of the streamed layers / (pageable x link) + head. Raises InputError for a
    budget too small for one layer.
    """
    spec = trace.spec
    resident, memory = resident_layers(spec, machine, vram_bytes, context, kv_stays=True)
    layer_bytes = spec.attention_bytes + spec.neurons * spec.neuron_bytes
    stream = machine.h2d.fixed_seconds + layer_bytes / (pageable * machine.h2d.bytes_per_second)
    integer = spec.dtype in ("int4", "int8")
    unpack = layer_bytes / dequantise_bytes_per_second if integer else 0.0
    ops: list[Op] = []
    for layer in range(spec.layers):
        if layer >= resident:
            ops.append(Op(layer, "prefetch", "h2d", stream, 0.0, spec.neurons, layer_bytes))
        ops += gpu_layer(spec, machine, layer, unpack)
    run = serial_run(trace, machine, [*ops, gpu_head(spec, machine)], np.ones(spec.layers, bool))
    return labelled(run, "transformers", memory)


def llama_cpp(trace: Trace, machine: Machine, vram_bytes: int, *, context: int = 512, **_: Any) -> Run:
    """llama.cpp's split: the last layers that fit run on the GPU, those before on the CPU, KV with its layer.

    Seconds of a token = CPU layers x bytes / CPU rate + GPU layers x bytes / GPU rate + one crossing + head;
    dense. The CPU's rate is that of its ``attention`` cost, the one of dense matrices.
    """
    spec = trace.spec
    resident, memory = resident_layers(spec, machine, vram_bytes, context, kv_stays=False)
    first = spec.layers - resident
    ops: list[Op] = []
    for layer in range(first):
        ops += cpu_layer(spec, machine, layer)
    if first:
        ops.append(Op(min(first, spec.layers - 1), "merge", "h2d", machine.h2d.seconds(1, spec.hidden * 4.0)))
    for layer in range(first, spec.layers):
        ops += gpu_layer(spec, machine, layer, 0.0)
    run = serial_run(trace, machine, [*ops, gpu_head(spec, machine)], np.arange(spec.layers) >= first)
    return labelled(run, "llama.cpp", memory)


def powerinfer(
    trace: Trace, machine: Machine, vram_bytes: int, *, context: int = 512,
    frequency: np.ndarray | None = None, predictor: Predictor | None = None, **_: Any,
) -> Run:  # fmt: skip
    """PowerInfer: the profile's hottest neurons stay on the GPU, the CPU computes what else is predicted."""
    predictor = predictor or perfect(trace)
    plan = neuron_plan(
        trace, machine, vram_bytes, context, frequency, predictor, {"name": "static"}, lookahead=0
    )
    return labelled(simulate(plan, trace, predictor=fixed(predictor)), "powerinfer", plan.memory)


def dynamicinfer(
    trace: Trace, machine: Machine, vram_bytes: int, *, context: int = 512,
    frequency: np.ndarray | None = None, predictor: Predictor | None = None,
    micro: bool = True, macro: bool = True, threshold: bool = True,
    lookahead: int = 1, issue: str = "copy", group: int = 1, **_: Any,
) -> Run:  # fmt: skip
    """DynamicInfer: prefetches by v = a + lambda f, a copy a neuron, a layer ahead; balances thresholds.

    ``group`` is how many neurons one copy moves. ``micro`` moves neurons at all, ``macro`` keeps the most frequent
    residents, ``threshold`` balances: the ablation adds them in this order. Copies of single neurons let the CPU's
    partial sum pass between them: it is on another stream. Raises InputError for macro without micro, which would keep
    what never leaves.
    """
    if macro and not micro:
        raise InputError("dynamicinfer: macro keeps what micro would move; it needs micro")
    predictor = predictor or perfect(trace)
    cache = {"name": "hot_predicted"} | ({} if macro else {"pinned": 0.0}) if micro else {"name": "static"}
    plan = neuron_plan(trace, machine, vram_bytes, context, frequency, predictor, cache, lookahead, issue, group)
    used = predictor if threshold else fixed(predictor)
    return labelled(simulate(plan, trace, predictor=used, asynchronous=True), "dynamicinfer", plan.memory)


def oracle(
    trace: Trace, machine: Machine, vram_bytes: int, *, context: int = 512,
    frequency: np.ndarray | None = None, lookahead: int = 1, issue: str = "copy", **_: Any,
) -> Run:  # fmt: skip
    """The clairvoyant: belady's replacement and a predictor that costs nothing and never errs."""
    predictor = perfect(trace)
    plan = neuron_plan(
        trace, machine, vram_bytes, context, frequency, predictor, {"name": "belady"}, lookahead, issue
    )
    return labelled(simulate(plan, trace, predictor=predictor, asynchronous=True), "oracle", plan.memory)


SYSTEMS: dict[str, Callable[..., Run]] = {
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "powerinfer": powerinfer,
    "dynamicinfer": dynamicinfer,
    "oracle": oracle,
}


def predict(
    trace: Trace, recall: float, precision: float, share: float, seed: int = 0, threshold: str = "balanced"
) -> Predictor:
    """The predictor of a trace's decode tokens with this quality, taking ``share`` of the model's bytes."""
    decoded = trace.phase("decode")
    predictions = with_predictor(decoded, recall, precision, seed)
    density = decoded.density
    recalls, precisions = np.full(len(density), recall), np.full(len(density), precision)
    tables = np.zeros((len(density), 5, 1))
    if recall < 1 and precision < 1:
        tables = THRESHOLDS[threshold]().init(recalls, false_chance(recalls, precisions, density), density)
    return Predictor(predictions, predictor_rank(trace.spec, share), tables)


def perfect(trace: Trace) -> Predictor:
    """A predictor that says the truth and costs nothing: no error to trade, so thresholds are fixed."""
    return Predictor(np.ascontiguousarray(trace.phase("decode").active))


def fixed(predictor: Predictor) -> Predictor:
    """The same predictor with the static threshold on both sides."""
    return predictor._replace(thresholds=np.zeros((0, 5, 0)))


def neuron_plan(
    trace: Trace, machine: Machine, vram_bytes: int, context: int, frequency: np.ndarray | None,
    predictor: Predictor, cache: dict[str, Any], lookahead: int = 1, issue: str = "gather", group: int = 1,
) -> Plan:  # fmt: skip
    """The plan of a neuron-level system: greedy over all layers, the predictor's bytes counted."""
    cache = dict(cache)
    return make_plan(
        trace, machine, vram_bytes, context=context, cache=cache.pop("name"), cache_parameters=cache,
        lookahead=min(lookahead, trace.spec.layers - 1), activation="predicted", prediction="oracle",
        issue=issue, group=group, frequency=frequency, predictor_bytes=predictor_bytes(trace.spec, predictor.rank),
    )  # fmt: skip


def resident_layers(
    spec: ModelSpec, machine: Machine, vram_bytes: int, context: int, kv_stays: bool
) -> tuple[int, dict[str, int]]:
    """Whole layers that the budget holds, and its bytes by the terms of solve.memory_breakdown.

    Embeddings and head stay, and all of the KV or (``kv_stays`` False) that of the resident layers. Where not
    all layers fit and KV stays, ``activations`` hold one streamed layer too. Raises InputError for a budget
    above the GPU's memory, or below what stays without any layer, with every term.
    """
    if vram_bytes > machine.gpu.memory_bytes:
        raise InputError(
            f"budget {format_bytes(vram_bytes)} is more than the {format_bytes(machine.gpu.memory_bytes)} of "
            f"{machine.gpu.name}; lower --vram"
        )
    ffn_bytes, kv = spec.neurons * spec.neuron_bytes, spec.kv_bytes(context)
    memory = {
        "context": machine.gpu.context_bytes,
        "weights": spec.dense_bytes - spec.layers * spec.attention_bytes,
        "kv": kv if kv_stays else 0,
        "activations": activation_bytes(spec, context),
        "predictor": 0,
        "margin": vram_bytes // MARGIN_PARTS,
    }
    layer_kv = 0 if kv_stays else -(-kv // spec.layers)
    each = spec.attention_bytes + ffn_bytes + layer_kv
    if kv_stays and vram_bytes - sum(memory.values()) < spec.layers * each:
        memory["activations"] += spec.attention_bytes + ffn_bytes
    room = vram_bytes - sum(memory.values())
    if room < 0:
        terms = ", ".join(f"{name} {format_bytes(count)}" for name, count in memory.items() if count)
        raise InputError(
            f"budget {format_bytes(vram_bytes)} on {machine.gpu.name} is below the "
            f"{format_bytes(vram_bytes - room)} that {terms} need; raise --vram"
        )
    layers = min(room // each, spec.layers)
    memory["weights"] += layers * spec.attention_bytes
    memory["kv"] += layers * layer_kv
    memory["neurons"] = layers * ffn_bytes
    memory["margin"] += vram_bytes - sum(memory.values())
    return layers, memory


class Op(NamedTuple):
    """A span that nothing overlaps: ``seconds`` and ``position_seconds`` for each token of context."""

    layer: int
    step: str
    stream: str
    seconds: float
    position_seconds: float = 0.0
    neurons: int = 0
    bytes: int = 0


def gpu_layer(spec: ModelSpec, machine: Machine, layer: int, unpack_seconds: float) -> list[Op]:
    """A layer computed dense on the GPU: attention, then all neurons."""
    costs = layer_costs(spec, machine, "predicted")
    ffn = costs.gpu_seconds(0, spec.neurons)
    return [
        Op(layer, "attention", "gpu", costs.attention_seconds, costs.attention_token_seconds),
        Op(layer, "ffn_gpu", "gpu", ffn + unpack_seconds, 0.0, spec.neurons),
    ]


def cpu_layer(spec: ModelSpec, machine: Machine, layer: int) -> list[Op]:
    """A layer computed dense on the CPU: bytes or flops at its attention's rate, whichever takes longer."""
    cpu, kv = machine.cpu, spec.kv_bytes(1) / spec.layers
    ffn_bytes = spec.neurons * spec.neuron_bytes
    attention = cpu.attention.seconds(spec.attention_bytes, 2.0 * spec.attention_parameters)
    ffn = cpu.attention.seconds(ffn_bytes, 2.0 * spec.neurons * spec.matrices * spec.hidden)
    return [
        Op(layer, "attention", "cpu", attention, kv / cpu.kv.bytes_per_second),
        Op(layer, "ffn_cpu", "cpu", ffn, 0.0, spec.neurons, ffn_bytes),
    ]


def gpu_head(spec: ModelSpec, machine: Machine) -> Op:
    """Final norm, output projection and sampling, on the GPU."""
    return Op(-1, "head", "gpu", layer_costs(spec, machine, "predicted").head_seconds)


def serial_run(trace: Trace, machine: Machine, ops: list[Op], on_gpu: np.ndarray) -> Run:
    """The run of ops that follow each other; all neurons are computed, ``on_gpu`` bool [layer] says where.

    Streamed layers are spans and bytes, not decisions: ``fetched`` stays 0. Raises InputError without decode
    tokens.
    """
    decoded = trace.phase("decode")
    if not len(decoded):
        raise InputError("the trace has no decode token; record with --tokens 1 or more")
    position = decoded.tokens["position"].to_numpy(float)
    seconds = np.array([op.seconds for op in ops]) + position[:, None] * [op.position_seconds for op in ops]
    ends = np.cumsum(seconds).reshape(seconds.shape)
    spans = np.empty(seconds.shape, SPAN_DTYPE)
    spans["token"] = np.arange(len(decoded))[:, None]
    spans["step"] = [STEPS.index(op.step) for op in ops]
    spans["stream"] = [STREAMS.index(op.stream) for op in ops]
    for field in ("layer", "neurons", "bytes"):
        spans[field] = [getattr(op, field) for op in ops]
    spans["start_seconds"], spans["end_seconds"] = ends - seconds, ends
    work = np.zeros((len(decoded), trace.spec.layers, 4), np.int32)
    work[:, on_gpu, 0], work[:, ~on_gpu, 1] = trace.spec.neurons, trace.spec.neurons
    meta = {"source": "simulated", "machine": machine.name, "model": trace.spec.name}
    nothing = np.zeros(0, np.int32)
    return Run(Timeline(spans.ravel(), len(decoded), float(ends[-1, -1]), meta), work, nothing, nothing)


def labelled(run: Run, system: str, memory: Mapping[str, int]) -> Run:
    """The run with its system's name and its GPU memory by term in the timeline's meta."""
    meta = {**run.timeline.meta, "system": system, "memory": dict(memory)}
    return replace(run, timeline=replace(run.timeline, meta=meta))


def cpu_share_of_ffn(run: Run) -> float:
    """CPU's share of the FFN latency: its busy time over all time but attention, prediction and head."""
    steps = run.timeline.step_seconds() * run.timeline.tokens
    ffn = run.timeline.seconds - float(steps[["attention", "predict", "head"]].sum())
    return run.timeline.busy("cpu") / ffn if ffn > 0 else 0.0
