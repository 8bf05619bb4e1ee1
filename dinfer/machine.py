"""What a machine costs: seconds for neurons, bytes and steps, each affine (a fixed part and a rate)."""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from dinfer.errors import InputError
from dinfer.model import BITS_PER_WEIGHT, ModelSpec


@dataclass(frozen=True)
class Cost:
    """Seconds of one step: ``fixed_seconds + max(bytes / bytes_per_second, flops / flops_per_second)``."""

    fixed_seconds: float = 0.0
    bytes_per_second: float = math.inf
    flops_per_second: float = math.inf

    def __post_init__(self) -> None:
        rates_hold = self.bytes_per_second > 0 and self.flops_per_second > 0  # nan is not
        if not (0 <= self.fixed_seconds < math.inf and rates_hold):
            raise InputError(f"cost {self}: fixed_seconds must be 0 or more and the rates positive")

    def seconds(self, count_bytes: float, flops: float = 0.0) -> float:
        """Seconds to read ``count_bytes`` and do ``flops``."""
        return self.fixed_seconds + max(count_bytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class Device:
    """A processor with its memory; one Cost for each of its steps.

    ``attention``: a layer's attention with its norms, bytes of its matrices; ``kv``: the bytes of the KV it reads.
    ``gate``: what an FFN reads of every neuron on this side to learn which are active; holds the FFN's fixed part.
    ``neuron``: what it reads of the active ones besides. ``head``: final norm, output projection, sampling.
    ``prefill``: a layer over a chunk of the prompt, all of its bytes and flops; the executor's runs on the CPU.
    ``merge``: adding the other side's partial sum. ``predict``, ``schedule``: the scheduler's part of one layer.
    ``hand``: what handing the CPU its part takes from the GPU's.
    ``wake``: from the end of the CPU's part until the decoding thread, if it waits for it, goes on. ``delay``: while an
    emulated link copies, which takes a core, how much later the CPU's part begins, and longer the GPU's takes; bytes
    of the copy.
    ``context_bytes`` is what the runtime takes of the memory before any weight.
    """

    name: str
    memory_bytes: int
    context_bytes: int = 0
    threads: int = 1
    attention: Cost = field(default_factory=Cost)
    kv: Cost = field(default_factory=Cost)
    gate: Cost = field(default_factory=Cost)
    neuron: Cost = field(default_factory=Cost)
    head: Cost = field(default_factory=Cost)
    prefill: Cost = field(default_factory=Cost)
    merge: Cost = field(default_factory=Cost)
    predict: Cost = field(default_factory=Cost)
    schedule: Cost = field(default_factory=Cost)
    hand: Cost = field(default_factory=Cost)
    wake: Cost = field(default_factory=Cost)
    delay: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 1), ("context_bytes", 0), ("threads", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(
                    f"device {self.name!r}: {name} is {value!r}; it must be a whole number of at least {least}"
                )


@dataclass(frozen=True)
class Link:
    """One direction of PCIe: a copy takes ``fixed_seconds + bytes / bytes_per_second``.

    ``fixed_seconds`` is of one copy; a fit of published points gives 5.40 us on PCIe 3 and 3.27 us on PCIe 4.
    """

    name: str
    fixed_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (0 <= self.fixed_seconds < math.inf and self.bytes_per_second > 0):
            raise InputError(
                f"link {self.name!r}: fixed_seconds is {self.fixed_seconds} and bytes_per_second "
                f"{self.bytes_per_second}; they must be 0 or more, and positive"
            )

    def seconds(self, copies: float, count_bytes: float) -> float:
        """Seconds of ``copies`` copies that move ``count_bytes`` in all."""
        return copies * self.fixed_seconds + count_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Machine:
    """A GPU, a CPU, the link between them each way, and the DRAM bandwidth that CPU and link share.

    ``emulated_link`` says that the GPU is a torch CPU device behind a copy that is slowed to this rate; ``h2d`` is
    then what such a copy was measured to take.
    """

    name: str
    gpu: Device
    cpu: Device
    h2d: Link
    d2h: Link
    dram_bytes_per_second: float
    emulated_link: Link | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        if not self.dram_bytes_per_second > 0:
            raise InputError(
                f"machine {self.name!r}: dram_bytes_per_second is {self.dram_bytes_per_second}; it must be positive"
            )

    @property
    def emulated(self) -> bool:
        """Whether the GPU is a torch CPU device."""
        return self.emulated_link is not None

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of every name and figure; the notes do not count."""
        values = {k: v for k, v in self.to_dict().items() if k != "notes"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and TOML (infinite rates and no emulated link left out)."""
        return _finite(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Machine":
        """The machine that ``to_dict`` or a TOML file wrote.

        A device's table may give ``bytes_per_second``, ``flops_per_second`` and ``launch_seconds`` for all of its
        steps and a table for each step that differs. Raises InputError for missing or unknown keys.
        """
        emulated = values.get("emulated_link")
        try:
            return cls(
                **{
                    **values,
                    "emulated_link": None if emulated is None else Link(**emulated),
                    "gpu": _device(values["gpu"], "gpu"),
                    "cpu": _device(values["cpu"], "cpu"),
                    "h2d": Link(**values["h2d"]),
                    "d2h": Link(**values["d2h"]),
                }
            )
        except KeyError as error:
            raise InputError(f"machine description lacks {error}; see docs/machine.md") from None
        except TypeError as error:
            raise InputError(f"machine description: {str(error).split('() ')[-1]}; see docs/machine.md") from None


STEP_COSTS = (
    "attention", "kv", "gate", "neuron", "head", "prefill", "merge", "predict", "schedule", "hand", "wake", "delay",
)  # fmt: skip
_LAUNCHES = {"attention": 12, "gate": 4, "head": 3, "merge": 1}
"""Kernel launches of a step on a GPU whose table gives only ``launch_seconds``: our count of our own executor."""


def _device(values: Mapping[str, Any], role: str) -> Device:
    if not isinstance(values, Mapping):
        raise InputError(f"machine {role} is {values!r}; it must be a table, see docs/machine.md")
    values = dict(values)
    rate = values.pop("bytes_per_second", math.inf)
    flops = values.pop("flops_per_second", math.inf)
    launch = values.pop("launch_seconds", 0.0)
    known = {f.name for f in fields(Device)}
    if unknown := set(values) - known:
        known |= {"bytes_per_second", "flops_per_second", "launch_seconds"}
        raise InputError(f"machine {role}: {', '.join(sorted(unknown))} is not one of {', '.join(sorted(known))}")
    for step in STEP_COSTS:
        fixed = launch * _LAUNCHES.get(step, 0)
        default = {"fixed_seconds": fixed, "bytes_per_second": rate, "flops_per_second": flops}
        given = values.get(step, {})
        if not isinstance(given, Mapping):
            raise InputError(f"machine {role}.{step} is {given!r}; it must be a table, see docs/machine.md")
        if unknown := set(given) - set(default):
            names = ", ".join(sorted(unknown))
            raise InputError(f"machine {role}.{step}: {names} is not one of {', '.join(sorted(default))}")
        values[step] = Cost(**{**default, **given})
    return Device(**values)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if v is not None and v != math.inf}
    return value


class Factors(NamedTuple):
    """What steps take over what a plan said: attention, each side's FFN, the link; 1 is as planned."""

    attention: float = 1.0
    gpu: float = 1.0
    cpu: float = 1.0
    link: float = 1.0


class LayerCosts(NamedTuple):
    """Seconds of one layer's steps for one model on one machine; the same values plan, simulator and executor use.

    ``attention_seconds`` grows by ``attention_token_seconds`` for each token of context. A side's FFN over
    ``examined`` neurons of which ``active`` are active takes ``fixed + examined * gate + active * neuron``.
    ``gpu_dram_bytes`` is what the GPU's part reads through the host's DRAM for each neuron: 0 but for an emulated GPU.
    The GPU's takes ``hand_seconds`` more where the CPU has a part.
    ``wake_seconds`` pass after the CPU's part when the GPU waits for it; while ``n`` neurons are copied by an emulated
    link the CPU's part begins ``delay_fixed + n * delay_neuron`` later, and the GPU's takes ``gpu_delay_fixed + n *
    gpu_delay_neuron`` longer.
    A prefetch of ``n`` neurons takes ``fixed + ceil(n / group) * copy + n * neuron``: a copy moves ``group`` of them.
    """

    attention_seconds: float
    attention_token_seconds: float
    gpu_fixed_seconds: float
    gpu_gate_seconds: float
    gpu_neuron_seconds: float
    cpu_fixed_seconds: float
    cpu_gate_seconds: float
    cpu_neuron_seconds: float
    prefetch_fixed_seconds: float
    prefetch_group: float
    prefetch_copy_seconds: float
    prefetch_neuron_seconds: float
    state_down_seconds: float
    state_up_seconds: float
    merge_seconds: float
    predict_seconds: float
    schedule_seconds: float
    hand_seconds: float
    wake_seconds: float
    delay_fixed_seconds: float
    delay_neuron_seconds: float
    gpu_delay_fixed_seconds: float
    gpu_delay_neuron_seconds: float
    head_seconds: float
    neuron_bytes: float
    gate_bytes: float
    gpu_dram_bytes: float
    state_bytes: float
    dram_bytes_per_second: float

    def gpu_seconds(self, examined: float, active: float) -> float:
        """Seconds of the GPU's part of one FFN."""
        return self.gpu_fixed_seconds + examined * self.gpu_gate_seconds + active * self.gpu_neuron_seconds

    def gpu_delay_seconds(self, copied: int) -> float:
        """Seconds that the GPU's part takes longer while an emulated link copies ``copied`` neurons."""
        return self.gpu_delay_fixed_seconds + copied * self.gpu_delay_neuron_seconds if copied else 0.0

    def cpu_seconds(self, examined: float, active: float) -> float:
        """Seconds of the CPU's part of one FFN, the DRAM to itself."""
        return self.cpu_fixed_seconds + examined * self.cpu_gate_seconds + active * self.cpu_neuron_seconds

    def scaled(self, factors: Factors) -> "LayerCosts":
        """These costs where the steps take ``factors`` as long."""
        scales = {"attention": factors.attention, "gpu": factors.gpu, "cpu": factors.cpu, "prefetch": factors.link}
        changed = {}
        for name, value in zip(self._fields, self, strict=True):
            scale = scales.get(name.split("_")[0])
            if scale is not None and name.endswith("_seconds"):
                changed[name] = value * scale
        return self._replace(**changed)

    def prefetch_seconds(self, neurons: int) -> float:
        """Seconds that the link takes for a prefetch of ``neurons``, the DRAM to itself."""
        copies = -(-neurons // max(int(self.prefetch_group), 1))
        each = copies * self.prefetch_copy_seconds + neurons * self.prefetch_neuron_seconds
        return self.prefetch_fixed_seconds + each

    @property
    def link_neuron_seconds(self) -> float:
        """Seconds of the link for each neuron of full copies."""
        return self.prefetch_neuron_seconds + self.prefetch_copy_seconds / max(self.prefetch_group, 1.0)


ISSUES = ("copy", "block", "gather")
"""How a prefetch moves scattered neurons: in copies, one copy of a staged block, a kernel that reads them."""

GROUPS = range(1, 65)
"""Neurons that one of several copies may move."""


def layer_costs(
    spec: ModelSpec,
    machine: Machine,
    activation: str = "exact",
    issue: str = "gather",
    predictor_rank: int = 0,
    batch: int = 1,
    group: int = 1,
) -> LayerCosts:
    """The costs of ``spec`` on ``machine``.

    With ``exact`` activation every neuron of a side is examined (``spec.examined_share`` of its bytes) and the
    active ones read the rest; with ``predicted`` the predicted neurons read both parts, the others nothing.
    ``issue`` is one of ISSUES: with ``copy`` each ``group`` of neurons pays the link's fixed seconds, else each
    prefetch once. ``batch`` sequences decoded together read each weight once, and do the flops and
    move the states of each. Raises InputError for what is not known, and for a group of what moves in one go.
    """
    if activation not in ("exact", "predicted"):
        raise InputError(f"activation {activation!r} is not one of exact, predicted")
    if issue not in ISSUES:
        raise InputError(f"issue {issue!r} is not one of {', '.join(ISSUES)}")
    if group not in GROUPS:
        raise InputError(f"group is {group!r} neurons; it must be between 1 and {GROUPS[-1]}")
    if group > 1 and issue != "copy":
        raise InputError(f"group is {group} with issue {issue}, which moves all at once; leave it 1 or plan with copy")
    gpu, cpu = machine.gpu, machine.cpu
    row_bytes = spec.neuron_bytes
    gate_bytes = row_bytes * spec.examined_share
    rest_bytes = row_bytes - gate_bytes
    exact = activation == "exact"
    flops_per_byte = batch * 2 * 8 / BITS_PER_WEIGHT[spec.dtype]
    state_bytes = batch * spec.hidden * 4.0  # the residual and the partial sum cross the link in fp32

    def rate(cost: Cost) -> float:
        return max(1 / cost.bytes_per_second, flops_per_byte / cost.flops_per_second)

    kv_token_bytes = spec.kv_bytes(1) / spec.layers
    attention = gpu.attention.fixed_seconds + spec.attention_bytes * rate(gpu.attention)
    predictor_bytes = predictor_rank * (spec.hidden + spec.neurons) * 2
    costs = LayerCosts(
        attention_seconds=attention,
        attention_token_seconds=kv_token_bytes / gpu.kv.bytes_per_second,
        gpu_fixed_seconds=gpu.gate.fixed_seconds,
        gpu_gate_seconds=gate_bytes * rate(gpu.gate) if exact else 0.0,
        gpu_neuron_seconds=rest_bytes * rate(gpu.neuron) + (0.0 if exact else gate_bytes * rate(gpu.gate)),
        cpu_fixed_seconds=cpu.gate.fixed_seconds,
        cpu_gate_seconds=gate_bytes * rate(cpu.gate) if exact else 0.0,
        cpu_neuron_seconds=rest_bytes * rate(cpu.neuron) + (0.0 if exact else gate_bytes * rate(cpu.gate)),
        prefetch_fixed_seconds=0.0 if issue == "copy" else machine.h2d.fixed_seconds,
        prefetch_group=group,
        prefetch_copy_seconds=machine.h2d.fixed_seconds if issue == "copy" else 0.0,
        prefetch_neuron_seconds=machine.h2d.seconds(0, row_bytes),
        state_down_seconds=machine.d2h.seconds(1, state_bytes),
        state_up_seconds=machine.h2d.seconds(0 if issue == "gather" else 1, state_bytes),
        merge_seconds=gpu.merge.seconds(state_bytes),
        predict_seconds=gpu.predict.seconds(predictor_bytes) if predictor_rank else 0.0,
        schedule_seconds=cpu.schedule.fixed_seconds,
        hand_seconds=cpu.hand.fixed_seconds,
        wake_seconds=cpu.wake.fixed_seconds,
        delay_fixed_seconds=cpu.delay.fixed_seconds if machine.emulated else 0.0,
        delay_neuron_seconds=row_bytes / cpu.delay.bytes_per_second if machine.emulated else 0.0,
        gpu_delay_fixed_seconds=gpu.delay.fixed_seconds if machine.emulated else 0.0,
        gpu_delay_neuron_seconds=row_bytes / gpu.delay.bytes_per_second if machine.emulated else 0.0,
        head_seconds=gpu.head.seconds(spec.head_bytes, batch * 2 * spec.vocab * spec.hidden),
        neuron_bytes=float(row_bytes),
        gate_bytes=gate_bytes if exact else 0.0,
        gpu_dram_bytes=float(row_bytes) if machine.emulated else 0.0,
        state_bytes=state_bytes,
        dram_bytes_per_second=machine.dram_bytes_per_second,
    )
    return LayerCosts(*map(float, costs))  # a TOML file may say 1 for 1.0, a compiled reader takes floats only


PREFILL_CHUNK = 512
"""Most prompt tokens that go through the layers at once; a longer prompt goes in several chunks. Ours."""

PREFILLS = ("cpu", "stream")
"""Who computes a prompt's FFNs: the CPU, where all neurons lie, or the GPU, to which the others are streamed."""


def prefill_block(spec: ModelSpec) -> int:
    """Neurons streamed at a time: two blocks and a block's values take what one FFN's values of a chunk would take."""
    return max(1, PREFILL_CHUNK * spec.neurons // (2 * spec.hidden + PREFILL_CHUNK))


def prefill_choices(spec: ModelSpec, machine: Machine, tokens: int, resident: int = 0) -> dict[str, float]:
    """Seconds of each of PREFILLS until a prompt of ``tokens`` tokens has gone through, the first logits included.

    Dense, in chunks: layers * (fixed + max(layer bytes / rate, 2 * layer weights * tokens / flops)) for each chunk,
    then the head. The attention's share of the flops is counted there too. Streaming takes as long as the link needs
    for the neurons that are not among the ``resident`` ones, where that is longer. A GPU of which no prefill cost is
    known is no choice.
    """
    layer_weights = spec.attention_parameters + spec.neurons * spec.matrices * spec.hidden
    layer_bytes = spec.attention_bytes + spec.neurons * spec.neuron_bytes
    whole, rest = divmod(tokens, PREFILL_CHUNK)
    chunks = [PREFILL_CHUNK] * whole + [rest] * (rest > 0)
    head = machine.gpu.head.seconds(spec.head_bytes, 2 * spec.vocab * spec.hidden)

    def layers(device: Device, least: float) -> float:
        return sum(max(device.prefill.seconds(layer_bytes, 2.0 * layer_weights * chunk), least) for chunk in chunks)

    choices = {"cpu": spec.layers * layers(machine.cpu, 0.0) + head}
    if machine.gpu.prefill != Cost():
        cold = spec.neurons - resident / spec.layers
        link = machine.h2d.seconds(math.ceil(cold / prefill_block(spec)), cold * spec.neuron_bytes)
        choices["stream"] = spec.layers * layers(machine.gpu, link) + head
    return choices


def prefill_seconds(spec: ModelSpec, machine: Machine, tokens: int, resident: int = 0) -> float:
    """Seconds of the faster of ``prefill_choices``."""
    return min(prefill_choices(spec, machine, tokens, resident).values())


def catalogue_machines() -> dict[str, Machine]:
    """The catalogue's machines by name, one TOML file each, every figure with its source."""
    files = sorted((resources.files("dinfer") / "catalog" / "machines").iterdir(), key=lambda file: file.name)
    return {f.name[:-5]: Machine.from_dict(tomllib.loads(f.read_text())) for f in files if f.name.endswith(".toml")}


def load_machine(name: str) -> Machine:
    """The machine of the TOML file ``name``, or the catalogue's machine of that name; raises InputError if neither."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"machine file {name} does not exist; write one with `dinfer profile -o {path.name}`")
        try:
            return Machine.from_dict(tomllib.loads(path.read_text()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"machine file {name} is not TOML: {error}") from None
    machines = catalogue_machines()
    if name not in machines:
        raise InputError(
            f"machine {name!r} is not in the catalogue ({', '.join(machines)}); name one of these or a .toml file"
        )
    return machines[name]
