"""Placements: who is resident, what a swap may do, and who is hottest."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.placement import Placement

SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=8,
    neurons=70,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=16,
    activation="relu",
    dtype="float32",
    compute_dtype="float32",
)
"""One neuron takes 3 x 8 x 4 = 96 bytes, and a layer's set two words."""


def placement(*residents: list[int], neurons: int = 70) -> Placement:
    return Placement(neurons, np.stack([bits.from_ids(ids, neurons) for ids in residents]))


def test_slots_and_buckets_are_those_of_the_words():
    placed = placement([69, 0, 64], [])
    assert placed.slots.tolist() == [3, 0]
    assert placed.bucket(0).tolist() == [0, 64, 69]
    assert placed.bucket(1).tolist() == []
    assert placed.bytes(SPEC) == 3 * 96


def test_the_papers_worked_example_swaps_4_for_7():
    before = placement([1, 3, 6, 7], neurons=10)
    after = before.swap(0, np.array([4]), np.array([7]))
    assert after.bucket(0).tolist() == [1, 3, 4, 6]
    assert before.bucket(0).tolist() == [1, 3, 6, 7]


@pytest.mark.parametrize(
    ("fetch", "evict"),
    [
        ([1], [3]),  # fetched is resident
        ([2], [4]),  # evicted is not
        ([2, 4], [1]),  # unequal numbers
        ([2, 2], [1, 3]),  # one fetched twice would lose a slot
        ([2, 4], [1, 1]),
        ([10], [1]),  # no such neuron
        ([2], [-9]),  # would count from the end
    ],
)
def test_a_swap_of_the_wrong_side_is_refused(fetch, evict):
    message = f"layer 0: cannot swap in {fetch} for {evict}; one is on the wrong side"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        placement([1, 3, 6, 7], neurons=10).swap(0, np.array(fetch), np.array(evict))


@given(st.data())
def test_a_swap_changes_what_it_names_and_no_number_of_slots(data):
    resident = data.draw(st.sets(st.integers(0, 69)))
    n = data.draw(st.integers(0, min(len(resident), 70 - len(resident))))
    fetch = data.draw(st.permutations(sorted(set(range(70)) - resident)))[:n]
    evict = data.draw(st.permutations(sorted(resident)))[:n]
    before = placement([5], sorted(resident))
    after = before.swap(1, np.array(fetch), np.array(evict))
    assert set(after.bucket(1)) == resident - set(evict) | set(fetch)
    assert after.slots.tolist() == before.slots.tolist()
    assert after.swap(1, np.array(evict), np.array(fetch)).bucket(1).tolist() == sorted(resident)


def test_a_budget_is_kept_to_the_byte():
    placed = placement([0, 1], [2])
    placed.check(SPEC, 3 * 96)
    message = "placement takes 288 B, its budget is 287 B; raise --vram"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        placed.check(SPEC, 3 * 96 - 1)


def test_a_placement_of_another_shape_is_refused():
    message = (
        "placement has 1 layers of 10 neurons, tiny has 2 of 70; make the plan for this model"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        placement([1], neurons=10).check(SPEC, 10**6)


def test_the_lowest_id_comes_first_among_equals():
    frequency = np.array([[0.5, 0.9, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]], np.float32)
    placed = Placement.hottest(frequency, np.array([3, 2]))
    assert placed.bucket(0).tolist() == [0, 1, 2]
    assert placed.bucket(1).tolist() == [0, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.data())
def test_nobody_outside_is_hotter(levels, data):
    frequency = np.array([levels], np.float32) / 3
    slots = data.draw(st.integers(0, len(levels)))
    inside = Placement.hottest(frequency, np.array([slots])).bucket(0)
    outside = np.setdiff1d(np.arange(len(levels)), inside)
    assert len(inside) == slots
    for i in inside:
        colder = frequency[0, outside] < frequency[0, i]
        assert (colder | ((frequency[0, outside] == frequency[0, i]) & (outside > i))).all()


@pytest.mark.parametrize("slots", [[5, 0], [-1, 0], [1], [1, 1, 1]])
def test_slots_that_a_layer_does_not_have_are_refused(slots):
    message = f"slots {slots} must be 2 numbers from 0 to 4"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Placement.hottest(np.zeros((2, 4), np.float32), np.array(slots))
