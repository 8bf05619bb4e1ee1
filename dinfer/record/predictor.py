"""Train predictors from a trace alone: least squares for a start and the widths, then class-weighted cross-entropy.

The trace is read in pieces of some tokens; what is held does not grow with it. A killed training goes on where its
last epoch ended.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dinfer import bits
from dinfer.errors import InputError
from dinfer.predictors import BITS, Predictors, normalised, rank_for_share
from dinfer.record.judge import LOGITS, Curves, Split, check_judged, of_domains, predictor_score, split
from dinfer.trace import Trace, decode_levels

PIECE = 16
"""Tokens of one sequence that are read together; a batch mixes pieces from everywhere."""

WIDTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Ranks that are tried for each layer, as multiples of the rank that all layers would have at the same width."""

VALIDATION_TOKENS, WIDTH_TOKENS = 4096, 1024
"""About so many tokens at most stop the training, and set thresholds; so many set the widths."""

Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Settings:
    """How predictors are trained.

    ``lookahead`` in layers; ``share`` of the FFN's bytes that they may take; ``bound``: largest missed contribution of
    a layer at its operating threshold, on prompts of the domains ``choose``, which are not learnt, or without any on
    validation prompts, whose domains are; ``hold_out``: domains kept for the test. ``batch`` in tokens; a layer stops
    after ``patience`` epochs without a better validation loss. ``contribution`` (0 to 1) is how far an active neuron's
    weight in the loss follows its contribution; ``bits`` of a stored weight, 8 or 16.
    """

    lookahead: int = 1
    share: float = 0.08
    bound: float = 0.05
    hold_out: tuple[str, ...] = ()
    choose: tuple[str, ...] = ()
    epochs: int = 6
    batch: int = 256
    rate: float = 2e-3
    patience: int = 2
    contribution: float = 1.0
    seed: int = 0
    bits: int = 8

    def check(self) -> None:
        """Raise InputError for a value that breaks a rule."""
        for name in ("epochs", "batch", "patience"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("bound", "contribution"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name):g}; it must lie between 0 and 1")
        if both := sorted({*self.hold_out} & {*self.choose}):
            raise InputError(
                f"domain {both[0]!r} is held out for the test and to choose thresholds by; name it for one of the two"
            )
        if self.bits not in BITS:
            raise InputError(f"bits is {self.bits}; it must be {BITS[0]} or {BITS[1]}")
        if not self.rate > 0:
            raise InputError(f"rate is {self.rate:g}; it must be above 0")

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def train(
    trace: Trace,
    out: str | Path,
    settings: Settings = Settings(),
    progress: Progress = None,  # noqa: B008
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
    store = _Store(Path(out), trace, settings)
    data = _Data(trace, parts, settings)
    told = _Told(progress, data.steps * (1 + settings.epochs))
    with data.threads():
        state = store.load() or _start(data, rank, told)
        if not state.epoch:
            store.save(state)
        told.done = data.steps * (1 + state.epoch)
        while state.epoch < settings.epochs and state.live(settings.patience):
            _epoch(state, data, settings, told)
            store.save(state)
        trained = _finish(state, data, settings)
    trained.save(out)
    store.remove()
    return trained


class _Data:
    """The trace's tokens in batches: residuals and labels of each layer."""

    def __init__(self, trace: Trace, parts: Split, settings: Settings) -> None:
        self.trace, self.settings, self.spec = trace, settings, trace.spec
        self.parts = parts
        self.pieces = _pieces(trace, parts.train)
        self.validation = spread(parts.validation, VALIDATION_TOKENS)
        chosen = spread(of_domains(trace, settings.choose), VALIDATION_TOKENS) if settings.choose else self.validation
        self.chosen_on = chosen  # rows that set the thresholds
        self.steps = -(-len(parts.train) // settings.batch)
        self.weights = np.ones((self.spec.layers, 256), np.float32)  # of an active neuron in the loss, by its code
        self.frequency = np.zeros((self.spec.layers, self.spec.neurons))

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Let ``each_layer`` work meanwhile: a core takes a layer at a time, which no layer's figures depend on."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as self.pool:
                yield
        finally:
            torch.set_num_threads(before)

    def each_layer(self, work: Callable[[int], Any], layers: Iterable[int] | None = None) -> list[Any]:
        """What ``work`` gives for each of ``layers`` (default: all)."""
        return list(self.pool.map(work, range(self.spec.layers) if layers is None else layers))

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Rows of each batch of an epoch; the order depends on the seed and the epoch alone."""
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(self.pieces))
        rows = np.concatenate([self.pieces[i] for i in order])
        for part in np.array_split(rows, self.steps):
            yield np.sort(part)

    def read(self, rows: np.ndarray) -> "_Batch":
        """The arrays of ``rows``."""
        assert self.trace.hidden is not None
        assert self.trace.contribution is not None
        return _Batch(self, self.trace.hidden[rows], self.trace.active[rows], self.trace.contribution[rows])


class _Batch(NamedTuple):
    """Residuals, active words and contribution codes [token, layer, ...] of some tokens."""

    data: _Data
    hidden: np.ndarray
    words: np.ndarray
    codes: np.ndarray

    def inputs(self, layer: int) -> torch.Tensor:
        """What predicts ``layer``: float32 [tokens, hidden]."""
        return torch.from_numpy(normalised(self.hidden[:, max(0, layer - self.data.settings.lookahead)]))

    def active(self, layer: int) -> torch.Tensor:
        """Labels of ``layer``: float32 [tokens, neurons]."""
        return torch.from_numpy(bits.unpack(self.words[:, layer], self.data.spec.neurons)).float()

    def weights(self, layer: int, active: torch.Tensor) -> torch.Tensor:
        """Weights in the loss of ``layer``: float32 [tokens, neurons]."""
        codes = self.codes[:, layer] * active.numpy().astype(np.uint8)  # code 0 stands for the inactive
        return torch.from_numpy(self.data.weights[layer][codes])


def spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of ``rows``, evenly."""
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)]


