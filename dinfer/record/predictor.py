"""Train predictors from a trace alone: least squares for a start and the widths, then class-weighted cross-entropy.

A killed training goes on where its last epoch ended.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.predictors import Predictors, rank_for_share
from dinfer.record.judge import LOGITS, Curves, check_judged, predictor_score, split
from dinfer.record.predictor_data import Data, Settings
from dinfer.record.predictor_start import start
from dinfer.record.predictor_steps import Progress, State, Store, Told, epoch
from dinfer.trace import Trace


def train(
    trace: Trace,
    out: str | Path,
    settings: Settings = Settings(),  # noqa: B008
    progress: Progress = None,
) -> Predictors:
    """Train predictors on the decode tokens of ``trace`` and save them in directory ``out``.

    A directory that holds an unfinished training of the same trace and settings is gone on with. ``progress`` is told
    passes over pieces done and in all. Raises InputError for a trace without residuals or contributions, a domain
    that it lacks, a share that no rank fits in, and a directory that holds something else.
    """
    settings.check()
    check_judged(trace)
    if not 0 <= settings.lookahead < trace.spec.layers:
        raise InputError(f"lookahead is {settings.lookahead}; it must be 0 to {trace.spec.layers - 1} layers")
    rank = rank_for_share(trace.spec, settings.share, settings.bits)
    parts = split(trace, settings.hold_out + settings.choose)
    store = Store(Path(out), trace, settings)
    data = Data(trace, parts, settings)
    told = Told(progress, data.steps * (1 + settings.epochs))
    with data.threads():
        state = store.load() or start(data, rank, told)
        if not state.epoch:
            store.save(state)
        told.done = data.steps * (1 + state.epoch)
        while state.epoch < settings.epochs and state.live(settings.patience):
            epoch(state, data, settings, told)
            store.save(state)
        trained = _finish(state, data, settings)
    trained.save(out)
    store.remove()
    return trained


def _finish(state: State, data: Data, settings: Settings) -> Predictors:
    """The best parameters on plain inputs, their log-odds calibrated, thresholds by missed contribution."""
    raw = _exported(state, data, settings, np.full(data.spec.layers, 0.5, np.float32))
    curves = _curves(raw, data, data.validation)
    for layer, (slope, shift) in enumerate(platt(curves)):
        best = state.best[layer]
        best["second"] *= slope
        best["bias"].mul_(slope).add_(shift)
    calibrated = _exported(state, data, settings, raw.thresholds)
    curves = _curves(calibrated, data, data.chosen_on)
    return _exported(state, data, settings, thresholds(curves, settings.bound), curves)


def _activity(trace: Trace) -> tuple[float, ...]:
    """The thresholds that a plan must have too; none of a ReLU kind at its own."""
    given = tuple(trace.meta.get("thresholds", ()))
    return given if trace.spec.sparsity_kind == "magnitude" or trace.spec.raised(given) else ()


def thresholds(curves: Curves, bound: float) -> np.ndarray:
    """Operating thresholds float32 [layer]: the highest at which each layer misses at most ``bound``; 0: all."""
    edge = curves.operating_edges(bound)
    chance = 1 / (1 + np.exp(-curves.edges[np.maximum(edge, 0)]))
    return np.where(edge >= 0, chance, 0.0).astype(np.float32)


def _curves(predictors: Predictors, data: Data, rows: np.ndarray) -> Curves:
    return Curves.measure(data.trace, rows, [(predictor_score(predictors), LOGITS)], data.settings.lookahead)[0]


def platt(curves: Curves) -> list[tuple[float, float]]:
    """Slope and shift of each layer's log-odds that fit how often neurons were active (Platt, 1999)."""
    middle = np.concatenate([curves.edges[:1], (curves.edges[1:] + curves.edges[:-1]) / 2, curves.edges[-1:]])
    fits = []
    for total, active in zip(curves.total, curves.active, strict=True):
        fit, design = np.array([1.0, 0.0]), np.stack([middle, np.ones_like(middle)])
        for _ in range(30):
            chance = 1 / (1 + np.exp(-fit @ design))
            gradient = design @ (active - total * chance)
            hessian = (design * (total * chance * (1 - chance))) @ design.T + 1e-6 * np.eye(2)
            fit = fit + np.clip(np.linalg.solve(hessian, gradient), -1, 1)
        fits.append((float(max(fit[0], 1e-3)), float(fit[1])))
    return fits


def _exported(
    state: State, data: Data, settings: Settings, limits: np.ndarray, curves: Curves | None = None
) -> Predictors:
    trace = data.trace
    layers = list(zip(state.best, state.scale, strict=True))
    trained = Predictors(
        spec=trace.spec,
        lookahead=settings.lookahead,
        first=[(best["first"] / scale[:, None]).half().numpy() for best, scale in layers],
        second=[best["second"].half().numpy() for best, _ in layers],
        bias=[best["bias"].half().numpy() for best, _ in layers],
        thresholds=limits,
        activity=_activity(trace),
        weights=trace.meta.get("weights", ""),
        trace=trace.fingerprint,
        quality={} if curves is None else _quality(curves, limits, data),
        training={
            **settings.document(),
            "tokens": len(data.parts.train),
            "validation_tokens": len(data.validation),
            "chosen_on_tokens": len(data.chosen_on),
            "epochs_done": state.epoch,
            "losses": [round(loss, 6) for loss, _ in state.losses.tolist()],
        },
    )
    if settings.bits == 8:
        trained = trained.rounded()
    bias = []
    for layer, best in enumerate(state.best):  # of plain inputs, whose mean the rounded matrices map
        first, second, _ = map(torch.from_numpy, trained.wide(layer))
        bias.append((best["bias"] - state.mean[layer] @ first @ second).half().numpy())
    return replace(trained, bias=bias)


def _quality(curves: Curves, limits: np.ndarray, data: Data) -> dict[str, Any]:
    """What is known of the operating point from the prompts that set it, one number a layer."""
    point = curves.at(curves.operating_edges(data.settings.bound)) | {"density": curves.density}
    domains = data.settings.choose
    return {"measured_on": f"prompts of {', '.join(domains)}" if domains else "validation prompts"} | {
        name: [round(float(v), 5) for v in values] for name, values in point.items()
    }
