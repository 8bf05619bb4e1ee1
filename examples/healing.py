"""A FATReLU student of a SiLU teacher: its thresholds, and one training of it that can be resumed."""

import copy
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from healing_fit import (
    BETAS,
    FARTHEST,
    attended,
    constant_gate,
    falling,
    fed,
    first_layer_call,
    fit_part,
    follow,
    inputs_of,
    measured_reach,
    neurons_of,
    open_neurons,
    read_through,
    refine,
    written,
)  # fmt: skip
from healing_texts import FITTED, STEPPED, Texts

from dinfer.errors import InputError
from dinfer.families.products import in_hardware
from dinfer.report import progress

RATE, CLIP = 1e-4, 1.0
SETTLED, PULL = 0.6, 0.2
"""Share of the training from which on the threshold stays; how far a step moves it towards the one that fits its
batch."""
FIT_ROWS, REACH_ROWS, ROWS_AT_ONCE = 2560, 32, 16
"""Sequences that the residual is fitted on, those of them that tell the reach, and how many go through a layer at a
time."""
SUMMED = 5
"""One in so many of these batches is summed in the regressions before a layer learns: few tell them enough."""
OPEN, OPEN_UNTIL = 0.3125, 0.6
"""Share of a layer's open gates that shall be open for every token, in the second layer and on, up to this depth."""
LEAST_THRESHOLD = 0.01
"""Below it reach could not be told from a neuron's threshold; a model that is as sparse by plain ReLU gets it."""
SAMPLED_ROWS = 61
"""One token in so many gives its gates to find the threshold (a prime: no fixed position)."""
HEAD_ROWS = 256
"""Tokens whose logits are in memory at a time."""
RECIPE = 9
"""Raised with any change after which a checkpoint could not be gone on with."""


States = list[torch.Tensor]
"""The residual of many sequences, batches [rows, length, hidden]."""
Pair = tuple[States, States]
"""The student's and the teacher's."""


