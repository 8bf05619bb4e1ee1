"""The steps of a training of predictors: AdamW on class-weighted cross-entropy, and its state between the epochs."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dinfer.errors import InputError
from dinfer.record.predictor_data import Batch, Data, Settings
from dinfer.trace import Trace

Progress = Callable[[int, int], None] | None
Tensors = dict[str, torch.Tensor]
NAMES = ("first", "second", "bias")


class State(NamedTuple):
    """What a training has come to after ``epoch`` epochs.

    ``values`` and ``best`` [layer][name] are the parameters now and at the best validation loss, on the standardised
    input (``mean``, ``scale`` [layer, hidden]); ``moments`` are AdamW's; ``losses`` float64 [layer, 2] is the best
    loss and the epochs since; ``weights`` float32 [layer, 256] are those of the loss by an active neuron's code;
    ``counters`` holds the epochs done.
    """

    values: list[Tensors]
    best: list[Tensors]
    moments: list[Tensors]
    mean: torch.Tensor
    scale: torch.Tensor
    losses: torch.Tensor
    weights: torch.Tensor
    counters: torch.Tensor

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return int(self.counters[0])

    def live(self, patience: int) -> list[int]:
        """Layers that still get better."""
        return [layer for layer, (_, since) in enumerate(self.losses.tolist()) if since < patience]


def epoch(state: State, data: Data, settings: Settings, told: "Told") -> None:
    """One pass over the training tokens, then the validation losses."""
    data.weights = state.weights.numpy()
    live = state.live(settings.patience)
    total = data.steps * settings.epochs
    for number, rows in enumerate(data.batches(state.epoch + 1)):
        batch = data.read(rows)
        done = (data.steps * state.epoch + number) / total
        rate = settings.rate * min(1.0, 20 * done + 0.05) * (0.05 + 0.95 * (1 + np.cos(np.pi * done)) / 2)
        step = partial(_step, state, batch=batch, rate=rate, number=data.steps * state.epoch + number + 1)
        data.each_layer(step, live)
        told.step()
    batch = data.read(data.validation)
    losses = data.each_layer(lambda layer: _validation_loss(state, layer, batch), live)
    for layer, loss in zip(live, losses, strict=True):
        if loss < state.losses[layer, 0]:
            state.losses[layer] = torch.tensor([loss, 0.0])
            for name, value in state.values[layer].items():
                state.best[layer][name].copy_(value)
        else:
            state.losses[layer, 1] += 1
    state.counters[0] += 1


def _validation_loss(state: State, layer: int, batch: Batch) -> float:
    values, active = state.values[layer], batch.active(layer)
    x = (batch.inputs(layer) - state.mean[layer]) / state.scale[layer]
    logits = torch.addmm(values["bias"], x @ values["first"], values["second"])
    return float(binary_cross_entropy_with_logits(logits, active, batch.weights(layer, active)))


def gradients(values: Tensors, x: torch.Tensor, active: torch.Tensor, weights: torch.Tensor) -> Tensors:
    """Of the mean weighted cross-entropy, by name: written out, as autograd takes twice the time."""
    code = x @ values["first"]
    wrong = torch.addmm(values["bias"], code, values["second"]).sigmoid_().sub_(active).mul_(weights / active.numel())
    through = x.T @ (wrong @ values["second"].T)
    return {"first": through, "second": code.T @ wrong, "bias": wrong.sum(dim=0)}


DECAY = 0.01
BETAS = 0.9, 0.98


def _step(state: State, layer: int, batch: Batch, rate: float, number: int) -> None:
    """One step of AdamW (Loshchilov and Hutter, 2019) on one layer."""
    values, active = state.values[layer], batch.active(layer)
    x = (batch.inputs(layer) - state.mean[layer]) / state.scale[layer]
    for name, gradient in gradients(values, x, active, batch.weights(layer, active)).items():
        mean, square = state.moments[layer][f"{name}.mean"], state.moments[layer][f"{name}.square"]
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient.square(), 1 - BETAS[1])
        if name != "bias":
            values[name].mul_(1 - rate * DECAY)
        root = (square / (1 - BETAS[1] ** number)).sqrt_().add_(1e-10)
        values[name].addcdiv_(mean, root, value=-rate / (1 - BETAS[0] ** number))


class Told:
    """Progress in batches."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)


class Store:
    """Where an unfinished training is kept: directory ``training`` in the output directory."""

    def __init__(self, out: Path, trace: Trace, settings: Settings) -> None:
        self.out, self.path = out, out / "training"
        self.trace = trace
        self.mark = settings.document() | {"trace": trace.fingerprint}
        if not out.exists():
            return
        if not out.is_dir() or (any(out.iterdir()) and not self.path.is_dir()):
            raise InputError(f"{out} exists and is no unfinished training; choose another -o or give --force")
        file = self.path / "settings.json"
        if file.is_file() and (was := json.loads(file.read_text())) != self.mark:
            other = [name for name in self.mark if was.get(name) != self.mark[name]]
            raise InputError(
                f"{out} holds an unfinished training with another {', '.join(other)}; go on with the same, or choose "
                "another -o or replace it with --force"
            )

    def save(self, state: State) -> None:
        """Replace what is kept by ``state``."""
        from safetensors.torch import save_file

        self.path.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(state, name) for name in ("mean", "scale", "losses", "weights", "counters")}
        for group in ("values", "best", "moments"):
            for layer, named in enumerate(getattr(state, group)):
                tensors |= {f"{group}/{layer}/{name}": tensor.contiguous() for name, tensor in named.items()}
        save_file(tensors, self.path / "state.safetensors.new")
        (self.path / "settings.json").write_text(json.dumps(self.mark) + "\n")
        os.replace(self.path / "state.safetensors.new", self.path / "state.safetensors")

    def load(self) -> State | None:
        """The kept state, None where there is none."""
        from safetensors.torch import load_file

        file = self.path / "state.safetensors"
        if not file.is_file():
            return None
        tensors = load_file(file)
        groups: dict[str, list[Tensors]] = {
            group: [{} for _ in range(self.trace.spec.layers)] for group in ("values", "best", "moments")
        }
        for key in [key for key in tensors if "/" in key]:
            group, layer, name = key.split("/")
            groups[group][int(layer)][name] = tensors.pop(key)
        return State(**groups, **tensors)  # type: ignore[arg-type]

    def remove(self) -> None:
        """The training is finished: what was kept of it goes."""
        shutil.rmtree(self.path)
