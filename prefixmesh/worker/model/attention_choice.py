"""Which attention backend a model gets on a device, and from where on it cascades."""

import logging

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.cascade_bound import cpu_rule, measured_rule
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention, unsupported
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.torch_attention import TorchAttention

logger = logging.getLogger(__name__)


def choose_attention(config: ModelConfig, pool: KVPool) -> AttentionBackend:
    """``torch`` on a CPU; on a GPU ``flashinfer`` where it can serve the model, else ``torch``. On a GPU the cascade's bound is
    measured, which reads the pool's first pages: only before the pool is used."""
    if pool.device.type == "cpu":
        return TorchAttention(config, pool, cpu_rule(config.num_kv_heads))
    reason = unsupported(config, pool.dtype, pool.device)

    def make(rule: CascadeRule | None) -> AttentionBackend:
        return TorchAttention(config, pool, rule) if reason else FlashInferAttention(config, pool, rule)

    rule = measured_rule(make, pool, config.num_heads)
    logger.info(
        "attention_chosen backend=%s cascade_min_reads=%s reason=%s",
        "torch" if reason else "flashinfer",
        None if rule is None else rule.min_reads,
        reason,
    )
    return make(rule)
