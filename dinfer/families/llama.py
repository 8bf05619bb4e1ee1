"""Llama, ReluLLaMA, ProSparse and Mistral: RMSNorm, rotary positions, grouped-query attention, gated FFN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from dinfer.errors import InputError

if TYPE_CHECKING:
    from dinfer.families import Checkpoint, Neurons
    from dinfer.model import ModelSpec


class Layer(NamedTuple):
    """Attention of one layer: qkv [(heads + 2 kv_heads) * head_dim, hidden], o [hidden, heads * head_dim], norms."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    ffn_norm: torch.Tensor


class Dense(NamedTuple):
    """Everything but the neurons, on one device: embedding, head [vocab, hidden]; cos, sin [position, head_dim]."""

    spec: ModelSpec
    epsilon: float
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def check(config: dict[str, Any]) -> None:
    """Refuse variants whose attention is not computed here."""
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise InputError("config.json has attention_bias or mlp_bias; Llama variants with biases are not supported")


def dense(checkpoint: Checkpoint, context: int, device: torch.device, dtype: torch.dtype) -> Dense:
    """The dense part of ``checkpoint`` on ``device``, rotary tables for ``context`` positions."""
    spec = checkpoint.spec

    def load(name: str) -> torch.Tensor:
        return checkpoint.tensor(name).to(device, dtype)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        qkv = torch.cat([load(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"])
        return Layer(
            attention_norm=load(f"{prefix}input_layernorm.weight"),
            qkv=qkv,
            o=load(f"{prefix}self_attn.o_proj.weight"),
            ffn_norm=load(f"{prefix}post_attention_layernorm.weight"),
        )

    embedding = load("model.embed_tokens.weight")
    cos, sin = _rotary_tables(checkpoint.config, context)
    return Dense(
        spec=spec,
        epsilon=checkpoint.config.get("rms_norm_eps", 1e-6),
        embedding=embedding,
        layers=[layer(index) for index in range(spec.layers)],
        norm=load("model.norm.weight"),
        head=embedding if spec.tied else load("lm_head.weight"),
        cos=cos.to(device, dtype),
        sin=sin.to(device, dtype),
    )


def neurons(checkpoint: Checkpoint, layer: int) -> Neurons:
    """One layer's gate, up and (transposed) down rows, neuron by neuron."""
    from dinfer.families import Neurons

    prefix = f"model.layers.{layer}.mlp."
    gate, up = checkpoint.tensor(f"{prefix}gate_proj.weight"), checkpoint.tensor(f"{prefix}up_proj.weight")
    return Neurons(torch.stack([gate, up, checkpoint.tensor(f"{prefix}down_proj.weight").T], dim=1), None, None)


def embed(model: Dense, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Hidden states [tokens, hidden] of ``ids`` [tokens] at positions from ``start``."""
    return F.embedding(ids, model.embedding)


def attention(model: Dense, layer: int, hidden: torch.Tensor, cache: torch.Tensor, start: int) -> torch.Tensor:
    """Residual after attention [tokens, hidden]; writes the new keys and values into ``cache``.

    ``hidden`` [tokens, hidden] stands at positions from ``start``; ``cache`` is [2, kv_heads, context, head_dim].
    """
    spec, weights = model.spec, model.layers[layer]
    tokens, end = hidden.shape[0], start + hidden.shape[0]
    qkv = F.linear(F.rms_norm(hidden, (spec.hidden,), weights.attention_norm, model.epsilon), weights.qkv)
    qkv = qkv.view(tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim).transpose(0, 1)
    rotated = spec.heads + spec.kv_heads
    qk = _rotate(qkv[:rotated], model.cos[start:end], model.sin[start:end])
    cache[0, :, start:end] = qk[spec.heads :]
    cache[1, :, start:end] = qkv[rotated:]
    window = spec.windows[layer] if spec.windows else 0
    mixed = attend(qk[: spec.heads], cache, start, end, window)
    return hidden + F.linear(mixed, weights.o)


def ffn_input(model: Dense, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """What the FFN reads: the normalised residual [tokens, hidden]."""
    return F.rms_norm(hidden, (model.spec.hidden,), model.layers[layer].ffn_norm, model.epsilon)


def head(model: Dense, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab]."""
    return F.linear(F.rms_norm(hidden, (model.spec.hidden,), model.norm, model.epsilon), model.head)


def attend(q: torch.Tensor, cache: torch.Tensor, start: int, end: int, window: int = 0) -> torch.Tensor:
    """Causal attention [tokens, heads * head_dim] of ``q`` [heads, tokens, head_dim] over the cache up to ``end``.

    ``window`` limits how many of the last tokens each query sees (0: all).
    """
    first = max(0, end - window) if window and end - start == 1 else 0
    keys, values = cache[0, :, first:end], cache[1, :, first:end]
    mask = None
    if end - start > 1:
        query, key = torch.arange(start, end, device=q.device)[:, None], torch.arange(end, device=q.device)[None]
        mask = (key <= query) & (key > query - window) if window else key <= query
    grouped = q.shape[0] != keys.shape[0]
    mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, enable_gqa=grouped)
    return mixed[0].transpose(0, 1).reshape(end - start, -1)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a transformers Llama or Mistral."""
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]


def site(layer: Any) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """norm, gate and down modules of a transformers decoder layer (see FfnSite)."""
    return layer.post_attention_layernorm, layer.mlp.gate_proj, layer.mlp.down_proj


def _rotary_tables(config: dict[str, Any], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    # transformers knows every rope variant (default, linear, llama3, yarn); the tables are computed once
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = LlamaConfig(**{k: v for k, v in config.items() if k not in ("model_type", "architectures", "hidden_act")})
    rotary = LlamaRotaryEmbedding(known)
    cos, sin = rotary(torch.zeros(1), torch.arange(context)[None])
    return cos[0], sin[0]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
