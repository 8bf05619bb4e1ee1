"""A plan: what is placed where and by which rules it moves; the simulator and the executor read the same one.

A plan is two files, ``NAME.json`` and ``NAME.safetensors`` beside it; docs/plan.md is the format.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dinfer.document import read_arrays, read_document
from dinfer.errors import InputError
from dinfer.machine import ISSUES, LayerCosts, Machine, layer_costs
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.units import exact_bytes, parse_bytes

if TYPE_CHECKING:
    from dinfer.policies import Cache
    from dinfer.policies.balanced import Levels
    from dinfer.policies.protocol import Beliefs

FORMAT = "dinfer-plan"
VERSION = 1
ACTIVATION_MODES = ("exact", "predicted")
PREDICTIONS = ("oracle", "previous", "trained")
MOST_SEQUENCES = 8
"""Most sequences decoded together: beyond, the union of their active sets is most of a layer."""
THRESHOLD_POLICIES = ("fixed", "balanced")
EARLY = ("predicted", "resident")
"""What becomes of layers with no layer ``lookahead`` before them: predicted from the first's residual, or resident."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a run needs to know beforehand.

    ``cache`` names a policy and its parameters; ``lookahead`` is in layers; ``window`` is the most neurons that one
    prefetch may move, None to size it from the time left by the believed costs. ``activation``: ``exact`` computes its
    gates and loses nothing, ``predicted`` computes the predicted set only. ``prediction``: ``previous`` is the layer's
    active set of the token before, ``oracle`` the trace's own (simulation and replay only), ``trained`` what a
    predictor computes from the residual ``lookahead`` layers before; ``predictor`` then names it (``Predictors.tag``)
    and says which layers are too ``early`` for that and what becomes of them (``early_layers``); else it is empty.
    ``issue``: how a prefetch moves (machine.ISSUES); with ``copy``, one copy takes ``group`` neurons.
    ``vram_bytes`` is the whole GPU budget, ``memory`` its breakdown in bytes by term, ``context`` the tokens
    that the KV cache holds of each of ``batch`` sequences decoded together. ``thresholds`` [layer]: values of magnitude
    kinds at most this large are inactive (0: none), and gates of ReLU kinds, where it raises the model's own;
    ``threshold`` names how they are used: ``fixed`` on both sides, or ``balanced``, with the ``levels`` of each side
    among which the believed costs choose. ``frequency`` float32 [layer, neuron] is the offline history that caches
    start from. ``weights`` is the checkpoint's fingerprint, empty for a plan
    that is not bound to weights.
    """

    spec: ModelSpec
    machine: Machine
    placement: Placement
    frequency: np.ndarray
    cache: Mapping[str, Any] = field(default_factory=lambda: {"name": "static"})
    lookahead: int = 1
    window: int | None = None
    activation: str = "exact"
    prediction: str = "previous"
    predictor: Mapping[str, Any] = field(default_factory=dict)
    issue: str = "gather"
    group: int = 1
    vram_bytes: int = 0
    context: int = 512
    batch: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    thresholds: tuple[float, ...] = ()
    threshold: Mapping[str, Any] = field(default_factory=lambda: {"name": "fixed"})
    levels: "Levels | None" = None
    solver: Mapping[str, Any] = field(default_factory=dict)
    trace: str = ""
    weights: str = ""

    def __post_init__(self) -> None:
        self.placement.check(self.spec, self.vram_bytes)
        if self.frequency.shape != (self.spec.layers, self.spec.neurons):
            raise InputError(
                f"frequency has shape {self.frequency.shape}; it must be {(self.spec.layers, self.spec.neurons)}"
            )
        _one_of("activation", self.activation, ACTIVATION_MODES)
        _one_of("prediction", self.prediction, PREDICTIONS)
        _one_of("issue", self.issue, ISSUES)
        if isinstance(self.group, bool) or not isinstance(self.group, int):
            raise InputError(f"group is {self.group!r}; it must be a whole number of neurons")
        layer_costs(self.spec, self.machine, self.activation, self.issue, group=self.group)  # refuses what does not fit
        self._check_predictor()
        if not 0 <= self.lookahead < self.spec.layers:
            raise InputError(f"lookahead is {self.lookahead}; it must be between 0 and {self.spec.layers - 1} layers")
        if self.window is not None and self.window < 0:
            raise InputError(f"window is {self.window} neurons; it must be 0 or more, or left out to be sized")
        if not 1 <= self.batch <= MOST_SEQUENCES:
            raise InputError(f"batch is {self.batch} sequences; it must be between 1 and {MOST_SEQUENCES}")
        if len(self.thresholds) not in (0, self.spec.layers):
            raise InputError(f"thresholds has {len(self.thresholds)} values for {self.spec.layers} layers")
        own = self.spec.gate_threshold
        if self.thresholds and self.spec.sparsity_kind == "relu" and min(self.thresholds) < own:
            raise InputError(
                f"thresholds has {min(self.thresholds):g}, but {self.spec.name} is a ReLU model whose gates are 0 up "
                f"to {own:g}; they can be raised only: give at least that, or leave them out"
            )
        _one_of("threshold", self.threshold.get("name", ""), THRESHOLD_POLICIES)
        if (self.threshold["name"] == "balanced") != (self.levels is not None):
            raise InputError(f"threshold {self.threshold['name']!r} and levels do not belong together; plan again")
        if self.levels is not None and (self.activation != "exact" or self.batch > 1):
            raise InputError(
                "threshold 'balanced' is for exact activation of one sequence, not "
                f"{self.activation!r} of {self.batch}; plan with --threshold fixed, or --activation exact --batch 1"
            )

    def _check_predictor(self) -> None:
        if (self.prediction == "trained") != bool(self.predictor):
            raise InputError(
                f"prediction is {self.prediction!r} with predictor {dict(self.predictor)}; 'trained' names its "
                "predictor and the others have none"
            )
        if self.predictor and self.predictor["lookahead"] != self.lookahead:
            raise InputError(
                f"lookahead is {self.lookahead}, but the predictor's is {self.predictor['lookahead']}; plan with the "
                "same, or train another predictor"
            )
        if "early" in self.predictor:
            self._check_early(self.predictor["early"])

    def _check_early(self, early: Mapping[str, Any]) -> None:
        _one_of("early", early.get("way", ""), EARLY)
        if dict(early) != early_layers(self.lookahead, early["way"]):
            raise InputError(f"early is {dict(early)}; at lookahead {self.lookahead} it must be what a planner writes")
        slots = self.placement.slots[early["layers"]] if early["way"] == "resident" else ()
        if any(slots < self.spec.neurons for slots in slots):
            raise InputError(
                f"early layers {early['layers']} are to stay resident, but have {[int(n) for n in slots]} slots for "
                f"{self.spec.neurons} neurons; plan with --early predicted or more --vram"
            )

    @property
    def held(self) -> np.ndarray:
        """Layers that stay resident as nothing predicts them ahead, bool [layer]: computed whole, never scheduled."""
        early = self.predictor.get("early", {})
        held = np.zeros(self.spec.layers, np.bool_)
        held[early.get("layers", []) if early.get("way") == "resident" else []] = True
        return held

    def check_predictor(self, fingerprint: str | None) -> None:
        """Raise InputError unless ``fingerprint`` is of the predictor that this plan names (None: of none)."""
        wanted = self.predictor.get("fingerprint")
        if fingerprint == wanted:
            return
        if wanted is None:
            raise InputError(f"plan predicts by {self.prediction!r} and takes no predictor; leave --predictor out")
        given = "none is given" if fingerprint is None else f"{fingerprint} is given"
        raise InputError(f"plan predicts by predictor {wanted}, {given}; give --predictor DIR with that one")

    @property
    def policy(self) -> "Cache":
        """The cache policy as a value with ``init`` and ``step``."""
        from dinfer.policies import cache_from_dict

        return cache_from_dict(self.cache)

    @property
    def costs(self) -> LayerCosts:
        """The believed costs: of this model on this plan's machine."""
        rank = self.predictor.get("rank", 0)
        return layer_costs(self.spec, self.machine, self.activation, self.issue, rank, self.batch, self.group)

    @property
    def beliefs(self) -> "Beliefs":
        """What the cache policy is told beforehand."""
        from dinfer.policies.protocol import Beliefs

        lag, queues = int(self.prediction == "previous"), self.issue != "gather"
        return Beliefs(self.spec.neurons, self.lookahead, lag, queues, self.costs)

    @property
    def value_thresholds(self) -> np.ndarray:
        """What a value, of ReLU kinds a gate, must exceed: float32 [layer]; the model's own when there are none."""
        own = self.spec.gate_threshold if self.spec.sparsity_kind == "relu" else 0.0
        return np.array(self.thresholds or (own,) * self.spec.layers, np.float32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint() == other.fingerprint()

    __hash__ = None  # type: ignore[assignment]

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of everything in the plan."""
        digest = hashlib.sha256(json.dumps(self._document(), sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self.placement.resident).tobytes())
        digest.update(np.ascontiguousarray(self.frequency, np.float32).tobytes())
        for array in self._level_arrays().values():
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def check_model(self, spec: ModelSpec, weights: str = "") -> None:
        """Raise InputError unless the plan was made for this shape, and for these weights where both are known."""
        if spec.fingerprint() != self.spec.fingerprint():
            raise InputError(
                f"plan is for {self.spec.name} ({self.spec.fingerprint()}), the model is {spec.name} "
                f"({spec.fingerprint()}); make a plan for this model with `dinfer plan`"
            )
        if self.weights and weights and weights != self.weights:
            raise InputError(
                f"plan is for other weights of {self.spec.name} ({self.weights}, the model has {weights}); "
                "record these weights and plan again"
            )

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.spec.to_dict(),
            "model_fingerprint": self.spec.fingerprint(),
            "weights": self.weights,
            "machine": self.machine.to_dict(),
            "machine_fingerprint": self.machine.fingerprint(),
            "trace": self.trace,
            "cache": dict(self.cache),
            "lookahead": self.lookahead,
            "window": self.window,
            "activation": self.activation,
            "prediction": self.prediction,
            "predictor": dict(self.predictor),
            "issue": self.issue,
            "group": self.group,
            "vram": exact_bytes(self.vram_bytes),
            "context": self.context,
            "batch": self.batch,
            "memory": dict(self.memory),
            "thresholds": list(self.thresholds),
            "threshold": dict(self.threshold),
            "slots": self.placement.slots.tolist(),
            "solver": dict(self.solver),
        }

    def _level_arrays(self) -> dict[str, np.ndarray]:
        """The tensors of ``levels``, in this order; none where thresholds are fixed."""
        if self.levels is None:
            return {}
        dtypes = {"gpu": "<f4", "cpu": "<f4", "tables": "<f8", "expected": "<i8"}
        return {f"levels.{k}": np.ascontiguousarray(getattr(self.levels, k), v) for k, v in dtypes.items()}

    def save(self, path: str | Path) -> None:
        """Write ``path`` (.json) and its arrays beside it (.safetensors), replacing both only when complete."""
        from safetensors.numpy import save_file

        path = Path(path)
        if path.suffix != ".json":
            raise InputError(f"plan file {path} must end in .json")
        if not path.parent.is_dir():
            raise InputError(f"plan file {path} cannot be written: {path.parent} is no directory; make it first")
        arrays = path.with_suffix(".safetensors")
        tensors = {
            "resident": np.ascontiguousarray(self.placement.resident),
            "frequency": np.ascontiguousarray(self.frequency, np.float32),
            **self._level_arrays(),
        }
        save_file(tensors, arrays.with_name(arrays.name + ".new"), {"plan": self.fingerprint()})
        text = json.dumps({**self._document(), "fingerprint": self.fingerprint()}, indent=1) + "\n"
        path.with_name(path.name + ".new").write_text(text)
        os.replace(arrays.with_name(arrays.name + ".new"), arrays)
        os.replace(path.with_name(path.name + ".new"), path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan in ``path``; raises InputError for a file that is none, is newer, or whose arrays do not fit."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"plan {path} does not exist; make one with `dinfer plan TRACE -o {path}`")
        document = read_document(path, f"plan {path}", "plan", VERSION)
        rule = "a plan is its .json and the .safetensors beside it"
        tensors = read_arrays(path.with_suffix(".safetensors"), "plan", rule)
        try:
            spec = ModelSpec.from_dict(document["model"])
            plan = cls(
                spec=spec,
                machine=Machine.from_dict(document["machine"]),
                placement=Placement(spec.neurons, tensors["resident"]),
                frequency=tensors["frequency"],
                vram_bytes=parse_bytes(document["vram"]),
                thresholds=tuple(document["thresholds"]),
                levels=_levels(tensors),
                **{k: document[k] for k in _PLAIN_FIELDS},
            )
            written = {**plan._document(), "fingerprint": plan.fingerprint()}
        except KeyError as error:
            raise InputError(f"plan {path} lacks {error}; make it again with `dinfer plan`") from None
        except (AttributeError, TypeError, IndexError) as error:
            raise InputError(f"plan {path} has a value of a wrong type ({error}); make it again") from None
        if document | written != document:
            raise InputError(f"plan {path} and its arrays do not belong together or were edited; make it again")
        return plan


def early_layers(lookahead: int, way: str = "predicted") -> dict[str, Any]:
    """What a plan says of the layers that no layer ``lookahead`` before them can predict: which, what, and why.

    ``ahead`` are the layers that each of them is predicted ahead in fact, where the way is not to keep them resident.
    """
    layers = list(range(lookahead))
    why = "no layer stands before layer 0"
    if lookahead > 1:
        why = f"no layer stands {lookahead} before layers 0 to {lookahead - 1}"
    ahead = {"ahead": layers} if way == "predicted" else {}  # from layer 0's residual: as far as they stand from it
    return {"layers": layers, "way": way, **ahead, "why": why if layers else ""}


_PLAIN_FIELDS = (
    *"cache lookahead window activation prediction predictor issue group context batch memory".split(),
    *"threshold solver trace weights".split(),
)


def _levels(tensors: Mapping[str, np.ndarray]) -> "Levels | None":
    from dinfer.policies.balanced import Levels

    if "levels.tables" not in tensors:
        return None
    return Levels(*(tensors[f"levels.{name}"] for name in ("gpu", "cpu", "tables", "expected")))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} {value!r} is not one of {', '.join(allowed)}")
