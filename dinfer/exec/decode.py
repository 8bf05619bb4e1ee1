"""One decoded token, for real: the same functions in the same order as sim/decode.py, doing the work."""

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dinfer import bits
from dinfer.exec import kernels_gpu
from dinfer.exec.bank import Bank
from dinfer.exec.clock import Clock
from dinfer.exec.link import EmulatedLink, Transport
from dinfer.exec.workers import Partial, Workers
from dinfer.families import FAMILIES
from dinfer.plan import Plan
from dinfer.policies.protocol import NO_FUTURE
from dinfer.policies.window import window_neurons
from dinfer.policies.words import add_members
from dinfer.trace import Trace


class Share(NamedTuple):
    """What one FFN computes: on the GPU ``slots`` (None: all), which hold ``gpu_ids``, and on the CPU ``cpu_ids``."""

    slots: torch.Tensor | None
    gpu_ids: np.ndarray
    cpu_ids: np.ndarray


class Ready(NamedTuple):
    """What a layer's FFN waits for: ``scheduled`` is set when the policy has stepped, ``copy[0]`` is its prefetch."""

    scheduled: threading.Event
    copy: list[Any]


NO_IDS = np.zeros(0, np.int32)


@dataclass(eq=False)
class Running:
    """A model being run under a plan: weights, threads, the cache's state and what is known of activity.

    ``predictions`` uint64 [layer, words] is what each layer's next step takes as predicted when nothing is replayed:
    its active set of the token before. ``kv`` [layer, 2, kv_heads, context, head_dim].
    """

    plan: Plan
    dense: Any
    bank: Bank
    link: Transport
    workers: Workers
    clock: Clock
    kv: torch.Tensor
    state: np.ndarray
    replay: Trace | None = None
    first: np.ndarray | None = None
    predictions: np.ndarray = field(init=False)
    ready: dict[int, Ready] = field(default_factory=dict)
    work: list[np.ndarray] = field(default_factory=list)
    moves: list[tuple[int, int, np.ndarray, np.ndarray]] = field(default_factory=list)
    fetched: dict[int, np.ndarray] = field(default_factory=dict)
    share: dict[int, Share] = field(default_factory=dict)
    scheduler: "Scheduler" = field(init=False)

    def __post_init__(self) -> None:
        spec = self.plan.spec
        self.family = FAMILIES[spec.family]
        self.policy = self.plan.policy
        self.schedules = self.policy.moves or self.plan.activation == "predicted"
        self.costs = self.plan.costs
        self.parameters = self.policy.parameters()
        self.value_thresholds = self.plan.value_thresholds
        self.predictions = np.zeros((spec.layers, spec.words), np.uint64)
        self.scheduler = Scheduler(self)

    def close(self) -> None:
        """End the threads, the scheduler first: it feeds the link."""
        self.scheduler.close()
        self.link.close()
        self.workers.close()


def decode_token(run: Running, token_id: int, position: int) -> torch.Tensor:
    """Logits [vocab] after ``token_id`` at ``position``: for each layer attention, schedule ahead, FFN; then head."""
    spec = run.plan.spec
    run.work.append(np.zeros((spec.layers, 4), np.int32))
    hidden = run.family.embed(run.dense, torch.tensor([token_id], device=run.kv.device), position)
    for layer in range(spec.layers):
        hidden = attention(run, layer, hidden, position)
        if run.schedules:
            first, last = targets(layer, run.plan.lookahead, spec.layers)
            for target in range(first, last):
                schedule(run, target)
        hidden = ffn(run, layer, hidden)
    logits = head(run, hidden)
    run.clock.token += 1
    return logits


def targets(layer: int, lookahead: int, layers: int) -> tuple[int, int]:
    """Layers to schedule after attention of ``layer``: the one ahead; at the first layer all up to it."""
    return 0 if layer == 0 else layer + lookahead, min(layer + lookahead + 1, layers)


