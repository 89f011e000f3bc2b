"""``prefixmesh pin``: prompts that stay cached, on as many workers as wished."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import BadRequest, one_line
from prefixmesh.cli.options import connection_options
from prefixmesh.cli.router_calls import open_router
from prefixmesh.seconds_flag import Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefixmesh.cli.pin_apply import Step
    from prefixmesh.proto.v1.router_pb2 import PinStatus

EVERYBODY: Final = "*"
"""As an owner to list: all of them."""

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=str)
_PROMPTS: Final = ("text", "prompt_file", "chat_file", "system", "token_ids_file")
_FIELDS: Final = (*_PROMPTS, "replicas", "tier", "ttl", "owner", "adapter", "extra_key")
"""Options of ``add`` that are a pin's fields of the same name."""

_DONE: Final = {"add": "added", "change": "changed", "keep": "unchanged", "remove": "removed"}
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_owner_option = click.option(
    "--owner", default="", metavar="NAME", help="Whose pin. [default: your own tenant]"
)


@click.group()
def pin() -> None:
    """Have prompts stay cached: say which, and on how many workers; the router sees to it.

    A tenant pins its own prompts. Administrators pin anybody's, and public ones, which every tenant's requests match.
    """


@pin.command(short_help="Pin a prompt.")
@click.argument("name")
@click.option("--text", metavar="TEXT", help="The prompt as plain text.")
@click.option("--text-file", "prompt_file", type=_FILE, help="The same, from a file.")
@click.option(
    "--chat-file", type=_FILE, help="A chat: a file with a JSON list of objects with role and content."
)
@click.option("--system", metavar="TEXT", help="A chat's system prompt.")
@click.option("--token-ids-file", type=_FILE, help="Token ids, from a file: commas or spaces between them.")
@click.option("--replicas", metavar="N", help="Workers that are to hold it, or all. [default: all]")
@click.option("--tier", metavar="TIER", help="Where: device or host. [default: device]")
@click.option(
    "--ttl", metavar="SPAN", help="How long from now, as in 1h or 7d. [default: until it is removed]"
)
@click.option(
    "--for-tenant", "for_tenant", metavar="NAME", help="Whose prompts it is for. [default: the owner's]"
)
@click.option("--owner", metavar="NAME", help="Whose budget it is charged to. [default: your own tenant]")
@click.option("--adapter", metavar="NAME", help="LoRA adapter of the requests it is for.")
@click.option("--extra-key", metavar="KEY", help="As those requests carry it.")
@click.option("--public", is_flag=True, help="Every tenant's requests match it. Administrators only.")
@click.option(
    "--wait", type=Seconds(), metavar="SECONDS", help="Wait until it is held by all that are to hold it."
)
@_json_option
@connection_options
def add(*, name: str, public: bool, wait: float | None, as_json: bool, **values: Any) -> None:
    """Have the prompt stay cached under NAME. The same again changes nothing but the TTL, which begins anew.

    With another prompt under a name that is there, the new one is warm before the old one goes. Exit code 1 when --wait passes before it
    is held.
    """
    from prefixmesh.cli.pin_spec import joined, make_spec
    from prefixmesh.cli.pin_text import pin_as_dict, print_pin
    from prefixmesh.cli.pin_wait import ask, is_held, wait_until_held
    from prefixmesh.proto.v1 import router_pb2 as pb

    if sum(values[field] is not None for field in _PROMPTS) != 1:
        raise click.UsageError("Give one of --text, --text-file, --chat-file, --system and --token-ids-file.")
    fields = {field: values[field] for field in _FIELDS if values[field] is not None}
    fields |= {"tenant": values["for_tenant"]} if values["for_tenant"] is not None else {}
    spec, problems = make_spec({"name": name, "public": public} | fields, Path())
    if problems:
        raise BadRequest(one_line(joined(problems)))
    with open_router(values) as call:
        answer = call("PutPin", pb.PutPinRequest(spec=spec))
        status = ask(call, name, answer.pin.spec.owner)
        if wait is not None:
            (status,) = wait_until_held(call, [status], wait)
    if as_json:
        click.echo(json.dumps({"changed": answer.changed, "pin": pin_as_dict(status)}, indent=2))
    else:
        print_pin(status)
    if wait is not None and not is_held(status):
        raise click.ClickException(_not_held([status], wait))


@pin.command(name="list", short_help="List pins, and what they take of their budgets.")
@click.option("--owner", default="", metavar="NAME", help="Whose pins. [default: your own tenant]")
@click.option("--all", "everybody", is_flag=True, help="Everybody's. Administrators only.")
@_json_option
@connection_options
def list_(*, owner: str, everybody: bool, as_json: bool, **values: Any) -> None:
    """List pins: on how many workers each is wanted, on how many it is, and why it is not on others."""
    from prefixmesh.cli.pin_text import pins_as_dict, print_pins
    from prefixmesh.proto.v1 import router_pb2 as pb

    if owner and everybody:
        raise click.UsageError("Give one of --owner and --all.")
    with open_router(values) as call:
        answer = call("ListPins", pb.ListPinsRequest(owner=EVERYBODY if everybody else owner))
    if as_json:
        click.echo(json.dumps(pins_as_dict(answer), indent=2))
    else:
        print_pins(answer)


