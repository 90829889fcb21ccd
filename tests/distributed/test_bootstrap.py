"""How the processes of a host find each other: one folder, whoever asks and however often."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from ltc import config
from ltc.distributed.transport import bootstrap
from ltc.distributed.transport.call_log import StoreCallLog
from ltc.distributed.transport.wire import Mismatch
from ltc.errors import LtcError, PeerFailure
from ltc.support.process.neighbours import own_name, this_machine
from ltc.support.process.private_folder import private_folder


@pytest.fixture
def met(monkeypatch):
    """Two processes of one host that meet through a store; gives what makes this one number i."""
    shared = dist.HashStore()
    monkeypatch.setattr(bootstrap, "store", lambda processes: shared)
    monkeypatch.delenv("LTC_RENDEZVOUS", raising=False)
    bootstrap._folder_through_store.cache_clear()

    def become(ordinal: int) -> None:
        monkeypatch.setenv("XRT_SHARD_WORLD_SIZE", "2")
        monkeypatch.setenv("XRT_SHARD_ORDINAL", str(ordinal))

    yield become
    bootstrap._folder_through_store.cache_clear()
    bootstrap._until_exit.close()


def as_another_process(ordinal: int, become) -> str:
    """The folder that a process without memory of this one finds."""
    become(ordinal)
    bootstrap._folder_through_store.cache_clear()
    return bootstrap.folder_of_host(2)


def test_asking_again_gives_the_same_folder(met):
    met(0)
    first = bootstrap.folder_of_host(2)
    assert bootstrap.folder_of_host(2) == first
    assert as_another_process(1, met) == first
    assert os.stat(first).st_mode & 0o777 == 0o700


def test_a_first_process_that_does_not_come_is_named(met):
    met(1)
    with config.override(LTC_PEER_TIMEOUT=0.1):
        with pytest.raises(
            PeerFailure, match="process 0 of 2, the first of this host, did not reach"
        ):
            bootstrap.folder_of_host(2)


def test_the_folder_of_a_launcher_comes_first(met):
    met(0)
    bootstrap.folder_of_host(2)
    with config.override(LTC_RENDEZVOUS="/given"):
        assert bootstrap.folder_of_host(2) == "/given"


def test_a_forked_child_asks_anew_and_leaves_the_folder(met):
    met(0)
    folder = bootstrap.folder_of_host(2)
    child = os.fork()
    if child == 0:
        asked = bootstrap._folder_through_store.cache_info().currsize == 0
        bootstrap._until_exit.close()  # as at the end of the interpreter
        os._exit(0 if asked and os.path.isdir(folder) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.path.isdir(folder)


def test_the_folder_goes_with_the_process_that_made_it(met):
    met(0)
    folder = bootstrap.folder_of_host(2)
    bootstrap._until_exit.close()
    assert not os.path.exists(folder)


def test_whoever_comes_first_names_the_run_and_another_attempt_has_another_name(monkeypatch):
    server = dist.TCPStore("localhost", 0, 1, True)
    monkeypatch.delenv("LTC_RENDEZVOUS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))

    def named(attempt: int) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        bootstrap.name_of_run.cache_clear()
        return bootstrap.name_of_run(2)

    assert len({named(0), named(0)}) == 1
    assert len({named(0), named(1)}) == 2
    bootstrap.name_of_run.cache_clear()


def test_without_a_launcher_the_error_says_what_to_do(monkeypatch):
    for name in ("LTC_RENDEZVOUS", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LtcError, match="the processes have no meeting point"):
        bootstrap.store(2)


def test_a_folder_does_not_wait_for_a_process_forked_meanwhile():
    with private_folder() as path:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
    still_there = os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    assert still_there and not os.path.exists(path)
    os.waitpid(child, 0)


# --- the end of a run -----------------------------------------------------------------------------


@pytest.fixture
def ending(met, monkeypatch):
    """The first process at its end, and the store by which a second one has said its name."""
    monkeypatch.setattr(bootstrap, "_met", [])
    monkeypatch.setenv("LTC_RENDEZVOUS", "somewhere")  # the address is this machine's
    met(0)
    bootstrap.address_of_first(2)
    return bootstrap.store(2)


def test_the_first_process_waits_for_one_that_runs_until_it_says_so(ending):
    ending.set("process 1 of 2", own_name())
    asked = []

    def seconds_left() -> float:
        asked.append(None)
        if len(asked) == 5:
            ending.set("end of 1 of 2", "")
        return 1.0

    bootstrap.wait_for_others(2, seconds_left)
    assert len(asked) == 5


def test_the_first_process_waits_for_none_that_is_gone(ending):
    child = os.fork()
    if child == 0:
        os._exit(0)
    ending.set("process 1 of 2", f"{this_machine()} {child}")
    os.waitpid(child, 0)
    asked = iter([1.0])
    bootstrap.wait_for_others(2, lambda: next(asked))


def test_a_process_of_another_machine_is_waited_for(ending):
    ending.set("process 1 of 2", f"{this_machine() + 1} {1 << 22}")
    asked = iter([1.0, 1.0, 0.0])
    bootstrap.wait_for_others(2, lambda: next(asked))
    assert next(asked, None) is None


# --- a store to which somebody else has written ---------------------------------------------------


def folder_in(tmp_path, kind: str) -> str:
    """A path that the store names, and that no process of this run has made so."""
    path = tmp_path / "ltc-run-abcdefgh"
    match kind:
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            path.symlink_to(tmp_path / "elsewhere")
        case "file":
            path.touch(mode=0o700)
        case "open":
            path.mkdir(mode=0o700)
            path.chmod(0o755)
        case "of another user":
            path.mkdir(mode=0o700)
            os.chown(path, 4321, 4321)
        case "inside of an open one":
            path = tmp_path / "open" / path.name
            path.mkdir(mode=0o700, parents=True)
            path.parent.chmod(0o777)
        case "another name":
            path = tmp_path / "precious"
            path.mkdir(mode=0o700)
        case "relative":
            return "ltc-run-abcdefgh"
        case "long":
            return f"/{'a/' * 600}ltc-run-abcdefgh"
        case "no text":
            return "/tmp/ltc-run-\x00\x1b[2J"
    return str(path)


KINDS = (
    "link", "file", "open", "inside of an open one", "another name", "relative", "long",
    "no text", "absent",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        *KINDS,
        pytest.param(
            "of another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_folder_that_the_store_names_is_used_only_where_nobody_else_can_have_made_it(
    met, tmp_path, kind
):
    met(1)
    bootstrap.store(2).set("folder/0", folder_in(tmp_path, kind))
    with pytest.raises(LtcError, match=r"but it cannot be used: .* keep its port"):
        bootstrap.folder_of_host(2)


def test_a_name_of_the_run_that_was_not_drawn_is_not_used(met):
    met(0)
    bootstrap.store(2).set("name of the run of 2", "../../home")
    bootstrap.name_of_run.cache_clear()
    with pytest.raises(
        LtcError, match="names the run '../../home', which is no name that ltc draws"
    ):
        bootstrap.name_of_run(2)


def test_a_call_that_no_rank_has_written_is_refused():
    store = dist.HashStore()
    log = StoreCallLog(store, 0, 2)
    log.compare(0, 1, 7)
    with pytest.raises(Mismatch):
        StoreCallLog(store, 1, 2).compare(0, 1, 8)
    store.set("call/0/2", "cos\nsystem\n")
    with pytest.raises(LtcError, match="in place of a call: something else writes to it"):
        log.compare(0, 2, 9)


def test_a_folder_of_the_launcher_that_others_can_write_to_is_no_place_for_a_store(tmp_path):
    tmp_path.chmod(0o777)
    with config.override(LTC_RENDEZVOUS=str(tmp_path)), pytest.raises(LtcError, match="others can"):
        bootstrap.store(2)
