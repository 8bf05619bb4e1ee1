"""The host-to-device link: real copies on their own CUDA stream, or an emulated link at a given rate."""

import queue
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.exec.bank import Bank
from dinfer.exec.kernels_cpu import copy_rows
from dinfer.machine import Link

Record = Callable[[int, str, str, float, float, int, int], None]
"""record(layer, step, stream, start, end, neurons, bytes) with perf_counter seconds."""


NOTHING = np.zeros(0, np.int32)

Arrival = Callable[[], np.ndarray]
"""Waits for what is on its way to the host and returns it."""


class Transport(Protocol):
    """Moves neurons into slots, in order, and vectors between the device and the host.

    ``lazy``: what goes down arrives later than the call returns.
    """

    lazy: bool

    def prefetch(self, layer: int, ids: np.ndarray, slots: np.ndarray) -> Any:
        """Start moving neurons ``ids`` into ``slots`` of a layer; returns what ``wait`` takes."""

    def bring(self, layer: int, ids: np.ndarray, into: torch.Tensor) -> Any:
        """Start moving neurons ``ids`` into the first rows of ``into``, after what reads them now."""

    def wait(self, token: Any) -> None:
        """Let what follows on the compute stream see the moved neurons."""

    def down(self, vectors: torch.Tensor) -> Arrival:
        """Start bringing a tensor of the device to the host, in float32."""

    def up(self, array: np.ndarray) -> torch.Tensor:
        """A host array on the device, for what follows on the compute stream."""

    def close(self) -> None:
        """Finish what was started."""


