"""Where the weights of the neurons lie: all of them in host memory, the resident ones in GPU slots too."""

import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from numba import njit

from dinfer.errors import InputError, PlanWarning
from dinfer.families import TORCH_DTYPES, Checkpoint, host_tensor
from dinfer.families.quantise import QUANT_BYTES, quantise, relative_error, row_bytes
from dinfer.placement import Placement
from dinfer.units import format_bytes


@dataclass(eq=False)
class Bank:
    """One host slab [layer, neuron, matrix, hidden], neuron-contiguous, and one device slab cut into slots.

    Quantised rows are uint8 [.., row_bytes] instead (docs/quantisation.md); ``errors`` [layer] are then the RMS of what
    quantising changed over the RMS of the weights, else it is empty.
    ``slots[layer]`` [slot, matrix, hidden] on the device; ``bucket[layer]`` int32 [slot] names the neuron that a slot
    holds (paper, method 5), ``slot_of[layer]`` int32 [neuron] the slot of a neuron or -1. ``resident`` uint64
    [layer, words] is the same as a set, ``cold[layer]`` int32 the ids that are not resident, ascending. ``up_bias``
    float32 [layer, neuron] and ``down_bias`` [layer, hidden] are None where the family has none; ``device_bias``
    [layer, neuron] is the former on the device, ``slot_bias[layer]`` [slot] what of it goes with the slots.
    """

    host: torch.Tensor
    slots: list[torch.Tensor]
    bucket: list[np.ndarray]
    slot_of: np.ndarray
    resident: np.ndarray
    cold: list[np.ndarray]
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    device_bias: torch.Tensor | None = None
    slot_bias: list[torch.Tensor] | None = None
    errors: list[float] = field(default_factory=list)

    @property
    def neurons(self) -> int:
        """Neurons of a layer."""
        return self.host.shape[1]

    def swap(self, layer: int, fetch: np.ndarray, evict: np.ndarray) -> np.ndarray:
        """Give the slots of ``evict`` to ``fetch`` (int32); returns the slots, whose rows are stale until copied."""
        slots, cold = np.empty_like(fetch), np.empty_like(self.cold[layer])
        move_slots(self.slot_of[layer], self.bucket[layer], fetch, evict, slots, cold)
        self.cold[layer] = cold
        return slots

    def move_biases(self, layer: int, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Bring the biases of neurons ``ids`` into ``slots``, int64 on the device both, where there are biases."""
        if self.device_bias is not None and self.slot_bias is not None:
            self.slot_bias[layer].index_copy_(0, slots, self.device_bias[layer].index_select(0, ids))


@njit(cache=True)
def move_slots(slot_of, bucket, fetch, evict, slots, cold):
    """Update ``slot_of`` [neuron] and ``bucket`` [slot]; write the reused ``slots`` and the new ``cold`` ids."""
    for j in range(fetch.size):
        slots[j] = slot_of[evict[j]]
        slot_of[evict[j]] = -1
    for j in range(fetch.size):
        slot_of[fetch[j]] = slots[j]
        bucket[slots[j]] = fetch[j]
    n = 0
    for neuron in range(slot_of.size):
        if slot_of[neuron] < 0:
            cold[n] = neuron
            n += 1


def fill_bank(
    checkpoint: Checkpoint, placement: Placement, dtype: str, device: torch.device, compute_dtype: str = ""
) -> Bank:
    """Load every neuron into the host slab (pinned for CUDA) and the placed ones into their slots.

    int8 and int4 are quantised from the checkpoint's own dtype; ``compute_dtype``, by default ``dtype``, is the
    biases' on the device.
    One slab, because the pinned allocator rounds each tensor up to a power of two. Raises InputError when the
    device lacks the memory for the slots.
    """
    spec = checkpoint.spec
    quantised = dtype in QUANT_BYTES
    width, kind = (row_bytes(spec.hidden, dtype), torch.uint8) if quantised else (spec.hidden, TORCH_DTYPES[dtype])
    host = host_slab((spec.layers, spec.neurons, spec.matrices, width), kind, device)
    compute, counts = TORCH_DTYPES[compute_dtype or dtype], placement.slots
    device_slab = _device_slab((int(counts.sum()), spec.matrices, width), kind, device)
    slots = list(device_slab.split([int(count) for count in counts]))
    up_biases, down_biases, buckets, errors = [], [], [], []
    slot_of = np.full((spec.layers, spec.neurons), -1, np.int32)
    for layer in range(spec.layers):
        rows, up_bias, down_bias = checkpoint.neurons(layer)
        if quantised:
            host[layer] = quantise(rows, dtype)
            errors.append(relative_error(rows, host[layer], dtype))
        else:
            host[layer].copy_(rows)
        bucket = placement.bucket(layer)
        slots[layer].copy_(host[layer][torch.from_numpy(bucket).long()])
        slot_of[layer, bucket] = np.arange(len(bucket))
        buckets.append(bucket)
        if up_bias is not None and down_bias is not None:
            up_biases.append(up_bias.float())
            down_biases.append(down_bias.to(device, compute))
    device_bias = torch.stack(up_biases).to(device, compute) if up_biases else None
    return Bank(
        host=host,
        slots=slots,
        bucket=buckets,
        slot_of=slot_of,
        resident=placement.resident.copy(),
        cold=[np.flatnonzero(row < 0).astype(np.int32) for row in slot_of],
        up_bias=torch.stack(up_biases) if up_biases else None,
        down_bias=torch.stack(down_biases) if down_biases else None,
        device_bias=device_bias,
        slot_bias=None if device_bias is None else [
            biases[torch.from_numpy(bucket).to(device, torch.int64)]
            for biases, bucket in zip(device_bias, buckets, strict=True)
        ],
        errors=errors,
    )


def host_slab(shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor in host memory, pinned for a CUDA ``device``; pageable, with a PlanWarning, failing that."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=kind, pin_memory=True)
        except RuntimeError as error:
            needed = format_bytes(int(np.prod(shape)) * kind.itemsize)
            warnings.warn(
                f"{needed} of host memory cannot be pinned ({str(error).splitlines()[0]}): the neurons lie in pageable "
                "memory and prefetches go through a pinned block; raise `ulimit -l` or free memory to avoid this",
                PlanWarning,
                stacklevel=4,
            )
    return host_tensor(shape, kind)


def _device_slab(shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=kind, device=device)
    except torch.OutOfMemoryError:
        needed = int(np.prod(shape)) * kind.itemsize
        free = torch.cuda.mem_get_info(device)[0]
        raise InputError(
            f"{torch.cuda.get_device_name(device)} has {format_bytes(free)} free, the plan's neurons need "
            f"{format_bytes(needed)}; plan again with --vram {free // 2**20}MiB less what the dense part takes"
        ) from None
