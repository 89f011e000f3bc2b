"""What counts as an address or a port: what can be called, and nothing that would raise or mean something else."""

import re
from typing import Final

from prefixmesh.errors import ConfigError

_ADDRESS: Final = re.compile(
    r"(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,32})?\]):(?P<port>[1-9][0-9]{0,4})"
)
"""A name of the network or an IPv4 address, or an IPv6 address with or without a zone: never what gRPC would take for another scheme."""


def is_address(text: str) -> bool:
    """Whether ``text`` is ``host:port`` with a port that can be called; IPv6 hosts stand in brackets."""
    parts = _ADDRESS.fullmatch(text)
    return parts is not None and 1 <= int(parts["port"]) <= 65535


def check_port(port: int, name: str = "port") -> None:
    """Raise ConfigError, which names the setting, for what is no port; 0 asks for a free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{name} must be 0 to 65535, got {port}")
