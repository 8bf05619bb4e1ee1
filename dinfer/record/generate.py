"""Real generation with a transformers model, batched, while a listener hears each FFN's activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch

from dinfer.errors import InputError
from dinfer.families import TORCH_DTYPES, Checkpoint, ffn_sites, open_checkpoint
from dinfer.model import ModelSpec

Sink = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes layer, residual [tokens, hidden], gate [tokens, neurons] and value at down's input."""


@dataclass(frozen=True)
class Loaded:
    """A transformers model ready to be recorded; ``stop`` holds the token ids that end a sequence."""

    checkpoint: Checkpoint
    spec: ModelSpec
    model: Any
    stop: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where the model's weights lie."""
        return next(self.model.parameters()).device

    @property
    def cache_name(self) -> str:
        """What this transformers calls the KV cache among a model's inputs and outputs."""
        named = signature(self.model.forward).parameters
        return "cache" if "cache" in named else "past_key_values"


class Sampling(NamedTuple):
    """How the next token is chosen: ``temperature`` 0 is greedy; each sequence has its own random stream."""

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def generator(self, sequence: int) -> torch.Generator:
        """The random stream of one sequence, the same in any batch."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + sequence)


class Step(NamedTuple):
    """One forward pass over ``sequences`` (indices into the batch), ``ids[i]`` at positions from ``starts[i]``."""

    phase: str
    sequences: list[int]
    ids: list[list[int]]
    starts: list[int]


def load(directory: Any, device: str = "cpu", dtype: str = "float32") -> Loaded:
    """The transformers model in ``directory`` on ``device`` ("cpu" or "cuda").

    Raises InputError for a missing device, an unknown dtype or a model that cannot be recorded.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {device!r} is not available here; record with --device cpu")
    if dtype not in TORCH_DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
    checkpoint = open_checkpoint(directory)
    model = _transformers_model(checkpoint).to(device, TORCH_DTYPES[dtype]).eval()
    model.requires_grad_(False)
    return Loaded(checkpoint, checkpoint.spec.with_dtype(dtype), model, _stop_ids(model))


def _transformers_model(checkpoint: Checkpoint) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.activations import ACT2FN

    spec = checkpoint.spec
    if spec.activation == "fatrelu":  # transformers does not know it: load as ReLU, then raise t
        keys = {k: v for k, v in checkpoint.config.items() if k not in ("model_type", "auto_map")}
        config = LlamaConfig.from_dict(keys | {"hidden_act": "relu"})
        model = AutoModelForCausalLM.from_pretrained(checkpoint.directory, config=config)
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.Threshold(spec.gate_threshold, 0.0)
        return model
    if spec.activation not in ACT2FN:
        raise InputError(
            f"activation {spec.activation!r} of {checkpoint.directory} cannot be recorded; "
            "transformers does not know it"
        )
    return AutoModelForCausalLM.from_pretrained(checkpoint.directory)


