"""Llama, ReluLLaMA, ProSparse and Mistral: RMSNorm, rotary positions, grouped-query attention, gated FFN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from dinfer.errors import InputError
from dinfer.families.products import linear

if TYPE_CHECKING:
    from dinfer.families import Checkpoint, Neurons, Stacked
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


def stacked(model: Dense) -> Stacked:
    """``model`` for compiled readers; its own qkv and o become views of the stacked ones."""
    from dinfer.families import Stacked, stack_matrices

    qkv, o = [layer.qkv for layer in model.layers], [layer.o for layer in model.layers]
    count = len(qkv)

    def with_no_bias(weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight.float(), torch.zeros_like(weight, dtype=torch.float32)])

    made = Stacked(
        rms=True,
        epsilon=model.epsilon,
        qkv=stack_matrices(qkv),
        qkv_bias=torch.empty(count, 0),
        o=stack_matrices(o),
        o_bias=torch.empty(count, 0),
        attention_norm=torch.stack([with_no_bias(layer.attention_norm) for layer in model.layers]),
        ffn_norm=torch.stack([with_no_bias(layer.ffn_norm) for layer in model.layers]),
        norm=with_no_bias(model.norm),
        head=model.head,
        cos=model.cos.float(),
        sin=model.sin.float(),
    )
    model.layers[:] = [layer._replace(qkv=q, o=p) for layer, q, p in zip(model.layers, qkv, o, strict=True)]
    return made


def neurons(checkpoint: Checkpoint, layer: int) -> Neurons:
    """One layer's gate, up and (transposed) down rows, neuron by neuron."""
    from dinfer.families import Neurons

    prefix = f"model.layers.{layer}.mlp."
    gate, up = checkpoint.tensor(f"{prefix}gate_proj.weight"), checkpoint.tensor(f"{prefix}up_proj.weight")
    return Neurons(torch.stack([gate, up, checkpoint.tensor(f"{prefix}down_proj.weight").T], dim=1), None, None)


def embed(model: Dense, ids: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Hidden states [rows, hidden] of ``ids`` [rows]: as many tokens of each sequence, at positions from ``starts``."""
    return F.embedding(ids, model.embedding)


def attention(
    model: Dense, layer: int, hidden: torch.Tensor, caches: Sequence[torch.Tensor], starts: Sequence[int]
) -> torch.Tensor:
    """Residual after attention [rows, hidden]; writes the new keys and values into ``caches``.

    ``hidden`` holds as many tokens of each sequence, one sequence after the other, at positions from ``starts``;
    each sequence's cache is [2, kv_heads, context, head_dim].
    """
    tokens = hidden.shape[0] // len(starts)
    cos, sin = at_positions(model.cos, starts, tokens), at_positions(model.sin, starts, tokens)
    mixed = attend_each(*_projected(model, layer, hidden, cos, sin), caches, starts, _window(model, layer))
    return hidden + linear(mixed, model.layers[layer].o)


def attention_at(
    model: Dense, layer: int, hidden: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, length: int
) -> torch.Tensor:
    """``attention`` of one token at ``position`` int64 [1] on the device, which no shape depends on.

    ``hidden`` is [1, hidden]; ``length`` positions of the cache are read, more than ``position``.
    """
    cos, sin = model.cos.index_select(0, position), model.sin.index_select(0, position)
    window = _window(model, layer)
    mixed = attend_at(*_projected(model, layer, hidden, cos, sin), cache, position, length, window)
    return hidden + linear(mixed, model.layers[layer].o)


def _window(model: Dense, layer: int) -> int:
    return model.spec.windows[layer] if model.spec.windows else 0


def _projected(
    model: Dense, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [heads, rows, head_dim], keys and values [kv_heads, rows, head_dim], turned by ``cos`` and ``sin``."""
    spec, weights = model.spec, model.layers[layer]
    qkv = linear(F.rms_norm(hidden, (spec.hidden,), weights.attention_norm, model.epsilon), weights.qkv)
    qkv = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim).transpose(0, 1)
    rotated = spec.heads + spec.kv_heads
    qk = _rotate(qkv[:rotated], cos, sin)
    return qk[: spec.heads], qk[spec.heads :], qkv[rotated:]


