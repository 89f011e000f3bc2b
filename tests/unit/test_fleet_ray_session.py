"""Joining a Ray that is not there or does not fit, in one clear line. No Ray is started here."""

import socket
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.fleet import ray_session


def fake_ray(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """A Ray whose ``init`` fails; the list tells what was called."""
    called: list[str] = []

    def init(**_: Any) -> None:
        called.append("init")
        raise error

    fake: Any = SimpleNamespace(init=init, shutdown=lambda: called.append("shutdown"))
    monkeypatch.setattr(ray_session, "_load_ray", lambda _: fake)
    return called


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "ray://host", "host:port"])
def test_an_address_of_no_known_form_is_refused(address: str) -> None:
    """With the forms there are."""
    with (
        pytest.raises(ConfigError, match="auto, HOST:PORT or ray://HOST:PORT"),
        ray_session.open_session(address),
    ):
        pass


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    """Ray itself would try for minutes and then end the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        pytest.raises(ConfigError, match=rf"cannot reach a Ray cluster at 127\.0\.0\.1:{port}: .*refused"),
        ray_session.open_session(f"127.0.0.1:{port}"),
    ):
        pass


def test_another_version_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's report has both versions over several lines."""
    report = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\nThis process …"
    )
    called = fake_ray(monkeypatch, RuntimeError(report))
    with pytest.raises(ConfigError) as caught, ray_session.open_session("auto"):
        pass
    assert "another version of Ray or Python" in str(caught.value)
    assert "Ray: 2.9.0 Python: 3.10.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert called == ["init", "shutdown"]


def test_no_cluster_to_join_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` means one that runs on this machine."""
    fake_ray(monkeypatch, ConnectionError("Could not find any running Ray instance."))
    with pytest.raises(ConfigError, match="leave --address out"), ray_session.open_session("auto"):
        pass


def test_an_exit_out_of_ray_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library must not end the command without a word."""
    fake_ray(monkeypatch, SystemExit(15))
    with pytest.raises(ConfigError, match="cannot join the Ray cluster"), ray_session.open_session("auto"):
        pass


def test_ray_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base installation has no Ray."""
    missing: dict[str, ModuleType | None] = {"ray": None}
    for name, module in missing.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    with (
        pytest.raises(ConfigError, match=r"pip install 'prefixmesh\[worker,ray\]'"),
        ray_session.open_session(None),
    ):
        pass
