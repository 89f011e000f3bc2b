"""The demo's texts and their order."""

import pytest

from prefixmesh.demo.workload import MAX_TURNS, MAX_USERS, Conversation, asks_of, make_workload
from prefixmesh.errors import ConfigError


def test_two_tenants_with_policies_that_share_no_beginning() -> None:
    """Otherwise equal tokens would blur what belongs to whom."""
    one, other = make_workload(users=4, turns=4)
    assert one.name != other.name
    assert one.policy[:20] != other.policy[:20]
    assert min(len(one.policy.split()), len(other.policy.split())) > 900


def test_no_two_conversations_and_no_two_questions_of_one_are_the_same() -> None:
    """Else a whole conversation would come from the cache and flatter it."""
    for tenant in make_workload(users=MAX_USERS, turns=MAX_TURNS):
        assert len({user.questions[0] for user in tenant.users}) == MAX_USERS
        for user in tenant.users:
            assert len(set(user.questions)) == MAX_TURNS


def test_users_take_turns() -> None:
    """Everybody's first question comes before anybody's second."""
    tenant = make_workload(users=2, turns=2)[0]
    assert [(ask.turn, ask.user) for ask in asks_of(tenant)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_turn_sends_the_policy_and_the_whole_history() -> None:
    """As chat messages, the way an application does."""
    tenant = make_workload(users=1, turns=2)[0]
    conversation = Conversation(tenant.policy, tenant.users[0])
    first = conversation.ask(0)
    conversation.answered(0, "Yes.")
    second = conversation.ask(1)
    assert [message.role for message in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2].content == "Yes."


@pytest.mark.parametrize(("users", "turns"), [(0, 1), (1, 0), (MAX_USERS + 1, 1), (1, MAX_TURNS + 1)])
def test_more_than_there_are_texts_for_is_refused(users: int, turns: int) -> None:
    """With both ranges in the message."""
    with pytest.raises(ConfigError, match="1 to 16 users and 1 to 12 turns"):
        make_workload(users, turns)
