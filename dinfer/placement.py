"""Which neurons live on the GPU."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.units import format_bytes


@dataclass(frozen=True, eq=False)
class Placement:
    """Resident neurons of each layer: ``resident`` uint64 [layer, words], bit-packed.

    A layer's number of slots never changes; at run time neurons replace each other in them.
    """

    neurons: int
    resident: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        """Slots of each layer: int64 [layer]."""
        return bits.count(self.resident)

    def bucket(self, layer: int) -> np.ndarray:
        """Neuron ids of a layer's slots at the start, ascending: int32 [slots]."""
        return bits.ids(self.resident[layer], self.neurons)

    def swap(self, layer: int, fetch: np.ndarray, evict: np.ndarray) -> "Placement":
        """The placement after ``fetch`` replaced ``evict`` (equal numbers of ids) in ``layer``.

        Raises InputError when a fetched neuron is resident or an evicted one is not.
        """
        members = bits.unpack(self.resident[layer], self.neurons)
        fetch, evict = np.asarray(fetch, np.int64), np.asarray(evict, np.int64)
        moved = np.concatenate([fetch, evict])
        known = len(np.unique(moved)) == len(moved) and ((moved >= 0) & (moved < self.neurons)).all()
        if len(fetch) != len(evict) or not known or members[fetch].any() or not members[evict].all():
            raise InputError(
                f"layer {layer}: cannot swap in {fetch.tolist()} for {evict.tolist()}; one is on the wrong side"
            )
        members[evict], members[fetch] = False, True
        resident = self.resident.copy()
        resident[layer] = bits.pack(members)
        return Placement(self.neurons, resident)

    def bytes(self, spec: ModelSpec) -> int:
        """Bytes of GPU memory that the slots take."""
        return int(self.slots.sum()) * spec.neuron_bytes

    def check(self, spec: ModelSpec, budget_bytes: int) -> None:
        """Raise InputError when the placement is for another shape or exceeds ``budget_bytes``."""
        if self.resident.shape != (spec.layers, spec.words) or self.neurons != spec.neurons:
            raise InputError(
                f"placement has {self.resident.shape[0]} layers of {self.neurons} neurons, "
                f"{spec.name} has {spec.layers} of {spec.neurons}; make the plan for this model"
            )
        if (needed := self.bytes(spec)) > budget_bytes:
            raise InputError(
                f"placement takes {format_bytes(needed)}, its budget is {format_bytes(budget_bytes)}; raise --vram"
            )

    @classmethod
    def hottest(cls, frequency: np.ndarray, slots: np.ndarray) -> Self:
        """The ``slots[layer]`` most frequent neurons of each layer (lowest id first among equals).

        ``frequency`` is [layer, neuron], ``slots`` [layer]. Raises InputError for slots that a layer does not have.
        """
        if np.shape(slots) != frequency.shape[:1] or np.min(slots) < 0 or np.max(slots) > frequency.shape[1]:
            raise InputError(
                f"slots {np.asarray(slots).tolist()} must be {len(frequency)} numbers from 0 to {frequency.shape[1]}"
            )
        members = np.zeros(frequency.shape, bool)
        for layer, count in enumerate(slots):
            members[layer, np.argsort(-frequency[layer], kind="stable")[:count]] = True
        return cls(frequency.shape[1], bits.pack(members))
