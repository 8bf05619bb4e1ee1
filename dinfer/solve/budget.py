"""Where the bytes go: the GPU's budget by term, the host's memory, and what the link allows."""

import math
import warnings
from bisect import bisect_right
from fractions import Fraction

from dinfer.errors import InputError, PlanWarning
from dinfer.machine import PREFILL_CHUNK, Machine
from dinfer.model import ModelSpec, weight_bytes
from dinfer.units import exact_bytes, format_bytes

MARGIN_PARTS = 100
"""One part in this many of the budget is left free, for what the allocator cannot use. Ours."""


def memory_breakdown(
    spec: ModelSpec,
    machine: Machine,
    context: int,
    vram_bytes: int,
    predictor_bytes: int = 0,
    margin_bytes: int | None = None,
    batch: int = 1,
) -> dict[str, int]:
    """The GPU's budget in bytes by term, which add up to ``vram_bytes``.

    ``context``: what the runtime takes (the machine's figure). ``weights``: all but the neurons.
    ``kv``: the cache at ``context`` tokens of each of ``batch`` sequences. ``activations``: as in ``activation_bytes``.
    ``predictor``: as given. ``margin``: as given, else a hundredth of the budget. ``neurons``:
    what is left. Raises InputError when nothing is left, with every term and the next value that
    would do, or when the GPU has less than ``vram_bytes``.
    """
    _check_budget(machine, vram_bytes)
    memory = _fixed_terms(spec, machine, context, batch) | {"predictor": predictor_bytes}
    memory["margin"] = vram_bytes // MARGIN_PARTS if margin_bytes is None else margin_bytes
    if sum(memory.values()) > vram_bytes:
        raise InputError(_too_small(spec, machine, context, vram_bytes, memory, margin_bytes, batch))
    return memory | {"neurons": vram_bytes - sum(memory.values())}


def activation_bytes(spec: ModelSpec, context: int, batch: int = 1) -> int:
    """Bytes of the GPU's working buffers: those of one prefill step and the logits of a token of each sequence.

    A token of the step holds three hidden vectors (residual, normed, a block's output), its
    queries, keys, values and attention result, and ``matrices`` FFN vectors (gate, up, product),
    in ``compute_dtype``; logits are fp32. The count is ours; a fused attention keeps no scores.
    """
    tokens = max(1, min(context, PREFILL_CHUNK))
    attention = spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    width = 3 * spec.hidden + attention + spec.matrices * spec.neurons
    return weight_bytes(tokens * width, spec.compute_dtype) + 4 * batch * spec.vocab


