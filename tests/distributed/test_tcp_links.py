"""Messages over TCP: in order, never waiting for each other, only between those that know the secret."""

import contextlib
import os
import resource
import selectors
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ltc import config
from ltc.distributed.transport import inter_host, tcp_mesh
from ltc.distributed.transport.inter_host import HostsWire
from ltc.distributed.transport.shm_segment import Region
from ltc.distributed.transport.tcp_link import ConnectionLost, Link
from ltc.distributed.transport.tcp_mesh import (
    Invitation,
    Listener,
    addresses_of_interface,
    connected,
)
from ltc.distributed.transport.wire import SharedMemoryWire
from ltc.errors import LtcError

LARGE = 6 << 20  # bytes: more than a connection holds
MESSAGE_BYTES = 1 << 20
LITTLE = 1 << 16


@pytest.fixture
def links():
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    ends = Link(1, here), Link(0, there)
    yield ends
    for end in ends:
        end.socket.close()


def exchange(*ends: Link, until) -> None:
    while not until():
        for end in ends:
            end.push()
            end.pull()


def test_messages_of_every_size_and_type_arrive_in_order(links):
    here, there = links
    sent = [
        torch.ones(n, dtype=dtype) * (n % 7)
        for dtype in (torch.bfloat16, torch.complex128, torch.bool, torch.uint8, torch.float64)
        for n in (3, 0, 100_001)
    ]
    for tag, part in enumerate(sent):
        here.send(tag, part, may_change=False)
    exchange(here, there, until=lambda: len(there.arrived) == len(sent))
    for tag, part in enumerate(sent):
        message = there.arrived.popleft()
        assert (message.tag, message.nbytes) == (tag, part.nbytes)
        assert torch.equal(message.read(torch.empty_like(part)), part)
        there.give_back(message)


def test_both_may_send_what_no_connection_holds(links):
    for number, link in enumerate(links):
        link.send(7, torch.full((LARGE,), number, dtype=torch.uint8), may_change=False)
        assert link.is_leaving
    exchange(*links, until=lambda: all(link.arrived for link in links))
    for number, link in enumerate(links):
        like = torch.empty(LARGE, dtype=torch.uint8)
        assert link.arrived.popleft().read(like).unique().tolist() == [1 - number]
        assert not link.is_leaving


def test_memory_that_may_change_is_copied_where_it_does_not_leave_at_once(links):
    here, there = links
    part = torch.zeros(LARGE, dtype=torch.uint8)
    here.send(1, part, may_change=False)
    small = torch.ones(8)
    here.send(2, small, may_change=True)
    small.fill_(5)
    exchange(here, there, until=lambda: len(there.arrived) == 2)
    assert there.arrived[1].read(torch.empty(8)).tolist() == [1.0] * 8


@pytest.mark.parametrize("tag, elements, fills", [(3, 1000, True), (4, 1000, False), (3, 8, False)])
def test_a_message_fills_what_was_offered_for_it(links, tag, elements, fills):
    here, there = links
    offered = torch.zeros(elements)
    there.offer(tag, offered)
    here.send(3, torch.ones(1000), may_change=True)
    exchange(here, there, until=lambda: there.arrived)
    like = offered if elements == 1000 else torch.empty(1000)
    assert (there.arrived[0].read(like) is offered) == fills
    assert there.arrived[0].read(like).sum() == 1000
    assert offered.sum() == (1000 if fills else 0)


def test_what_nobody_asks_for_is_not_read_without_an_end(links):
    here, there = links
    for _ in range(3):
        here.send(0, torch.zeros(LARGE, dtype=torch.uint8), may_change=False)
    exchange(here, there, until=lambda: len(there.arrived) == 2)
    assert not there.awaits & selectors.EVENT_READ
    there.give_back(there.arrived.popleft())
    assert there.awaits & selectors.EVENT_READ


