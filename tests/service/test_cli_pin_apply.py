"""``prefixmesh pin apply`` against a scripted ``Router`` service: what a file changes, what it leaves, and what is told of its faults."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixmesh.cli.main import main
from tests.support.scripted_pins import ScriptedPins, serving_pins

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "pins" / "pins.yaml"

TWO = """
pins:
  - name: support
    prompt_file: support.txt
    replicas: 2
  - name: greeting
    chat:
      - {role: system, content: Be kind.}
    replicas: all
    ttl: 1h
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path / "home"))
    (tmp_path / "support.txt").write_text("We answer within a day.")
    return tmp_path


async def apply(pins: ScriptedPins, folder: Path, text: str, *options: str) -> Result:
    """Write the file and apply it, from another folder."""
    (folder / "pins.yaml").write_text(text)
    async with serving_pins(pins) as address:
        command = ["pin", "apply", "-f", str(folder / "pins.yaml"), *options, "--address", address]
        return await asyncio.to_thread(CliRunner().invoke, main, command)


async def test_file_is_put_and_put_again_as_it_was(home: Path) -> None:
    """Prompts are read from beside the file. The second time nothing differs; the TTL begins anew, so it is put all the same."""
    pins = ScriptedPins()
    first = await apply(pins, home, TWO)
    assert (first.exit_code, first.stdout) == (0, "added support of acme\nadded greeting of acme\n"), (
        first.output
    )
    assert pins.pins["acme", "support"].text == "We answer within a day."
    assert pins.pins["acme", "greeting"].ttl_ms == 3_600_000
    again = await apply(pins, home, TWO)
    assert again.stdout == "unchanged support of acme\nunchanged greeting of acme\n"
    (home / "support.txt").write_text("We answer within an hour.")
    changed = await apply(pins, home, TWO.replace("replicas: 2", "replicas: 3"))
    assert changed.stdout.startswith("changed support of acme (replicas, prompt)\n")
    assert pins.pins["acme", "support"].text == "We answer within an hour."


async def test_dry_run_tells_and_does_nothing(home: Path) -> None:
    pins = ScriptedPins()
    await apply(pins, home, TWO)
    pins.calls.clear()
    wanted = TWO.replace("name: greeting", "name: welcome").replace("replicas: 2", "tier: host")
    told = await apply(pins, home, wanted, "--dry-run", "--prune", "--json")
    assert pins.calls == []
    assert json.loads(told.stdout) == {
        "dry_run": True,
        "pins": [
            {
                "name": "support",
                "owner": "",
                "deed": "change",
                "differs": ["replicas", "tier"],
                "error": None,
            },
            {"name": "welcome", "owner": "", "deed": "add", "differs": [], "error": None},
            {"name": "greeting", "owner": "acme", "deed": "remove", "differs": [], "error": None},
        ],
    }


async def test_prune_removes_what_its_owners_have_beside_the_file_and_nobody_elses(home: Path) -> None:
    """After the new ones are there. Without it nothing is removed; an empty file is about the caller's own."""
    pins = ScriptedPins()
    await apply(pins, home, TWO)
    await apply(pins, home, "pins: [{name: theirs, owner: beta, text: x}]")
    pins.calls.clear()
    only = "pins: [{name: support, owner: acme, prompt_file: support.txt}, {name: new, text: x}]"
    assert "removed" not in (await apply(pins, home, only)).stdout
    assert "removed greeting of acme" in (await apply(pins, home, only, "--prune")).stdout
    assert pins.calls[-3:] == ["put support", "put new", "remove greeting"]
    assert set(pins.pins) == {("acme", "support"), ("acme", "new"), ("beta", "theirs")}
    await apply(pins, home, "pins: []", "--prune")
    assert set(pins.pins) == {("beta", "theirs")}


