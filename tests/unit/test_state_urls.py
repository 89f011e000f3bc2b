"""A state's URL may have a password: what is shown of it, and how else than by a command's arguments it is given."""

import click
import pytest

from prefixmesh.cli.up import up
from prefixmesh.errors import ConfigError
from prefixmesh.router.__main__ import main as router
from prefixmesh.router.open_state import open_store
from prefixmesh.router_config import RouterConfig
from prefixmesh.state_url import check_state_url, without_password

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@10.0.0.1:6379/1", "redis://***@10.0.0.1:6379/1"),
        ("rediss://user:s3cret@redis/0", "rediss://***@redis/0"),
        ("redis://:s3cret:s3cret@s3cret@redis/0", "redis://***@redis/0"),
        ("redis://:s3cret/#?s3cret@redis/0", "redis://***@redis/0"),
        ("redis://redis/0?password=s3cret", "redis://redis/0?***"),
        ("redis:/:s3cret@redis", "***@redis"),
        ("redis://10.0.0.1:6379/1", "redis://10.0.0.1:6379/1"),
        ("file:///home/a:b@c/state.json", "file:///home/a:b@c/state.json"),
        ("memory://", "memory://"),
    ],
)
def test_nothing_of_a_password_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url", ["redis://:s3cret#1@redis/0", "redis://:s3cret/1@redis/0", "redi://:s3cret@redis/0"]
)
def test_url_that_is_refused_keeps_its_password_to_itself(url: str) -> None:
    """A password that is not quoted breaks the URL, and what breaks is then taken for the port."""
    with pytest.raises(ConfigError, match="state") as refused:
        open_store(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", ["redis://redis/zero", "redis://:s3cret@redis:6379/0x", "rediss://redis/0/1"])
def test_redis_has_numbered_databases_alone(url: str) -> None:
    """What is no number would be database 0, and that may be another fleet's."""
    with pytest.raises(ConfigError, match=r"must end in the number of a database") as refused:
        check_state_url(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["redis://redis", "redis://:s3/cret@redis:6379/12", "redis://redis/0?timeout=1"]
)
def test_a_database_may_be_left_out_and_stand_before_options(url: str) -> None:
    check_state_url(url)


def test_a_router_that_knows_no_workers_tells_both_ways_to_name_them() -> None:
    with pytest.raises(ConfigError, match=r"--worker HOST:PORT.*--state file://PATH or redis://"):
        RouterConfig(workers=())


@pytest.mark.parametrize("command", [up, router], ids=["up", "router"])
def test_state_may_be_given_by_the_environment(
    command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others do not see it."""
    url = f"redis://:{SECRET}@redis/0"
    monkeypatch.setenv("PREFIXMESH_STATE", url)
    assert command.make_context("it", []).params["state"] == url
