"""What comes before the steps of a healing, part by part: reach, regressions, lines, open neurons, a layer by itself.

Each part is compared with numpy, with central differences, or with an answer that is known beforehand.
"""

import healing_fit
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from healing import FatRelu
from healing_fit import (
    Opening,
    attended,
    constant_gate,
    fed,
    first_layer_call,
    fit_part,
    follow,
    hooked,
    measured_reach,
    neurons_of,
    open_neurons,
    read_through,
    refine,
    shuffled,
    written,
)  # fmt: skip
from transformers import AutoModelForCausalLM


def test_the_reach_is_how_the_loss_moves_with_an_open_gate(teacher_directory):
    """Compared with central differences, one activation of one token moved at a time (norms are in float32)."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(3, 256, (2, 6), generator=torch.Generator().manual_seed(4))
    reach, gates = measured_reach(teacher, ids, 61)
    acts, random = [layer.mlp.act_fn for layer in teacher.model.layers], torch.Generator().manual_seed(0)
    neurons, felt = [2, 7, 11], torch.zeros(len(acts), 3, dtype=torch.float64)
    opened = felt.clone()
    for row in ids.split(1):
        drawn = torch.multinomial(teacher(row).logits[0].float().softmax(-1), 1, generator=random)[:, 0]
        opening: list[torch.Tensor] = []
        with hooked(acts, lambda act, given, value, opening=opening: opening.append(given[0][0] > 0)):
            teacher(row)
        for layer, act in enumerate(acts):
            for column, neuron in enumerate(neurons):
                for token in range(row.shape[1]):
                    losses = []
                    for moved in (0.01, -0.01):
                        nudge = torch.zeros(row.shape[1], reach.shape[1], dtype=torch.float64)
                        nudge[token, neuron] = moved
                        handle = act.register_forward_hook(lambda act, given, value, nudge=nudge: value + nudge)
                        losses.append(F.cross_entropy(teacher(row).logits[0], drawn, reduction="sum"))
                        handle.remove()
                    is_open = opening[layer][token, neuron]
                    felt[layer, column] += is_open * ((losses[0] - losses[1]) / 0.02) ** 2
                    opened[layer, column] += is_open
    expected = (felt / opened.clamp(min=1)).sqrt()
    assert opened.min() > 0
    ratio = reach[:, neurons] / expected
    assert torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=0.005)
    assert float(reach.median()) == pytest.approx(1)
    assert [tuple(layer.shape) for layer in gates] == [(2, reach.shape[1])] * len(acts)


def test_the_first_layer_is_looked_at_without_running_any(teacher_directory):
    """Its call gives, layer by layer, what the whole model gives; no layer runs for it, and no hook stays."""
    model = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float32).requires_grad_(False)
    ids, ran = torch.randint(3, 256, (2, 6), generator=torch.Generator().manual_seed(4)), []
    with hooked(list(model.model.layers), lambda layer, given, value: ran.append(layer)):
        states, rest = first_layer_call(model, ids)
    assert not ran
    for layer in model.model.layers:
        states = fed(layer, attended(layer, states, rest))
    assert torch.allclose(model.model.norm(states), model.model(ids).last_hidden_state, atol=1e-5)


def test_a_fitted_matrix_is_the_ridge_regression_of_what_is_missing():
    random = torch.Generator().manual_seed(6)
    given, ours, theirs = ([torch.randn(3, 40, n, generator=random) * n for _ in range(2)] for n in (12, 5, 5))
    part = torch.nn.Linear(12, 5, bias=False).requires_grad_(False)
    before = part.weight.double().numpy().copy()
    fit_part(part, given, ours, theirs)
    moved = written(part, given, ours)
    rows, have, want = (torch.cat(part).flatten(0, 1).double().numpy() for part in (given, ours, theirs))
    scale = np.linalg.norm(want, axis=1, keepdims=True)
    squares = (rows / scale).T @ (rows / scale)
    squares += healing_fit.RIDGE * np.trace(squares) / 12 * np.eye(12)
    change = np.linalg.solve(squares, (rows / scale).T @ ((want - have - rows @ before.T) / scale))
    assert np.allclose(part.weight.double().numpy() - before, change.T, atol=1e-5)
    assert np.allclose(torch.cat(moved).flatten(0, 1).numpy(), have + rows @ (before.T + change), atol=1e-3)


@pytest.mark.parametrize("block", [5, 7, 64])
def test_a_symmetric_product_in_blocks_is_the_whole_product(monkeypatch, block):
    monkeypatch.setattr(healing_fit, "BLOCK", block)
    random = torch.Generator().manual_seed(1)
    given, ours, theirs = ([torch.randn(2, 30, n, generator=random) for _ in range(3)] for n in (21, 4, 4))
    squares, products = healing_fit.normal_equations(given, ours, theirs, weighted=False)
    rows, have, want = (torch.cat(part).flatten(0, 1).double() for part in (given, ours, theirs))
    assert torch.allclose(squares.double(), rows.T @ rows, atol=1e-4)
    assert torch.allclose(products.double(), rows.T @ (want - have), atol=1e-4)


def test_what_is_linear_in_what_is_left_is_read_again():
    """Where the student's residual is the teacher's through a matrix, its reads become the teacher's reads."""
    random = torch.Generator().manual_seed(3)
    theirs = [torch.randn(3, 50, 6, generator=random) for _ in range(2)]
    through = torch.eye(6) + 0.2 * torch.randn(6, 6, generator=random)
    ours = [x @ through for x in theirs]
    parts = [torch.nn.Linear(6, n, bias=False).requires_grad_(False) for n in (4, 9)]
    ours_all, theirs_all = torch.cat(ours), torch.cat(theirs)
    wanted = [part(theirs_all) for part in parts]
    before = [float((part(ours_all) - want).norm()) for part, want in zip(parts, wanted, strict=True)]
    read_through(parts, ours, theirs)
    after = [float((part(ours_all) - want).norm()) for part, want in zip(parts, wanted, strict=True)]
    assert all(now < 0.05 * was for now, was in zip(after, before, strict=True))


