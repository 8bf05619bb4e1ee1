"""The CPU's FFN kernel at ReluLLaMA-7B shape, beside a pure read of the same rows and dense torch.

Neurons are predicted (a sorted random id list, all of them active) or, marked exact, told active by
their gates. Layers rotate, so that the weights come from memory and not from a cache. Times of one
setting are measured in turn in one run; a ratio is the median over the turns.

The same without AVX-512: NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES= python benchmarks/kernels.py
ggml's dense time needs an interpreter that has llama-cpp-python: --ggml-python PY. Without it, it is unmeasured.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from kernels_table import save
from rows import OUTPUTS, Row, measure_in_turn, spread, write

from dinfer.exec.kernels_cpu import VIEWS, ffn_cpu, read_rows
from dinfer.families import host_tensor
from dinfer.families.quantise import QUANT_BYTES, dequantise, quantise
from dinfer.model import ModelSpec

ALL_ACTIVE = float(np.finfo(np.float32).min)
FULL, QUICK = (0.0, 0.2, 0.5, 0.8, 0.9, 0.95), (0.0, 0.9)
EXACT = (0.8, 0.9, 0.95)
THREADS = (1, 2)


class Weights(NamedTuple):
    """Random weights of several layers: one memory, as the kernel, the read and torch see it.

    ``rows`` [layer, neuron, 3, row] and ``words`` uint32 [layer, neuron, word] are views of
    ``matrices`` [layer, 3, neuron, hidden]: random numbers, which mean as much either way. torch has
    no FFN over groups of 32: None for int8 and int4. ``gates`` float32 [neuron, hidden] are a layer's.
    """

    dtype: str
    hidden: int
    rows: np.ndarray
    words: np.ndarray
    gates: torch.Tensor
    matrices: torch.Tensor | None


def random_weights(dtype: str, neurons: int, hidden: int, gib: float) -> Weights:
    """About ``gib`` GiB of layers, at least one; all hold the same numbers."""
    one = torch.randn(neurons, 3, hidden, generator=torch.Generator().manual_seed(0)) / hidden**0.5
    if dtype in QUANT_BYTES:
        stored = quantise(one, dtype)
        gates = dequantise(stored[:, 0], dtype, torch.float32)
    else:
        stored = one.to(getattr(torch, dtype))
        gates = stored[:, 0].float()
    view_of_stored = getattr(torch, VIEWS[dtype])
    view = stored.view(view_of_stored).numpy()
    layers = max(1, round(gib * 2**30 / view.nbytes))
    slab = host_tensor((layers, *view.shape), view_of_stored).numpy()
    slab[:] = view
    matrices = None
    if dtype not in QUANT_BYTES:
        matrices = torch.from_numpy(slab).view(stored.dtype).view(layers, 3, neurons, hidden)
    words = slab.reshape(layers, neurons, -1).view(np.uint32)
    return Weights(dtype, hidden, slab, words, gates, matrices)


class Bench:
    """Calls of one setting, each on the next layer; ``threads`` split the ids between them."""

    def __init__(self, weights: Weights, threads: int) -> None:
        layers, neurons, hidden = *weights.rows.shape[:2], weights.hidden
        self.weights, self.threads = weights, threads
        self.setting = f"{weights.dtype}, {threads} thread{'s'[: threads - 1]}"
        self.spec = ModelSpec(
            "shape", "llama", layers, hidden, neurons, 1, 1, 1, 1, activation="relu"
        )
        self.x, self.outs = torch.empty(hidden).numpy(), torch.zeros(threads, hidden).numpy()
        self.x[:] = np.random.default_rng(1).standard_normal(hidden)
        self.values = np.empty((threads, neurons), np.float32)
        self.pool = ThreadPoolExecutor(threads)
        self.turn = itertools.cycle(range(layers))
        torch.set_num_threads(threads)

    def _split(self, work: Callable[..., object], *ids: np.ndarray) -> None:
        """``work(thread, *part)`` on each thread's part of each of ``ids``."""
        parts = zip(*(np.array_split(each, self.threads) for each in ids), strict=True)
        if self.threads == 1:
            work(0, *next(parts))
            return
        barrier = threading.Barrier(self.threads)  # one part a thread, never two on the same

        def part(index: int, mine: tuple[np.ndarray, ...]) -> None:
            barrier.wait()
            work(index, *mine)

        list(self.pool.map(part, range(self.threads), parts))

    def ffn(self, ids: np.ndarray, threshold: float, predicted: bool) -> None:
        """The sparse FFN of the next layer."""
        rows = self.weights.rows[next(self.turn)]
        self.outs[:] = 0

        def work(index: int, mine: np.ndarray) -> None:
            out, values = self.outs[index], self.values[index, : len(mine)]
            ffn_cpu(self.spec, rows, self.x, mine, out, values, threshold, predicted=predicted)

        self._split(work, ids)

    def read(self, ids: np.ndarray) -> None:
        """The rows that a predicted FFN reads."""
        words = self.weights.words[next(self.turn)]
        self._split(lambda _, mine: read_rows(words, mine), ids)

    def read_exact(self, ids: np.ndarray, active: np.ndarray) -> None:
        """The rows that an exact FFN reads: the gates of ``ids``, up and down of ``active``."""
        words = self.weights.words[next(self.turn)]
        single = words.reshape(-1, words.shape[1] // 3)
        others = np.stack([3 * active + 1, 3 * active + 2], axis=1).ravel()

        def work(_: int, gates: np.ndarray, rest: np.ndarray) -> None:
            read_rows(single, gates)
            read_rows(single, rest)

        self._split(work, 3 * ids, others)

    def dense(self) -> None:
        """The whole FFN of the next layer in torch, x in the weights' dtype."""
        gate, up, down = self.weights.matrices[next(self.turn)]
        x = torch.from_numpy(self.x).to(gate.dtype)[None]
        F.linear(F.relu(F.linear(x, gate)) * F.linear(x, up), down.view(down.shape[1], -1))

    def gates(self) -> np.ndarray:
        """The gates float32 [neuron] of a layer (all hold the same numbers)."""
        return (self.weights.gates @ torch.from_numpy(self.x)).numpy()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def figure(name: str, setting: str, own: np.ndarray, against: str, other: np.ndarray) -> Row:
    """A row in milliseconds of seconds ``own`` [turns]; ``other`` is the peer's, [turns] or one."""
    return Row(name, setting, *spread(1e3 * own), "ms", against, float(np.median(other / own)))


def ggml_seconds(python: str, weights: Weights, gib: float, repeat: int) -> dict[int, np.ndarray]:
    """Seconds [turns] of ggml's dense FFN in a process of its own, by number of threads."""
    shape = {"hidden": weights.hidden, "neurons": weights.rows.shape[1], "dtype": weights.dtype, "gib": gib}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({**shape, "repeat": repeat, "threads": THREADS}))
        command = [python, str(Path(__file__).with_name("ggml_peer.py")), str(job)]
        answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {int(threads): np.array(seconds) for threads, seconds in answer["seconds"].items()}


