"""What comes before the steps of a healing: how much the loss feels of each gate, and the fit of the residual."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F

RIDGE, LINEAR_RIDGE, GATE_RIDGE, READ_RIDGE = 0.03, 0.003, 0.001, 0.01
"""What keeps a fitted matrix near what it was, relative to the mean square of an input; the same for a linear map of
the FFN's input, for the gate that is the same for every token, and for the guess of the teacher's residual."""
BLOCK = 512
"""Columns of a symmetric product at a time; half of the blocks need no product."""
FARTHEST = 16
"""How often a measured reach may be the median's, or the median it; an open neuron's."""
STRIDE, SELDOM, SLOPES = 5, 30, (0.5, 1.2)
"""One token in so many gives its gates to the lines that follow SiLU, and tells the share that is open before a layer
learns; a gate that is open less often gets no line; the slopes that lines may have."""
BETAS, WARMUP = (0.9, 0.95), 20
"""AdamW's, and the steps in which the rate rises: of a layer by itself and of the whole model."""
REFINE_RATE, REFINE_TOKENS, REFINE_STEPS = 3e-3, 1024, 640
"""Where a layer's FFN learns by itself: highest learning rate, tokens a step, steps."""
NEAR, FIRST_PRICE, HASTE = 0.05, 1e-4, 0.4
"""How near its threshold a gate tells what opening it would win; what an open gate costs at first, and how fast that
follows the share that is open."""


def measured_reach(teacher: Any, ids: torch.Tensor, every: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """How much the loss feels of one unit of each neuron's gate where it is open, float32 [layers, neurons] over their
    median, and each layer's gates of ``every``-th token [tokens, neurons].

    It is the root mean square of the gradient of -log p(token), the token drawn from the teacher's own prediction (the
    diagonal of the Fisher information), over ``ids`` [rows, length]; at most FARTHEST times from the median.
    """
    random = torch.Generator(teacher.device).manual_seed(0)
    acts = [layer.mlp.act_fn for layer in teacher.model.layers]
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def listen(act: Any, inputs: tuple[torch.Tensor, ...], value: torch.Tensor) -> None:
        value.retain_grad()
        heard.append((inputs[0].detach()[0], value))

    felt, opened, gates = 0.0, 0.0, []
    for row in ids.split(1):
        heard.clear()
        with hooked(acts, listen):
            embedded = teacher.get_input_embeddings()(row).requires_grad_(True)
            states = teacher.model(inputs_embeds=embedded).last_hidden_state[0]
        logits = F.linear(states, teacher.get_output_embeddings().weight).float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=random)[:, 0]
        F.cross_entropy(logits, drawn, reduction="sum").backward()
        felt += torch.stack([(value.grad[0].float().square() * (gate > 0)).sum(0) for gate, value in heard])
        opened += torch.stack([(gate > 0).float().sum(0) for gate, _ in heard])
        gates.append(torch.stack([gate[::every] for gate, _ in heard]))
    slope = (felt / opened.clamp(min=1)).sqrt()
    return (slope / slope.median()).clamp(1 / FARTHEST, FARTHEST), list(torch.cat(gates, 1))


class Reached(Exception):
    """The first decoder layer is; the others need not run."""


