"""The GPU's kernels at ReluLLaMA-7B shape: the sparse FFN beside torch dense and the roofline, and the link's ways.

The FFN is told active by its gates (exact) or given a random list of slots to pick (all of them active). Layers rotate,
so that the weights come from memory. The roofline is the bytes that must be read at the rate of a device copy of 1 GiB
(what it reads and writes). A prefetch moves random neurons from pinned memory into slots in each of the three ways;
its time counts what the host does for it. With --device cpu only the FFN in torch is there to be timed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from rows import OUTPUTS, Row, measure_in_turn, spread, write

from dinfer.exec import kernels_gpu
from dinfer.exec.bank import Bank
from dinfer.exec.link import CudaLink
from dinfer.machine import ISSUES
from dinfer.model import ModelSpec

SPARSITIES = (0.0, 0.5, 0.8, 0.9, 0.95)
MOVED = (24, 240, 1100)
"""Neurons of one prefetch: 0.2, 2 and 10% of a layer."""


def finished(device: str, function: Callable[[], object]) -> Callable[[], None]:
    """``function`` and the wait for the device's end."""

    def run() -> None:
        function()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def copy_rate(device: str, mib: int, repeat: int) -> float:
    """Bytes a second of a device copy, read and write counted."""
    source = torch.ones(mib * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = measure_in_turn({"": finished(device, lambda: target.copy_(source))}, repeat)[""]
    return 2 * source.nbytes / float(np.median(seconds))


class Layers:
    """Random weights of several layers that hold the same numbers, and one input."""

    def __init__(self, device: str, dtype: str, neurons: int, hidden: int, gib: float) -> None:
        self.device, kind = device, getattr(torch, dtype)
        generator = torch.Generator().manual_seed(0)
        one = (torch.randn(neurons, 3, hidden, generator=generator) / hidden**0.5).to(kind)
        count = max(1, round(gib * 2**30 / one.nbytes))
        self.rows = torch.empty((count, *one.shape), dtype=kind, device=device)
        self.rows[:] = one.to(device)
        self.x = torch.randn(1, hidden, generator=generator).to(device, kind)
        self.gates = F.linear(self.x, self.rows[0][:, 0])[0].float().cpu()
        self.spec = ModelSpec("shape", "llama", count, hidden, neurons, 1, 1, 1, 1, activation="fatrelu", dtype=dtype)

    def each(self, work: Callable[[torch.Tensor], object]) -> Callable[[], None]:
        """``work`` on every layer in turn, to its end."""

        def all_layers() -> None:
            for rows in self.rows:
                work(rows)

        return finished(self.device, all_layers)

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """The whole FFN in torch."""
        gate, up, down = rows.unbind(1)
        return F.linear(F.relu(F.linear(self.x, gate)) * F.linear(self.x, up), down.T)


def ffn_rows(layers: Layers, rate: float, sparsities: tuple[float, ...], repeat: int) -> Iterator[Row]:
    """Microseconds of a layer's FFN by kernel, sparsity and mode, beside torch dense and the roofline."""
    kernels = dict.fromkeys(["torch"], kernels_gpu.ffn)
    if layers.device == "cuda":
        kernels["triton"] = kernels_gpu.device_ffn(torch.device("cuda"))
    count, neurons, row_bytes = len(layers.rows), layers.spec.neurons, layers.rows[0, 0].nbytes
    for sparsity in sparsities:
        threshold = float(np.quantile(layers.gates, sparsity)) if sparsity else float(layers.gates.min()) - 1
        spec = replace(layers.spec, gate_threshold=threshold)
        active = int((layers.gates > threshold).sum())
        picked = torch.from_numpy(np.sort(np.random.default_rng(1).permutation(neurons)[:active])).to(layers.device)
        everything = replace(layers.spec, gate_threshold=-1e9)
        needed = {"exact": row_bytes * (neurons + 2 * active) / 3, "picked": row_bytes * active}
        work: dict[tuple[str, str], Callable[[torch.Tensor], object]] = {}
        for name, ffn in kernels.items():
            work[name, "exact"] = partial(_call, ffn, layers.x, spec, None)
            work[name, "picked"] = partial(_call, ffn, layers.x, everything, picked)
        functions = {"dense": layers.each(layers.dense)} | {str(key): layers.each(w) for key, w in work.items()}
        seconds = {name: 1e6 * taken / count for name, taken in measure_in_turn(functions, repeat).items()}
        setting = f"{layers.spec.dtype}, {sparsity:.0%} sparse"
        yield Row("torch dense", setting, *spread(seconds["dense"]), "us", "", None)
        for (name, mode), taken in ((key, seconds[str(key)]) for key in work):
            median = float(np.median(taken))
            for against, other in (
                ("torch dense", float(np.median(seconds["dense"]))),
                ("roofline", 1e6 * needed[mode] / rate),
            ):
                yield Row(f"ffn {name}", f"{setting}, {mode}", *spread(taken), "us", against, other / median)


def _call(ffn, x, spec, picked, rows):
    return ffn(rows, x, spec, None, 0.0, picked)


def link_rows(dtype: str, neurons: int, hidden: int, moved: tuple[int, ...], repeat: int) -> Iterator[Row]:
    """Bytes a second of a prefetch in each way, beside one large pinned copy."""
    shape = (1, neurons, 3, hidden)
    host = torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).normal_()
    slots = torch.empty(shape[1:], dtype=host.dtype, device="cuda")
    peak = {"": finished("cuda", lambda: slots.copy_(host[0], non_blocking=True))}
    best = host.nbytes / float(np.median(measure_in_turn(peak, repeat)[""]))
    yield Row("one pinned copy", f"{host.nbytes / 2**20:.0f} MiB", best, best, best, "B/s", "", None)
    everyone = np.arange(neurons, dtype=np.int32)
    words = np.zeros((1, 1), np.uint64)  # residency is not looked at here
    bank = Bank(host, [slots], [everyone], everyone[None].copy(), words, [everyone[:0]], None, None)
    rng = np.random.default_rng(2)
    for count in moved:
        links = {issue: CudaLink(bank, issue, 1, count, lambda *_: None) for issue in ISSUES}

        def move(link: CudaLink, count: int = count) -> None:
            ids = np.sort(rng.permutation(neurons)[:count]).astype(np.int32)
            link.prefetch(0, ids, ids).synchronize()

        seconds = measure_in_turn({issue: partial(move, link) for issue, link in links.items()}, repeat)
        for issue, taken in seconds.items():
            rates = spread(count * host[0, 0].nbytes / taken)
            yield Row(f"prefetch {issue}", f"{count} neurons", *rates, "B/s", "one pinned copy", rates[0] / best)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", choices=OUTPUTS, default="md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer settings and repetitions")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--gib", type=float, default=4.0, help="weights to rotate over")
    parser.add_argument("--dtype", action="append", help="default: float16")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("device cuda is missing: torch sees no NVIDIA GPU here; --device cpu times the torch kernel alone")
    repeat, sparsities = (5, (0.0, 0.9)) if given.quick else (15, SPARSITIES)
    rate = copy_rate(given.device, 1024 if given.device == "cuda" else 64, repeat)
    found = [Row("device copy", "read and write", rate, rate, rate, "B/s", "", None)]
    for dtype in given.dtype or ["float16"]:
        layers = Layers(given.device, dtype, given.neurons, given.hidden, given.gib)
        found += ffn_rows(layers, rate, sparsities, repeat)
        del layers
        if given.device == "cuda":
            found += link_rows(dtype, given.neurons, given.hidden, MOVED, repeat)
    write(found, given.output)


if __name__ == "__main__":
    main()