def neuron_capacity(spec: ModelSpec, memory: dict[str, int]) -> int:
    """Neurons that the ``neurons`` term of a breakdown holds, at most all of the model's."""
    return min(memory["neurons"] // spec.neuron_bytes, spec.layers * spec.neurons)


def kv_capacity(spec: ModelSpec, machine: Machine, vram_bytes: int) -> int:
    """Tokens of KV cache that fit beside the whole model, at most ``max_positions``.

    0 when the model alone does not fit. Raises InputError when the GPU has less than
    ``vram_bytes``.
    """
    _check_budget(machine, vram_bytes)
    room = vram_bytes - vram_bytes // MARGIN_PARTS - spec.ffn_bytes
    return max(0, _largest_context(spec, machine, spec.max_positions, room))


def budget_for_share(spec: ModelSpec, machine: Machine, share: float, context: int = 512, batch: int = 1) -> int:
    """The smallest budget in bytes that holds ``share`` of all neurons, their number rounded up.

    Raises InputError for a share outside 0 to 1, or when the GPU has less.
    """
    if not 0 <= share <= 1:
        raise InputError(f"share of the neurons is {share}; it must be between 0 and 1")
    exact = Fraction(str(float(share)))  # as written: the binary 0.1 is above a tenth
    neurons = math.ceil(exact * spec.layers * spec.neurons)
    fixed = sum(_fixed_terms(spec, machine, context, batch).values())
    budget = _with_margin(fixed + neurons * spec.neuron_bytes)
    _check_budget(machine, budget)
    return budget


def warn_when_everything_fits(spec: ModelSpec, machine: Machine, memory: dict[str, int]) -> bool:
    """Whether all neurons fit, and then a PlanWarning: offloading would only cost."""
    spare = memory["neurons"] - spec.ffn_bytes
    if spare < 0:
        return False
    warnings.warn(
        f"all of {spec.name} fits on {machine.gpu.name} with {format_bytes(spare)} to spare: the "
        "plan keeps every neuron there; offloading what fits costs up to 19x",
        PlanWarning,
        stacklevel=3,
    )
    return True


def host_breakdown(spec: ModelSpec, machine: Machine, rounded: bool = False) -> dict[str, int]:
    """The host's memory in bytes by term: ``slab``, ``rounding`` and what is ``left``.

    The slab holds every neuron, as any may be moved or computed there. With ``rounded`` it is
    pinned by an allocator that takes powers of two (torch's), which counts as taken. Raises
    InputError when the host has less.
    """
    slab = spec.ffn_bytes
    rounding = pinned_bytes(slab) - slab if rounded else 0
    left = machine.cpu.memory_bytes - slab - rounding
    if left < 0:
        raise InputError(
            f"the neurons of {spec.name} take {format_bytes(slab + rounding)} of host memory (slab "
            f"{format_bytes(slab)}, rounding {format_bytes(rounding)}), {machine.cpu.name} has "
            f"{format_bytes(machine.cpu.memory_bytes)}; choose a smaller dtype or a machine with "
            "more memory"
        )
    return {"slab": slab, "rounding": rounding, "left": left}


def pinned_bytes(count: int) -> int:
    """Bytes that torch's pinned allocator takes for one tensor of ``count``: a power of two."""
    return 1 << (count - 1).bit_length() if count else 0


def speed_ceiling(machine: Machine, bytes_per_token: int) -> float:
    """Tokens per second that the link allows when every token moves ``bytes_per_token`` over it."""
    return machine.h2d.bytes_per_second / bytes_per_token


def check_speed(machine: Machine, bytes_per_token: int, tokens_per_second: float) -> None:
    """Raise InputError when ``tokens_per_second`` is above what the link allows."""
    ceiling = speed_ceiling(machine, bytes_per_token)
    if tokens_per_second <= ceiling:
        return
    rate = machine.h2d.bytes_per_second
    raise InputError(
        f"{tokens_per_second:g} tok/s is above the ceiling of {machine.h2d.name}: it moves "
        f"{format_bytes(round(rate))}/s and a token needs {format_bytes(bytes_per_token)}, so "
        f"{ceiling:.2f} tok/s at most; {tokens_per_second:g} tok/s allows "
        f"{format_bytes(round(rate / tokens_per_second))} a token; stream less or ask for less"
    )


def _check_budget(machine: Machine, vram_bytes: int) -> None:
    if vram_bytes > (have := machine.gpu.memory_bytes):
        raise InputError(
            f"budget {format_bytes(vram_bytes)} is more than the {format_bytes(have)} of "
            f"{machine.gpu.name}; lower --vram to {exact_bytes(have)} or name a machine with more"
        )


def _fixed_terms(spec: ModelSpec, machine: Machine, context: int, batch: int = 1) -> dict[str, int]:
    return {
        "context": machine.gpu.context_bytes,
        "weights": spec.dense_bytes,
        "kv": batch * spec.kv_bytes(context),
        "activations": activation_bytes(spec, context, batch),
    }


def _largest_context(spec: ModelSpec, machine: Machine, most: int, room: int, batch: int = 1) -> int:
    # the largest context up to most whose terms fit in room, -1 when none does
    def needed(context: int) -> int:
        return sum(_fixed_terms(spec, machine, context, batch).values())

    return bisect_right(range(most + 1), room, key=needed) - 1


def _with_margin(count: int) -> int:
    # the smallest budget whose default margin leaves count bytes
    return count + max(count - 1, 0) // (MARGIN_PARTS - 1)


def _too_small(
    spec: ModelSpec,
    machine: Machine,
    context: int,
    vram_bytes: int,
    memory: dict[str, int],
    margin_bytes: int | None,
    batch: int,
) -> str:
    gpu, needed = machine.gpu, sum(memory.values())
    enough = needed if margin_bytes is not None else _with_margin(needed - memory["margin"])
    room = vram_bytes - memory["margin"] - memory["predictor"]
    shorter = _largest_context(spec, machine, context, room, batch)
    remedies = []
    if enough <= gpu.memory_bytes:
        remedies.append(f"raise --vram to {_rounded_up(enough, gpu.memory_bytes)}")
    if shorter > 0:
        remedies.append(f"lower --context to {shorter}")
    if batch > 1:
        remedies.append("lower --batch")
    if not remedies:
        remedies = ["choose a smaller dtype", "a GPU with more memory"]
    labels = {"kv": "KV"}
    terms = [f"{labels.get(name, name)} {format_bytes(count)}" for name, count in memory.items()]
    return (
        f"budget {format_bytes(vram_bytes)} on {gpu.name} is below the {format_bytes(needed)} that "
        f"{', '.join(terms[:-1])} and {terms[-1]} need; {' or '.join(remedies)}"
    )


def _rounded_up(count: int, most: int) -> str:
    # count as text that parse_bytes reads, rounded up to a tenth of its unit but not above most
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)):
        if count >= size:
            tenths = -(-count * 10 // size)
            if size > 1 and tenths * size <= most * 10:
                return f"{tenths / 10:g}{unit}"
            break
    return exact_bytes(count)