class EmulatedLink:
    """A link of a given rate to a torch CPU device: a thread copies, then sleeps until the link would be done.

    One copy moves ``group`` neurons, 0: all of a prefetch. In order; each copy starts when the one before has ended by
    the emulated clock, so that an overslept wake-up does not slow the link down.
    """

    lazy = False

    def __init__(self, bank: Bank, link: Link, group: int, record: Record) -> None:
        self.bank, self.link, self.group, self.record = bank, link, group, record
        self.row_bytes = bank.host[0, 0].numel() * bank.host.element_size()
        self.jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.free_seconds = 0.0
        self.error: BaseException | None = None
        copy_rows(_words(bank.host[0]), NOTHING, _words(bank.host[0]), NOTHING)  # compiles before the clock runs
        self.thread = threading.Thread(target=self._work, name="h2d", daemon=True)
        self.thread.start()

    def prefetch(self, layer: int, ids: np.ndarray, slots: np.ndarray) -> threading.Event:
        """Queue the copy; the event is set when the emulated link has moved the last neuron."""
        return self._queue("prefetch", layer, ids, self.bank.slots[layer], slots, len(ids) * self.row_bytes)

    def bring(self, layer: int, ids: np.ndarray, into: torch.Tensor) -> threading.Event:
        """Queue the copy."""
        return self._queue("", layer, ids, into, np.arange(len(ids), dtype=np.int32), len(ids) * self.row_bytes)

    def state(self, layer: int, count_bytes: int) -> threading.Event:
        """Queue the copy of a partial sum behind the prefetches."""
        return self._queue("merge", layer, NOTHING, None, NOTHING, count_bytes)

    def _queue(self, step: str, layer: int, *what: Any) -> threading.Event:
        done = threading.Event()
        self.jobs.put((step, layer, what, done, time.perf_counter()))
        return done

    def wait(self, token: threading.Event) -> None:
        """Block until the copy has ended; an error of the link's thread is raised here."""
        token.wait()
        if self.error is not None:
            raise self.error

    def down(self, vectors: torch.Tensor) -> Arrival:
        """The tensor itself: the device is the host."""
        array = vectors.float().numpy()
        return lambda: array

    def up(self, array: np.ndarray) -> torch.Tensor:
        """The array itself."""
        return torch.from_numpy(array)

    def close(self) -> None:
        """Finish the queue and end the thread."""
        self.jobs.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            step, layer, what, done, asked = job
            try:
                self._move(step, layer, what, asked)
            except BaseException as error:  # noqa: BLE001 - the decoding thread raises it
                self.error = error
            done.set()

    def _move(self, step: str, layer: int, what: tuple[Any, ...], asked: float) -> None:
        ids, into, slots, count_bytes = what
        start = max(self.free_seconds, asked)
        if len(ids):
            copy_rows(_words(self.bank.host[layer]), ids, _words(into), slots)
        if step == "prefetch":
            self.bank.move_biases(layer, *(torch.from_numpy(array).long() for array in (ids, slots)))
        copies = -(-len(ids) // self.group) if self.group and len(ids) else 1
        self.free_seconds = start + self.link.seconds(copies, count_bytes)
        _sleep_until(self.free_seconds)
        if step:
            end = max(self.free_seconds, time.perf_counter())
            self.record(layer, step, "h2d", start, end, len(ids), count_bytes)


class CudaLink:
    """Copies from pinned memory on a stream of its own; an event for each prefetch. It never stops the GPU.

    ``block`` stages the rows in pinned memory and moves them in one copy, ``copy`` in copies of ``group`` rows,
    where one needs no staging; ``gather`` is one Triton kernel that reads the scattered rows across the link.
    """

    lazy = True

    def __init__(self, bank: Bank, issue: str, group: int, largest: int, measure: Callable[..., None]) -> None:
        self.bank, self.issue, self.measure = bank, issue, measure
        self.group = largest if issue == "block" else group
        self.staged = issue == "block" or issue == "copy" and group > 1
        self.row_bytes = bank.host[0, 0].numel() * bank.host.element_size()
        self.device = bank.slots[0].device
        self.stream = torch.cuda.Stream(self.device)
        self.asked: dict[int, tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = {}
        self.last = torch.cuda.Event()
        if self.staged:
            shape = (max(largest, 1), *bank.host.shape[2:])
            self.staging = torch.empty(shape, dtype=bank.host.dtype, pin_memory=True)
            self.landing = torch.empty(shape, dtype=bank.host.dtype, device=self.device)
        if issue == "gather":
            self._compile()

    def _compile(self) -> None:
        """Run the kernel once, on a neuron that is there already, before the clock runs."""
        if not find_spec("triton"):
            raise InputError("issue 'gather' needs Triton, which is not installed here; plan with --issue block")
        from dinfer.exec.kernels_triton import copy_scattered

        self.copy_scattered = copy_scattered
        for layer, bucket in enumerate(self.bank.bucket):
            if len(bucket):
                self.wait(self.prefetch(layer, bucket[:1], np.zeros(1, np.int32)))
                break

    def prefetch(self, layer: int, ids: np.ndarray, slots: np.ndarray) -> torch.cuda.Event:
        """Start the copy; the event fires on the copy's stream."""
        if layer in self.asked:  # a token ago: the GPU has read the lists of then
            self.asked.pop(layer)[0].synchronize()
        which, where = (torch.from_numpy(array).long().pin_memory() for array in (ids, slots))
        if self.staged:
            self.last.synchronize()  # the staging block must have left before it is written again
            copy_rows(_words(self.bank.host[layer]), ids, _words(self.staging), np.arange(len(ids), dtype=np.int32))
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            begin.record(self.stream)
            self._move(layer, which, where)
            done.record(self.stream)
        self.asked[layer], self.last = (done, which, where), done
        self.measure(layer, "prefetch", "h2d", begin, done, len(ids), len(ids) * self.row_bytes)
        return done

    def bring(self, layer: int, ids: np.ndarray, into: torch.Tensor) -> torch.cuda.Event:
        """Start the copy of the rows, gathered into pinned memory that torch keeps until it is done."""
        host, which = self.bank.host[layer], torch.from_numpy(ids).long()
        staged = torch.empty((len(ids), *host.shape[1:]), dtype=host.dtype, pin_memory=True)
        torch.index_select(host, 0, which, out=staged)
        done = torch.cuda.Event()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into[: len(ids)].copy_(staged, non_blocking=True)
            done.record(self.stream)
        return done

    def _move(self, layer: int, which: torch.Tensor, where: torch.Tensor) -> None:
        host, slots, n = self.bank.host[layer], self.bank.slots[layer], len(which)
        if self.issue == "gather":
            self.copy_scattered(host, which, slots, where)
        elif not self.staged:
            for neuron, slot in zip(which.tolist(), where.tolist(), strict=True):
                slots[slot].copy_(host[neuron], non_blocking=True)
        else:
            for first in range(0, n, self.group):
                part = slice(first, min(first + self.group, n))
                self.landing[part].copy_(self.staging[part], non_blocking=True)
            slots.index_copy_(0, where.to(self.device, non_blocking=True), self.landing[:n])
        if self.bank.slot_bias is not None:
            self.bank.move_biases(layer, *(a.to(self.device, non_blocking=True) for a in (which, where)))

    def wait(self, token: torch.cuda.Event) -> None:
        """Make the compute stream wait, not the host."""
        torch.cuda.current_stream(self.device).wait_event(token)

    def down(self, vectors: torch.Tensor) -> Arrival:
        """Start the copy into pinned memory, which torch keeps until the copy is done."""
        host = vectors.float().to("cpu", non_blocking=True)
        there = torch.cuda.Event()
        there.record()

        def arrive() -> np.ndarray:
            there.synchronize()
            return host.numpy()

        return arrive

    def up(self, array: np.ndarray) -> torch.Tensor:
        """Start the copy from pinned memory on the compute stream."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def close(self) -> None:
        """Wait for the last copy."""
        self.stream.synchronize()


def _words(rows: torch.Tensor) -> np.ndarray:
    """Rows [neuron, matrix, hidden] as words [neuron, row words] for copying."""
    flat = rows.view(torch.uint8).reshape(rows.shape[0], -1).numpy()
    return flat.view(np.uint64 if flat.shape[1] % 8 == 0 else np.uint16)


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)
