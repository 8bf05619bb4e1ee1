"""A FATReLU student of a SiLU teacher: its thresholds, its two losses, and one training that can be resumed."""

import copy
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from healing_texts import Texts

from dinfer.errors import InputError

RATE, WARMUP, BETAS, CLIP = 3e-4, 20, (0.9, 0.95), 1.0
RISE, SETTLED, PULL = 0.35, 0.6, 0.2
"""Shares of the training at which the wanted sparsity is reached and from which on the threshold stays; how far a step
moves the threshold towards the one that fits its batch."""
SOFT, HARD = (1.0, 0.2), 0.19
"""First and last softness of the step at the threshold, and the share of the training from which on it is hard."""
SAMPLED_ROWS = 61
"""One token in so many gives its gates to find the threshold (a prime: no fixed position)."""
HEAD_ROWS = 256
"""Tokens whose logits are in memory at a time."""


class FatRelu(torch.nn.Module):
    """``gate`` where it is above ``threshold`` [neurons], else 0; ``gates`` and ``active`` tell of the last call.

    With a ``softness`` above 0 the step is a logistic one of that width: SiLU is softness 1 and threshold 0.
    """

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(neurons))
        self.softness = 1.0
        self.gates = self.active = torch.empty(0)

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        above = gate > self.threshold
        self.gates = gate.detach().reshape(-1, gate.shape[-1])[::SAMPLED_ROWS]
        self.active = above.float().mean()
        if self.softness:
            return gate * torch.sigmoid((gate - self.threshold.to(gate.dtype)) / self.softness)
        return gate * above


