"""Run a transformers model with its FFNs restricted to what predictors predict: perplexity, output error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pandas as pd
import torch

from dinfer.families import ffn_sites
from dinfer.predictors import Predictors
from dinfer.record.calibrate import perplexity
from dinfer.record.generate import Loaded, thresholded
from dinfer.trace import Trace


@contextmanager
def restricted(
    loaded: Loaded,
    predictors: Predictors,
    errors: np.ndarray | None = None,
    dense: int = 0,
    oracle: np.ndarray | None = None,
) -> Iterator[None]:
    """Run the model with every value at down's input set to 0 that the predictors did not predict.

    What is below the activity thresholds that they learnt is 0 too. ``errors`` float64 [layer, 2], if given, adds
    up per layer the relative error of the FFN's output against its own values, and the tokens. The first
    ``dense`` rows of a pass keep all of their values. With ``oracle`` [layer] each token keeps that share of a layer's
    neurons instead, those of the largest contributions, which only a computed layer knows.
    """
    spec, handles = loaded.spec, []
    residual: list[torch.Tensor] = [torch.empty(0)] * spec.layers
    layers = [tuple(map(torch.from_numpy, predictors.wide(layer))) for layer in range(spec.layers)]
    activity = predictors.activity or (0.0,) * spec.layers
    limits = activity if spec.sparsity_kind == "magnitude" else (0.0,) * spec.layers

    def attach(layer: int, site: Any) -> None:
        first, second, bias = layers[layer]
        weight = site.down.weight if site.down.weight.shape[1] == spec.neurons else site.down.weight.T
        norms = weight.detach().float().norm(dim=0)

        def before_norm(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            residual[layer] = inputs[0].detach()

        def before_down(module: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
            value = inputs[0] * (inputs[0].abs() > float(limits[layer]))
            if oracle is None:
                rows = residual[predictors.source(layer)].float()
                rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + 1e-6)
                chosen = rows @ first @ second + bias >= float(predictors.cuts[layer])
            else:
                chosen = _largest(value.abs() * norms, round(float(oracle[layer]) * spec.neurons))
            chosen = chosen.reshape(-1, spec.neurons)
            chosen[:dense] = True
            kept = value * chosen.reshape(value.shape)
            if errors is not None:
                whole = torch.nn.functional.linear(value, weight).norm(dim=-1)
                lost = torch.nn.functional.linear(value - kept, weight).norm(dim=-1)
                errors[layer] += float(((lost / whole.clamp(min=1e-30)) ** 2).sum()), whole.numel()
            return (kept,)

        handles.append(site.norm.register_forward_pre_hook(before_norm))
        handles.append(site.down.register_forward_pre_hook(before_down))

    for layer, site in enumerate(ffn_sites(loaded.model, spec)):
        attach(layer, site)
    try:
        with thresholded(loaded, activity) if spec.raised(activity) else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(contributions: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest of each row are: bool, same shape."""
    found = torch.zeros_like(contributions, dtype=torch.bool)
    return found.scatter_(-1, contributions.topk(count, dim=-1).indices, True)


def texts_of(trace: Trace, rows: np.ndarray, most: int) -> list[list[int]]:
    """Token ids of at most ``most`` sequences that hold ``rows``, prompts included, evenly spread."""
    sequence = trace.tokens["sequence"].to_numpy()
    numbers = np.unique(sequence[rows])
    chosen = numbers[np.linspace(0, len(numbers) - 1, min(most, len(numbers))).round().astype(int)]
    ids = trace.tokens["id"]
    return [ids[sequence == number].tolist() for number in chosen]


def exact_perplexity(loaded: Loaded, predictors: Predictors, texts: list[list[int]]) -> float:
    """Perplexity of ``texts`` with all active neurons: those above what thresholds were learnt."""
    if not predictors.activity:
        return perplexity(loaded, texts)
    with thresholded(loaded, predictors.activity):
        return perplexity(loaded, texts)


def perplexities(
    loaded: Loaded,
    predictors: Predictors,
    texts: list[list[int]],
    exact: float | None = None,
    oracle: np.ndarray | None = None,
) -> pd.DataFrame:
    """One row: perplexity of ``texts`` exact and predicted, their ratio, and the relative error of the FFN's output.

    ``exact`` spares measuring ``exact_perplexity`` again; with ``oracle`` it is the oracle's choice of ``restricted``
    that is judged. The error is the root mean square over tokens and layers, measured, where ``Curves.missed`` assumes
    down columns at right angles.
    """
    errors = np.zeros((loaded.spec.layers, 2))
    if exact is None:
        exact = exact_perplexity(loaded, predictors, texts)
    # a prompt runs dense: the first token's residual, hundreds of times the others', is none that was learnt
    dense = len(os.path.commonprefix(texts)) if len(texts) > 1 else 1
    with restricted(loaded, predictors, errors, dense, oracle):
        predicted = perplexity(loaded, texts)
    error = float(np.sqrt(errors[:, 0].sum() / errors[:, 1].sum()))
    columns = {"texts": len(texts), "exact_perplexity": exact, "predicted_perplexity": predicted}
    return pd.DataFrame([columns | {"ratio": predicted / exact, "output_error": error}])