def gated(inner: int, hidden: int, random: torch.Generator, threshold: float = 0.2) -> torch.nn.Module:
    """A FATReLU FFN of random matrices."""
    mlp = torch.nn.Module()
    for name, shape in {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}.items():
        part = torch.nn.Linear(*shape, bias=False)
        part.weight.data = torch.randn(part.weight.shape, generator=random) / shape[0] ** 0.5
        setattr(mlp, name, part)
    mlp.act_fn = FatRelu(inner)
    mlp.act_fn.threshold.fill_(threshold)
    return mlp


def test_a_layer_learns_what_another_of_its_kind_does(monkeypatch):
    """An FFN whose matrices are another's and noise comes nearer to the other; as many gates stay open, the threshold
    stays."""
    monkeypatch.setattr(healing_fit, "REFINE_TOKENS", 128)
    monkeypatch.setattr(healing_fit, "REFINE_STEPS", 200)
    random = torch.Generator().manual_seed(12)
    teacher = gated(24, 8, random)
    student = gated(24, 8, random)
    for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
        ours.data = theirs.data + 0.3 * ours.data
    entered = [torch.randn(4, 256, 8, generator=random) for _ in range(12)]
    ours = [torch.randn(4, 256, 8, generator=random) * 3 for _ in entered]
    with torch.no_grad():
        theirs = [our + teacher.down_proj(neurons_of(teacher, x)) for our, x in zip(ours, entered, strict=True)]

    def left() -> float:
        with torch.no_grad():
            written = [student.down_proj(neurons_of(student, x)) for x in entered]
        return float((torch.cat(theirs) - torch.cat(ours) - torch.cat(written)).norm())

    def opened() -> float:
        with torch.no_grad():
            return float((student.gate_proj(torch.cat(entered)) > student.act_fn.threshold).float().mean())

    before, share = left(), opened()
    refine(student, entered, ours, theirs)
    assert left() < 0.6 * before
    assert opened() == pytest.approx(share, rel=0.03)
    assert torch.equal(student.act_fn.threshold, teacher.act_fn.threshold)
    assert all(weight.grad is None for weight in student.parameters())