def _stop_ids(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


class Listener:
    """Hooks on a model's FFN sites; ``real`` (bool [batch * width]) says which tokens are no padding."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.real: torch.Tensor | None = None

    def real_rows(self, activations: torch.Tensor) -> torch.Tensor:
        """``activations`` [real tokens, width] of [batch, width, ...] or [batch * width, ...]."""
        flat = activations.reshape(-1, activations.shape[-1])
        return flat if self.real is None else flat[self.real]


@contextmanager
def listening(loaded: Loaded, sink: Sink) -> Iterator[Listener]:
    """Call ``sink`` once a layer and forward pass with the activations of the real tokens."""
    listener = Listener(sink)
    handles = []

    def attach(layer: int, norm: Any, gate: Any, down: Any) -> None:
        heard: dict[str, torch.Tensor] = {}

        def before_norm(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            heard["hidden"] = inputs[0]

        def after_gate(module: Any, inputs: Any, output: torch.Tensor) -> None:
            heard["gate"] = output

        def before_down(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = [listener.real_rows(x) for x in (heard["hidden"], heard["gate"], inputs[0])]
            heard.clear()
            listener.sink(layer, *rows)

        handles.append(norm.register_forward_pre_hook(before_norm))
        handles.append(gate.register_forward_hook(after_gate))
        handles.append(down.register_forward_pre_hook(before_down))

    try:
        for layer, site in enumerate(ffn_sites(loaded.model, loaded.spec)):
            attach(layer, *site)
        yield listener
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def thresholded(loaded: Loaded, thresholds: Any) -> Iterator[None]:
    """Run the model with every |value| <= thresholds[layer] at down's input set to 0, of ReLU kinds every such gate."""
    handles = []
    for site, threshold in zip(ffn_sites(loaded.model, loaded.spec), thresholds, strict=True):

        def after_gate(module: Any, inputs: Any, output: torch.Tensor, threshold: float = float(threshold)) -> Any:
            return output * (output > threshold)

        def before_down(module: Any, inputs: Any, threshold: float = float(threshold)) -> Any:
            return (inputs[0] * (inputs[0].abs() > threshold),)

        if loaded.spec.sparsity_kind == "relu":
            handles.append(site.gate.register_forward_hook(after_gate))
        else:
            handles.append(site.down.register_forward_pre_hook(before_down))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def generate(
    loaded: Loaded,
    listener: Listener,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    first_sequence: int = 0,
) -> Iterator[Step]:
    """Prefill the left-padded ``prompts``, then decode them together; one Step after each forward pass.

    A sequence ends at a stop id, which is not fed back, or when ``max_new_tokens`` tokens were fed back. Prompt ``i``
    draws from the random stream of sequence ``first_sequence + i``.
    """
    streams = [sampling.generator(first_sequence + i) for i in range(len(prompts))]
    alive, fed, starts = list(range(len(prompts))), [list(p) for p in prompts], [0] * len(prompts)
    width = max(map(len, prompts))
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache: Any = None
    for count in range(max_new_tokens + 1):
        logits, cache = _forward(loaded, listener, fed, mask, cache)
        yield Step("decode" if count else "prefill", list(alive), fed, list(starts))
        if count == max_new_tokens:
            return
        drawn = [draw(row, sampling, streams[s]) for row, s in zip(logits, alive, strict=True)]
        keep = [i for i, token in enumerate(drawn) if token not in loaded.stop]
        if not keep:
            return
        if len(keep) < len(alive):
            cache.batch_select_indices(torch.tensor(keep, device=loaded.device))
        starts = [starts[i] + len(fed[i]) for i in keep]
        alive, fed = [alive[i] for i in keep], [[drawn[i]] for i in keep]
        mask = torch.cat([mask[keep], torch.ones(len(keep), 1, dtype=mask.dtype)], dim=1)


def _forward(
    loaded: Loaded, listener: Listener, fed: list[list[int]], mask: torch.Tensor, cache: Any
) -> tuple[torch.Tensor, Any]:
    """Logits of each sequence's last token, float32 [sequences, vocab] on the CPU, and the KV cache."""
    width = max(map(len, fed))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in fed])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]
    listener.real = mask[:, -width:].flatten().bool().to(loaded.device)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    output = loaded.model(
        **{name: tensor.to(loaded.device) for name, tensor in inputs.items()},
        **{loaded.cache_name: cache},
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float().cpu(), output[loaded.cache_name]


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token id from float32 ``logits`` [vocab]: the best, or one of the nucleus ``top_p``."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    likely = (logits / sampling.temperature).softmax(-1)
    # those below (1 - top_p) / vocab make up less than 1 - top_p together: the nucleus is full before them
    able = (likely * len(likely) >= 1 - sampling.top_p).nonzero()[:, 0]
    some, order = likely[able].sort(descending=True, stable=True)
    some[some.cumsum(0) - some >= sampling.top_p] = 0
    nucleus = torch.zeros_like(likely)  # of full length, so that the random stream goes on alike
    nucleus[: len(some)] = some
    return int(able[order[torch.multinomial(nucleus, 1, generator=generator)]])