class Student:
    """A copy of ``teacher`` with FATReLU, whose FFN and attention weights train, in float32.

    A neuron's threshold is ``threshold`` / ``reach`` [layers, neurons]; ``reach`` tells how much of the residual one
    unit of its gate moves, so that one ``threshold`` silences the least contributions of the whole model.
    """

    def __init__(self, teacher: Any) -> None:
        self.model = copy.deepcopy(teacher).requires_grad_(False)
        self.mlps = [layer.mlp for layer in self.model.model.layers]
        neurons = self.mlps[0].gate_proj.out_features
        for mlp in self.mlps:
            mlp.act_fn = FatRelu(neurons).to(teacher.device)
        self.linears = {
            name: part.float().requires_grad_(True)
            for name, part in self.model.named_modules()
            if isinstance(part, torch.nn.Linear) and name.startswith("model.layers.")
        }
        self.threshold = 0.0
        self.reach = torch.ones(len(self.mlps), neurons, device=teacher.device)

    def weights(self) -> list[torch.nn.Parameter]:
        """What trains."""
        return [part.weight for part in self.linears.values()]

    def set_threshold(self, threshold: float) -> None:
        """Silence every gate up to ``threshold`` / reach."""
        self.threshold = threshold
        for mlp, reach in zip(self.mlps, self.reach, strict=True):
            mlp.act_fn.threshold.copy_(threshold / reach)

    def set_softness(self, softness: float) -> None:
        """Make every step that soft; 0 is FATReLU."""
        for mlp in self.mlps:
            mlp.act_fn.softness = softness

    def sparsity(self) -> torch.Tensor:
        """Share of silenced gates in each layer's last forward pass, float32 [layers]."""
        return 1 - torch.stack([mlp.act_fn.active for mlp in self.mlps])

    def threshold_for(self, sparsity: float) -> float:
        """The threshold that would have silenced ``sparsity`` of the gates of the last forward pass, at least 0."""
        gates = torch.cat([(mlp.act_fn.gates * r).flatten() for mlp, r in zip(self.mlps, self.reach, strict=True)])
        rank = min(len(gates), max(1, round(sparsity * len(gates))))
        return max(0.0, float(gates.float().kthvalue(rank).values))

    @torch.inference_mode()
    def measure_reach(self, ids: torch.Tensor) -> None:
        """Set ``reach`` from the texts ``ids``: mean |up| where the gate is open x norm of the down column, relative
        to the typical residual of the layer; at most 8 times more or less than the model's median."""
        moved: list[torch.Tensor] = []

        def listen(mlp: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            opened = mlp.gate_proj(inputs[0]).float() > 0
            up = (mlp.up_proj(inputs[0]).float().abs() * opened).sum((0, 1)) / opened.sum((0, 1)).clamp(min=1)
            moved.append(up * mlp.down_proj.weight.norm(dim=0))

        with hooked(self.mlps, listen):
            residuals = self.model(ids, output_hidden_states=True).hidden_states[:-1]
        typical = torch.stack([residual.float().norm(dim=-1).median() for residual in residuals])
        reach = torch.stack(moved) / typical[:, None]
        self.reach = (reach / reach.median()).clamp(1 / 8, 8).clone()


class LogitKl(torch.autograd.Function):
    """KL(teacher, student) in nats, mean over tokens, a few tokens at a time.

    ``hidden`` and ``target`` [tokens, hidden] go through the same ``head`` [vocab, hidden]; the gradient
    (softmax(student) - softmax(teacher)) @ head / tokens is made on the way, so that the logits need not stay.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, target: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        loss, slope = torch.zeros((), device=hidden.device), torch.empty_like(hidden)
        for start in range(0, len(hidden), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            ours, theirs = (F.linear(states[rows].to(head.dtype), head).float() for states in (hidden, target))
            ours -= ours.logsumexp(-1, keepdim=True)
            theirs -= theirs.logsumexp(-1, keepdim=True)
            wanted = theirs.exp()
            loss += torch.dot(wanted.flatten(), theirs.sub_(ours).flatten())
            slope[rows] = (ours.exp_().sub_(wanted).to(head.dtype) @ head).to(slope.dtype)
        ctx.save_for_backward(slope / len(hidden))
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * outer, None, None


@dataclass
class Run:
    """Where a training stands: steps taken, their seconds, what the teacher's source.json says."""

    step: int = 0
    seconds: float = 0.0
    teacher: dict[str, Any] = field(default_factory=dict)


class Healing:
    """One training: ``step`` takes the next one, ``save`` and ``resume`` keep it on disk.

    ``sparsity`` is wanted at the end; ``rows`` sequences a step.
    """

    def __init__(self, teacher: Any, texts: Texts, sparsity: float, rows: int, seed: int) -> None:
        self.teacher, self.texts = teacher, texts
        self.sparsity, self.rows, self.seed = sparsity, rows, seed
        self.student, self.run = Student(teacher), Run()
        self.first_sparsity = 0.0
        self.optimiser = self._optimiser()

    def _optimiser(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.student.weights(), betas=BETAS, weight_decay=0.0, fused=True)

    def step(self, share: float) -> dict[str, float]:
        """The next step, at ``share`` (0 to 1) of the training; what it measured."""
        begun = time.perf_counter()
        if not self.run.step:
            self._measure_reach()
        self.student.set_softness(softness(share))
        ids = self.texts.batch(self.seed, self.run.step, self.rows).to(self.teacher.device)
        loss = self._loss(ids)
        norm = torch.nn.utils.clip_grad_norm_(self.student.weights(), CLIP)
        rate = falling(RATE, self.run.step, share)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        if share < SETTLED:
            self._raise_threshold(share)
        self.run.step += 1
        self.run.seconds += time.perf_counter() - begun
        told = {"loss": loss, "norm": float(norm), "rate": rate, "sparsity": float(self.student.sparsity().mean())}
        return told | {"threshold": self.student.threshold, "softness": self.student.mlps[0].act_fn.softness}

    def _measure_reach(self) -> None:
        with autocast(self.teacher):
            self.student.measure_reach(self.texts.batch(self.seed, 2**31, 4 * self.rows).to(self.teacher.device))
        self.first_sparsity = float(self.student.sparsity().mean())

    def _loss(self, ids: torch.Tensor) -> float:
        """Divergence from the teacher on ``ids``; leaves the gradients."""
        with torch.no_grad():
            theirs = self.teacher.model(ids).last_hidden_state.flatten(0, 1)
        with autocast(self.teacher):
            ours = self.student.model.model(ids).last_hidden_state.flatten(0, 1)
        loss = LogitKl.apply(ours, theirs, self.teacher.get_output_embeddings().weight)
        loss.backward()
        return float(loss.detach())

    def _raise_threshold(self, share: float) -> None:
        wanted = self.first_sparsity + (self.sparsity - self.first_sparsity) * min(1, share / RISE)
        now = self.student.threshold
        self.student.set_threshold(now + PULL * (self.student.threshold_for(wanted) - now))

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, except the texts and the teacher."""
        return {
            "run": vars(self.run),
            "threshold": self.student.threshold,
            "reach": self.student.reach,
            "first_sparsity": self.first_sparsity,
            "weights": [weight.detach() for weight in self.student.weights()],
            "optimiser": self.optimiser.state_dict(),
        }

    def save(self, file: Path) -> None:
        """Write ``state`` beside ``file``, then rename: a killed process leaves the old checkpoint."""
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".checkpoint-", delete=False) as stream:
            torch.save(self.state(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        Path(stream.name).replace(file)

    def resume(self, file: Path) -> None:
        """Go on from ``file``; raises InputError where it trains other weights, as of an older recipe or model."""
        state = torch.load(file, map_location=self.teacher.device)
        shapes, saved_shapes = ([weight.shape for weight in ws] for ws in (self.student.weights(), state["weights"]))
        if shapes != saved_shapes:
            raise InputError(
                f"{file} holds {len(saved_shapes)} weights, this recipe trains {len(shapes)} of other shapes; "
                "remove it to begin anew, or choose another place with --work"
            )
        self.run = Run(**state["run"])
        self.first_sparsity = state["first_sparsity"]
        with torch.no_grad():
            for weight, saved in zip(self.student.weights(), state["weights"], strict=True):
                weight.copy_(saved)
        self.student.reach = state["reach"]
        self.student.set_threshold(state["threshold"])
        self.optimiser.load_state_dict(state["optimiser"])


def autocast(model: Any) -> Any:
    """bfloat16 matrix products on ``model``'s device."""
    return torch.autocast(model.device.type, dtype=torch.bfloat16)


def falling(rate: float, step: int, share: float) -> float:
    """Learning rate of ``step`` at ``share`` of the training: warm-up, then a cosine from ``rate`` to a 50th of it."""
    return rate * min(1, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1, share))))


def softness(share: float) -> float:
    """How soft the step is at ``share`` of the training: falling by equal ratios, and 0 from ``HARD`` on."""
    first, last = SOFT
    return 0.0 if share >= HARD else first * (last / first) ** (share / HARD)


@contextmanager
def hooked(modules: list[Any], hook: Callable[..., None]) -> Iterator[None]:
    """Call ``hook`` after each forward pass of each of ``modules``."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """exp of the mean negative log likelihood of every token but the first of each row of ``ids``."""
    total = 0.0
    for rows in ids.split(4):
        rows = rows.to(model.device)
        with autocast(model):
            logits = model(rows).logits
        total += float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (ids.numel() - len(ids)))
