"""The simulation's network: delay, loss, doubling, disorder, cuts; and streams, which keep order."""

from typing import Any

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network, Stream


def numbers_through(quality: LinkQuality, count: int = 1000, seed: int = 0) -> tuple[list[int], Network]:
    """What arrives, in order, of numbers sent one a millisecond."""
    sim = Simulation(seed)
    network, arrived = Network(sim, quality), list[int]()
    for number in range(count):
        sim.call_at(number * 0.001, network.send, "a", "b", lambda number=number: arrived.append(number))
    sim.run_until_idle()
    return arrived, network


def test_a_good_link_carries_everything_in_order_after_its_delay() -> None:
    sim = Simulation(0)
    network, arrived = Network(sim, LinkQuality(delay_s=0.25)), list[float]()
    network.send("a", "b", lambda: arrived.append(sim.now))
    sim.run_until_idle()
    assert arrived == [0.25]
    assert numbers_through(LinkQuality())[0] == list(range(1000))


def test_losses_and_doubles_come_at_their_share_and_are_counted() -> None:
    arrived, network = numbers_through(LinkQuality(loss=0.1, duplicate=0.2))
    counts = network.counts
    assert 60 <= counts.lost <= 140
    assert 130 <= counts.duplicated <= 230
    assert len(arrived) == counts.delivered == counts.sent - counts.lost + counts.duplicated
    assert len(set(arrived)) == counts.sent - counts.lost


def test_late_messages_are_overtaken() -> None:
    arrived, _ = numbers_through(LinkQuality(late=0.1, late_s=0.05))
    assert sorted(arrived) == list(range(1000))
    assert arrived != sorted(arrived)


def test_jitter_reorders_single_messages_and_never_a_stream() -> None:
    quality = LinkQuality(jitter_s=0.02, late=0.1)
    assert numbers_through(quality)[0] != list(range(1000))
    sim = Simulation(0)
    arrived = list[int]()
    stream = open_stream(Network(sim, quality), arrived)
    for number in range(1000):
        sim.call_at(number * 0.001, stream.send, number)
    sim.run_until_idle()
    assert arrived == list(range(1000))


def test_one_seed_gives_one_course_of_events() -> None:
    quality = LinkQuality(jitter_s=0.02, loss=0.1, duplicate=0.1)
    assert numbers_through(quality, seed=3)[0] == numbers_through(quality, seed=3)[0]
    assert numbers_through(quality, seed=3)[0] != numbers_through(quality, seed=4)[0]


def open_stream(
    network: Network, arrived: list[int], broken: list[float] | None = None, **options: Any
) -> Stream[int]:
    told = broken if broken is not None else []
    return network.open_stream("a", "b", arrived.append, lambda: told.append(1.0), **options)


def test_a_cut_link_loses_what_is_sent_and_what_is_under_way() -> None:
    sim = Simulation(0)
    network, arrived = Network(sim, LinkQuality(delay_s=1.0)), list[str]()
    network.send("a", "b", lambda: arrived.append("under way"))
    network.cut("a", "b")
    network.send("b", "a", lambda: arrived.append("sent while cut"))
    sim.run_until_idle()
    network.mend("b", "a")
    network.send("a", "b", lambda: arrived.append("after"))
    sim.run_until_idle()
    assert arrived == ["after"]
    assert network.counts.lost == 2


def test_a_cut_breaks_streams_and_tells_once() -> None:
    sim = Simulation(0)
    network = Network(sim)
    arrived, broken = list[int](), list[float]()
    stream = open_stream(network, arrived, broken)
    stream.send(1)
    network.cut("b", "a")
    network.cut("a", "b")
    sim.run_until_idle()
    assert (arrived, broken, stream.is_open) == ([], [1.0], False)
    assert not stream.send(2)
    network.mend("a", "b")
    assert not stream.send(3), "a broken stream stays broken"


def test_a_silent_cut_stalls_a_stream_which_goes_on_in_order_when_it_is_mended() -> None:
    sim = Simulation(0)
    network = Network(sim)
    arrived, broken = list[int](), list[float]()
    stream = open_stream(network, arrived, broken)
    stream.send(1)
    network.cut("a", "b", silently=True)
    stream.send(2)
    sim.run_until_idle()
    assert (arrived, broken) == ([], [])
    network.mend("a", "b")
    stream.send(3)
    sim.run_until_idle()
    assert (arrived, broken) == ([1, 2, 3], [])


def test_a_reader_may_close_its_stream_while_it_is_handed_messages() -> None:
    sim = Simulation(0)
    arrived = list[int]()

    def read(number: int) -> None:
        arrived.append(number)
        stream.close()

    stream = Network(sim).open_stream("a", "b", read, lambda: None)
    stream.pause()
    stream.send(1)
    stream.send(2)
    sim.run_until_idle()
    stream.resume()
    assert arrived == [1]


def test_a_stream_over_a_cut_link_breaks_at_once() -> None:
    sim = Simulation(0)
    network = Network(sim)
    network.isolate("a", ["b", "c"])
    broken = list[float]()
    open_stream(network, [], broken)
    sim.run_until_idle()
    assert broken == [1.0]


def test_a_slow_reader_fills_the_buffer_and_loses_nothing() -> None:
    sim = Simulation(0)
    arrived = list[int]()
    stream = open_stream(Network(sim), arrived, buffer=3)
    stream.pause()
    assert [stream.send(number) for number in range(5)] == [True, True, True, False, False]
    sim.run_until_idle()
    assert (arrived, stream.pending) == ([], 3)
    stream.resume()
    assert (arrived, stream.pending) == ([0, 1, 2], 0)
    assert stream.send(5)


def test_a_closed_stream_delivers_nothing_more() -> None:
    sim = Simulation(0)
    network = Network(sim)
    arrived, broken = list[int](), list[float]()
    stream = open_stream(network, arrived, broken)
    stream.send(1)
    stream.close()
    network.cut("a", "b")
    sim.run_until_idle()
    assert (arrived, broken) == ([], [])


@pytest.mark.parametrize(("name", "value"), [("loss", 1.5), ("delay_s", -1.0), ("duplicate", float("nan"))])
def test_what_no_link_can_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        LinkQuality(**{name: value})
