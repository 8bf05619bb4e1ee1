"""How long a prefetch takes in each of the ways that a GPU has, measured on nothing else."""

import time
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from dinfer.exec.bank import Bank
from dinfer.exec.link import CudaLink
from dinfer.machine import ISSUES
from dinfer.model import ModelSpec

SIZES = (1, 8, 24, 64, 160, 400)
"""Neurons of one prefetch, at most a layer's."""

TURNS = 20


class Fit(NamedTuple):
    """One fit: seconds = fixed + units * per_unit; ``residual`` is the mean over levels of |fit / measured - 1|."""

    step: str
    fixed_us: float
    per_unit_ns: float
    unit: str
    residual: float
    points: int


def link_fits(spec: ModelSpec, device: torch.device) -> list[Fit]:
    """One fit for each way: seconds from the call to the landing of random neurons of one layer, affine in neurons.

    With ``copy`` the fixed part is of each neuron and stands in ``per_unit_ns`` with its bytes.
    """
    bank = _bank(spec, device)
    sizes = np.array([size for size in SIZES if size <= spec.neurons])
    ways = [issue for issue in ISSUES if issue != "gather" or find_spec("triton")]
    links = [CudaLink(bank, issue, 1, int(sizes.max()), _forget) for issue in ways]
    return [_fit(link.issue, sizes, _median_seconds(link, sizes)) for link in links]


def _bank(spec: ModelSpec, device: torch.device) -> Bank:
    """One layer of zero bytes, all of it in slots."""
    shape = (spec.neurons, 1, spec.neuron_bytes)
    host = torch.zeros((1, *shape), dtype=torch.uint8, pin_memory=True)
    everyone, nobody = np.arange(spec.neurons, dtype=np.int32), np.zeros(0, np.int32)
    slots = torch.zeros(shape, dtype=torch.uint8, device=device)
    resident = np.full((1, spec.words), -1).view(np.uint64)
    return Bank(host, [slots], [everyone], everyone[None].copy(), resident, [nobody], None, None)


def _forget(*_: object) -> None:
    """The spans of these prefetches belong to no run."""


def _median_seconds(link: CudaLink, sizes: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    seconds = np.empty((TURNS, len(sizes)))
    for turn in range(TURNS):
        for i, size in enumerate(sizes):
            ids = np.sort(rng.permutation(link.bank.neurons)[:size]).astype(np.int32)
            start = time.perf_counter()
            link.prefetch(0, ids, ids).synchronize()
            seconds[turn, i] = time.perf_counter() - start
    return np.median(seconds, axis=0)


def _fit(issue: str, sizes: np.ndarray, seconds: np.ndarray) -> Fit:
    """Non-negative least squares, each size weighing the same."""
    design = np.column_stack([np.ones(len(sizes)), sizes])
    scale = design.max(axis=0)
    fixed, each = nnls(design / scale / seconds[:, None], np.ones(len(sizes)))[0] / scale
    residual = float(np.abs(design @ [fixed, each] / seconds - 1).mean())
    return Fit(f"prefetch {issue}", fixed * 1e6, each * 1e9, "neuron", residual, TURNS * len(sizes))
