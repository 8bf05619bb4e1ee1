"""One decoded token, for real: the same functions in the same order as sim/decode.py, doing the work."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dinfer import bits
from dinfer.exec import kernels_gpu
from dinfer.exec.bank import Bank
from dinfer.exec.clock import Clock
from dinfer.exec.estimate import Estimate
from dinfer.exec.graphs import Graphs
from dinfer.exec.host import Host
from dinfer.exec.link import Arrival, EmulatedLink, Transport
from dinfer.exec.predictor import LivePredictor
from dinfer.exec.workers import Partial, Workers
from dinfer.families import FAMILIES, TORCH_DTYPES
from dinfer.machine import Factors, LayerCosts
from dinfer.plan import Plan
from dinfer.policies.protocol import NO_FUTURE
from dinfer.policies.window import sized_window
from dinfer.policies.words import add_members, count_members, ids, swap
from dinfer.trace import Trace


class Seen(NamedTuple):
    """What tells who was active in a layer at ``token``; ``gpu_values`` may be on their way to the host."""

    token: int
    gpu_ids: np.ndarray
    gpu_values: Arrival
    partial: Partial | None


class Share(NamedTuple):
    """What one FFN computes: on the GPU ``slots`` (None: all), which hold ``gpu_ids``, and on the CPU ``cpu_ids``."""

    slots: torch.Tensor | None
    gpu_ids: np.ndarray
    cpu_ids: np.ndarray


NO_IDS = np.zeros(0, np.int32)


@dataclass(eq=False)
class Running:
    """A model being run under a plan: weights, threads, the cache's state and what is known of activity.

    ``predictions`` uint64 [layer, words] is what each layer's next step takes as predicted when nothing is replayed:
    its active set of the token before, of a batch the union. ``prefills`` holds tokens and seconds of each prompt,
    ``ways`` who computed it.
    ``kv`` [layer][sequence] are the caches [2, kv_heads, context, head_dim], ``going`` the sequences that still decode,
    ``decoded`` the tokens so far (``clock.token`` counts steps of the batch). ``estimate`` keeps the believed costs up
    to date; without one the plan's are believed throughout.
    ``residual`` is what a trained ``predictor`` sees, ``replayed`` uint64 [token, layer, words] what it said of a
    replayed trace. ``kernel`` is the device's FFN, ``graphs`` its captured work where there is any, ``seen`` what is
    to be learnt of each layer's last FFN.
    """

    plan: Plan
    dense: Any
    bank: Bank
    link: Transport
    workers: Workers
    clock: Clock
    device: torch.device
    kv: list[list[torch.Tensor]]
    state: np.ndarray
    replay: Trace | None = None
    first: np.ndarray | None = None
    predictor: LivePredictor | None = None
    replayed: np.ndarray | None = None
    estimate: Estimate | None = None
    going: Sequence[int] = (0,)
    decoded: int = 0
    position: int = 0
    kernel: kernels_gpu.Ffn = kernels_gpu.ffn
    graphs: Graphs | None = None
    seen: dict[int, Seen] = field(default_factory=dict)
    host: Host | None = None
    predictions: np.ndarray = field(init=False)
    residual: torch.Tensor = field(init=False)
    copies: dict[int, Any] = field(default_factory=dict)
    work: list[np.ndarray] = field(default_factory=list)
    moves: list[tuple[int, int, np.ndarray, np.ndarray]] = field(default_factory=list)
    prefills: list[list[float]] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    fetched: dict[int, np.ndarray] = field(default_factory=dict)
    share: dict[int, Share] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.plan.spec
        self.family = FAMILIES[spec.family]
        self.policy = self.plan.policy
        self.schedules = self.policy.moves or self.plan.activation == "predicted"
        self.held = self.plan.held
        self.value_thresholds = self.plan.value_thresholds
        self.gpu_thresholds = self.value_thresholds
        self.unread = [0] * spec.layers
        self.believe(self.plan.costs)
        self.predictions = np.zeros((spec.layers, spec.words), np.uint64)
        self.fetch, self.evict = np.zeros(spec.words, np.uint64), np.zeros(spec.words, np.uint64)
        self._compile()
        gc.freeze()  # the collector would go through all that torch ever imported: 0.25 s in the midst of a token

    def believe(self, costs: LayerCosts) -> None:
        """Let decisions from here on depend on ``costs``."""
        self.costs = costs
        self.parameters = self.policy.parameters(self.plan.beliefs._replace(costs=costs))
        self.balance()

    def balance(self) -> None:
        """Choose each side's thresholds by the believed costs: again whenever these have moved."""
        if self.plan.levels is not None:
            levels = self.plan.levels.choose(self.costs)
            chosen = self.plan.levels.thresholds(levels)
            self.gpu_thresholds = chosen[:, 0]
            if self.plan.spec.sparsity_kind == "relu":  # its one threshold is the gate's
                self.workers.thresholds = np.maximum(chosen[:, 1], self.value_thresholds).tolist()
            else:
                self.workers.gate_thresholds = chosen[:, 1].tolist()
            self.unread = self.plan.levels.unread(levels)

    def _compile(self) -> None:
        """Call what is compiled or set up at its first call once, on nothing, before the clock runs."""
        words = np.zeros(1, np.uint64)
        add_members(words, NO_IDS, np.zeros(0, np.float32))
        swap(words, words, words)
        ids(words, 0)
        self.bank.swap(0, NO_IDS, NO_IDS)
        spec, biases = self.plan.spec, self.bank.slot_bias
        kind = TORCH_DTYPES[spec.compute_dtype]
        x = torch.zeros(self.plan.batch, spec.hidden, dtype=kind, device=self.device)
        for layer, slots in enumerate(self.bank.slots):
            if len(slots):  # torch sets a product up for each shape
                self.kernel(slots, x, spec, None if biases is None else biases[layer], 0.0)

    def close(self) -> None:
        """End the threads."""
        gc.unfreeze()
        self.link.close()
        self.workers.close()
        if self.host is not None:
            self.host.close()