def test_a_gate_near_its_threshold_tells_what_opening_it_would_win():
    """Its slope is what it passes on and, near the threshold, the step's height over the width, by hand."""
    near, price = healing_fit.NEAR, 0.25
    threshold = torch.tensor([0.5, 0.5, 0.5, 0.5])
    gate = torch.tensor([[0.9, 0.5 + 0.9 * near, 0.5 - 0.9 * near, 0.5 - 1.1 * near]], requires_grad=True)
    passed = Opening.apply(gate, threshold, price)
    assert torch.equal(passed, gate * (gate > threshold))
    outer = torch.tensor([[2.0, -3.0, 5.0, 7.0]])
    passed.backward(outer)
    edge = (outer * gate + price)[0].detach() / (2 * near)
    assert torch.allclose(gate.grad[0], torch.stack([outer[0, 0], outer[0, 1] + edge[1], edge[2], torch.tensor(0.0)]))


def test_tokens_come_pass_after_pass():
    """Each pass has every token once, the last one is cut where the steps end."""
    batches = list(shuffled(10, 4, 5))
    assert [len(chosen) for chosen in batches] == [4, 4, 2, 4, 4]
    assert torch.cat(batches[:3]).sort().values.tolist() == list(range(10))
    assert len(set(torch.cat(batches[3:]).tolist())) == 8


def test_gates_follow_silu_where_they_are_open():
    """By numpy's straight lines; the same gates are open as before, one that is seldom open does not move."""
    random = torch.Generator().manual_seed(9)
    mlp = gated(5, 7, random).requires_grad_(False)
    mlp.act_fn.threshold.copy_(torch.tensor([0.2, 0.5, 0.9, 1.3, 50.0]))
    entered = [torch.randn(3, 500, 7, generator=random) for _ in range(4)]
    for x in entered:
        x[..., 2] = 1.5
    mlp.gate_proj.weight *= 4
    gates, before = [mlp.gate_proj(x) for x in entered], mlp.gate_proj.weight.clone()
    moved = follow(mlp, F.silu, constant_gate(entered), entered)
    was, now = (torch.cat(part).flatten(0, 1) for part in (gates, [mlp.gate_proj(x) for x in entered]))
    for neuron, threshold in enumerate(mlp.act_fn.threshold[:4].tolist()):
        gate = torch.cat([batch.flatten(0, 1)[:: healing_fit.STRIDE, neuron] for batch in gates]).double()
        gate = gate[gate > threshold]
        slope, offset = np.polyfit(gate, F.silu(gate), 1)
        assert torch.allclose(now[:, neuron], slope * was[:, neuron] + offset, atol=0.02)
        line = slope * threshold + offset
        assert float(moved[neuron]) == pytest.approx(max(line, threshold / 20), abs=1e-3)
        if line > threshold / 20:
            assert float(((was > threshold) != (now > moved))[:, neuron].float().mean()) < 0.01
    assert torch.equal(mlp.gate_proj.weight[4], before[4])


def test_open_neurons_are_the_linear_map_that_was_lost():
    """Of a map of rank 3 three neurons give back all, in the places of those that add least; the others stay."""
    random = torch.Generator().manual_seed(8)
    mlp = gated(20, 6, random, threshold=0.5).requires_grad_(False)
    mlp.down_proj.weight[:, [4, 9, 17]] = 0.001
    before = [part.weight.clone() for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    entered, ours = ([torch.randn(3, 40, 6, generator=random) for _ in range(4)] for _ in range(2))
    for x in entered:
        x[..., 2] = 1.5  # the direction in which an input hardly moves
    lost = torch.randn(6, 3, generator=random) @ torch.randn(3, 6, generator=random)
    others = [mlp.down_proj(neurons_of(mlp, x)) for x in entered]
    theirs = [our + x @ lost + other for our, x, other in zip(ours, entered, others, strict=True)]
    constant = constant_gate(entered)
    places = open_neurons(mlp, 3, constant, entered, ours, theirs)
    x = torch.cat(entered).flatten(0, 1)
    gates = mlp.gate_proj(x)[:, places]
    assert sorted(places.tolist()) == [4, 9, 17]
    assert torch.allclose(gates, torch.ones(()), atol=0.01)
    regained = (gates * mlp.up_proj(x)[:, places]) @ mlp.down_proj.weight[:, places].T
    assert (regained - x @ lost).norm() < 0.03 * (x @ lost).norm()
    stay = [n for n in range(20) if n not in places]
    assert torch.equal(mlp.gate_proj.weight[stay], before[0][stay])
    assert torch.equal(mlp.up_proj.weight[stay], before[1][stay])
    assert torch.equal(mlp.down_proj.weight[:, stay], before[2][:, stay])
