"""The simulator: replays a trace under a plan on a machine's costs; loads no torch."""

from dinfer.sim.simulate import simulate

__all__ = ["simulate"]