async def test_what_the_budget_had_no_room_for_is_tried_again_after_the_removal(home: Path) -> None:
    """A full budget must not keep a file from ever being applied."""
    pins = ScriptedPins(room=2)
    await apply(pins, home, TWO)
    swapped = TWO.replace("name: greeting", "name: welcome")
    refused = await apply(pins, home, swapped)
    assert refused.exit_code == 1
    assert "pins.yaml: pin 'welcome': of acme: 20 tokens wanted" in refused.stderr
    assert "1 of 2 pins failed" in refused.stderr
    assert (await apply(pins, home, swapped, "--prune")).exit_code == 0
    assert set(pins.pins) == {("acme", "support"), ("acme", "welcome")}


async def test_wait_is_for_all_pins(home: Path) -> None:
    assert (await apply(ScriptedPins(rises=True), home, TWO, "--wait", "60")).exit_code == 0
    late = await apply(ScriptedPins(held=1, why="no room"), home, TWO, "--wait", "0")
    assert (late.exit_code, "support: 1 of 2 workers" in late.stderr) == (1, True)
    assert "greeting: 1 of 2 workers" in late.stderr


async def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_put(home: Path) -> None:
    """Each with the file, the pin and the field."""
    bad = """
pins:
  - {name: a, text: x, replicas: -1, teir: host}
  - {prompt_file: missing.txt}
  - {name: b}
  - {name: c, text: x, token_ids: [1], public: "yes"}
  - just words
  - {name: d, chat: [{role: pilot, content: x}]}
  - {name: e, text: x}
  - {name: e, text: y}
defaults: {}
"""
    pins = ScriptedPins()
    result = await apply(pins, home, bad)
    assert (result.exit_code, pins.calls) == (2, [])
    for told in (
        "pins.yaml: defaults: is not known",
        "pin 'a': replicas: must be 'all' or a number of workers from 1 on, got -1",
        "pin 'a': teir: is no field of a pin",
        "pin 2: prompt_file: cannot read",
        "pin 2: name: is missing",
        "pin 'b': prompt: needs one of",
        "pin 'c': public: must be true or false, got 'yes'",
        "pin 'c': prompt: needs one of text, prompt_file, chat, chat_file, system, system_file, token_ids, token_ids_file; got text and token_ids",
        "pin 5: must be a mapping of fields",
        "pin 'd': chat:",
        "pin 'e': name: stands twice for one owner",
        "nothing was done: 11 things are wrong",
    ):
        assert told in result.stderr, (told, result.stderr)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must be a mapping with a list under 'pins'"),
        ("pins: 5", "must be a mapping with a list under 'pins'"),
        ("pins: [", "pins.yaml: while parsing"),
        ("pins: [{name: a, name: b, text: x}]", "'name' stands twice"),
        ("pins: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("pins: " + "[" * 600, "recursion"),
        ("# " + "x" * (4 * 2**20), "has more than 4194304 bytes"),
        ("pins: &a [*a]", "pin 1: must be a mapping"),
    ],
)
async def test_file_that_is_none_is_refused(home: Path, text: str, told: str) -> None:
    result = await apply(ScriptedPins(), home, text)
    assert (result.exit_code, told in result.stderr) == (2, True), result.output[:500]


async def test_example_that_ships_is_applied(tmp_path: Path) -> None:
    """As an operator would, from the folder it lies in; what stands in comments is read as well."""
    pins = ScriptedPins()
    text = EXAMPLE.read_text("utf-8")
    (tmp_path / "support-policy.txt").write_text((EXAMPLE.parent / "support-policy.txt").read_text("utf-8"))
    result = await apply(pins, tmp_path, text)
    assert (result.exit_code, len(pins.pins)) == (0, 2), result.output
    assert "lamps" in pins.pins["acme", "support-policy"].chat.messages[0].content
    rest = text.replace("  # - name", "  - name").replace("  #   ", "    ")
    assert (await apply(pins, tmp_path, rest)).exit_code == 0
    assert pins.pins["northwind-air", "support-policy"].replicas == 0
    assert pins.pins["acme", "house-rules"].public
