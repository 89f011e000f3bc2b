"""F77: what a tenant's own answers tell it of others' prompts: nothing, while within a tenant they tell all. And what they do tell: load."""

import random

import pytest

from tests.support.probing import PIN_TOKENS, Probe, Probing, Trial, area_under_curve

PAIRS = 2000
"""Of trials with the guess asked, and without: by chance alone the area deviates from a half by ``sqrt(1 / (6 * PAIRS))``, 0.009."""

EITHER = pytest.mark.parametrize("pinned", [False, True], ids=["no-pin", "public-pin"])
PROBES = pytest.mark.parametrize("probe", ["after", "meanwhile", "order"])


def trials(probe: Probe, prober: str, *, pinned: bool, pairs: int, mirrored: bool = False) -> list[Trial]:
    """As many with the guess asked as without, in an order by chance; ``mirrored``, each the other way."""
    probing = Probing(1, prober=prober, pinned=pinned)
    cases = [True, False] * pairs
    random.Random(1).shuffle(cases)
    return [probing.trial(probe, was_asked=was_asked is not mirrored) for was_asked in cases]


@EITHER
@PROBES
def test_nothing_that_a_prober_sees_depends_on_what_another_tenant_asks(probe: Probe, pinned: bool) -> None:
    """Two runs that differ in the other's prompts alone look the same to the last bit: time, order, cached tokens, worker."""
    views = []
    for was_asked in (True, False):
        probing = Probing(1, prober="other", pinned=pinned)
        views.append([probing.trial(probe, was_asked=was_asked).seen for _ in range(8)])
    assert views[0] == views[1]
    # A worker has the common beginning or not; of what lies behind it there is nothing to find.
    found = {seen.cached_tokens for view in views[0] for seen in view}
    assert PIN_TOKENS in found <= {0, PIN_TOKENS}


@EITHER
@PROBES
def test_within_the_tenant_the_same_probe_tells(probe: Probe, pinned: bool) -> None:
    """Or the probe would be worth nothing: a hit is soon, and comes before what must be computed."""
    told = trials(probe, "victim", pinned=pinned, pairs=12)
    # Asked meanwhile, it may have to wait for what the other is still computing.
    assert area_under_curve(told) >= (0.85 if probe == "meanwhile" else 0.95)


@pytest.mark.slow
@EITHER
@PROBES
def test_by_time_or_order_a_prober_tells_another_tenants_prompt_as_by_tossing_a_coin(
    probe: Probe, pinned: bool
) -> None:
    """Whatever chance does to a trial is done to its mirror image, too: what is left is what the prompts do."""
    told = trials(probe, "other", pinned=pinned, pairs=100)
    told += trials(probe, "other", pinned=pinned, pairs=100, mirrored=True)
    assert area_under_curve(told) == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
@pytest.mark.deep
@EITHER
@PROBES
def test_nor_does_a_prober_tell_it_where_chance_alone_is_against_it(probe: Probe, pinned: bool) -> None:
    told = trials(probe, "other", pinned=pinned, pairs=PAIRS)
    assert area_under_curve(told) == pytest.approx(0.5, abs=0.05)


def test_that_another_tenant_works_at_all_is_told_by_the_load_and_is_not_hidden() -> None:
    """So that nobody takes the tests above for more than they say: who shares a fleet can see that it is busy."""
    probing = Probing(1, prober="other", pinned=True)
    told = [probing.busy(is_busy=index % 2 == 0) for index in range(24)]
    assert area_under_curve(told) <= 0.2
