"""Costs in blocks: what is to be prefilled, less what is cached, and what is active. The rule of NVIDIA Dynamo's KV router. Pure.

Source: the design page of its router. A worker costs ``weight * prefill blocks + decode blocks``, both as they would be if the request
went there: the blocks still to be prefilled, the request's among them less the overlap that the worker has cached, and the blocks of the
requests that are active, the new one among them. What it calls decode blocks it counts from the moment in which a request is sent until it
ends: a prompt that waits is in both. The least is taken. A block on the device is a credit of 1, one on the host of 0.75; the weight is 1,
the temperature 0, both the defaults.
"""

from typing import Final

from prefixmesh.sim.rivals.view import RivalView, least

DEVICE_CREDIT: Final = 1.0
HOST_CREDIT: Final = 0.75


def block_cost(view: RivalView) -> int:
    """See the module. O(workers)."""
    costs = [
        waiting + view.prompt_blocks - (DEVICE_CREDIT * device + HOST_CREDIT * (held - device)) + active
        for waiting, device, held, active in zip(
            view.prefill_blocks, view.device_blocks, view.held_blocks, view.active_blocks, strict=True
        )
    ]
    return least(costs, view.turn)