def attention(run: Running, layer: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
    """The GPU's attention: the un-normalised residual [1, hidden]."""
    hidden = run.family.attention(run.dense, layer, hidden, run.kv[layer], position)
    run.clock.lap(layer, "attention")
    return hidden


def schedule(run: Running, layer: int) -> None:
    """Hand the step of ``layer`` to the scheduler thread."""
    run.ready[layer] = Ready(threading.Event(), [])
    run.scheduler.jobs.put((step_policy, run.clock.token, layer, run.ready[layer]))


def step_policy(run: Running, token: int, layer: int, ready: Ready) -> None:
    """Step the policy for ``layer``, swap, and prefetch (on the scheduler thread)."""
    start = time.perf_counter()
    predicted, future = predict(run, token, layer)
    bank, window = run.bank, run.plan.window
    if window is None:
        hits = int(bits.count(predicted & bank.resident[layer]))
        slots, misses = len(bank.bucket[layer]), int(bits.count(predicted)) - hits
        window = window_neurons(run.costs, run.plan.lookahead, slots, bank.neurons, hits, misses)
    n = run.policy.step(  # type: ignore[operator]
        run.parameters, run.state[layer], bank.resident[layer], predicted, future, window,
        run.scheduler.fetch, run.scheduler.evict,
    )  # fmt: skip
    fetch, evict = run.scheduler.fetch[:n].copy(), run.scheduler.evict[:n].copy()
    run.clock.record(layer, "schedule", "scheduler", start, time.perf_counter())
    prefetch(run, token, layer, fetch, evict, ready)
    if run.plan.activation == "predicted":
        run.share[layer] = predicted_share(bank, layer, predicted)
    ready.scheduled.set()


def predicted_share(bank: Bank, layer: int, predicted: np.ndarray) -> Share:
    """The predicted neurons by where they are now."""
    ids = bits.ids(predicted, bank.neurons)
    slots = bank.slot_of[layer, ids]
    device = bank.slots[layer].device
    return Share(torch.from_numpy(slots[slots >= 0]).to(device).long(), ids[slots >= 0], ids[slots < 0])


def predict(run: Running, token: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The set that ``layer`` is predicted to use, and the future where it is known (a replay)."""
    if run.replay is None:
        return run.predictions[layer], NO_FUTURE
    active = run.replay.active
    if run.plan.prediction == "previous":
        known = token > 0 and not (run.first is not None and run.first[token])
        predicted = active[token - 1, layer] if known else np.zeros(active.shape[2], np.uint64)
    else:
        predicted = active[token, layer]
    return np.ascontiguousarray(predicted), active[token + 1 :, layer]


def prefetch(run: Running, token: int, layer: int, fetch: np.ndarray, evict: np.ndarray, ready: Ready) -> None:
    """Start the host-to-device copy of ``fetch`` into the slots of ``evict``."""
    run.fetched[layer] = fetch
    if len(fetch) == 0:
        return
    slots = run.bank.swap(layer, fetch, evict)
    run.moves.append((token, layer, fetch, evict))
    ready.copy.append(run.link.prefetch(layer, fetch, slots))


def ffn(run: Running, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Both sides' parts and the merge; the GPU waits for its neurons, then for the CPU's partial sum."""
    x = run.family.ffn_input(run.dense, layer, hidden)
    if run.schedules:
        wait(run, layer)
    share = run.share.get(layer) or Share(None, run.bank.bucket[layer], run.bank.cold[layer])
    if len(share.cpu_ids):
        run.workers.start(layer, x[0].float().cpu().numpy(), share.cpu_ids)
    total, values = ffn_gpu(run, layer, x, share.slots)
    partial = None
    if len(share.cpu_ids):
        partial = run.workers.result()
        run.clock.lap(layer, "wait")
        total = merge(run, layer, total, partial)
    run.scheduler.jobs.put((observe, run.clock.token, layer, share.gpu_ids, values, partial))
    if run.bank.down_bias is not None:
        total = total + run.bank.down_bias[layer]
    return hidden + total


def wait(run: Running, layer: int) -> None:
    """The barrier: the policy has stepped and the layer's prefetch has landed."""
    ready = run.ready.pop(layer)
    ready.scheduled.wait()
    for copy in ready.copy:
        run.link.wait(copy)
    run.clock.lap(layer, "wait")


def ffn_gpu(
    run: Running, layer: int, x: torch.Tensor, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sum [1, hidden] and values of the neurons in ``slots`` (None: every slot)."""
    rows, bias = run.bank.slots[layer], None
    bucket = run.bank.bucket[layer]
    if slots is not None:
        rows, bucket = rows[slots], bucket[slots.cpu().numpy()]
    if run.bank.up_bias is not None:
        bias = run.bank.up_bias[layer][torch.from_numpy(bucket).long()].to(x.device, x.dtype)
    total, values = kernels_gpu.ffn(rows, x, run.plan.spec, bias, float(run.value_thresholds[layer]))
    run.clock.lap(layer, "ffn_gpu", rows.shape[0])
    return total, values[0]


def merge(run: Running, layer: int, total: torch.Tensor, partial: Partial) -> torch.Tensor:
    """Bring the CPU's partial sum over and add it; a copy queues behind the prefetches, a kernel's read does not."""
    if run.plan.issue != "gather" and isinstance(run.link, EmulatedLink):
        run.link.wait(run.link.state(layer, partial.total.nbytes))
    total = total + torch.from_numpy(partial.total).to(total.device, total.dtype, non_blocking=True)
    run.clock.lap(layer, "merge")
    return total


def observe(
    run: Running, token: int, layer: int, gpu_ids: np.ndarray, gpu_values: torch.Tensor, partial: Partial | None
) -> None:
    """Learn who was active (on the scheduler thread): the next token's prediction, and the log of the work."""
    active = np.zeros(run.plan.spec.words, np.uint64)
    on_gpu = add_members(active, gpu_ids, gpu_values.float().cpu().numpy())
    on_cpu = 0 if partial is None else add_members(active, partial.ids, partial.values)
    run.predictions[layer] = active
    run.work[token][layer, :2] = on_gpu, on_cpu
    fetched = run.fetched.get(layer, NO_IDS)
    if len(fetched):
        members = bits.unpack(active, run.bank.neurons)
        run.work[token][layer, 2:] = len(fetched), len(fetched) - int(members[fetched].sum())


def head(run: Running, hidden: torch.Tensor) -> torch.Tensor:
    """Final norm and output projection: logits [vocab]; the lap is the sampler's."""
    return run.family.head(run.dense, hidden)[0]


class Scheduler:
    """One thread that steps the policy and prefetches while the main thread computes; jobs in order."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.fetch = np.empty(64 * run.plan.spec.words, np.int32)
        self.evict = np.empty_like(self.fetch)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Finish the queue and end the thread; an error in it is raised here."""
        self.jobs.put(None)
        self.thread.join()
        if self.error is not None:
            raise self.error

    def flush(self) -> None:
        """Wait until every job so far is done."""
        done = threading.Event()
        self.jobs.put((lambda run: done.set(),))
        done.wait()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            function, *arguments = job
            try:
                function(self.run, *arguments)
            except BaseException as error:  # noqa: BLE001 - raised on the decoding thread by close
                self.error = self.error or error
                for argument in arguments:
                    if isinstance(argument, Ready):
                        argument.scheduled.set()
