"""Model families: where the FFN is, what makes a neuron, and the dense part of a token in plain torch."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from dinfer.errors import InputError
from dinfer.families import llama, opt
from dinfer.model import ModelSpec

FAMILIES: dict[str, ModuleType] = {"llama": llama, "opt": opt}
RUNNABLE = ("llama", "mistral", "sparsellama", "opt")
LINE_BYTES = 64
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Neurons(NamedTuple):
    """One layer's neurons: ``rows`` [neuron, matrix, hidden] in the order gate, up, down (up, down if ungated).

    ``up_bias`` [neuron] and ``down_bias`` [hidden] are None where the family has none.
    """

    rows: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Stacked(NamedTuple):
    """The dense part with the layers stacked, for compiled readers, in host memory.

    qkv [layer, (heads + 2 kv_heads) * head_dim, hidden], o [layer, hidden, heads * head_dim] and head [vocab, hidden]
    in the weights' dtype. All else float32: their biases [layer, row]; norms [layer, 2, hidden] and ``norm``
    [2, hidden], weight and bias; cos, sin [position, head_dim]. What a family lacks has an empty last axis.
    """

    rms: bool
    epsilon: float
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor
    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def stack_matrices(matrices: list[torch.Tensor]) -> torch.Tensor:
    """[layer, row, column] of equal ``matrices``; the list then holds views of it, so that nothing lies twice."""
    stacked = host_tensor((len(matrices), *matrices[0].shape), matrices[0].dtype)
    for i in range(len(matrices)):
        stacked[i].copy_(matrices[i])
        matrices[i] = stacked[i]
    return stacked


def host_tensor(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    """An empty host tensor on numpy's memory, from the start of a cache line on.

    That memory gets huge pages where torch's did not, 14-17% faster to read; and a vector of 512 bits that lies across
    two lines is read as two.
    """
    count = int(np.prod(shape)) * kind.itemsize
    memory = np.empty(count + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return torch.from_numpy(memory[start : start + count]).view(kind).view(shape)


@dataclass(frozen=True)
class Checkpoint:
    """A local Hugging Face directory with config.json and safetensors, read tensor by tensor."""

    directory: Path
    config: dict[str, Any]
    spec: ModelSpec

    @cached_property
    def _files(self) -> dict[str, Any]:
        files = sorted(self.directory.glob("*.safetensors"))
        handles = [safe_open(str(file), framework="pt") for file in files]
        return {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``; raises InputError when the checkpoint lacks it."""
        if name not in self._files:
            raise InputError(f"{self.directory} lacks the tensor {name}; it does not fit its config.json")
        return self._files[name].get_tensor(name)

    def neurons(self, layer: int) -> Neurons:
        """The neurons of one layer in the checkpoint's own dtype."""
        return FAMILIES[self.spec.family].neurons(self, layer)

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of a SHA-256 over each file's size and 1 MiB at its start, middle and end."""
        digest = hashlib.sha256()
        for file in sorted(self.directory.glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                for start in (0, size // 2, max(0, size - 2**20)):
                    stream.seek(start)
                    digest.update(stream.read(2**20))
        return digest.hexdigest()[:16]


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """The checkpoint in ``directory``; raises InputError when it is none or its family cannot be run."""
    path = Path(directory)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(
            f"model {directory} has no config.json; give a Hugging Face directory or `dinfer fetch smollm2`"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error})") from None
    kind = config.get("model_type")
    if kind not in RUNNABLE:
        raise InputError(f"model_type {kind!r} of {file} cannot be run; runnable are {', '.join(RUNNABLE)}")
    if not any(path.glob("*.safetensors")):
        raise InputError(f"model {directory} has no *.safetensors; save it with save_pretrained")
    spec = ModelSpec.from_config(config, name=_name(path.resolve()))
    FAMILIES[spec.family].check(config)
    return Checkpoint(path, config, spec)


def _name(path: Path) -> str:
    """The directory's name; of a snapshot in a hub's cache the model's, not the revision's."""
    hub = path.parents[1].name if path.parent.name == "snapshots" else ""
    return hub.removeprefix("models--").replace("--", "/") if hub.startswith("models--") else path.name


class FfnSite(NamedTuple):
    """Modules of one layer of a transformers model where a recorder listens.

    ``norm``'s input is the un-normalised residual after attention, ``gate``'s output decides activity of ReLU
    kinds (its input is the FFN's), ``down``'s input is the neurons' values and its weight their down columns.
    """

    norm: torch.nn.Module
    gate: torch.nn.Module
    down: torch.nn.Module


def ffn_sites(model: torch.nn.Module, spec: ModelSpec) -> Iterator[FfnSite]:
    """The FFN sites of a transformers model, layer by layer."""
    for layer in FAMILIES[spec.family].decoder_layers(model):
        yield FfnSite(*FAMILIES[spec.family].site(layer))
