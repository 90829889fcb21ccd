"""The TCP connections of a process are found, and ended for both ends."""

import os
import socket

from ltc.support.process import tcp_connections


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_new_connections_are_found_and_nothing_else():
    before = tcp_connections.connections()
    first, second = connected()
    with first, second, socket.create_server(("127.0.0.1", 0)), open(os.devnull):
        local = socket.socketpair()
        new = tcp_connections.connections() - before
        assert {one.descriptor for one in new} == {first.fileno(), second.fileno()}
        for one in local:
            one.close()


def test_both_ends_of_one_that_is_ended_are_told():
    before = tcp_connections.connections()
    first, second = connected()
    with first, second:
        mine = [one for one in tcp_connections.connections() - before if one[0] == first.fileno()]
        tcp_connections.end(mine)
        assert (first.recv(1), second.recv(1)) == (b"", b"")


def test_a_descriptor_that_is_another_ones_by_now_is_left_alone():
    before = tcp_connections.connections()
    first, second = connected()
    old = tcp_connections.connections() - before
    for one in (first, second):
        one.close()
    third, fourth = connected()
    with third, fourth:
        assert {one.descriptor for one in old} == {third.fileno(), fourth.fileno()}
        tcp_connections.end(old)
        third.sendall(b"x")
        assert fourth.recv(1) == b"x"
