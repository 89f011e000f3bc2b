"""Pins and heat as commands show them: rows for tables, lines, plain values for ``--json``."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.pin_spec import ALL, TIERS, prompt_of
from prefixmesh.cli.status import describe_left
from prefixmesh.cli.tables import print_table

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import ListPinsResponse, PinBudgetUse, PinStatus

_S_PER_MS: Final = 1e-3
_TIER_NAMES: Final[dict[int, str]] = {number: name for name, number in TIERS.items()}


def print_pins(answer: "ListPinsResponse") -> None:
    """A table of pins; below it what their owners' budgets say, and who acts."""
    if answer.pins:
        columns = ("name", "owner", "for", "tier", "tokens", "wanted", "held", "missing", "expires", "why")
        print_table(columns, [_row(pin) for pin in answer.pins], texts=4)
    else:
        click.echo("No prompt is pinned.")
    for use in answer.budgets:
        click.echo(budget_line(use))
    if answer.actions:
        counts = ", ".join(f"{count:,} {one_line(name)}" for name, count in sorted(answer.actions.items()))
        click.echo(f"since this router began: {counts}")
    if not answer.acting:
        click.echo("another router acts for the pins; this one tells what it sees of them")


def print_pin(pin: "PinStatus") -> None:
    """One pin: what it asks for, how far it is, and each worker."""
    spec = pin.spec
    click.echo(f"{one_line(spec.name)} of {one_line(spec.owner)}, for {_audience(pin)}")
    click.echo(
        f"{pin.tokens:,} tokens on the {tier_name(spec.tier)} of {_workers(spec.replicas)}, {_end(pin)}"
    )
    about = [f"version {pin.generation}", f"namespace {one_line(pin.namespace_digest) or '-'}"]
    about += [f"adapter {one_line(spec.adapter)}"] if spec.adapter else []
    click.echo(" · ".join(about))
    click.echo(f"held by {pin.held} of {pin.wanted}" + (f"; {one_line(pin.why)}" if pin.why else ""))
    if pin.replicas:
        rows = [
            (
                one.worker_id or "-",
                one.address,
                f"{one.held_tokens:,}",
                f"{one.generation}",
                one.state,
                one.problem,
            )
            for one in pin.replicas
        ]
        print_table(("worker", "address", "tokens", "version", "state", "why"), rows, texts=2)


def told(pin: "PinStatus") -> str:
    """How far a pin is, in one line."""
    counts = f"{pin.held} of {pin.wanted} workers hold its {pin.tokens:,} tokens" if pin.wanted else ""
    return f"{one_line(pin.spec.name)}: " + "; ".join(filter(None, (counts, one_line(pin.why))))


def budget_line(use: "PinBudgetUse") -> str:
    """What an owner's pins take of what they may."""
    share = f" ({use.charged_tokens / use.budget_tokens:.0%})" if use.budget_tokens else ""
    return f"budget of {one_line(use.owner)}: {use.charged_tokens:,} of {use.budget_tokens:,} tokens{share}"


def pins_as_dict(answer: "ListPinsResponse") -> dict[str, Any]:
    """A list of pins for ``--json``."""
    return {
        "acting": answer.acting,
        "actions": dict(answer.actions),
        "pins": [pin_as_dict(pin) for pin in answer.pins],
        "budgets": [
            {
                "owner": use.owner,
                "charged_tokens": use.charged_tokens,
                "budget_tokens": use.budget_tokens,
            }
            for use in answer.budgets
        ],
    }


def pin_as_dict(pin: "PinStatus") -> dict[str, Any]:
    """A pin for ``--json``: plain values, spans in seconds; ``replicas`` is a number or 'all', each worker's is under ``workers``."""
    spec = pin.spec
    told = {
        "name": spec.name,
        "owner": spec.owner,
        "tenant": spec.tenant,
        "adapter": spec.adapter,
        "extra_key": spec.extra_key,
        "public": spec.public,
        "replicas": spec.replicas or ALL,
        "tier": tier_name(spec.tier),
        "ttl_s": spec.ttl_ms * _S_PER_MS or None,
        "tokens": pin.tokens,
        "wanted": pin.wanted,
        "held": pin.held,
        "missing": pin.missing,
        "why": pin.why,
        "expires_in_s": pin.expires_in_ms * _S_PER_MS or None,
        "generation": pin.generation,
        "namespace_digest": pin.namespace_digest,
        "workers": [
            {field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields} for one in pin.replicas
        ],
    }
    prompt = prompt_of(spec)
    return told if prompt is None else told | {"prompt": prompt}


def tier_name(tier: int) -> str:
    """As people say it; a number that is not known here stands for itself."""
    return _TIER_NAMES.get(tier, f"{tier}")


def held_and_wanted(pins: "Iterable[PinStatus]") -> tuple[int, int]:
    """Copies of all pins that workers hold, and that they are to hold."""
    pairs = [(min(pin.held, pin.wanted), pin.wanted) for pin in pins]
    return sum(held for held, _ in pairs), sum(wanted for _, wanted in pairs)


def held_at(pins: "Iterable[PinStatus]") -> Counter[str]:
    """How many pins each worker holds, by its address."""
    return Counter(one.address for pin in pins for one in pin.replicas if one.state == "held")


def summary_as_dict(pins: "Sequence[PinStatus]") -> dict[str, Any]:
    """All pins together for ``--json``; the names of those that lack workers with their owners."""
    held, wanted = held_and_wanted(pins)
    missing = [
        {"owner": pin.spec.owner, "name": pin.spec.name, "why": pin.why} for pin in pins if pin.missing
    ]
    return {"pins": len(pins), "held": held, "wanted": wanted, "missing": missing}


def pins_line(pins: "Sequence[PinStatus]") -> str:
    """All pins in one line for people: how many, and how much of what they ask for is there."""
    held, wanted = held_and_wanted(pins)
    short = sorted(pin.spec.name for pin in pins if pin.missing)
    missing = f" · missing: {one_line(', '.join(short[:5]))}" if short else ""
    more = f" and {len(short) - 5} more" if len(short) > 5 else ""
    return f"pins: {len(pins)} · {held} of {wanted} copies held{missing}{more}"


def _row(pin: "PinStatus") -> tuple[str, ...]:
    return (
        pin.spec.name,
        pin.spec.owner,
        _audience(pin),
        tier_name(pin.spec.tier),
        f"{pin.tokens:,}",
        f"{pin.wanted}",
        f"{pin.held}",
        f"{pin.missing}",
        describe_left(pin.expires_in_ms * _S_PER_MS) if pin.expires_in_ms else "-",
        pin.why,
    )


def _audience(pin: "PinStatus") -> str:
    return "everybody" if pin.spec.public else one_line(pin.spec.tenant or pin.spec.owner)


def _workers(replicas: int) -> str:
    return "all workers" if not replicas else "1 worker" if replicas == 1 else f"{replicas} workers"


def _end(pin: "PinStatus") -> str:
    if not pin.expires_in_ms:
        return "until it is removed"
    return f"for another {describe_left(pin.expires_in_ms * _S_PER_MS)}"
