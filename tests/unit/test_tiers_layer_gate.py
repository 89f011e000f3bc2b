"""Where a step waits for layers: one bound for the step as a whole, and what ends a wait."""

import pytest

from prefixmesh.errors import LoadBackError
from prefixmesh.worker.tiers.layer_gate import Arriving, LayerGate


class Clock:
    """Goes on by ``step_s`` at each look."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_the_bound_is_for_all_waits_of_a_step_together() -> None:
    """Each of three waits takes 4 s of 10: the fourth layer finds no time left, and the next step has its own."""
    joined: list[str] = []
    gate, job = LayerGate(joined.append, Clock(4.0)), Arriving(7)
    for layer in range(3):
        gate.arrived(job, f"layer {layer}")
    gate.expect([job], 10.0)
    for layer in range(3):
        gate.await_layer(layer)
    assert joined == ["layer 0", "layer 1", "layer 2"]
    with pytest.raises(LoadBackError, match="layer 3 of load-back 7 did not come in time"):
        gate.await_layer(3)
    gate.arrived(job, "layer 3")
    gate.expect([job], 10.0)
    gate.await_layer(3)
    assert joined[-1] == "layer 3"


def test_a_layer_is_joined_with_all_that_bring_a_part_of_it() -> None:
    joined: list[str] = []
    gate, one, other = LayerGate(joined.append), Arriving(1), Arriving(2)
    gate.arrived(one, "one")
    gate.arrived(other, "other")
    gate.expect([one, other], 0.0)
    gate.await_layer(0)
    assert joined == ["one", "other"]


def test_a_failure_is_told_though_all_layers_had_come() -> None:
    """What failed is worth nothing, whatever came before."""
    gate, job = LayerGate(lambda mark: None), Arriving(1)
    gate.arrived(job, None)
    gate.failed(job, "a lost device")
    gate.expect([job], 0.0)
    with pytest.raises(LoadBackError, match="load-back 1 failed: a lost device"):
        gate.await_layer(0)


def test_a_closed_gate_fails_those_who_expect_and_lets_all_others_through() -> None:
    gate, job = LayerGate(lambda mark: None), Arriving(1)
    gate.arrived(job, None)
    gate.close()
    gate.await_layer(0)
    gate.expect([job], 0.0)
    with pytest.raises(LoadBackError, match="the mover was closed"):
        gate.await_layer(0)