def first_layer_call(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the first decoder layer is called with for ``ids``: the embedded tokens, and all else (mask, positions)."""
    calls: list[Any] = []

    def stop(layer: Any, states: tuple[torch.Tensor, ...], rest: dict[str, Any]) -> None:
        calls.append((states[0], rest))
        raise Reached

    handle = model.model.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    with suppress(Reached):
        model.model(ids, use_cache=False)
    handle.remove()
    return calls[0]


def attended(layer: Any, states: torch.Tensor, rest: dict[str, Any]) -> torch.Tensor:
    """The residual after a decoder layer's attention."""
    return states + layer.self_attn(layer.input_layernorm(states), **rest)[0]


def fed(layer: Any, states: torch.Tensor) -> torch.Tensor:
    """The residual after its FFN."""
    return states + layer.mlp(layer.post_attention_layernorm(states))


def inputs_of(part: torch.nn.Linear, layer: Any, states: list[torch.Tensor], others: list[Any]) -> list[torch.Tensor]:
    """What ``part`` of a decoder ``layer``'s attention is given for each batch of ``states``."""
    given: list[torch.Tensor] = []
    with hooked([part], lambda part, inputs, output: given.append(inputs[0])):
        for call in zip(states, others, strict=True):
            attended(layer, *call)
    return given


def read_through(parts: list[torch.nn.Linear], ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Let ``parts``, which read ``ours``, read the best linear guess of ``theirs`` from it instead.

    Both are batches [rows, length, hidden] of normalised residuals. What was lost before is partly linear in what is
    left; the guess is a ridge regression, and the matrices take it in.
    """
    with torch.autocast(ours[0].device.type, enabled=False):
        squares, products = normal_equations(ours, ours, theirs, weighted=False)
        squares.diagonal().add_(READ_RIDGE * squares.diagonal().mean())
        guess = torch.linalg.solve(squares, products)
        for part in parts:
            part.weight += part.weight @ guess.T
    torch.clear_autocast_cache()  # it holds the matrices as they were


def fit_part(
    part: torch.nn.Linear, inputs: list[torch.Tensor], ours: list[torch.Tensor], theirs: list[torch.Tensor]
) -> None:
    """Give ``part`` the weights whose product with its ``inputs`` brings ``ours`` nearest to ``theirs``.

    All are batches [rows, length, values]. It is ridge regression: a token counts by 1 / the squared norm of the
    teacher's residual, as the next normalisation sees it, and RIDGE x the mean square of an input keeps the weights
    near those that they were.
    """
    with torch.autocast(part.weight.device.type, enabled=False):
        squares, products = normal_equations(inputs, ours, theirs)
        missing = products - squares @ part.weight.T
        squares.diagonal().add_(RIDGE * squares.diagonal().mean())
        part.weight += torch.linalg.solve(squares, missing).T
    torch.clear_autocast_cache()  # it holds the matrix as it was


def written(part: torch.nn.Linear, inputs: list[torch.Tensor], ours: list[torch.Tensor]) -> list[torch.Tensor]:
    """``ours`` and what ``part`` makes of its ``inputs``, batches [rows, length, values]."""
    return [our + part(given) for given, our in zip(inputs, ours, strict=True)]


def normal_equations(
    inputs: Iterable[torch.Tensor], ours: list[torch.Tensor], theirs: list[torch.Tensor], weighted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over tokens of input x input [values, values] and of input x (theirs - ours) [values, hidden], float32.

    All are batches [rows, length, ...]; ``weighted``, a token counts by 1 / the squared norm of the teacher's residual.
    Of the first, which is symmetric, only blocks on and above the diagonal are multiplied.
    """
    squares = products = torch.empty(0)
    for given, our, their in zip(inputs, ours, theirs, strict=True):
        scale = 1 / their.float().norm(dim=-1, keepdim=True) if weighted else 1
        rows = (given.float() * scale).flatten(0, 1)
        wanted = ((their.float() - our.float()) * scale).flatten(0, 1)
        if not len(squares):
            squares, products = (rows.new_zeros(rows.shape[1], side.shape[1]) for side in (rows, wanted))
        for first in range(0, rows.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            squares[: block.stop, block] += rows[:, : block.stop].T @ rows[:, block]
        products += rows.T @ wanted
    return squares.triu() + squares.triu(1).T, products


def constant_gate(entered: list[torch.Tensor]) -> torch.Tensor:
    """The regression of 1 on the FFN's inputs ``entered`` [rows, length, hidden]: a gate [hidden] that is nearly the
    same for every token, as there is a direction in which a normalised residual hardly moves."""
    squares, total = torch.zeros(entered[0].shape[-1:] * 2, device=entered[0].device), 0.0
    with torch.autocast(squares.device.type, enabled=False):
        for inputs in entered:
            rows = inputs.float().flatten(0, 1)
            squares += rows.T @ rows
            total += rows.sum(0)
        squares.diagonal().add_(GATE_RIDGE * squares.diagonal().mean())
        return torch.linalg.solve(squares, total)


def follow(mlp: Any, silu: Any, constant: torch.Tensor, entered: list[torch.Tensor]) -> torch.Tensor:
    """Make each gate of ``mlp`` the straight line of it that is nearest to its ``silu`` where it is open; returns the
    thresholds [neurons] that open it as before, but nowhere below 0.

    An open FATReLU passes the gate, SiLU passes less. Least squares over every STRIDE-th token of the FFN's inputs
    ``entered`` [rows, length, hidden]; the line's offset goes onto the ``constant`` gate [hidden]. A neuron that is
    hardly ever open stays as it is.
    """
    threshold = mlp.act_fn.threshold
    count, x, y, xx, xy = (torch.zeros_like(threshold) for _ in range(5))
    for inputs in entered:
        gate = mlp.gate_proj(inputs.flatten(0, 1)[::STRIDE]).float()
        above, value = (gate > threshold).float(), silu(gate)
        for total, term in ((count, above), (x, gate * above), (y, value * above)):
            total += term.sum(0)
        xx += (gate.square() * above).sum(0)
        xy += (gate * value * above).sum(0)
    mean = x / count.clamp(min=1)
    slope = (xy - mean * y) / (xx - mean * x).clamp(min=1e-4)
    slope = torch.where(count < SELDOM, 1.0, slope.clamp(*SLOPES))
    offset = torch.where(count < SELDOM, 0.0, y / count.clamp(min=1) - slope * mean)
    mlp.gate_proj.weight.mul_(slope[:, None]).add_(offset[:, None] * constant)
    torch.clear_autocast_cache()  # it holds the matrix as it was
    return torch.maximum(slope * threshold + offset, threshold / 20)


def open_neurons(
    mlp: Any,
    count: int,
    constant: torch.Tensor,
    entered: list[torch.Tensor],
    ours: list[torch.Tensor],
    theirs: list[torch.Tensor],
) -> torch.Tensor:
    """Make ``count`` of ``mlp``'s neurons a linear map of the FFN's input ``entered``; returns their numbers.

    Most of what silenced gates lose is linear in the FFN's input. A gated neuron is linear where its gate is the same
    for every token, the ``constant`` one. The map is the part on ``entered`` of a ridge regression of what ``mlp``
    leaves of ``theirs`` - ``ours`` on its neurons and ``entered``, tokens weighted as in fit_part; of it the ``count``
    directions of the output that give back most. They take the places of the neurons that add least. All are batches
    [rows, length, values].
    """
    neurons = mlp.down_proj.in_features
    both = [torch.cat([neurons_of(mlp, x), x], dim=-1) for x in entered]
    with torch.autocast(mlp.down_proj.weight.device.type, enabled=False):
        squares, products = normal_equations(both, ours, theirs)
        missing = products - squares[:, :neurons] @ mlp.down_proj.weight.T
        powers, linear = squares.diagonal()[:neurons].clone(), squares[neurons:, neurons:].clone()
        squares.diagonal()[:neurons].add_(RIDGE * powers.mean())
        squares.diagonal()[neurons:].add_(LINEAR_RIDGE * linear.diagonal().mean())
        lost = torch.linalg.solve(squares, missing)[neurons:]
        down = torch.linalg.eigh(lost.T @ linear @ lost).eigenvectors[:, -count:]
        up = lost @ down
    balance = up.norm(dim=0).sqrt()
    places = (powers * mlp.down_proj.weight.square().sum(0)).topk(count, largest=False).indices
    mlp.gate_proj.weight[places] = constant
    mlp.up_proj.weight[places] = (up / balance).T
    mlp.down_proj.weight[:, places] = down * balance
    torch.clear_autocast_cache()  # it holds the matrices as they were
    return places


def neurons_of(mlp: Any, entered: torch.Tensor) -> torch.Tensor:
    """The activations [rows, length, neurons] of an FFN for its input."""
    return mlp.act_fn(mlp.gate_proj(entered)) * mlp.up_proj(entered)


class Opening(torch.autograd.Function):
    """``gate`` [tokens, neurons] where it is above ``threshold`` [neurons], else 0, with a slope for what opens.

    FATReLU jumps at its threshold, so its slope never tells a closed gate to open. Here the jump counts as a slope of
    1 / (2 NEAR) as far as NEAR on both sides (as for the thresholds of JumpReLU autoencoders, arXiv 2407.14435), and
    each open gate adds ``price`` to the loss.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, threshold: torch.Tensor, price: float) -> torch.Tensor:
        above = gate > threshold
        ctx.save_for_backward(gate, threshold, above)
        ctx.price = price
        return gate * above

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        gate, threshold, above = ctx.saved_tensors
        near = (gate - threshold).abs() < NEAR
        return outer * above + (outer * gate + ctx.price) * near / (2 * NEAR), None, None


@torch.enable_grad()
def refine(mlp: Any, entered: list[torch.Tensor], ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Let all three matrices of ``mlp`` learn by gradient what brings ``ours`` nearest to ``theirs``, while as many
    gates stay open; thresholds stay.

    All are batches [rows, length, values]. Each of REFINE_STEPS takes REFINE_TOKENS in a random order, pass after pass,
    and they count as in fit_part; the rate is REFINE_RATE after a warm-up, then falls as a cosine. An open gate's price
    rises while more are open than at the beginning.
    """
    scale = torch.cat([1 / their.float().norm(dim=-1).flatten() for their in theirs])[:, None]
    given = torch.cat([x.flatten(0, 1) for x in entered])
    wanted = torch.cat([(b.float() - a.float()).flatten(0, 1) for a, b in zip(ours, theirs, strict=True)]) * scale
    missing = wanted.square().sum(-1).mean()
    threshold = mlp.act_fn.threshold
    share = open_share(mlp.gate_proj(given[::STRIDE]).detach(), threshold)
    optimiser = torch.optim.AdamW(
        [part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)], betas=BETAS, weight_decay=0.0, fused=True
    )
    price = FIRST_PRICE
    for step, chosen in enumerate(shuffled(len(given), REFINE_TOKENS, REFINE_STEPS)):
        chosen = chosen.to(given.device)
        x = given[chosen]
        gate = mlp.gate_proj(x)
        opened = Opening.apply(gate, threshold, price / len(chosen))
        left = mlp.down_proj(opened * mlp.up_proj(x)).float() * scale[chosen] - wanted[chosen]
        (left.square().sum(-1).mean() / missing).backward()
        for group in optimiser.param_groups:
            group["lr"] = falling(REFINE_RATE, step, step / REFINE_STEPS)
        optimiser.step()
        optimiser.zero_grad()
        price *= math.exp(HASTE * (open_share(gate.detach(), threshold) / share - 1))
        torch.clear_autocast_cache()  # it holds the matrices as they were


def open_share(gate: torch.Tensor, threshold: torch.Tensor) -> float:
    """Share of ``gate`` [tokens, neurons] above ``threshold`` [neurons]."""
    return float((gate > threshold).float().mean())


def shuffled(count: int, size: int, batches: int) -> Iterator[torch.Tensor]:
    """``batches`` times the numbers of up to ``size`` of ``count`` rows, in a random order, pass after pass."""
    random = torch.Generator().manual_seed(0)
    while batches > 0:
        chosen = torch.randperm(count, generator=random).split(size)[:batches]
        yield from chosen
        batches -= len(chosen)


def falling(rate: float, step: int, share: float) -> float:
    """Learning rate of ``step`` at ``share`` of a training: warm-up, then a cosine from ``rate`` to a 50th of it."""
    return rate * min(1, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1, share))))


@contextmanager
def hooked(modules: list[Any], hook: Callable[..., None]) -> Iterator[None]:
    """Call ``hook`` after each forward pass of each of ``modules``."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