def predicted_rows(
    bench: Bench, sparsities: tuple[float, ...], repeat: int, ggml: np.ndarray | None = None
) -> Iterator[Row]:
    """The kernel on predicted neurons against the pure read and dense torch and ggml, by sparsity.

    torch has turns of its own: its threads spin for a while after each, to the cost of the next.
    """
    neurons = bench.spec.neurons
    peers = {} if ggml is None else {"ggml dense": ggml}
    if bench.weights.matrices is not None:
        peers |= measure_in_turn({"torch dense": bench.dense}, max(5, repeat // 3))
    for peer, dense in peers.items():
        yield Row(peer, bench.setting, *spread(1e3 * dense), "ms", "", None)
    for sparsity in sparsities:
        count = max(1, round(neurons * (1 - sparsity)))
        ids = np.sort(np.random.default_rng(2).permutation(neurons)[:count]).astype(np.int32)
        ffn, read = partial(bench.ffn, ids, ALL_ACTIVE, True), partial(bench.read, ids)
        seconds = measure_in_turn({"ffn": ffn, "read": read}, repeat)
        setting = f"{bench.setting}, {sparsity:.0%} sparse"
        yield figure("ffn_cpu", setting, seconds["ffn"], "pure read", seconds["read"])
        for peer, dense in peers.items():
            yield figure("ffn_cpu", setting, seconds["ffn"], peer, np.median(dense))


def exact_rows(bench: Bench, sparsities: tuple[float, ...], repeat: int) -> Iterator[Row]:
    """The kernel on all neurons, told active by their gates, against a read of what it needs."""
    ids, gates = np.arange(bench.spec.neurons, dtype=np.int32), bench.gates()
    for sparsity in sparsities:
        threshold = float(np.quantile(gates, sparsity))
        active = np.flatnonzero(gates > threshold).astype(np.int32)
        ffn = partial(bench.ffn, ids, threshold, False)
        read = partial(bench.read_exact, ids, active)
        seconds = measure_in_turn({"ffn": ffn, "read": read}, repeat)
        setting = f"{bench.setting}, {sparsity:.0%} sparse, exact"
        yield figure("ffn_cpu", setting, seconds["ffn"], "pure read", seconds["read"])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", choices=OUTPUTS, default="md")
    parser.add_argument("--quick", action="store_true", help="fewer settings and repetitions")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--gib", type=float, help="weights to rotate over: 2, or 1 if quick")
    parser.add_argument("--dtype", choices=list(VIEWS), action="append", help="default: all")
    parser.add_argument("--ggml-python", metavar="PY", help="interpreter with llama-cpp-python, to time ggml")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="put the rows there too, and a page beside it")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = arguments()
    repeat, sparsities, exact = (7, QUICK, (0.9,)) if given.quick else (21, FULL, EXACT)
    gib = given.gib or (1.0 if given.quick else 2.0)
    found: list[Row] = []
    dtypes = given.dtype or list(VIEWS)
    for dtype in dtypes:
        weights = random_weights(dtype, given.neurons, given.hidden, gib)
        ggml = ggml_seconds(given.ggml_python, weights, gib, repeat) if given.ggml_python else {}
        for threads in THREADS:
            print(f"{dtype}, {threads} threads", file=sys.stderr)
            with Bench(weights, threads) as bench:
                found += predicted_rows(bench, sparsities, repeat, ggml.get(threads))
                found += exact_rows(bench, exact, repeat)
        del weights, bench
    write(found, given.output)
    if given.save:
        save(found, dtypes, os.environ.get("NUMBA_CPU_NAME", "native"), given.save)


if __name__ == "__main__":
    main()
