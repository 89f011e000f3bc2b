"""``prefixmesh pin`` and ``prefixmesh heat`` against a scripted ``Router`` service: what they ask for, show, and end with."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefixmesh.cli.main import main
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.tokens import pack
from tests.support.scripted_pins import ScriptedPins, serving_pins

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFIXMESH_API_KEY", raising=False)
    return tmp_path


async def run(pins: ScriptedPins, *commands: tuple[str, ...]) -> list[Result]:
    """Run commands one after the other, in threads: the service lives on this event loop."""
    async with serving_pins(pins) as address:
        return [
            await asyncio.to_thread(CliRunner().invoke, main, [*command, "--address", address])
            for command in commands
        ]


async def one(pins: ScriptedPins, *command: str) -> Result:
    (result,) = await run(pins, command)
    return result


async def test_added_pin_carries_every_field_that_was_given() -> None:
    pins = ScriptedPins(held=2)
    command = (
        "pin", "add", "policy", "--text", "Be kind.", "--replicas", "2", "--tier", "host", "--ttl", "1h30m", "--owner", "beta",
        "--for-tenant", "gamma", "--adapter", "lora", "--extra-key", "blue",
    )  # fmt: skip
    added = await one(pins, *command)
    assert added.exit_code == 0, added.output
    assert pins.pins["beta", "policy"] == pb.PinSpec(
        name="policy", owner="beta", tenant="gamma", adapter="lora", extra_key="blue", text="Be kind.", replicas=2,
        tier=control.TIER_HOST, ttl_ms=5_400_000,
    )  # fmt: skip
    assert "policy of beta, for gamma" in added.stdout
    assert "held by 2 of 2" in added.stdout


async def test_prompts_come_in_every_form(tmp_path: Path) -> None:
    """Text, its file, a chat's file, a system prompt and ids: what is asked for is the same as in a request."""
    (tmp_path / "text").write_text("hello")
    (tmp_path / "chat").write_text(json.dumps(CHAT))
    (tmp_path / "ids").write_text("[5, 17,\n9]")
    pins = ScriptedPins()
    results = await run(
        pins,
        ("pin", "add", "a", "--text", "hello"),
        ("pin", "add", "b", "--text-file", str(tmp_path / "text")),
        ("pin", "add", "c", "--chat-file", str(tmp_path / "chat")),
        ("pin", "add", "d", "--system", "be brief"),
        ("pin", "add", "e", "--token-ids-file", str(tmp_path / "ids"), "--public"),
    )
    assert [result.exit_code for result in results] == [0] * 5, results
    a, b, c, d, e = pins.pins.values()
    assert a.text == b.text == "hello"
    assert [(turn.role, turn.content) for turn in c.chat.messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]
    assert list(d.chat.messages) == list(c.chat.messages)[:1]
    assert (e.tokens.ids, e.public, e.replicas, e.ttl_ms) == (pack([5, 17, 9]), True, 0, 0)


async def test_wait_ends_when_all_hold_it_and_tells_of_each_step() -> None:
    result = await one(ScriptedPins(wanted=3, rises=True), "pin", "add", "p", "--text", "x", "--wait", "60")
    assert result.exit_code == 0, result.output
    assert "p: 2 of 3 workers hold its 1,234 tokens" in result.stderr
    assert "held by 3 of 3" in result.stdout


async def test_wait_that_is_over_says_why_it_is_not_held() -> None:
    """The pin stays; the exit code tells a script."""
    pins = ScriptedPins(held=1, why="worker-1: no room")
    result = await one(pins, "pin", "add", "p", "--text", "x", "--wait", "0")
    assert result.exit_code == 1
    assert "not all is held after 0 s: p: 1 of 2 workers hold" in result.stderr
    assert "worker-1: no room" in result.stderr
    assert len(pins.pins) == 1


async def test_list_shows_progress_budgets_and_who_acts() -> None:
    pins = ScriptedPins(held=1, why="worker-1 is [red]full[/red]\x1b[31m", acting=False)
    _, _, table, told, other = await run(
        pins,
        ("pin", "add", "policy", "--text", "x", "--ttl", "2h"),
        ("pin", "add", "all", "--text", "x", "--owner", "ops", "--public"),
        ("pin", "list", "--all"),
        ("pin", "list", "--json"),
        ("pin", "list", "--owner", "nobody"),
    )
    row = next(line for line in table.stdout.splitlines() if line.startswith("policy"))
    assert row.split()[:9] == ["policy", "acme", "acme", "device", "1,234", "2", "1", "1", "2"]
    assert "worker-1 is [red]full[/red][31m" in row  # neither markup nor an escape
    assert "everybody" in table.stdout
    assert "budget of acme: 500 of 2,000 tokens (25%)" in table.stdout
    assert "another router acts" in table.stdout
    assert "since this router began: 1 warm_failed, 3 warmed" in table.stdout
    answer = json.loads(told.stdout)
    assert [one["name"] for one in answer["pins"]] == ["policy"]
    assert (answer["acting"], answer["budgets"][0]["charged_tokens"]) == (False, 500)
    assert answer["actions"] == {"warmed": 3, "warm_failed": 1}
    assert "No prompt is pinned." in other.stdout


