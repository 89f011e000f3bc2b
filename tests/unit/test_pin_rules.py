"""Whose pins a caller may list."""

import pytest

from prefixmesh.errors import AccessDeniedError
from prefixmesh.ids import TenantId
from prefixmesh.router.pins.pin_rules import EVERYBODY, listed_owner
from prefixmesh.rpc.identity import Caller


def caller(name: str, *, is_admin: bool = False) -> Caller:
    return Caller(tenant=TenantId(name), is_admin=is_admin)


def test_tenant_lists_its_own() -> None:
    assert listed_owner(caller("acme"), "") == listed_owner(caller("acme"), "acme") == "acme"
    for owner in ("other", EVERYBODY):
        with pytest.raises(AccessDeniedError):
            listed_owner(caller("acme"), owner)


def test_administrator_lists_anybodys() -> None:
    boss = caller("boss", is_admin=True)
    assert (listed_owner(boss, ""), listed_owner(boss, "acme")) == ("boss", "acme")
    assert listed_owner(boss, EVERYBODY) is None


def test_tenant_that_is_called_everybody_lists_its_own() -> None:
    """Any printable name may be a tenant's."""
    assert listed_owner(caller(EVERYBODY), "") == listed_owner(caller(EVERYBODY), EVERYBODY) == EVERYBODY