def decode_token(run: Running, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Logits [sequence, vocab] after one token of each sequence that is ``going``: its id and position.

    For each layer attention, schedule ahead, FFN; then the head.
    """
    spec = run.plan.spec
    run.work.append(np.zeros((spec.layers, 4), np.int32))
    run.position = sum(positions)
    hidden = run.family.embed(run.dense, torch.tensor(ids, device=run.device), positions)
    if run.host is not None:
        return on_the_host(run, run.host, hidden[0], positions[0])
    if run.graphs is not None:
        run.graphs.start(positions[0])
    for layer in range(spec.layers):
        hidden, x = attention(run, layer, hidden, positions)
        if run.schedules:
            run.residual = hidden
            first, last = targets(layer, run.plan.lookahead, spec.layers)
            for target in range(first, last):
                if not run.held[target]:
                    schedule(run, target)
            run.clock.lap(layer, "wait")
        hidden = ffn(run, layer, hidden, x)
    return head(run, hidden)


def on_the_host(run: Running, host: Host, hidden: torch.Tensor, position: int) -> torch.Tensor:
    """All layers and the head without a GPU; what is to be computed is known beforehand."""
    sets = None
    if run.plan.activation == "predicted":
        predicted = (predict(run, run.clock.token, layer)[0] for layer in range(run.plan.spec.layers))
        sets = [bits.ids(words, run.bank.neurons) for words in predicted]
    logits, active = host.decode(hidden, position, sets)
    run.work[run.clock.token][:, 1] = active
    return logits[None]


def targets(layer: int, lookahead: int, layers: int) -> tuple[int, int]:
    """Layers to schedule after attention of ``layer``: the one ahead; at the first layer all up to it."""
    return 0 if layer == 0 else layer + lookahead, min(layer + lookahead + 1, layers)


def attention(
    run: Running, layer: int, hidden: torch.Tensor, positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The GPU's attention with its norms: the un-normalised residual and the FFN's input, [sequence, hidden] each."""
    if run.graphs is not None:
        hidden, x = run.graphs.attention(layer, hidden)
    else:
        caches = [run.kv[layer][sequence] for sequence in run.going]
        hidden = run.family.attention(run.dense, layer, hidden, caches, positions)
        x = run.family.ffn_input(run.dense, layer, hidden)
    run.clock.lap(layer, "attention")
    return hidden, x


def schedule(run: Running, layer: int) -> None:
    """Step the policy for ``layer``, swap, and start its prefetch.

    On the decoding thread: the step is compiled and takes microseconds, a thread of its own would cost more in
    hand-overs of the GIL (250 us a layer measured on 2 cores) than it saves.
    """
    token = run.clock.token
    settle(run, layer)
    predicted, future = predict(run, token, layer)
    start = time.perf_counter()
    resident, window = run.bank.resident[layer], run.plan.window
    if window is None:
        slots, neurons = len(run.bank.bucket[layer]), run.bank.neurons
        window = sized_window(run.costs, run.plan.lookahead, resident, predicted, slots, neurons)
    n = run.policy.step(  # type: ignore[operator]
        run.parameters, run.state[layer], resident, predicted, future, window, run.fetch, run.evict
    )
    if n:
        swap(resident, run.fetch, run.evict)
    prefetch(run, token, layer, n)
    if run.plan.activation == "predicted":
        run.share[layer] = predicted_share(run, layer, predicted)
    run.clock.record(layer, "schedule", "scheduler", start, time.perf_counter())


def predicted_share(run: Running, layer: int, predicted: np.ndarray) -> Share:
    """The predicted neurons by where they are now."""
    ids = bits.ids(predicted, run.bank.neurons)
    slots = run.bank.slot_of[layer, ids]
    return Share(run.link.up(slots[slots >= 0].astype(np.int64)), ids[slots >= 0], ids[slots < 0])


def predict(run: Running, token: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The set that ``layer`` is predicted to use, and the future where it is known (a replay).

    A trained predictor computes it from the residual at hand; a replay takes what it computed from the trace's, so
    that no rounding makes it differ from the simulator.
    """
    if run.predictor is not None:
        future = NO_FUTURE if run.replay is None else run.replay.active[token + 1 :, layer]
        if run.replayed is not None:
            return run.replayed[token, layer], future
        start = time.perf_counter()
        predicted = run.predictor.predicted(layer, run.residual)
        run.clock.record(layer, "predict", "scheduler", start, time.perf_counter())
        return predicted, future
    if run.replay is None:
        return run.predictions[layer], NO_FUTURE
    active = run.replay.active
    if run.plan.prediction == "previous":
        known = token > 0 and not (run.first is not None and run.first[token])
        predicted = active[token - 1, layer] if known else np.zeros(active.shape[2], np.uint64)
    else:
        predicted = active[token, layer]
    return np.ascontiguousarray(predicted), active[token + 1 :, layer]


def prefetch(run: Running, token: int, layer: int, n: int) -> None:
    """Start the host-to-device copy of the ``n`` neurons that the policy fetched."""
    fetch, evict = ids(run.fetch, n), ids(run.evict, n)
    run.fetched[layer] = fetch
    if n:
        slots = run.bank.swap(layer, fetch, evict)
        run.moves.append((token, layer, fetch, evict))
        run.copies[layer] = run.link.prefetch(layer, fetch, slots)


def ffn(run: Running, layer: int, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Both sides' parts and the merge; the GPU waits for its neurons, then for the CPU's partial sum."""
    share = run.share.get(layer) or Share(None, run.bank.bucket[layer], run.bank.cold[layer])
    if len(share.cpu_ids):
        run.workers.start(layer, run.link.down(x), share.cpu_ids)
    if layer in run.copies:
        run.clock.lap(layer, "ffn_gpu")  # handing over, which stands in the GPU's part where there is no copy
        wait(run, layer)
    total, values = ffn_gpu(run, layer, x, share)
    partial = None
    if len(share.cpu_ids):
        partial = run.workers.result()
        run.clock.lap(layer, "wait")
        total = merge(run, layer, total, partial)
    observe(run, layer, share.gpu_ids, values, partial)
    if run.bank.down_bias is not None:
        total = total + run.bank.down_bias[layer]
    return hidden + total


def wait(run: Running, layer: int) -> None:
    """The GPU's barrier: the layer's prefetch has landed."""
    run.link.wait(run.copies.pop(layer))
    run.clock.lap(layer, "wait")


def ffn_gpu(run: Running, layer: int, x: torch.Tensor, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums [sequence, hidden] and values [sequence, neuron] of the neurons in the GPU's share, or 0."""
    if not len(share.gpu_ids):
        return torch.zeros_like(x), x.new_zeros(len(x), 0)
    if run.graphs is not None and share.slots is None and run.plan.levels is None:  # graphs hold one threshold
        total, values = run.graphs.ffn(layer)
    else:
        bias = None if run.bank.slot_bias is None else run.bank.slot_bias[layer]
        threshold = float(run.gpu_thresholds[layer])
        total, values = run.kernel(run.bank.slots[layer], x, run.plan.spec, bias, threshold, share.slots)
    run.clock.lap(layer, "ffn_gpu", len(share.gpu_ids))
    return total, values


def merge(run: Running, layer: int, total: torch.Tensor, partial: Partial) -> torch.Tensor:
    """Bring the CPU's partial sum over and add it; a copy queues behind the prefetches, a kernel's read does not."""
    if run.plan.issue != "gather" and isinstance(run.link, EmulatedLink):
        run.link.wait(run.link.state(layer, partial.total.nbytes))
    total = total + run.link.up(partial.total).to(total.dtype)
    run.clock.lap(layer, "merge")
    return total


def observe(
    run: Running, layer: int, gpu_ids: np.ndarray, gpu_values: torch.Tensor, partial: Partial | None
) -> None:
    """Note who was active; where the values are still on their way, it is learnt when the layer is scheduled again."""
    settle(run, layer)
    run.seen[layer] = Seen(run.clock.token, gpu_ids, run.link.down(gpu_values), partial)
    if not run.link.lazy:
        settle(run, layer)


def settle(run: Running, layer: int) -> None:
    """Learn from what was seen last: the next token's prediction, and the log of the work.

    Before the layer's neurons are swapped, which changes ``gpu_ids``. Where the GPU's threshold is lower than the
    plan's, it computes neurons that are not active (of gated ReLU kinds their values do not tell, and they count as
    active); those that the CPU leaves out by their gates are not known to be.
    """
    if (seen := run.seen.pop(layer, None)) is None:
        return
    active, values = np.zeros(run.plan.spec.words, np.uint64), largest(seen.gpu_values())
    on_gpu = np.count_nonzero(values)
    told = run.plan.spec.sparsity_kind == "magnitude" or not run.plan.spec.gated
    if told and run.gpu_thresholds[layer] < run.value_thresholds[layer]:
        values = np.where(np.abs(values) > run.value_thresholds[layer], values, 0)
    add_members(active, seen.gpu_ids, values)
    on_cpu = 0 if seen.partial is None else add_members(active, seen.partial.ids, largest(seen.partial.values))
    run.predictions[layer] = active
    fetched = run.fetched.get(layer, NO_IDS)
    run.work[seen.token][layer] = on_gpu, on_cpu, len(fetched), len(fetched) - count_members(active, fetched)


def largest(values: np.ndarray) -> np.ndarray:
    """A batch's values float32 [sequence, neuron] as [neuron]: 0 where the neuron is inactive in every sequence."""
    return values[0] if len(values) == 1 else np.abs(values).max(axis=0)


def head(run: Running, hidden: torch.Tensor) -> torch.Tensor:
    """Final norm and output projection: logits [sequence, vocab]; ``end_token`` laps it with the sampling."""
    return run.family.head(run.dense, hidden)


def end_token(run: Running) -> None:
    """Each sequence's token is sampled: close the head's lap, and believe what the costs have become."""
    run.clock.lap(-1, "head")
    run.clock.token += 1
    run.decoded += len(run.going)
    if run.estimate is not None:
        for layer in range(run.plan.spec.layers):
            settle(run, layer)
        run.clock.resolve()
        run.believe(run.plan.costs.scaled(run.estimate.update(run.clock.spans, planned(run))))


def planned(run: Running) -> Factors:
    """Seconds that the plan's costs give the token that has ended: attention and both sides over all layers."""
    costs, exact = run.plan.costs, run.plan.activation == "exact"
    ahead, layers = run.plan.lookahead, run.plan.spec.layers
    attention = gpu = cpu = 0.0
    for layer, (on_gpu, on_cpu) in enumerate(run.work[-1][:, :2].tolist()):
        share = run.share.get(layer) or Share(None, run.bank.bucket[layer], run.bank.cold[layer])
        attention += costs.attention_seconds + run.position * costs.attention_token_seconds
        if examined := len(share.gpu_ids):
            gpu += costs.gpu_seconds(examined, on_gpu if exact else examined)
            gpu += costs.hand_seconds if len(share.cpu_ids) else 0.0
            copied = sum(len(run.fetched.get(target, NO_IDS)) for target in range(*targets(layer, ahead, layers)))
            gpu += costs.gpu_delay_seconds(copied)
        if examined := len(share.cpu_ids) - run.unread[layer]:
            cpu += costs.cpu_seconds(examined, on_cpu if exact else examined)
    return Factors(attention, gpu, cpu)
