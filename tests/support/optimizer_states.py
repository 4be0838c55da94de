"""The state of the trainer's optimizer by parameter, for tests that look into it."""

from __future__ import annotations

from typing import Any

from pipeloom.train.optimizer import Optimizer


def optimizer_states(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return name -> range and values of the elements that are stepped (`master`), the number of steps, and flat moments."""
    states: dict[str, dict[str, Any]] = {}
    for master in optimizer.masters.all:
        state = optimizer.torch_optimizer(master.name).state.get(master.tensor, {})
        moments = {key: state[key].reshape(-1) for key in optimizer.moments(master.name) if key in state}
        step = float(state["step"]) if "step" in state else float(bool(moments))
        states[master.name] = {"start": master.start, "stop": master.stop, "step": step, **moments}
        states[master.name]["master"] = master.tensor.detach().reshape(-1)
    return states