def ffn_input(model: Dense, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """What the FFN reads: the normalised residual [tokens, hidden]."""
    return F.rms_norm(hidden, (model.spec.hidden,), model.layers[layer].ffn_norm, model.epsilon)


def head(model: Dense, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab]."""
    return linear(F.rms_norm(hidden, (model.spec.hidden,), model.norm, model.epsilon), model.head)


def at_positions(table: torch.Tensor, starts: Sequence[int], tokens: int) -> torch.Tensor:
    """Rows of ``table`` for ``tokens`` positions from each of ``starts``, one after the other."""
    rows = [table[start : start + tokens] for start in starts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def attend_each(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    caches: Sequence[torch.Tensor],
    starts: Sequence[int],
    window: int = 0,
) -> torch.Tensor:
    """Each sequence's ``attend`` [rows, heads * head_dim] after its ``keys`` and ``values`` went into its cache.

    ``q`` is [heads, rows, head_dim], ``keys`` and ``values`` [kv_heads, rows, head_dim]. A cache that is shorter than
    the context is a ring of the layer's window.
    """
    tokens, mixed = q.shape[1] // len(starts), []
    for index, (cache, start) in enumerate(zip(caches, starts, strict=True)):
        rows, end = slice(index * tokens, (index + 1) * tokens), start + tokens
        if end > cache.shape[2]:
            mixed.append(attend_ring(q[:, rows], keys[:, rows], values[:, rows], cache, start))
            continue
        cache[0, :, start:end] = keys[:, rows]
        cache[1, :, start:end] = values[:, rows]
        mixed.append(attend(q[:, rows], cache, start, end, window))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def attend_ring(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, start: int
) -> torch.Tensor:
    """Attention [tokens, heads * head_dim] over a window as long as the ring ``cache`` [2, kv_heads, window, head_dim].

    Position p lies at p modulo the window; the order of keys does not matter, as they are rotated already.
    """
    tokens, window = q.shape[1], cache.shape[2]
    new = torch.stack([keys, values])
    if tokens == 1:
        cache[:, :, start % window] = new[:, :, 0]
        return _mixed(q, cache[0], cache[1], None)
    first, end = max(0, start - window), start + tokens
    seen = torch.cat([cache[:, :, torch.arange(first, start, device=q.device) % window], new], dim=2)
    query, key = torch.arange(start, end, device=q.device)[:, None], torch.arange(first, end, device=q.device)[None]
    kept = torch.arange(max(start, end - window), end, device=q.device)
    cache[:, :, kept % window] = new[:, :, kept - start]
    return _mixed(q, seen[0], seen[1], (key <= query) & (key > query - window))


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
    return _mixed(q, keys, values, mask)


def _mixed(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    grouped = q.shape[0] != keys.shape[0]
    mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, enable_gqa=grouped)
    return mixed[0].transpose(0, 1).reshape(q.shape[1], -1)


def attend_at(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: torch.Tensor,
    position: torch.Tensor,
    length: int,
    window: int = 0,
) -> torch.Tensor:
    """``attend`` [1, heads * head_dim] of one token at ``position`` int64 [1], whose keys and values go into the cache.

    ``q`` is [heads, 1, head_dim], ``keys`` and ``values`` [kv_heads, 1, head_dim]; the first ``length`` positions of
    the cache are read and those that the token does not see are masked. A cache of the window's length is a ring.
    """
    ring = cache.shape[2]
    cache.index_copy_(2, position % ring, torch.stack([keys, values]))
    there = torch.arange(min(length, ring), device=q.device)[None]
    mask = there <= position
    if 0 < window < ring:
        mask = mask & (there > position - window)
    return _mixed(q, cache[0, :, :length], cache[1, :, :length], mask)


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
