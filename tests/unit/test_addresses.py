"""What counts as the address of a worker or a router: what can be called, and nothing that would raise or mean something else."""

import pytest

from prefixmesh.addresses import is_address


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:80", "localhost:1", "w-1.svc.cluster_2.local:65535", "[::1]:80", "[fe80::1%eth0]:9"],
)
def test_what_can_be_called_is_an_address(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:0",
        "host:65536",
        "host:080",
        "::1:80",
        "[]:80",
        "[unix:/run/socket]:80",
        "dns:///host:80",
        "two words:80",
        "line\n:80",
        "host:80\n",
        "user@host:80",
        "a/b:80",
        "\0:1",
        "host:１２３",  # decimal digits, too, to Python
        "h" * 300 + ":80",
    ],
)
def test_what_cannot_be_called_is_none(text: str) -> None:
    assert not is_address(text)


def test_a_port_of_thousands_of_digits_is_refused_without_being_read() -> None:
    assert not is_address("host:" + "1" * 5000)
