"""How much memory there can be: the machine's, or what a container is given of it."""

import sys

import pytest

from ltc.errors import OutOfMemory
from ltc.support.process import control_groups, machine_memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """16 GiB and 2 GiB of swap, and control groups as files."""
    memory = f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nSwapTotal:      {2 << 20} kB\n"
    (tmp_path / "meminfo").write_text(memory)
    (tmp_path / "own").write_text("")
    monkeypatch.setattr(machine_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "GROUP", tmp_path / "own")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    return tmp_path


def total() -> int:
    return machine_memory.total.__wrapped__()


def write(folder, files: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, 18),
        ({"pod": {"memory.max": "max", "memory.swap.max": "max"}}, 18),
        ({"pod": {"memory.max": 4 * GIB, "memory.swap.max": "max"}}, 6),
        ({"pod": {"memory.max": 4 * GIB, "memory.swap.max": 0}}, 4),
        ({"pod": {"memory.max": 4 * GIB}, "pod/worker": {"memory.max": 8 * GIB}}, 6),
        ({"pod/worker": {"memory.max": 1 * GIB, "memory.swap.max": 8 * GIB}}, 3),
        ({"pod/worker": {"memory.max": "nonsense"}}, 18),
    ],
)
def test_a_container_has_the_memory_and_swap_that_its_groups_are_given(machine, limits, expected):
    (machine / "own").write_text("0::/pod/worker\n")
    for group, files in limits.items():
        write(machine / group, files)
    assert total() == expected * GIB


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"memory.limit_in_bytes": 9223372036854771712}, 18),
        ({"memory.limit_in_bytes": 4 * GIB}, 6),
        ({"memory.limit_in_bytes": 4 * GIB, "memory.memsw.limit_in_bytes": 5 * GIB}, 5),
    ],
)
def test_the_first_version_of_groups_has_a_limit_with_swap(machine, files, expected):
    (machine / "own").write_text("4:memory:/pod\n1:cpu:/other\n0::/\n")
    write(machine / "memory" / "pod", files)
    assert total() == expected * GIB


def test_where_nobody_tells_nothing_is_refused(machine):
    (machine / "meminfo").unlink()
    assert total() == sys.maxsize


def test_this_machine_has_some():
    machine_memory.require(1 << 20)
    if sys.platform == "linux":
        assert 1 << 28 < machine_memory.total() < 1 << 50
        with pytest.raises(OutOfMemory, match="Tried to allocate 1125899906842625 bytes"):
            machine_memory.require((1 << 50) + 1)
