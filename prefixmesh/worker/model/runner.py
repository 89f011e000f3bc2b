"""Runs one step of the model: the one door from the engine to torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.decode_graphs import DecodeGraphs, GraphAttention, GraphDevice
from prefixmesh.worker.model.device import wait_for_device
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.llama import Llama, StepTensors
from prefixmesh.worker.model.lora import LoraSlots
from prefixmesh.worker.model.weights import LlamaWeights

PROFILE_PROMPT_TOKENS: Final = 256
"""Long enough that the rate is that of long prompts within some 15 %, short enough to take a fraction of a second."""

PROFILE_PREFILLS: Final = 3
"""The quickest of so many counts: others on the machine can only make one slower, and a router believes the figure until traffic
corrects it, of which a worker that seems slow gets little."""

PROFILE_DECODE_STEPS: Final = 4

FEW_TOKENS: Final = 4
"""Steps of at most so many new tokens may be computed on one thread: on a CPU such a step is read rather than multiplied, for which one
core may do, and each of its thousand operations is so short that threads wait for each other longer than they work."""

ALONE_LIMIT: Final = 1.1
"""One thread does for such steps unless it takes more than so many times as long as all of them: it waits for nobody, which tells as
soon as others want the cores, and leaves those to them."""


@dataclass(frozen=True, slots=True)
class ModelRates:
    """What the model was measured to do on this machine."""

    prefill_tokens_per_s: float
    decode_step_ms: float
    """One sequence alone, at about ``PROFILE_PROMPT_TOKENS`` of context."""


class ModelRunner:
    """A model, its KV pool and an attention backend. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        pool: KVPool,
        backend: AttentionBackend,
        adapters: LoraSlots | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._device = weights.embedding.device
        self._backend = backend
        self._adapters = adapters
        self._llama = Llama(config, weights, pool)
        self._graphs: DecodeGraphs | None = None
        self._few_alone = False

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Compute one step: K/V of the ``T`` new tokens go to the pool, logits of the ``R`` wanted rows come back.

        Returns float32 [R, vocab_size] on the model's device, valid until the next step. DeviceLostError when the GPU failed, in
        this step or since the last; LoadBackError when KV that the step reads did not come, and the step is void.
        """
        # Whoever samples waits for the logits, and finds errors. Here only what that left undone is waited for, an unsampled step or a
        # failed one: a library's plan must not overwrite pinned memory of which the step before has yet to be copied.
        wait_for_device(self._device)
        replayed = None if self._graphs is None else self._graphs.forward(plan)
        logits = self._compute(plan) if replayed is None else replayed
        if not len(logits):
            wait_for_device(self._device)  # nobody else does, and the time that it takes is this step's
        return logits

    @torch.inference_mode()
    def record_decodes(
        self, attention: GraphAttention, device: GraphDevice, sizes: Sequence[int]
    ) -> DecodeGraphs:
        """Record decode steps of these sizes; ``forward`` replays them from then on. Seconds. Writes only scratch pages."""
        graphs = DecodeGraphs(self._llama, self.pool, self.config.vocab_size, attention, device, sizes)
        self._graphs = graphs
        return graphs

    @property
    def replays(self) -> bool:
        """Whether any decode step can be replayed."""
        return self._graphs is not None and bool(self._graphs.sizes)

    def replay_gain_s(self, plan: BatchPlan) -> float:
        """Seconds by which replaying such a step is quicker than computing it; like ``profile`` only before the pool is used."""
        computed_s, replayed_s = (
            min(self._timed(plan, way) for _ in range(PROFILE_DECODE_STEPS))
            for way in (self._compute, self.forward)
        )
        return max(0.0, computed_s - replayed_s)

    def profile(self) -> ModelRates:
        """Warm up and measure; takes about two seconds. Overwrites the first pages of the pool, so only before it is used. On a CPU
        what it finds also decides whether steps of few tokens are computed on one thread from then on."""
        tokens = max(
            1, min(PROFILE_PROMPT_TOKENS, self.pool.total_tokens - 1, self.config.context_length - 1)
        )
        prompt = single_sequence_plan(0, tokens, self.pool.page_size)
        self._timed(prompt)  # allocates and chooses kernels
        prefill_s = min(self._timed(prompt) for _ in range(PROFILE_PREFILLS))
        step = single_sequence_plan(tokens, 1, self.pool.page_size) if self.pool.total_tokens > 1 else prompt
        self._few_alone = False
        decode_s = self._least(step)
        if self._device.type == "cpu" and torch.get_num_threads() > 1:
            self._few_alone = True
            alone_s = self._least(step)
            self._few_alone = alone_s <= ALONE_LIMIT * decode_s
            decode_s = alone_s if self._few_alone else decode_s
        return ModelRates(prefill_tokens_per_s=tokens / prefill_s, decode_step_ms=decode_s * 1e3)

    @torch.inference_mode()
    def _compute(self, plan: BatchPlan) -> torch.Tensor:
        if not self._few_alone or len(plan.token_ids) > FEW_TOKENS:
            return self._computed(plan)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # both ways together half a microsecond
        try:
            return self._computed(plan)
        finally:
            torch.set_num_threads(threads)

    def _computed(self, plan: BatchPlan) -> torch.Tensor:
        self._backend.prepare(plan)
        assert plan.adapter_slots is None or self._adapters is not None
        lora = None if self._adapters is None else self._adapters.step(plan)
        return self._llama(StepTensors.of(plan, self._device, self._llama.least_rows), self._backend, lora)

    def _least(self, plan: BatchPlan) -> float:
        self._timed(plan)  # allocates and chooses kernels
        return min(self._timed(plan) for _ in range(PROFILE_DECODE_STEPS))

    def _timed(self, plan: BatchPlan, way: Callable[[BatchPlan], torch.Tensor] | None = None) -> float:
        started = time.perf_counter()
        (way or self.forward)(plan)
        wait_for_device(self._device)
        return time.perf_counter() - started


def single_sequence_plan(seen: int, new: int, page_size: int) -> BatchPlan:
    """A plan for one sequence of token 0 in the pool's first pages: ``new`` tokens after ``seen`` ones."""
    positions = np.arange(seen, seen + new, dtype=np.int32)
    pages = -(-(seen + new) // page_size)
    return BatchPlan(
        token_ids=np.zeros(new, dtype=np.int32),
        positions=positions,
        out_slots=positions,
        qo_indptr=np.array([0, new], dtype=np.int32),
        kv_indptr=np.array([0, pages], dtype=np.int32),
        kv_indices=np.arange(pages, dtype=np.int32),
        last_page_len=np.array([seen + new - (pages - 1) * page_size], dtype=np.int32),
        logit_rows=np.array([new - 1], dtype=np.int32),
    )
