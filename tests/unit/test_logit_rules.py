"""Penalties, biases and forbidden stops against a naive reading of their definitions, row by row in Python."""

import math
from collections import Counter
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.logit_rules import RuledRow, apply_rules
from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.token_tally import TokenTally

VOCAB: Final = 12
IDS = st.integers(0, VOCAB - 1)


def params(**rules: object) -> EngineSampling:
    plain: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "max_tokens": 9,
        "stop_token_ids": (3, 5, 2**31 - 1),
    }
    return EngineSampling(**(plain | rules))  # type: ignore[arg-type]


def with_bias(bias: dict[int, float], **rules: object) -> EngineSampling:
    return params(bias_ids=tuple(bias), biases=tuple(bias.values()), **rules)


PARAMS = st.builds(
    with_bias,
    st.dictionaries(IDS, st.sampled_from([-100.0, -1.5, 0.0, 3.0]), max_size=3),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.4]),
    min_tokens=st.integers(0, 4),
)
ROWS = st.lists(
    st.tuples(PARAMS, st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, max_size=6)),
    min_size=1,
    max_size=5,
)


def tallied(prompt: list[int], answer: list[int]) -> TokenTally:
    """As it stands after the answer came one by one."""
    ids = np.array(prompt + answer, dtype=np.int32)
    tally = TokenTally(ids, len(prompt))
    for length in range(len(prompt), len(ids) + 1):
        tally.catch_up(length)
    return tally


def naive(logits: list[float], p: EngineSampling, prompt: list[int], answer: list[int]) -> list[float]:
    """The definitions, one row, one token at a time."""
    found = []
    bias = dict(zip(p.bias_ids, p.biases, strict=True))
    for token, logit in enumerate(logits):
        if token in prompt or token in answer:
            logit = logit / p.repetition_penalty if logit > 0 else logit * p.repetition_penalty
        logit -= p.frequency_penalty * answer.count(token)
        logit -= p.presence_penalty * (token in answer)
        logit += bias.get(token, 0.0)
        found.append(-math.inf if token in p.stop_token_ids and len(answer) < p.min_tokens else logit)
    return found


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 100))
def test_every_row_is_what_the_definitions_say(
    rows: list[tuple[EngineSampling, list[int], list[int]]], seed: int
) -> None:
    """Ruled rows among plain ones, which stay as they were."""
    before = torch.randn((2 * len(rows), VOCAB), generator=torch.Generator().manual_seed(seed))
    after = before.clone()
    ruled = [
        RuledRow(2 * n, p, len(answer), tallied(prompt, answer)) for n, (p, prompt, answer) in enumerate(rows)
    ]
    apply_rules(after, ruled)
    assert torch.equal(after[1::2], before[1::2])
    for n, row in enumerate(rows):
        assert after[2 * n].tolist() == pytest.approx(naive(before[2 * n].tolist(), *row), rel=1e-5, abs=1e-5)


def test_rules_change_logits_that_a_model_made_without_gradients() -> None:
    """In place, also where torch guards such tensors."""
    with torch.inference_mode():
        logits = torch.zeros((1, VOCAB))
    apply_rules(logits, [RuledRow(0, with_bias({4: 2.0}), 0)])
    assert logits[0, 4] == 2.0


def test_only_requests_that_ask_for_it_are_ruled() -> None:
    assert not params().changes_logits
    for rule in (
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"bias_ids": (1,), "biases": (1.0,)},
    ):
        assert params(**rule).changes_logits


@pytest.mark.parametrize("steps", [1, 7, 300])
def test_a_tally_says_what_the_tokens_say_however_they_came(steps: int) -> None:
    """One by one, in lumps as after a resumption, or all at once; beyond the room that it began with."""
    rng = np.random.default_rng(steps)
    ids = rng.integers(0, 200, size=350).astype(np.int32)
    tally = TokenTally(ids, 50)
    for length in range(50, 351, steps):
        tally.catch_up(length)
        assert tally.prompt_ids().tolist() == sorted(set(ids[:50].tolist()))
        counted = dict(zip(tally.answer_ids.tolist(), tally.answer_counts.tolist(), strict=True))
        assert counted == Counter(ids[50:length].tolist())
