"""Who a call comes from: API keys, tenants, and what happens without credentials."""

from pathlib import Path

import pytest

from prefixmesh.errors import AccessDeniedError, AuthenticationError, ConfigError, InvalidRequestError
from prefixmesh.rpc.identity import (
    DEFAULT_TENANT,
    MAX_TENANT_CHARS,
    ApiKeys,
    hash_key,
    identify,
    is_loopback,
    new_key,
)


@pytest.fixture
def key() -> str:
    return new_key()


@pytest.fixture
def keys(key: str, tmp_path: Path) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\n{hash_key(key)} acme admin # the owner\n{hash_key('b')} bolt\n")
    return ApiKeys.from_file(file)


def test_a_key_gives_its_tenant(keys: ApiKeys, key: str) -> None:
    """The tenant and the rights come from the keys file."""
    caller = identify([("authorization", f"Bearer {key}")], keys)
    assert (caller.tenant, caller.is_admin) == ("acme", True)
    caller = identify([("authorization", "bearer b")], keys)
    assert (caller.tenant, caller.is_admin) == ("bolt", False)


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic b", "b"])
def test_a_missing_or_unknown_key_is_refused(keys: ApiKeys, value: str | None) -> None:
    """Nothing but a bearer token that is in the file is let in."""
    metadata = [] if value is None else [("authorization", value)]
    with pytest.raises(AuthenticationError):
        identify(metadata, keys)


def test_a_key_cannot_act_for_another_tenant(keys: ApiKeys, key: str) -> None:
    """A tenant named beside a key must be the key's own (F49)."""
    own = [("authorization", f"Bearer {key}"), ("x-prefixmesh-tenant", "acme")]
    assert identify(own, keys).tenant == "acme"
    with pytest.raises(AccessDeniedError):
        identify([own[0], ("x-prefixmesh-tenant", "bolt")], keys)


@pytest.mark.parametrize("name", ["authorization", "x-prefixmesh-tenant"])
def test_who_calls_is_said_once(keys: ApiKeys, key: str, name: str) -> None:
    """Where a caller and a proxy before us both say it, nothing is left to the order in which they come."""
    said = [("authorization", f"Bearer {key}"), ("x-prefixmesh-tenant", "acme")]
    twice = [*said, *(pair for pair in said if pair[0] == name)]
    for metadata in (twice, twice[::-1]):
        with pytest.raises(AuthenticationError, match=f"one {name}"):
            identify(metadata, keys)
    with pytest.raises(AuthenticationError):
        identify([("x-prefixmesh-tenant", "acme"), ("x-prefixmesh-tenant", "bolt")], None)


def test_without_keys_metadata_names_the_tenant() -> None:
    """On loopback without credentials the caller may say who it is, or be the default tenant."""
    assert identify([("x-prefixmesh-tenant", "acme")], None).tenant == "acme"
    assert identify([], None).tenant == DEFAULT_TENANT
    assert identify(None, None).tenant == DEFAULT_TENANT


@pytest.mark.parametrize("name", ["", "a\nb", "x" * (MAX_TENANT_CHARS + 1)])
def test_a_tenant_name_has_limits(name: str) -> None:
    """Empty, unprintable and overlong names are the caller's error."""
    with pytest.raises(InvalidRequestError, match="x-prefixmesh-tenant"):
        identify([("x-prefixmesh-tenant", name)], None)


@pytest.mark.parametrize(
    "line",
    [
        "abc acme",
        f"{'0' * 64}",
        f"{'0' * 64} acme root",
        f"{'0' * 64} a b c",
        f"{'x' * 64} acme",
        f"{'0' * 64} café",
        f"{'0' * 64} {'t' * (MAX_TENANT_CHARS + 1)}",
        f"{'a' * 64} acme admin",
    ],
)
def test_a_wrong_keys_file_names_the_line(tmp_path: Path, line: str) -> None:
    """A typing error in the file is found at start-up, not at the first call."""
    file = tmp_path / "keys"
    file.write_text(f"{'A' * 64} acme\n{line}\n", "utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        ApiKeys.from_file(file)


def test_a_keys_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A wrong file ends the start with a message, not with a trace."""
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        ApiKeys.from_file(file)


def test_an_empty_or_missing_keys_file_is_refused(tmp_path: Path) -> None:
    """A file without keys would lock everybody out, or, read otherwise, let everybody in."""
    (tmp_path / "keys").write_text("# nothing\n")
    for name in ("keys", "absent"):
        with pytest.raises(ConfigError):
            ApiKeys.from_file(tmp_path / name)


def test_keys_are_random_and_never_shown(keys: ApiKeys) -> None:
    """Two new keys differ, and a repr holds no hash."""
    assert new_key() != new_key()
    assert repr(keys) == "ApiKeys(2 keys)"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_only_loopback_is_loopback(host: str, expected: bool) -> None:
    """Everything that another machine might reach counts as reachable."""
    assert is_loopback(host) is expected
