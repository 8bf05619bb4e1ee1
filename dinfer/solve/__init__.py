"""Solving: how many bytes the neurons get, how many slots each layer gets, and the plan of both.

The solvers are functions of the names of their modules: dinfer.solve.greedy.greedy and
dinfer.solve.ilp.ilp.
"""

from dinfer.solve.budget import (
    budget_for_share,
    check_speed,
    host_breakdown,
    kv_capacity,
    memory_breakdown,
    neuron_capacity,
    speed_ceiling,
)
from dinfer.solve.ilp import Solution, layer_seconds, minimum_slots
from dinfer.solve.planner import SOLVERS, make_plan

__all__ = [
    "SOLVERS",
    "Solution",
    "budget_for_share",
    "check_speed",
    "host_breakdown",
    "kv_capacity",
    "layer_seconds",
    "make_plan",
    "memory_breakdown",
    "minimum_slots",
    "neuron_capacity",
    "speed_ceiling",
]
