"""Which attention backend a model gets on a device, and from where on it cascades."""

import logging

import torch

from prefixmesh.config import AttentionBackendName
from prefixmesh.errors import ConfigError
from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.cascade_bound import MakeBackend, cpu_rule, measured_rule
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention, unsupported
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.torch_attention import TorchAttention

logger = logging.getLogger(__name__)


def check_backend(
    wanted: AttentionBackendName, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """ConfigError when ``flashinfer`` is asked for by name where it cannot serve; before weights are loaded for nothing."""
    reason = unsupported(config, dtype, device)
    if wanted == "flashinfer" and reason:
        raise ConfigError(f"attention_backend=flashinfer cannot be used: {reason}")


def choose_attention(
    config: ModelConfig, pool: KVPool, wanted: AttentionBackendName = "auto"
) -> AttentionBackend:
    """``auto``: ``flashinfer`` on a GPU where it can serve the model and works, else ``torch``. ConfigError, saying why, when
    ``flashinfer`` is asked for by name and that is not so.

    On a GPU the cascade's bound is measured, which reads the pool's first pages: only before the pool is used. With ``flashinfer``
    that also compiles its kernels where they are not yet: minutes, once for each machine.
    """
    why_not = "asked for" if wanted == "torch" else unsupported(config, pool.dtype, pool.device)
    if not why_not:
        try:
            return _with_rule("flashinfer", backend_maker(config, pool, flashinfer=True), config, pool)
        except Exception as error:  # its compiler may be missing, its kernels may not fit the driver
            why_not = f"{type(error).__name__}: {error}"
            logger.warning("attention_failed backend=flashinfer reason=%s", why_not)
    if wanted == "flashinfer":
        raise ConfigError(f"attention_backend=flashinfer cannot be used: {why_not}")
    logger.info("attention_not_chosen backend=flashinfer reason=%s", why_not)
    return _with_rule("torch", backend_maker(config, pool, flashinfer=False), config, pool)


def backend_maker(
    config: ModelConfig, pool: KVPool, *, flashinfer: bool, beside: FlashInferAttention | None = None
) -> MakeBackend:
    """Makes one backend for any rule. Those of ``flashinfer`` share their workspaces, and ``beside``'s where it is given: no two may
    be used at once."""
    first = beside

    def make(rule: CascadeRule | None) -> AttentionBackend:
        nonlocal first
        if not flashinfer:
            return TorchAttention(config, pool, rule)
        backend = FlashInferAttention(config, pool, rule, first)
        first = first or backend
        return backend

    return make


def _with_rule(name: str, make: MakeBackend, config: ModelConfig, pool: KVPool) -> AttentionBackend:
    on_cpu = pool.device.type == "cpu"
    rule = cpu_rule(config.num_kv_heads) if on_cpu else measured_rule(make, pool, config.num_heads)
    logger.info(
        "attention_chosen backend=%s cascade_min_reads=%s", name, None if rule is None else rule.min_reads
    )
    return make(rule)
