"""Whether the host tiers of one machine's workers fit in its memory together: told before anything is loaded.

Each worker makes its own sums at its start and refuses what does not fit. It knows of no other: of several that start at one moment each
sees all the memory there is. So whoever starts them adds them up. Of a cluster that was joined nothing is known here, and of a GPU's pool
only a size that was asked for outright; there each worker's own sums must do.
"""

from typing import TYPE_CHECKING, Final

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.fleet.plan import FleetPlan, WorkerPlan
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import resolve_model

if TYPE_CHECKING:
    from prefixmesh.worker.model.memory import DeviceMemory, MemorySums

_MIB: Final = 2**20
_GIB: Final = 2**30
_GPU_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "auto": 2}
"""Of a GPU's ``auto``: which it is, only the GPU could tell, and this process takes no memory of one."""

_LOWER: Final = "lower --hicache-size, --hicache-ratio, --max-total-tokens or --mem-fraction-static, or ask for fewer --workers"


def check_host_tiers(plan: FleetPlan) -> None:
    """Raises ConfigError with the sums. Needs the model's files here, and torch, whose loading takes seconds; neither where there is no host
    tier to check."""
    worker = plan.workers[0]
    if plan.request.address is not None or not worker.config.engine.has_host_tier:
        return
    from prefixmesh.worker.model.memory import read_cpu_memory

    model = read_model_config(resolve_model(worker.config.engine.model))
    check_sums(worker, len(plan.workers), model, read_cpu_memory(0))


def check_sums(worker: WorkerPlan, workers: int, model: ModelConfig, memory: "DeviceMemory") -> None:
    """Refuse ``workers`` such workers where ``memory`` is what this machine has left. Raises ConfigError with the sums."""
    engine = worker.config.engine
    if worker.num_gpus:
        each, terms = _host_bytes_beside_gpu(engine, model), "host tier"
    else:
        sums = _sums_on_cpu(engine, model, memory)
        each, terms = sums.on_device, sums.describe()
    needed = each * workers
    if needed > memory.free:
        of_each = f"{each / _MIB:,.0f} MiB" + (f" ({terms})" if terms else "")
        raise ConfigError(
            f"the host tiers of {workers} workers do not fit in this machine's memory together: {workers} x {of_each} = "
            f"{needed / _MIB:,.0f} MiB, and {memory.free / _MIB:,.0f} MiB are free ({memory.source}); {_LOWER}"
        )


def weight_bytes(model: ModelConfig, dtype_bytes: int, *, packs: bool) -> int:
    """About what a model's weights take in memory: its linear layers and its embedding, without norms and biases. A head that is packed
    (``worker.model.linear``) is a copy of its own also where it is tied to the embedding."""
    sizes = LinearSizes.of(model)
    layer = sum(wide * high for wide, high in sizes.layer.values())
    ends = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings and not packs else 2)
    return (sizes.num_layers * layer + ends) * dtype_bytes


def _sums_on_cpu(engine: EngineConfig, model: ModelConfig, memory: "DeviceMemory") -> "MemorySums":
    """What one worker's own sums will be, as if it were alone: those that it refuses by itself are refused here already."""
    import torch

    from prefixmesh.worker.model.device import resolve_dtype
    from prefixmesh.worker.model.linear import can_pack
    from prefixmesh.worker.model.memory import DeviceMemory, size_host_pool, size_pool

    cpu = torch.device("cpu")
    dtype = resolve_dtype(engine.dtype, cpu)
    weights = weight_bytes(model, dtype.itemsize, packs=can_pack(cpu, dtype))
    beside = DeviceMemory(total=memory.free, free=max(0, memory.free - weights), source=memory.source)
    sums = size_pool(
        memory=beside,
        weights_bytes=weights,
        kv_bytes_per_token=model.kv_bytes_per_token(dtype.itemsize),
        page_size=engine.page_size,
        context_length=model.context_length,
        mem_fraction_static=engine.mem_fraction_static,
        max_total_tokens=engine.max_total_tokens,
        on_cpu=True,
    )
    return size_host_pool(
        sums, ratio=engine.hicache_ratio, size_gib=engine.hicache_size, staging_bytes=0, host_memory=None
    )


def _host_bytes_beside_gpu(engine: EngineConfig, model: ModelConfig) -> int:
    """Of one worker's host tier; 0 where it depends on a GPU's memory."""
    if engine.hicache_size:
        return int(engine.hicache_size * _GIB)
    per_token = model.kv_bytes_per_token(_GPU_DTYPE_BYTES[engine.dtype])
    return int((engine.max_total_tokens or 0) * engine.hicache_ratio) * per_token
