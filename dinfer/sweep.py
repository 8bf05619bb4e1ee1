"""A grid of budgets and systems on one machine, one row a cell, in processes or on a Dask cluster."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dinfer.errors import InputError, PlanWarning
from dinfer.machine import Machine
from dinfer.record.synth import profile, statistics_of
from dinfer.sim.predictor import Predictor
from dinfer.systems import SYSTEMS
from dinfer.trace import Trace
from dinfer.units import format_bytes, parse_bytes

TERMS = ("context", "weights", "kv", "activations", "predictor", "margin", "neurons")
"""Terms of the GPU's memory; columns of a sweep with ``_GiB`` behind."""

COLUMNS = (
    *("machine", "model", "vram_bytes", "vram", "system", "tokens_per_second", "gpu_share", "cpu_busy_share"),
    *("fetched", "wasted"),
    *(f"{term}_GiB" for term in TERMS),
    "note",
)

MOST = 10_000
"""Most budgets of one grid."""


class Job(NamedTuple):
    """What all cells share: trace, machine, context in tokens, offline profile and predictor."""

    trace: Trace
    machine: Machine
    context: int = 512
    frequency: np.ndarray | None = None
    predictor: Predictor | None = None


def sweep(
    job: Job,
    budgets: Sequence[int],
    systems: Sequence[str],
    jobs: int = 1,
    dask: str | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """One row a budget (bytes) and system, in that order, columns COLUMNS; the same however it is computed.

    ``gpu_share`` is of the active neurons, ``cpu_busy_share`` of the time; ``fetched`` and ``wasted`` are
    neurons a token. A cell that cannot be is a row with the reason in ``note`` and no figures. ``jobs``
    processes (joblib), or the workers of the Dask scheduler at ``dask``. ``tell`` is told cells done and
    cells in all. Raises InputError for no budgets, unknown systems, fewer than one job, or a scheduler that
    does not answer.
    """
    _check(budgets, systems, jobs, dask)
    cells = [(budget, system) for budget in budgets for system in systems]
    rows: dict[int, dict[str, Any]] = {}
    for number, row in _rows(job, cells, jobs, dask):
        rows[number] = row
        if tell is not None:
            tell(len(rows), len(cells))
    return pd.DataFrame([rows[number] for number in range(len(cells))], columns=list(COLUMNS))


def parse_grid(text: str) -> list[int]:
    """Budgets in bytes of ``6GiB-24GiB+1GiB`` (both ends included), ``8GiB``, or several with commas.

    Raises InputError for anything else.
    """
    budgets: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^-+]+)(?:-([^-+]+)\+([^-+]+))?\s*", part)
        if match is None:
            raise InputError(
                f"vram {part!r} is no budget; write 8GiB, or 6GiB-24GiB+1GiB for a range with its step"
            )
        first = parse_bytes(match[1])
        last, step = (parse_bytes(match[2]), parse_bytes(match[3])) if match[2] else (first, 1)
        if step < 1 or last < first or (last - first) // step >= MOST:
            raise InputError(f"vram {part!r} must go up by a step above 0, in at most {MOST:,} budgets")
        budgets += range(first, last + 1, step)
    return budgets


def offline_profile(trace: Trace) -> np.ndarray | None:
    """A synthetic trace's offline profile, float32 [layer, neuron]; None for a recorded one: its own."""
    if not trace.synthetic or "statistics" not in trace.meta:
        return None
    return profile(trace.spec, statistics_of(trace), trace.meta.get("seed", 0))


def cell(job: Job, vram_bytes: int, system: str) -> dict[str, Any]:
    """One row of a sweep."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, np.nan)
    row |= {
        "machine": job.machine.name, "model": job.trace.spec.name, "vram_bytes": vram_bytes,
        "vram": format_bytes(vram_bytes), "system": system, "note": "",
    }  # fmt: skip
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PlanWarning)
            run = SYSTEMS[system](
                job.trace, job.machine, vram_bytes, context=job.context, frequency=job.frequency,
                predictor=job.predictor,
            )  # fmt: skip
    except InputError as error:
        return row | {"note": str(error)}
    tokens = run.timeline.tokens
    moved = run.work[..., 2:].sum(axis=(0, 1), dtype=np.int64) / tokens
    memory = run.timeline.meta["memory"]
    return row | {
        "tokens_per_second": run.timeline.tokens_per_second,
        "gpu_share": run.gpu_share,
        "cpu_busy_share": run.timeline.busy("cpu") / run.timeline.seconds,
        "fetched": float(moved[0]),
        "wasted": float(moved[1]),
        "note": "; ".join(str(w.message) for w in caught if issubclass(w.category, PlanWarning)),
        **{f"{term}_GiB": memory[term] / 2**30 for term in TERMS},
    }


def _check(budgets: Sequence[int], systems: Sequence[str], jobs: int, dask: str | None) -> None:
    if not budgets:
        raise InputError("the sweep has no budget; give --vram a size or a range such as 6GiB-24GiB+1GiB")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise InputError(f"system {unknown[0]!r} is not one of {', '.join(SYSTEMS)}")
    if not systems:
        raise InputError(f"the sweep has no system; name some of {', '.join(SYSTEMS)}")
    if jobs < 1:
        raise InputError(f"jobs is {jobs}; it must be at least 1")
    if dask is not None and jobs > 1:
        raise InputError(
            f"jobs {jobs} and dask {dask} are both given; the cluster has its own workers, give one"
        )


def _rows(
    job: Job, cells: list[tuple[int, str]], jobs: int, dask: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    job.trace.frequency  # noqa: B018 - once here, not once in each process
    if dask is not None:
        yield from _on_dask(job, cells, dask)
    elif jobs == 1:
        yield from ((number, cell(job, *at)) for number, at in enumerate(cells))
    else:
        from joblib import Parallel, delayed

        parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", mmap_mode="c")
        yield from parallel(delayed(_numbered)(job, number, at) for number, at in enumerate(cells))


def _numbered(job: Job, number: int, at: tuple[int, str]) -> tuple[int, dict[str, Any]]:
    return number, cell(job, *at)


def _on_dask(job: Job, cells: list[tuple[int, str]], address: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from dask.distributed import Client, as_completed
    except ImportError:
        raise InputError("dask.distributed is not installed; install dinfer[dask], or use --jobs") from None
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise InputError(
            f"dask scheduler {address} does not answer ({error}); start one or use --jobs"
        ) from None
    with client:
        shared = client.scatter(job, broadcast=True, hash=False)
        futures = [
            client.submit(_numbered, shared, number, at, pure=False) for number, at in enumerate(cells)
        ]
        for _, result in as_completed(futures, with_results=True):
            yield result