def _pieces(trace: Trace, rows: np.ndarray) -> list[np.ndarray]:
    """``rows`` cut where the sequence changes and after at most PIECE tokens."""
    sequence = trace.tokens["sequence"].to_numpy()[rows]
    runs = np.split(rows, np.flatnonzero(np.diff(sequence)) + 1)
    return [run[start : start + PIECE] for run in runs for start in range(0, len(run), PIECE)]


Tensors = dict[str, torch.Tensor]
NAMES = ("first", "second", "bias")


class _State(NamedTuple):
    """What a training has come to after ``epoch`` epochs.

    ``values`` and ``best`` [layer][name] are the parameters now and at the best validation loss, on the standardised
    input (``mean``, ``scale`` [layer, hidden]); ``moments`` are AdamW's; ``losses`` float64 [layer, 2] is the best
    loss and the epochs since; ``steps`` float64 [layer] those that each layer has trained.
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


def _start(data: _Data, rank: int, told: "_Told") -> _State:
    """One pass: the least-squares map of each layer, cut to the width that its measured recall asks for."""
    sums = [_Sums(data.spec.hidden, data.spec.neurons) for _ in range(data.spec.layers)]
    power = np.zeros((data.spec.layers, 256))
    for rows in data.batches(0):
        batch = data.read(rows)

        def add(layer: int, batch: _Batch = batch) -> None:
            active = batch.active(layer)
            sums[layer].add(batch.inputs(layer), active)
            power[layer] += np.bincount(batch.codes[:, layer][active.numpy() > 0], minlength=256)

        data.each_layer(add)
        told.step()
    data.weights = _loss_weights(power, np.array([s.rate.mean().item() for s in sums]), data.settings.contribution)
    maps = data.each_layer(lambda layer: sums[layer].solve())
    ranks = _widths(data, maps, sums, rank)
    values = []
    for map_, sum_, width in zip(maps, sums, ranks, strict=True):
        first, second = map_.cut(width)
        chance = sum_.rate.clamp(1e-3, 1 - 1e-3)
        spread = (chance * (1 - chance)).clamp(min=0.02)  # of a label: the slope of its log-odds
        values.append({"first": first, "second": second / spread, "bias": torch.logit(chance)})
    zeros = [{f"{n}.{m}": torch.zeros_like(v[n]) for n in NAMES for m in ("mean", "square")} for v in values]
    return _State(
        values=values,
        best=[{n: t.clone() for n, t in v.items()} for v in values],
        moments=zeros,
        mean=torch.stack([s.mean for s in sums]),
        scale=torch.stack([s.scale for s in sums]),
        losses=torch.tensor([[float("inf"), 0.0]] * data.spec.layers, dtype=torch.float64),
        weights=torch.from_numpy(data.weights),
        counters=torch.zeros(1, dtype=torch.int64),
    )


def _loss_weights(power: np.ndarray, density: np.ndarray, follow: float) -> np.ndarray:
    """Weight of an active neuron by its contribution's code, of an inactive one (1) at code 0: float32 [layer, 256].

    The class's weight (1 - density) / density, and of it the share ``follow`` in proportion to the contribution, at
    most ten times the mean: what is missed should be what matters little.
    """
    levels = decode_levels(np.arange(256), 1.0).astype(np.float64)
    mean = (power @ levels) / np.maximum(power.sum(axis=1), 1)
    relative = np.minimum(levels / np.maximum(mean, 1e-30)[:, None], 10.0)
    class_weight = ((1 - density) / np.maximum(density, 1e-3))[:, None]
    weights = class_weight * (1 - follow + follow * relative)
    weights[:, 0] = 1
    return weights.astype(np.float32)


class _Sums:
    """Streamed sums of one layer: of inputs, of labels and of their products."""

    def __init__(self, hidden: int, neurons: int) -> None:
        self.inputs, self.labels = torch.zeros(hidden, dtype=torch.float64), torch.zeros(neurons, dtype=torch.float64)
        self.square, self.product = torch.zeros(hidden, hidden), torch.zeros(hidden, neurons)
        self.count = 0

    def add(self, x: torch.Tensor, active: torch.Tensor) -> None:
        """Add a batch."""
        self.inputs += x.sum(dim=0)
        self.labels += active.sum(dim=0)
        self.square += x.T @ x
        self.product += x.T @ active
        self.count += len(x)

    @property
    def rate(self) -> torch.Tensor:
        """How often each neuron is active: float32 [neurons]."""
        return (self.labels / self.count).float()

    @property
    def mean(self) -> torch.Tensor:
        """Mean input: float32 [hidden]."""
        return (self.inputs / self.count).float()

    @property
    def scale(self) -> torch.Tensor:
        """Standard deviation of the input: float32 [hidden]."""
        variance = self.square.diagonal().double() / self.count - (self.inputs / self.count) ** 2
        return variance.clamp(min=1e-8).sqrt().float()

    def solve(self) -> "_Map":
        """The least-squares map of standardised inputs onto centred labels, in the directions that matter."""
        mean, scale = self.mean.double(), self.scale.double()
        moment = (self.square.double() / self.count - mean[:, None] * mean) / (scale[:, None] * scale)
        product = (self.product.double() / self.count - mean[:, None] * self.rate.double()) / scale[:, None]
        ridge = 1e-3 * torch.eye(len(mean), dtype=torch.float64)
        root = torch.linalg.cholesky(moment + ridge)
        white = torch.linalg.solve_triangular(root, product, upper=False)  # the map of whitened inputs
        # its left singular vectors from the small square matrix: the inputs are fewer than the neurons
        values, left = torch.linalg.eigh(white @ white.T)
        left = left.flip(1)
        first = torch.linalg.solve_triangular(root.T, left, upper=True)
        return _Map(first.float(), (left.T @ white).float())


class _Map(NamedTuple):
    """A map in the order of what each direction explains: ``first`` [hidden, hidden], ``second`` [hidden, neurons]."""

    first: torch.Tensor
    second: torch.Tensor

    def cut(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its best approximation of ``rank``."""
        return self.first[:, :rank].clone(), self.second[:rank].clone()