class FatRelu(torch.nn.Module):
    """``gate`` where it is above ``threshold`` [neurons], else 0; ``gates`` and ``active`` tell of the last call."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(neurons))
        self.gates = self.active = torch.empty(0)

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        above = gate > self.threshold
        self.gates = gate.detach().reshape(-1, gate.shape[-1])[::SAMPLED_ROWS]
        self.active = above.float().mean()
        return gate * above


class Student:
    """A copy of ``teacher`` with FATReLU, whose FFN and attention weights train, in float32.

    A neuron's threshold is ``threshold`` / ``reach`` [layers, neurons]; ``reach`` tells how much the loss feels of its
    gate, so that one ``threshold`` silences what matters least in the whole model.
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

    def sparsity(self) -> torch.Tensor:
        """Share of silenced gates in each layer's last forward pass, float32 [layers]."""
        return 1 - torch.stack([mlp.act_fn.active for mlp in self.mlps])

    def threshold_for(self, sparsity: float) -> float:
        """The threshold that would have silenced ``sparsity`` of the gates of the last forward pass, or the least."""
        reached = torch.cat([(mlp.act_fn.gates * r).flatten() for mlp, r in zip(self.mlps, self.reach, strict=True)])
        rank = min(len(reached), max(1, round(sparsity * len(reached))))
        return max(LEAST_THRESHOLD, float(reached.float().kthvalue(rank).values))

    def silence(self, teacher: Any, ids: torch.Tensor, sparsity: float) -> None:
        """Silence ``sparsity`` of the gates of ``ids`` [rows, length], those the loss feels least."""
        self.reach, gates = measured_reach(teacher, ids[:: max(1, len(ids) // REACH_ROWS)], SAMPLED_ROWS)
        for mlp, sampled in zip(self.mlps, gates, strict=True):
            mlp.act_fn.gates = sampled
        always = sum(self.opened(sparsity)) / self.reach.numel()
        self.set_threshold(self.threshold_for(sparsity / (1 - always)))

    def opened(self, sparsity: float) -> list[int]:
        """How many neurons of each layer shall be open for every token."""
        layers, neurons = self.reach.shape
        each = round(OPEN * (1 - sparsity) * neurons)
        return [each if 0 < layer < round(OPEN_UNTIL * layers) else 0 for layer in range(layers)]

    @torch.no_grad()
    def fit(self, teacher: Any, ids: torch.Tensor, opened: list[int], fitted: int, done: Callable[[int], None]) -> None:
        """Fit each layer in turn: what it reads of ``ids`` [rows, length] shall be what the teacher's reads, and after
        attention and after the FFN the residual where the teacher's is, whatever was lost before.

        The first ``fitted`` layers were before; ``done`` is told how many are, after each.
        """
        calls = [first_layer_call(teacher, rows) for rows in ids.split(ROWS_AT_ONCE)]
        theirs, ours = ([states for states, _ in calls] for _ in range(2))
        others = [rest for _, rest in calls]
        layers = list(zip(teacher.model.layers, self.model.model.layers, strict=True))
        with progress("fitting the residual to the teacher's", "layers") as show, autocast(teacher):
            for number, (their, our) in enumerate(layers):
                if number < fitted:
                    ours, theirs = (passed(*side, others) for side in ((our, ours), (their, theirs)))
                else:
                    ours, theirs = self._fit_attention(their, our, ours, theirs, others)
                    ours, theirs = self._fit_ffn(number, opened[number], their, our, ours, theirs)
                    done(number + 1)
                show(number + 1, len(layers))

    def _fit_attention(self, their: Any, our: Any, ours: States, theirs: States, others: list[Any]) -> Pair:
        """The residuals after attention, whose reads and output are fitted; ``others``: a call's mask and positions."""
        attention, norm = our.self_attn, our.input_layernorm
        reads = [[norm(x) for x in states[::SUMMED]] for states in (ours, theirs)]
        read_through([attention.q_proj, attention.k_proj, attention.v_proj], *reads)
        given = inputs_of(attention.o_proj, our, ours, others)
        theirs = [attended(their, *call) for call in zip(theirs, others, strict=True)]
        fit_part(attention.o_proj, given[::SUMMED], ours[::SUMMED], theirs[::SUMMED])
        return written(attention.o_proj, given, ours), theirs

    def _fit_ffn(self, number: int, opened: int, their: Any, our: Any, ours: States, theirs: States) -> Pair:
        """The residuals after the FFN: its reads are fitted, gates follow the teacher's activation where they are open,
        ``opened`` neurons become a linear map, then all of it learns, and what it writes is fitted."""
        mlp, norm = our.mlp, our.post_attention_layernorm
        entered, meant = [norm(x) for x in ours], [norm(x) for x in theirs[::SUMMED]]
        theirs = [fed(their, states) for states in theirs]
        few = entered[::SUMMED], ours[::SUMMED], theirs[::SUMMED]
        read_through([mlp.gate_proj, mlp.up_proj], few[0], meant)
        constant = constant_gate(few[0])
        self.reach[number] = self.threshold / follow(mlp, their.mlp.act_fn, constant, few[0])
        self.set_threshold(self.threshold)
        if opened:
            places = open_neurons(mlp, opened, constant, *few)
            self.reach[number, places] = FARTHEST
            self.set_threshold(self.threshold)
        fit_part(mlp.down_proj, [neurons_of(mlp, x) for x in few[0]], *few[1:])
        refine(mlp, entered, ours, theirs)
        active = [neurons_of(mlp, x) for x in entered]
        fit_part(mlp.down_proj, active, ours, theirs)
        return written(mlp.down_proj, active, ours), theirs


def passed(layer: Any, states: States, others: list[Any]) -> States:
    """The residuals after a decoder ``layer``; ``others``: a call's mask and positions."""
    return [fed(layer, attended(layer, *call)) for call in zip(states, others, strict=True)]


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
    """Where a training stands: layers fitted, steps taken, their seconds (the fit's not), and what the teacher's
    source.json says."""

    fitted: int = 0
    step: int = 0
    seconds: float = 0.0
    teacher: dict[str, Any] = field(default_factory=dict)


class Healing:
    """One training: ``begin`` fits, ``step`` takes the next step, ``save`` and ``resume`` keep it on disk.

    ``sparsity`` is wanted at the end; ``rows`` sequences a step.
    """

    def __init__(self, teacher: Any, texts: Texts, sparsity: float, rows: int, seed: int) -> None:
        self.teacher, self.texts = teacher, texts
        self.sparsity, self.rows, self.seed = sparsity, rows, seed
        self.student, self.run = Student(teacher), Run()
        self.optimiser = torch.optim.AdamW(self.student.weights(), betas=BETAS, weight_decay=0.0, fused=True)

    def begin(self, keep: Callable[[], None] = lambda: None) -> None:
        """All that comes before the first step, if it has not: the fit, layer by layer; ``keep`` after each."""
        if self.run.fitted == len(self.student.mlps):
            return

        def done(layers: int) -> None:
            self.run.fitted = layers
            keep()

        ids = self.texts.batch(self.seed, 2**31, FIT_ROWS, FITTED).to(self.teacher.device)
        if not self.run.fitted:
            self.student.silence(self.teacher, ids, self.sparsity)
        self.student.fit(self.teacher, ids, self.student.opened(self.sparsity), self.run.fitted, done)

    def step(self, share: float) -> dict[str, float]:
        """The next step, at ``share`` (0 to 1) of the training; what it measured."""
        self.begin()
        begun = time.perf_counter()
        ids = self.texts.batch(self.seed, self.run.step, self.rows, STEPPED).to(self.teacher.device)
        loss = self._loss(ids)
        norm = torch.nn.utils.clip_grad_norm_(self.student.weights(), CLIP)
        rate = falling(RATE, self.run.step, share)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        if share < SETTLED:
            self._keep_sparsity()
        self.run.step += 1
        self.run.seconds += time.perf_counter() - begun
        told = {"loss": loss, "norm": float(norm), "rate": rate, "sparsity": float(self.student.sparsity().mean())}
        return told | {"threshold": self.student.threshold}

    def _loss(self, ids: torch.Tensor) -> float:
        """Divergence from the teacher on ``ids``; leaves the gradients."""
        with torch.no_grad():
            theirs = self.teacher.model(ids).last_hidden_state.flatten(0, 1)
        with autocast(self.teacher):
            ours = self.student.model.model(ids).last_hidden_state.flatten(0, 1)
        loss = LogitKl.apply(ours, theirs, self.teacher.get_output_embeddings().weight)
        loss.backward()
        return float(loss.detach())

    def _keep_sparsity(self) -> None:
        now = self.student.threshold
        self.student.set_threshold(now + PULL * (self.student.threshold_for(self.sparsity) - now))

    def settings(self) -> dict[str, Any]:
        """What a training may not change on its way."""
        texts = self.texts
        return {
            "recipe": RECIPE,
            "seed": self.seed,
            "sparsity": self.sparsity,
            "rows a step": self.rows,
            "tokens a row": texts.chats.shape[1],
            "rows of chats": len(texts.chats),
            "rows written freely": len(texts.free),
            "tokens of English": len(texts.english),
        }

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, except the texts and the teacher."""
        return {
            "run": vars(self.run),
            "settings": self.settings(),
            "threshold": self.student.threshold,
            "reach": self.student.reach,
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
        """Go on from ``file``; raises InputError where it is of another recipe, model or settings."""
        own = self.state()
        try:
            state = torch.load(file, map_location=self.teacher.device)
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            state = {}
        if state.keys() != own.keys() or [w.shape for w in state["weights"]] != [w.shape for w in own["weights"]]:
            raise InputError(
                f"{file} is of another recipe or model; remove it to begin anew, or choose another place with --work"
            )
        for name, value in own["settings"].items():
            if state["settings"].get(name) != value:
                raise InputError(
                    f"{file} was made with {name} {state['settings'].get(name)}, this training has {value}; set it as "
                    "it was, remove the file to begin anew, or choose another place with --work"
                )
        self.run = Run(**state["run"])
        with torch.no_grad():
            for weight, saved in zip(self.student.weights(), state["weights"], strict=True):
                weight.copy_(saved)
        self.student.reach = state["reach"]
        self.student.set_threshold(state["threshold"])
        self.optimiser.load_state_dict(state["optimiser"])


def dtype_of_products(device: torch.device) -> torch.dtype:
    """bfloat16, or float32 where ``device`` has no instructions for its products: they take 100 times longer."""
    return torch.bfloat16 if in_hardware(device.type, torch.bfloat16) else torch.float32


def autocast(model: Any) -> Any:
    """Matrix products on ``model``'s device in ``dtype_of_products``."""
    dtype = dtype_of_products(model.device)
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.inference_mode()
def losses(model: Any, ids: torch.Tensor) -> np.ndarray:
    """Negative log likelihood in nats of each row's tokens but its first, float64 [rows, length - 1]."""
    found = []
    for rows in ids.split(4):
        rows = rows.to(model.device)
        with autocast(model):
            logits = model(rows).logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none")
        found.append(loss.reshape(len(rows), -1).double().cpu())
    return torch.cat(found).numpy()