def test_memory_of_messages_is_used_again(links):
    here, there = links
    places = set()
    for _ in range(5):
        here.send(0, torch.ones(1000), may_change=True)
        exchange(here, there, until=lambda: there.arrived)
        message = there.arrived.popleft()
        places.add(message.read(torch.empty(1000)).data_ptr())
        there.give_back(message)
    assert len(places) == 1


def test_a_connection_that_is_closed_is_told_to_whoever_needs_it(links):
    here, there = links
    here.send(1, torch.ones(2), may_change=True)
    here.socket.close()
    exchange(there, until=lambda: there.lost)
    assert there.arrived  # what was sent before counts
    assert there.awaits == 0
    with pytest.raises(ConnectionLost, match="^connection to replica 0: closed by peer$"):
        there.require_open()
    there.send(1, torch.ones(2), may_change=True)
    assert not there.is_leaving


def test_a_forked_child_holds_no_connection(links):
    here, there = links
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        here.socket.close()
        exchange(there, until=lambda: there.lost)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# --- the wire of a replica ---


@pytest.fixture
def wires(monkeypatch):
    """Two replicas, each as if on a host of its own; the second has less room for messages."""
    store, found, of_memory = dist.HashStore(), {}, SharedMemoryWire.__init__
    regions = [Region.of_threads(1), Region.of_threads(1)]

    def set_up(wire: SharedMemoryWire, region: Region, replica: int) -> None:
        of_memory(wire, region, replica)
        wire.message_bytes = LITTLE if region is regions[1] else 4 * LITTLE

    monkeypatch.setattr(SharedMemoryWire, "__init__", set_up)

    def make(host: int) -> None:
        found[host] = HostsWire(store, regions[host], 0, host, 2)

    threads = [threading.Thread(target=make, args=(host,)) for host in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def test_hosts_with_different_room_agree_on_the_largest_message(wires):
    assert [wire.message_bytes for wire in wires] == [LITTLE, LITTLE]


def test_a_wait_that_is_interrupted_ends_all_connections(wires):
    """Else what was to leave would leave later, with other values by then."""
    here, there = wires
    here.send(1, torch.zeros(LARGE, dtype=torch.uint8), 7)

    def interrupt() -> None:
        raise KeyboardInterrupt

    here.ask = interrupt
    with pytest.raises(KeyboardInterrupt):
        here.finish()
    with pytest.raises(ConnectionLost, match="replica 1: ended by KeyboardInterrupt"):
        here.send(1, torch.zeros(2), 7)
    with pytest.raises(ConnectionLost, match="replica 0: closed by peer"):
        there.take(0, torch.empty(LARGE, dtype=torch.uint8), 7)


class Clock:
    """Of which a second is over at each look."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("moves", [True, False])
def test_a_connection_that_is_slow_is_not_one_of_an_absent_replica(wires, monkeypatch, moves):
    here, _ = wires
    waited, looks, (link,) = [], iter(range(20)), here._links.values()

    def move(seconds: float) -> None:
        link.moved_bytes += moves

    monkeypatch.setattr(inter_host, "time", Clock())
    here._move, here.late = move, lambda peer, seconds: waited.append(seconds)
    here._wait_until(link, lambda: next(looks) == 19)
    assert max(waited) < 5 if moves else max(waited) > 19


# --- connecting -------------------------------------------------------------------------------


def nothing() -> None:
    """No report of a fault."""


class Accepting:
    """A listener that accepts replicas 1 and 2 in a thread."""

    def __init__(self) -> None:
        self.listener, self.found = Listener(MESSAGE_BYTES), {}
        self.thread = threading.Thread(
            target=self.listener.accept, args=((1, 2), self.found, nothing), daemon=True
        )
        self.thread.start()

    def end(self) -> dict[int, socket.socket]:
        self.thread.join()
        self.listener.close()
        return self.found


def test_replicas_connect_in_any_order_past_strangers():
    accepting = Accepting()
    invitation = accepting.listener.invitation
    strangers = [socket.create_connection(("127.0.0.1", invitation.port)) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    strangers[1].close()
    ends = {replica: connected(invitation, replica, nothing)[0] for replica in (2, 1)}
    found = accepting.end()
    assert set(found) == {1, 2}
    for replica, end in ends.items():
        found[replica].settimeout(None)
        end.sendall(b"%d" % replica)
        assert found[replica].recv(1) == b"%d" % replica
    strangers[0].settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert strangers[0].recv(1) == b""


def ask_a_few_times(invitation: Invitation) -> None:
    """Connect until a check has been made some times."""
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) > 6:
            raise TimeoutError("not connected")

    with pytest.raises(TimeoutError, match="not connected"):
        connected(invitation, 1, check)


def test_a_port_of_another_program_is_no_replica():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    connection.sendall(bytes(32))

        threading.Thread(target=answer, daemon=True).start()
        port = other.getsockname()[1]
        ask_a_few_times(Invitation(["127.0.0.1"], port, "secret", MESSAGE_BYTES))


def test_nobody_connects_without_the_secret():
    accepting = Accepting()
    wrong = accepting.listener.invitation._replace(secret="guessed", addresses=["127.0.0.1"])
    ask_a_few_times(wrong)
    assert not accepting.found
    for replica in (1, 2):
        connected(accepting.listener.invitation, replica, nothing)
    accepting.end()


def test_a_replica_that_stands_still_while_it_connects_is_waited_for(monkeypatch):
    monkeypatch.setattr(tcp_mesh, "_HELLO_SECONDS", 0.2)
    accepting = Accepting()
    own = accepting.listener.invitation
    stands_still = socket.create_connection(("127.0.0.1", own.port))
    nonce = bytes(16)
    proof = tcp_mesh._proof(own.secret, b"hello", 1, nonce)
    stands_still.sendall(tcp_mesh._HELLO.pack(1, nonce, proof))
    assert stands_still.recv(32) == tcp_mesh._proof(own.secret, b"welcome", 1, nonce)
    time.sleep(0.5)
    stands_still.sendall(b"\1")
    other = connected(own, 2, nothing)
    assert set(accepting.end()) == {1, 2} and other


def test_the_address_that_served_before_is_tried_first():
    accepting = Accepting()
    own = accepting.listener.invitation._replace(addresses=["192.0.2.1", "127.0.0.1"])
    for replica in (1, 2):  # the first leads nowhere, and would take seconds
        _, position = connected(own, replica, nothing, likely=1)
        assert position == 1
    accepting.end()


def test_too_many_open_files_are_told_and_not_taken_for_an_absent_host():
    listener = Listener(MESSAGE_BYTES)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.socket()
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        caller.connect(("127.0.0.1", listener.invitation.port))
        with pytest.raises(LtcError, match="Too many open files.*ulimit -n"):
            listener.accept((1,), {}, nothing)
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        caller.close()
        listener.close()


def test_an_invitation_is_read_as_it_was_written():
    listener = Listener(MESSAGE_BYTES)
    assert Invitation.of_text(listener.invitation.text().encode()) == listener.invitation
    listener.close()


@pytest.mark.parametrize("text", ["", "[]", "[1, 2]", '["a", "b", "c"]', "{}", "[[], null, 1, 2]"])
def test_what_no_replica_has_written_is_no_invitation(text):
    with pytest.raises(LtcError, match="is no address of a replica"):
        Invitation.of_text(text)


def test_an_interface_is_named_by_the_variable_that_gloo_reads():
    assert "127.0.0.1" in addresses_of_interface("lo")
    with config.override(GLOO_SOCKET_IFNAME="lo"):
        listener = Listener(MESSAGE_BYTES)
        assert listener.invitation.addresses[0] == "127.0.0.1"
        listener.close()
    with (
        config.override(GLOO_SOCKET_IFNAME="none7"),
        pytest.raises(LtcError, match="GLOO_SOCKET_IFNAME=none7.*This machine has.*lo"),
    ):
        Listener(MESSAGE_BYTES)