@pin.command(short_help="Show one pin and each worker that is to hold it.")
@click.argument("name")
@_owner_option
@_json_option
@connection_options
def show(*, name: str, owner: str, as_json: bool, **values: Any) -> None:
    """Show the pin NAME: what it asks for, and how far each worker is. Its prompt is in what --json prints."""
    from prefixmesh.cli.pin_text import pin_as_dict, print_pin
    from prefixmesh.cli.pin_wait import ask

    with open_router(values) as call:
        status = ask(call, name, owner)
    if as_json:
        click.echo(json.dumps(pin_as_dict(status), indent=2))
    else:
        print_pin(status)


@pin.command(short_help="Let go of a pin.")
@click.argument("name")
@_owner_option
@_json_option
@connection_options
def remove(*, name: str, owner: str, as_json: bool, **values: Any) -> None:
    """Let go of the pin NAME: what it alone kept may be evicted from then on."""
    from prefixmesh.proto.v1 import router_pb2 as pb

    with open_router(values) as call:
        answer = call("RemovePin", pb.RemovePinRequest(name=name, owner=owner))
    if as_json:
        click.echo(json.dumps({"removed": answer.removed}))
    else:
        click.echo(f"removed {one_line(name)}" if answer.removed else f"{one_line(name)} was not there")


@pin.command(short_help="Make pins what a file says.")
@click.option(
    "-f",
    "--file",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="pins.yaml",
)
@click.option("--prune", is_flag=True, help="Remove what the file's owners have and the file has not.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("--wait", type=Seconds(), metavar="SECONDS", help="Wait until all of them are held.")
@_json_option
@connection_options
def apply(
    *, path: Path, prune: bool, dry_run: bool, wait: float | None, as_json: bool, **values: Any
) -> None:
    """Put every pin of a file. As often as wished: what is as it should be stays untouched.

    Nothing is done while anything in the file is wrong; all that is wrong is told. Exit code 2 then, and 1 when the router refused some.
    """
    from prefixmesh.cli.pin_apply import as_dict as step_as_dict
    from prefixmesh.cli.pin_apply import carry_out, make_plan
    from prefixmesh.cli.pin_file import read_pins
    from prefixmesh.cli.pin_wait import is_held, wait_until_held

    file = read_pins(path)
    if file.problems:
        for problem in file.problems:
            click.echo(one_line(problem), err=True)
        raise BadRequest(f"nothing was done: {len(file.problems)} things are wrong with {path}")
    with open_router(values) as call:
        steps = make_plan(call, file.specs, prune=prune)
        if not dry_run:
            steps = carry_out(call, steps)
        pins = [step.pin for step in steps if step.pin is not None]
        if wait is not None:
            pins = wait_until_held(call, pins, wait)
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, "pins": [step_as_dict(step) for step in steps]}, indent=2))
    else:
        _print_steps(steps, dry_run=dry_run)
    _end(steps, path)
    if wait is not None and not all(is_held(pin) for pin in pins):
        raise click.ClickException(_not_held([pin for pin in pins if not is_held(pin)], wait))


def _print_steps(steps: "Sequence[Step]", *, dry_run: bool) -> None:
    for step in steps:
        if step.error is None:
            word = f"would {step.deed}" if dry_run else _DONE[step.deed]
            owner = (step.pin.spec if step.pin else step.spec).owner
            of = f" of {owner}" if owner else ""
            differs = f" ({', '.join(step.differs)})" if step.differs else ""
            click.echo(one_line(f"{word} {step.spec.name}{of}{differs}"))
    if not steps:
        click.echo("Nothing to do.")


def _end(steps: "Sequence[Step]", path: Path) -> None:
    """Tell what failed, each pin in a line, and end the command accordingly."""
    from prefixmesh.cli.pin_apply import is_callers_fault

    failed = [step for step in steps if step.error is not None]
    for step in failed:
        named = f"pin {step.spec.name!r}"
        problem = f"{step.error}".removeprefix(f"{named} ").removeprefix(f"{named}: ")
        click.echo(one_line(f"{path}: {named}: {problem}"), err=True)
    if failed:
        message = f"{len(failed)} of {len(steps)} pins failed"
        raise BadRequest(message) if is_callers_fault(failed) else click.ClickException(message)


def _not_held(pins: "Sequence[PinStatus]", wait_s: float) -> str:
    from prefixmesh.cli.pin_text import told

    return f"not all is held after {wait_s:g} s: {' · '.join(told(pin) for pin in pins)}"