def _widths(data: _Data, maps: list[_Map], sums: list[_Sums], rank: int) -> list[int]:
    """Rank of each layer under the bytes of ``rank`` for all: where another step raises measured recall most."""
    tried = sorted({min(max(1, round(w * rank)), data.spec.hidden, data.spec.neurons) for w in WIDTHS})
    batch = data.read(data.validation[:: max(1, len(data.validation) // WIDTH_TOKENS)])

    def recalls(layer: int) -> list[float]:
        map_, sum_ = maps[layer], sums[layer]
        x = (batch.inputs(layer) - sum_.mean) / sum_.scale
        active = batch.active(layer) > 0
        said, done, found = sum_.rate.expand(active.shape).clone(), 0, []
        for width in tried:
            said += x @ map_.first[:, done:width] @ map_.second[done:width]
            found.append(_matched_recall(said, active))
            done = width
        return found

    recall = np.array(data.each_layer(recalls))
    return [tried[i] for i in spend(recall, np.array(tried), rank * data.spec.layers)]


def _matched_recall(said: torch.Tensor, active: torch.Tensor) -> float:
    """Recall where as many neurons are predicted as are active."""
    count = int(active.sum())
    if not count:
        return 1.0
    limit = said.flatten().kthvalue(said.numel() - count + 1).values
    return float((active & (said >= limit)).sum()) / count


def spend(recall: np.ndarray, ranks: np.ndarray, budget: int) -> list[int]:
    """Index into ``ranks`` for each layer, the sum of ranks at most ``budget``, by recall [layer, rank] won a rank.

    Greedy: the layer whose next step (or several at once) wins most recall a rank takes it while the budget lasts.
    """
    chosen = [0] * len(recall)
    left = budget - len(recall) * int(ranks[0])
    while True:
        best: tuple[float, int, int] | None = None
        for layer, at in enumerate(chosen):
            for to in range(at + 1, len(ranks)):
                cost = int(ranks[to] - ranks[at])
                gain = (recall[layer, to] - recall[layer, at]) / cost
                if cost <= left and gain > 0 and (best is None or gain > best[0]):
                    best = gain, layer, to
        if best is None:
            return chosen
        _, layer, to = best
        left -= int(ranks[to] - ranks[chosen[layer]])
        chosen[layer] = to


def _epoch(state: _State, data: _Data, settings: Settings, told: "_Told") -> None:
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


def _validation_loss(state: _State, layer: int, batch: _Batch) -> float:
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


def _step(state: _State, layer: int, batch: _Batch, rate: float, number: int) -> None:
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


def _finish(state: _State, data: _Data, settings: Settings) -> Predictors:
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


def _curves(predictors: Predictors, data: _Data, rows: np.ndarray) -> Curves:
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
    state: _State, data: _Data, settings: Settings, limits: np.ndarray, curves: Curves | None = None
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


def _quality(curves: Curves, limits: np.ndarray, data: _Data) -> dict[str, Any]:
    """What is known of the operating point from the prompts that set it, one number a layer."""
    point = curves.at(curves.operating_edges(data.settings.bound)) | {"density": curves.density}
    domains = data.settings.choose
    return {"measured_on": f"prompts of {', '.join(domains)}" if domains else "validation prompts"} | {
        name: [round(float(v), 5) for v in values] for name, values in point.items()
    }


class _Told:
    """Progress in batches."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)


class _Store:
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

    def save(self, state: _State) -> None:
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

    def load(self) -> _State | None:
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
        return _State(**groups, **tensors)  # type: ignore[arg-type]

    def remove(self) -> None:
        """The training is finished: what was kept of it goes."""
        shutil.rmtree(self.path)