async def test_show_tells_of_each_worker_and_json_has_the_prompt() -> None:
    pins = ScriptedPins(held=1)
    _, shown, told, unknown = await run(
        pins,
        ("pin", "add", "p", "--system", "be brief"),
        ("pin", "show", "p"),
        ("pin", "show", "p", "--json"),
        ("pin", "show", "q"),
    )
    assert "worker-0" in shown.stdout
    assert "warming" in shown.stdout
    assert "version 3" in shown.stdout
    assert "be brief" not in shown.stdout
    answer = json.loads(told.stdout)
    assert answer["prompt"] == CHAT[:1]
    assert (answer["replicas"], answer["tier"], answer["held"], answer["ttl_s"]) == ("all", "device", 1, None)
    assert [one["state"] for one in answer["workers"]] == ["held", "warming"]
    assert (unknown.exit_code, "q is no pin of acme" in unknown.stderr) == (1, True)


async def test_removing_what_is_not_there_is_no_error() -> None:
    pins = ScriptedPins()
    _, first, second = await run(
        pins, ("pin", "add", "p", "--text", "x"), ("pin", "remove", "p"), ("pin", "remove", "p")
    )
    assert (first.stdout, second.stdout) == ("removed p\n", "p was not there\n")
    assert pins.pins == {}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "Give one of --text"),
        (("--text", "x", "--system", "y"), "Give one of --text"),
        (("--text", "x", "--replicas", "0"), "replicas: must be 'all' or a number"),
        (("--text", "x", "--replicas", "many"), "replicas: must be 'all' or a number"),
        (("--text", "x", "--tier", "disk"), "tier: must be device or host, got 'disk'"),
        (("--text", "x", "--ttl", "soon"), "ttl: 'soon' is no span of time"),
        (("--text", "x", "--ttl", "0s"), "ttl: must be more than nothing"),
        (("--text", "x", "--wait", "nan"), "is no number of seconds"),
        (("--text", ""), "text: must be a text"),
    ],
)
async def test_bad_option_is_named_and_nothing_is_put(options: tuple[str, ...], told: str) -> None:
    pins = ScriptedPins()
    result = await one(pins, "pin", "add", "p", *options)
    assert (result.exit_code, told in result.stderr) == (2, True), result.stderr
    assert pins.calls == []


async def test_file_that_holds_no_token_ids_is_said_so_without_its_words(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("5, secret")
    result = await one(ScriptedPins(), "pin", "add", "p", "--token-ids-file", str(tmp_path / "ids"))
    assert (result.exit_code, "ids is no list of token ids, as in 5, 17, 9" in result.stderr) == (2, True)
    assert "secret" not in result.stderr


async def test_refusal_for_the_budget_shows_the_sums() -> None:
    result = await one(ScriptedPins(room=0), "pin", "add", "p", "--text", "x")
    assert result.exit_code == 1
    assert "20 tokens wanted, 10 of 100 are left" in result.stderr


async def test_server_that_knows_no_pins_is_said_so() -> None:
    class Old:
        """A router of an earlier version."""

    old: Any = Old()
    result = await one(old, "pin", "list")
    assert (result.exit_code, "knows ListPins" in result.stderr) == (1, True)


async def test_heat_shows_the_most_used_first() -> None:
    items = [
        pb.HotItem(id="aa" * 8, tokens=640, requests_per_s=0.5, holders=1, target=1, namespace_digest="cd"),
        pb.HotItem(id="b" * 32, is_adapter=True, requests_per_s=7.25, holders=1, target=3),
    ]
    pins = ScriptedPins(heat=pb.ListHeatResponse(enabled=True, items=items))
    table, told = await run(pins, ("heat",), ("heat", "--json"))
    rows = [line.split() for line in table.stdout.splitlines()[2:]]
    assert rows[0] == ["adapter", "b" * 16, "-", "-", "7.25", "1", "3"]
    assert rows[1] == ["prefix", "aa" * 8, "cd", "640", "0.50", "1", "1"]
    assert [one["target"] for one in json.loads(told.stdout)["items"]] == [3, 1]
    (off,) = await run(ScriptedPins(), ("heat",))
    assert "switched off" in off.stdout


async def test_status_and_workers_show_what_is_pinned_and_copied() -> None:
    """In one line for all pins, and at each worker how many it holds."""
    copies = control.CopyCounts(copied_tokens=4_000, given_tokens=12)
    views = [
        pb.WorkerView(worker_id="worker-0", address="127.0.0.1:7000", ready=True, copies=copies),
        pb.WorkerView(worker_id="worker-1", address="127.0.0.1:7001", ready=True),
    ]
    pins = ScriptedPins(held=1, workers=views)
    line = "pins: 2 · 2 of 4 copies held · missing: policy, rules"
    _, _, status, told, listed, as_json = await run(
        pins,
        ("pin", "add", "policy", "--text", "x"),
        ("pin", "add", "rules", "--text", "x"),
        ("status",),
        ("status", "--json"),
        ("workers", "list"),
        ("workers", "list", "--json"),
    )
    for shown in (status, listed):
        assert line in shown.stdout, shown.output
        assert "4,000 in, 12 out" in shown.stdout
    answer = json.loads(told.stdout)
    assert (answer["pins"]["held"], answer["pins"]["wanted"]) == (2, 4)
    assert [one["pins_held"] for one in answer["workers"]] == [2, 0]
    first, second = json.loads(as_json.stdout)["workers"]
    assert (first["pins_held"], first["copies"]["copied_tokens"], second["copies"]) == (2, 4_000, None)


async def test_fleet_without_pins_says_nothing_of_them() -> None:
    pins = ScriptedPins(workers=[pb.WorkerView(worker_id="worker-0", address="127.0.0.1:7000", ready=True)])
    status = await one(pins, "status")
    assert (status.exit_code, "pins" in status.stdout, "copied" in status.stdout) == (0, False, False)
