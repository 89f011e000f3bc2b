"""A program: binds every call of the ``flashinfer`` backend to the signatures of the library that is on the path.

The backend computes on the stand-in (``fake_flashinfer``); each call that the stand-in takes is bound to the real class's method of
that name first, and one that does not fit raises. Prints what was bound, as JSON.
"""

import importlib
import inspect
import json
import sys
from typing import Any

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model import flashinfer_attention
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention
from tests.support import fake_flashinfer
from tests.support.paged_attention import PagedSetting, Sharer, alone

WRAPPERS = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
)
CASCADE = [alone(70, 1), Sharer(0, 64, 66, 9), Sharer(1, 0, 0, 12), Sharer(0, 16, 30, 1)]


def main() -> None:
    real = importlib.import_module("flashinfer")
    bound: set[tuple[str, str, tuple[str, ...]]] = set()
    for name in WRAPPERS:
        for method in ("__init__", "plan", "run"):
            _bind_first(getattr(fake_flashinfer, name), getattr(real, name), method, bound)
    sys.modules["flashinfer"] = fake_flashinfer
    flashinfer_attention.WORKSPACE_BYTES = 64  # type: ignore[misc]  # the stand-in needs none
    for work in ([alone(9, 1)], [alone(0, 4)], CASCADE):
        setting = PagedSetting(work)
        backend = FlashInferAttention(setting.config, setting.pool, CascadeRule(min_reads=1))
        setting.check(backend, 1e-6)
    decodes = PagedSetting([alone(9, 1), alone(4, 1)])
    backend = FlashInferAttention(decodes.config, decodes.pool)
    decodes.check(backend.decode_of_size(2), 1e-6)
    print(json.dumps({"version": real.__version__, "bound": sorted(bound)}))


def _bind_first(fake: Any, real: Any, method: str, bound: set[tuple[str, str, tuple[str, ...]]]) -> None:
    original = getattr(fake, method)
    # Newer ones have the decode wrapper's plan take any keywords and pass them on.
    passed_on = method == "plan" and hasattr(real, "_plan_impl")
    signature = inspect.signature(real._plan_impl if passed_on else getattr(real, method))

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is fake:  # not what the stand-in's classes ask of each other
            signature.bind(self, *args, **kwargs)
            bound.add((fake.__name__, method, tuple(kwargs)))
        return original(self, *args, **kwargs)

    setattr(fake, method, checked)


if __name__ == "__main__":
    main()
