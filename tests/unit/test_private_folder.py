"""Where processes meet: a folder with room, private, and gone when its processes are."""

import ast
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ltc
from ltc.distributed.transport.shm_segment import Region
from ltc.distributed.transport.wire import SharedMemoryWire
from ltc.errors import LtcError
from ltc.support.process import private_folder as folders
from ltc.support.process.private_folder import (
    private_folder,
    require_private,
    reserve,
    shared_file,
)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two folders in the place of the file system in memory and of the folder on a disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(folders, "IN_MEMORY", str(memory))
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(disk))
    folders._say_once.cache_clear()
    return memory, disk


def test_only_its_user_may_enter_it_and_it_goes(places):
    with private_folder() as path:
        assert Path(path).parent == places[0]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert not os.path.exists(path) and not list(places[0].iterdir())


def test_where_memory_has_no_room_it_is_on_a_disk_and_one_line_says_so(places, monkeypatch, caplog):
    real = os.statvfs

    class Small:
        f_bavail, f_frsize = 16, 1 << 20

    monkeypatch.setattr(os, "statvfs", lambda p: Small if p == str(places[0]) else real(p))
    for _ in range(2):
        with private_folder(17 << 20) as path:
            assert Path(path).parent == places[1]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(f"16 MB left of the 17 MB that are needed: {line.partition(': ')[2]}")
    with private_folder(15 << 20) as path:
        assert Path(path).parent == places[0]


def test_where_there_is_no_memory_it_is_on_a_disk(places, monkeypatch, caplog):
    places[0].rmdir()
    with private_folder(1) as path:
        assert Path(path).parent == places[1]
    assert "there is no" in caplog.text


def test_where_nothing_has_room_the_error_says_what_to_do(places):
    with pytest.raises(LtcError, match="Set TMPDIR to a folder with more room"):
        with private_folder(1 << 60):
            pass


KILLED_WITH_ITS_JANITOR = """
import os, signal, sys
from ltc.support.process import private_folder as folders
folders.IN_MEMORY = sys.argv[1]
with folders.private_folder() as path:
    print(path, flush=True)
    for entry in os.listdir(f"/proc/{os.getpid()}/task"):
        for child in open(f"/proc/{os.getpid()}/task/{entry}/children").read().split():
            os.kill(int(child), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_processes_leave_that_are_killed_with_their_janitor_goes_with_the_next_start(places):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WITH_ITS_JANITOR, str(places[0])],
        capture_output=True, text=True,
    )  # fmt: skip
    left = killed.stdout.strip()
    assert killed.returncode == -signal.SIGKILL and os.path.isdir(left)
    others = places[0] / "ltc-abcdefgh"  # of a version that locks nothing
    others.mkdir(mode=0o700)
    with private_folder() as first, private_folder() as second:
        assert not os.path.exists(left)
        assert os.path.isdir(first) and os.path.isdir(second)
    assert [path.name for path in places[0].iterdir()] == ["ltc-abcdefgh"]


def test_a_link_in_the_place_of_a_shared_file_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    os.symlink(tmp_path / "precious", tmp_path / "programs")
    with pytest.raises(OSError):
        shared_file(str(tmp_path / "programs"), 4096)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_processes_do_not_meet_where_others_may_write(tmp_path):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(LtcError, match="others can write to"):
        require_private(str(tmp_path))


def test_a_region_has_the_system_give_memory_before_it_is_used(tmp_path):
    """Otherwise a small file system would end the process with SIGBUS."""
    region = Region.of_processes(2, str(tmp_path / "region"))
    assert os.stat(tmp_path / "region").st_blocks * 512 >= os.stat(tmp_path / "region").st_size
    messages = tmp_path / "region-messages"
    for nbytes in (1 << 10, 1 << 20):
        blocks = os.stat(messages).st_blocks
        SharedMemoryWire(region, 1).share(torch.zeros(nbytes, dtype=torch.uint8))
        assert os.stat(messages).st_blocks > blocks


def test_memory_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = shared_file(str(tmp_path / "file"), 4096)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LtcError, match="has no room for 4096 more bytes"):
        reserve(file, 0, 4096)
    os.close(file)


# --- what is unpickled -----------------------------------------------------------------------

# Where bytes become objects in a way that can run code, and why that is no other user's choice.
_UNPICKLES = {
    "distributed/launch/parent.py": "what this process's own ranks send through inherited pipes",
    "distributed/launch/child.py": "what this process has just pickled itself: whether it can travel",
    "distributed/launch/pickled_call.py": "what the parent of this process gave it",
    "device/hooks/scripting.py": "reads names, and makes nothing of them",
    "checkpointing/checked_archive.py": "weights_only is the caller's choice, and True as torch.load's",
    "utils/cached_dataset.py": "a folder that the caller named, with that warning in its docstring",
}
_NAMES = {"Unpickler", "loads"}


def unpickles(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("pickle", "cloudpickle", "marshal") and node.attr in _NAMES:
                return True
        if isinstance(node, ast.keyword) and node.arg == "weights_only":
            if not (isinstance(node.value, ast.Constant) and node.value.value is True):
                return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            if not any(keyword.arg == "weights_only" for keyword in node.keywords):
                return True
    return False


def test_nothing_is_unpickled_but_what_the_table_names():
    package = Path(ltc.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if unpickles(ast.parse(path.read_text()))
    }
    assert found == set(_UNPICKLES)


_LISTENERS = {"connection.Listener", "socketserver.TCPServer", "socket.create_server"}


def test_one_socket_is_opened_that_others_could_reach():
    """Where replicas of several hosts meet: a stranger is left there, see test_tcp_links."""
    package = Path(ltc.__file__).parent
    calls = {
        str(path.relative_to(package)): ast.unparse(node)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in _LISTENERS
    }
    assert calls == {"distributed/transport/tcp_mesh.py": "socket.create_server"}
