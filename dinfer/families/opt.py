"""OPT: LayerNorm with biases, learned positions, two matrices a neuron, ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from dinfer.errors import InputError
from dinfer.families.llama import at_positions, attend_at, attend_each
from dinfer.families.products import linear

if TYPE_CHECKING:
    from dinfer.families import Checkpoint, Neurons, Stacked
    from dinfer.model import ModelSpec

NORM_EPSILON = 1e-5
"""torch's default, which OPT's norms take."""

POSITION_OFFSET = 2
"""OPT's position table starts two rows early."""


class Affine(NamedTuple):
    """Weight and bias of a norm or a projection."""

    weight: torch.Tensor
    bias: torch.Tensor


class Layer(NamedTuple):
    """Attention of one layer: qkv weight [3 * hidden, hidden], o weight [hidden, hidden], norms [hidden]."""

    attention_norm: Affine
    qkv: Affine
    o: Affine
    ffn_norm: Affine


class Dense(NamedTuple):
    """Everything but the neurons, on one device: embedding and head [vocab, hidden], positions [position, hidden]."""

    spec: ModelSpec
    embedding: torch.Tensor
    positions: torch.Tensor
    layers: list[Layer]
    norm: Affine
    head: torch.Tensor


def check(config: dict[str, Any]) -> None:
    """Refuse OPT-350m's layout, which norms after the layers and projects its embeddings."""
    projected = config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]
    if not config.get("do_layer_norm_before", True) or projected:
        raise InputError(
            "config.json has do_layer_norm_before false or projected embeddings; OPT-350m is not supported"
        )


def dense(checkpoint: Checkpoint, context: int, device: torch.device, dtype: torch.dtype) -> Dense:
    """The dense part of ``checkpoint`` on ``device``; raises InputError past the learned positions."""
    spec = checkpoint.spec
    if context > spec.max_positions:
        raise InputError(f"context {context} exceeds the {spec.max_positions} learned positions; lower --context")
    prefix = "model.decoder."

    def load(name: str) -> torch.Tensor:
        return checkpoint.tensor(prefix + name).to(device, dtype)

    def affine(name: str) -> Affine:
        return Affine(load(f"{name}.weight"), load(f"{name}.bias"))

    def layer(index: int) -> Layer:
        at = f"layers.{index}."
        parts = [affine(f"{at}self_attn.{part}_proj") for part in "qkv"]
        return Layer(
            attention_norm=affine(f"{at}self_attn_layer_norm"),
            qkv=Affine(torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])),
            o=affine(f"{at}self_attn.out_proj"),
            ffn_norm=affine(f"{at}final_layer_norm"),
        )

    embedding = load("embed_tokens.weight")
    return Dense(
        spec=spec,
        embedding=embedding,
        positions=load("embed_positions.weight"),
        layers=[layer(index) for index in range(spec.layers)],
        norm=affine("final_layer_norm"),
        head=embedding if spec.tied else checkpoint.tensor("lm_head.weight").to(device, dtype),
    )


def stacked(model: Dense) -> Stacked:
    """``model`` for compiled readers; its own qkv and o become views of the stacked ones."""
    from dinfer.families import Stacked, stack_matrices

    qkv, o = [layer.qkv.weight for layer in model.layers], [layer.o.weight for layer in model.layers]

    def biases(name: str) -> torch.Tensor:
        return torch.stack([getattr(layer, name).bias.float() for layer in model.layers])

    def norms(name: str) -> torch.Tensor:
        return torch.stack([torch.stack(tuple(getattr(layer, name))).float() for layer in model.layers])

    made = Stacked(
        rms=False,
        epsilon=NORM_EPSILON,
        qkv=stack_matrices(qkv),
        qkv_bias=biases("qkv"),
        o=stack_matrices(o),
        o_bias=biases("o"),
        attention_norm=norms("attention_norm"),
        ffn_norm=norms("ffn_norm"),
        norm=torch.stack(tuple(model.norm)).float(),
        head=model.head,
        cos=torch.empty(len(model.positions), 0),
        sin=torch.empty(len(model.positions), 0),
    )
    model.layers[:] = [
        layer._replace(qkv=layer.qkv._replace(weight=q), o=layer.o._replace(weight=p))
        for layer, q, p in zip(model.layers, qkv, o, strict=True)
    ]
    return made


def neurons(checkpoint: Checkpoint, layer: int) -> Neurons:
    """One layer's up and (transposed) down rows, neuron by neuron, with both biases."""
    from dinfer.families import Neurons

    prefix = f"model.decoder.layers.{layer}."
    rows = torch.stack([checkpoint.tensor(f"{prefix}fc1.weight"), checkpoint.tensor(f"{prefix}fc2.weight").T], dim=1)
    return Neurons(rows, checkpoint.tensor(f"{prefix}fc1.bias"), checkpoint.tensor(f"{prefix}fc2.bias"))


def embed(model: Dense, ids: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Hidden states [rows, hidden] of ``ids`` [rows]: as many tokens of each sequence, at positions from ``starts``."""
    positions = at_positions(model.positions[POSITION_OFFSET:], starts, len(ids) // len(starts))
    return F.embedding(ids, model.embedding) + positions


def attention(
    model: Dense, layer: int, hidden: torch.Tensor, caches: Sequence[torch.Tensor], starts: Sequence[int]
) -> torch.Tensor:
    """Residual after attention [rows, hidden]; writes the new keys and values into ``caches``.

    ``hidden`` holds as many tokens of each sequence, one sequence after the other, at positions from ``starts``;
    each sequence's cache is [2, heads, context, head_dim].
    """
    mixed = attend_each(*_projected(model, layer, hidden), caches, starts)
    return hidden + linear(mixed, *model.layers[layer].o)


def attention_at(
    model: Dense, layer: int, hidden: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, length: int
) -> torch.Tensor:
    """``attention`` of one token at ``position`` int64 [1] on the device, which no shape depends on.

    ``hidden`` is [1, hidden]; ``length`` positions of the cache are read, more than ``position``.
    """
    mixed = attend_at(*_projected(model, layer, hidden), cache, position, length)
    return hidden + linear(mixed, *model.layers[layer].o)


def _projected(
    model: Dense, layer: int, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, [heads, rows, head_dim] each."""
    spec, weights = model.spec, model.layers[layer]
    qkv = linear(F.layer_norm(hidden, (spec.hidden,), *weights.attention_norm), *weights.qkv)
    q, k, v = qkv.view(-1, 3, spec.heads, spec.head_dim).permute(1, 2, 0, 3)
    return q, k, v


def ffn_input(model: Dense, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """What the FFN reads: the normalised residual [tokens, hidden]."""
    return F.layer_norm(hidden, (model.spec.hidden,), *model.layers[layer].ffn_norm)


def head(model: Dense, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab]."""
    return linear(F.layer_norm(hidden, (model.spec.hidden,), *model.norm), model.head)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a transformers OPT."""
    return list(model.model.decoder.layers)  # type: ignore[union-attr, arg-type]


def site(layer: Any) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """norm, gate and down modules of a transformers decoder layer (see FfnSite); fc1 plays the gate."""
    return layer.final_layer_norm, layer.fc1, layer.fc2
