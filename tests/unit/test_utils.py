import enum
import re
import socket
import threading
import time
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest

from ltc.core.training import RateTracker
from ltc.distributed.loader_epoch import Channel
from ltc.support import atomic_file, tree
from ltc.utils import utils as xu


class Bag:
    def __init__(self, **attributes):
        vars(self).update(attributes)


LEAF = (int, float, str)


def visited(value):
    leaves = []
    tree.for_each_instance(value, LEAF, leaves.append)
    return leaves


def rewritten_leaves(value):
    leaves = []
    tree.for_each_instance_rewrite(value, LEAF, lambda x: leaves.append(x) or x)
    return leaves


def pair():
    """12 leaves, of which two are keys of dictionaries within."""
    return Bag(a={"k": [1, 2, 3], 4.5: "y", 5: {"m": "n"}}, b=("f", (17, 18)))


def test_166_walking_and_rewriting_meet_the_same_17_leaves_in_the_same_order():
    shared = pair()
    data = {"first": shared, 20: [21, shared, Bag(more=shared)]}
    expected = ["first", "k", 1, 2, 3, 4.5, "y", 5, "m", "n", "f", 17, 18, 20, 21]
    data["last"] = 22
    assert visited(data) == rewritten_leaves(data) == [*expected, "last", 22]
    assert len(visited(data)) == 17


def test_166_a_cycle_of_objects_ends_after_its_11_leaves():
    left = Bag(x=1, words={"two", "three"})
    right = Bag(x=4, left=left, more=[5, {6: "seven"}, (8, 9)])
    left.right = right
    right.itself = right
    right.list = [10, 11]
    right.list.append(right.list)
    assert len(visited(left)) == 11
    assert sorted(map(str, visited(left))) == sorted(map(str, rewritten_leaves(left)))


def test_a_rewritten_cycle_leads_back_to_the_new_object():
    ring = Bag(x=1)
    ring.next = Bag(x=2, next=ring)
    new = tree.for_each_instance_rewrite(ring, int, lambda n: n + 10)
    assert (new.x, new.next.x) == (11, 12)
    assert new.next.next is new and new is not ring
    assert (ring.x, ring.next.x) == (1, 2)


def test_what_is_shared_stays_shared():
    part = [1]
    new = tree.for_each_instance_rewrite([part, part], int, lambda n: n + 1)
    assert new == [[2], [2]] and new[0] is new[1]


def test_a_selected_object_is_replaced_once_and_not_looked_into():
    calls = []
    inner = Bag(x=1)
    data = [inner, inner]
    new = tree.for_each_instance_rewrite(data, Bag, lambda b: calls.append(b) or "bag")
    assert new == ["bag", "bag"] and calls == [inner]


def test_containers_come_back_as_plain_ones():
    Point = namedtuple("Point", "x y")
    data = OrderedDict(p=Point(1, 2), t=(3,), s={4}, l=[5])
    new = tree.for_each_instance_rewrite(data, int, lambda n: -n)
    assert new == {"p": [-1, -2], "t": [-3], "s": {-4}, "l": [-5]} and type(new) is dict


def test_a_tuple_that_must_be_hashable_stays_a_tuple():
    data = [{(1, (2, 3)): "x"}, {(4, 5)}]
    new = tree.for_each_instance_rewrite(data, int, lambda n: -n)
    assert new == [{(-1, (-2, -3)): "x"}, {(-4, -5)}]


def test_a_deque_comes_back_as_one_of_the_same_length_limit():
    data = deque([1, [2]], maxlen=2)
    new = tree.for_each_instance_rewrite(data, int, lambda n: -n)
    assert visited(data) == [1, 2] and new == deque([-1, [-2]]) and new.maxlen == 2


@dataclass(slots=True)
class Slotted:
    x: object
    y: object = None


@dataclass(slots=True, frozen=True)
class Frozen:
    x: object
    z: object = 9


class Mixed(Slotted):  # has a __dict__ as well
    pass


@pytest.mark.parametrize("kind", [Slotted, Frozen])
def test_what_lies_in_slots_is_met_and_replaced(kind):
    data = kind(1, [2])
    new = tree.for_each_instance_rewrite(data, int, lambda n: -n)
    assert visited(data) == [1, 2] and type(new) is kind
    assert new == kind(-1, [-2]) and data == kind(1, [2])


def test_slots_that_hold_nothing_and_attributes_beside_slots():
    data = Mixed(1, 2)
    data.more = [3]
    del data.y
    new = tree.for_each_instance_rewrite(data, int, lambda n: -n)
    assert visited(data) == [1, 3] and (new.x, new.more) == (-1, [-3]) and not hasattr(new, "y")


def test_members_of_things_made_in_c_are_no_parts():
    data = [slice(1, 2), range(3), 1 + 2j]
    new = tree.for_each_instance_rewrite(data, str, str.upper)
    assert new == data and visited(data) == []


class Pack(tree.DataWrapper):
    def __init__(self, tensors):
        self.tensors = tensors

    def get_tensors(self):
        return list(self.tensors)

    def from_tensors(self, tensors):
        return Pack(tensors)


def test_a_data_wrapper_is_opened_and_rebuilt_by_itself():
    data = {"a": Pack([1, [2, Pack([3])]])}
    assert [x for x in visited(data) if x != "a"] == [1, 2, 3]
    new = tree.for_each_instance_rewrite(data, int, lambda n: -n)
    assert new["a"].tensors[0] == -1 and new["a"].tensors[1][0] == -2
    assert new["a"].tensors[1][1].tensors == [-3]


def test_a_data_wrapper_may_make_its_values_on_demand():
    class Fresh(Pack):
        def get_tensors(self):
            return [str(x) for x in self.tensors]

        def from_tensors(self, tensors):
            return tensors

    data = [Fresh([n]) for n in range(1000, 1100)]
    new = tree.for_each_instance_rewrite(data, str, lambda text: f"-{text}")
    assert new == [[f"-{n}"] for n in range(1000, 1100)]


def test_a_data_wrapper_inside_itself_is_refused():
    pack = Pack([])
    pack.tensors.append(pack)
    with pytest.raises(ValueError, match="A Pack contains itself"):
        tree.for_each_instance_rewrite(pack, int, lambda n: n)


class Color(enum.Enum):
    RED = "red"


def test_things_one_refers_to_are_not_copied():
    data = [Color.RED, len, test_things_one_refers_to_are_not_copied, Path, pytest]
    new = tree.for_each_instance_rewrite(data, int, lambda n: n)
    assert all(a is b for a, b in zip(new, data, strict=True))


def test_depth_is_no_limit():
    deep = leaf = []
    for _ in range(100_000):
        leaf.append([])
        leaf = leaf[0]
    leaf.append(7)
    assert visited(deep) == [7]
    new = tree.for_each_instance_rewrite(deep, int, lambda n: n + 1)
    for chain in (deep, new):
        while isinstance(chain[0], list):  # taken apart by hand: del recurses in C
            chain = chain[0]
    assert chain == [8]


def test_168_a_sample_generator_starts_anew_each_time():
    samples = xu.SampleGenerator("x", 3)
    assert len(samples) == 3
    assert list(samples) == list(samples) == ["x"] * 3


def test_168_a_function_generator_gives_arguments_and_values():
    made = xu.FnDataGenerator(sum, 2, lambda *shape: list(shape), dims=[3, 4], count=2)
    assert list(made) == list(made) == [([2, 3, 4], 9)] * 2 and len(made) == 2
    assert list(xu.FnDataGenerator(sum, 2, lambda *shape: list(shape))) == [([2, 1], 3)]


def test_169_an_environment_variable_as_a_type(monkeypatch):
    for text, value in (("1", True), ("0", False)):
        monkeypatch.setenv("X", text)
        assert xu.getenv_as("X", bool) is value
    monkeypatch.setenv("X", "true")
    with pytest.raises(ValueError):
        xu.getenv_as("X", bool)
    monkeypatch.setenv("X", "2.5")
    assert xu.getenv_as("X", float) == 2.5
    monkeypatch.delenv("X")
    assert xu.getenv_as("X", int) is None and xu.getenv_as("X", int, 4) == 4


def test_an_environment_flag(monkeypatch):
    for text in ("ON", "1", "yes", "True", "y"):
        monkeypatch.setenv("X", text)
        assert xu.check_env_flag("X")
    monkeypatch.setenv("X", "0")
    assert not xu.check_env_flag("X")
    monkeypatch.delenv("X")
    assert not xu.check_env_flag("X") and xu.check_env_flag("X", "1")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)
    return Clock


def test_170_a_rate_is_that_since_the_last_one_blended_with_it(clock):
    tracker = RateTracker(smooth_factor=0.4)
    tracker.add(100)
    clock.now += 1
    assert tracker.rate() == 100
    tracker.add(50)
    clock.now += 1
    assert tracker.rate() == pytest.approx(0.6 * 50 + 0.4 * 100)
    assert tracker.global_rate() == 75


def test_170_without_time_there_is_no_rate(clock):
    tracker = RateTracker()
    tracker.add(10)
    assert tracker.rate() == tracker.global_rate() == 0.0
    clock.now += 1
    assert tracker.global_rate() == 10


def test_170_the_smoothing_comes_from_the_environment(clock, monkeypatch):
    monkeypatch.setenv("RATE_TRACKER_SMOOTHING", "0.5")
    tracker = RateTracker()
    for count, rate in ((100, 100), (50, 75)):
        tracker.add(count)
        clock.now += 1
        assert tracker.rate() == rate


def test_172_parallel_work_keeps_the_order():
    def slow(x, y):
        time.sleep(0.02 * (3 - x))
        return x + y

    assert xu.parallel_work(3, slow, [0, 1, 2], [10, 10, 10]) == [10, 11, 12]


def test_172_a_temporary_folder_goes_with_its_object():
    folder = xu.TmpFolder()
    path = Path(folder.name)
    (path / "file").write_text("x")
    assert path.is_dir()
    del folder
    assert not path.exists()


def test_172_a_lazy_property_is_made_once_and_when_asked_for():
    made = []
    lazy = xu.LazyProperty(lambda: made.append(1))
    assert made == []
    assert (lazy.value, lazy.value) == (None, None) and made == [1]


def test_a_cleaner_runs_when_it_is_deleted():
    runs = []
    cleaner = xu.Cleaner(lambda: runs.append(1))
    assert not runs
    del cleaner
    assert runs == [1]


def test_lists_and_tuples():
    assert xu.as_list(1) == [1] and xu.as_list([1]) == [1] and xu.as_list((1,)) == (1,)
    assert xu.shape([[1, 2, 3], [4, 5, 6]]) == [2, 3]
    assert xu.shape(1) == [] and xu.shape([]) == [0]
    assert xu.flatten_nested_tuple((1, (2, [3, ()]), 4)) == (1, 2, 3, 4)
    first = [1]
    assert xu.list_copy_append(first, 2) == [1, 2] and first == [1]
    with pytest.raises(ValueError, match="a shape needs them equal"):
        xu.shape([[1], [2, 3]])


def test_printing_where_it_is_wanted(capsys, monkeypatch):
    xu.null_print("no")
    xu.eprint("yes")
    assert capsys.readouterr() == ("", "yes\n")
    assert xu.get_print_fn(True) is xu.eprint and xu.get_print_fn(False) is xu.null_print
    monkeypatch.setenv("DEBUG", "1")
    assert xu.get_print_fn() is xu.eprint
    monkeypatch.delenv("DEBUG")
    assert xu.get_print_fn() is xu.null_print


def test_a_timed_call_returns_and_prints():
    lines = []
    assert xu.timed(lambda: 7, msg="took ", printfn=lines.append) == 7
    assert re.fullmatch(r"took \d+\.\d{3}s", lines[0])


def test_a_timed_scope_prints_the_error():
    lines = []
    with xu.TimedScope("x ", printfn=lines.append) as scope:
        scope.set_error("bad")
    with pytest.raises(KeyError), xu.TimedScope("y ", printfn=lines.append):
        raise KeyError("k")
    assert lines[0].endswith("error: 'bad'") and lines[1].endswith("error: KeyError('k')")


def test_free_ports_are_different_and_free():
    ports = xu.get_free_tcp_ports(4)
    assert len(set(ports)) == 4
    assert any(map(can_be_bound, ports))  # another process may have taken some meanwhile


def can_be_bound(port: int) -> bool:
    with socket.socket() as server:
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with pytest.raises(OSError, match="disk"), atomic_file.replacing(path) as file:
        file.write(b"ne")
        raise OSError("disk")
    assert path.read_bytes() == b"old"
    with atomic_file.replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_replaced_file_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with atomic_file.replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def started(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def fails_after(channel, items, error):
    for item in items:
        channel.put(item)
    try:
        raise error
    except BaseException as raised:
        channel.fail(raised)


def test_a_channel_ends_after_its_last_item():
    channel = Channel(capacity=2)
    started(lambda: [channel.put(n) for n in range(5)] and channel.close())
    assert list(channel) == [0, 1, 2, 3, 4]
    assert list(channel) == []


def test_a_producers_error_reaches_the_consumer_after_the_good_items():
    channel = Channel(capacity=2)
    started(fails_after, channel, range(3), OSError("shard 3"))
    seen = []
    with pytest.raises(OSError, match="shard 3") as raised:
        for item in channel:
            seen.append(item)  # noqa: PERF402  as far as it comes
    assert seen == [0, 1, 2]
    assert "fails_after" in [entry.name for entry in raised.traceback]


def test_the_error_comes_to_every_consumer_with_the_producers_lines_alone():
    channel = Channel(capacity=1)
    fails_after(channel, [], OSError("shard 3"))
    depths = []
    for _ in range(3):
        with pytest.raises(OSError) as raised:
            next(channel)
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1


def test_a_producers_stop_iteration_is_no_normal_end():
    channel = Channel(capacity=1)
    fails_after(channel, [], StopIteration())
    with pytest.raises(RuntimeError, match="stopped by StopIteration"):
        list(channel)


def test_the_first_ending_counts():
    channel = Channel(capacity=1)
    channel.close()
    channel.fail(OSError())
    assert list(channel) == [] and channel.put(1) is False


def test_close_wakes_a_blocked_producer():
    channel = Channel(capacity=1)
    taken = []
    producer = started(lambda: taken.extend([channel.put(1), channel.put(2)]))
    while len(channel) < 1:
        time.sleep(0.001)
    channel.close()
    producer.join(600)
    assert taken == [True, False] and list(channel) == [1]


def test_cancel_drops_what_is_inside():
    channel = Channel(capacity=2)
    channel.put(1)
    channel.cancel()
    assert channel.put(2) is False and list(channel) == []


def test_a_channel_of_no_capacity_is_refused():
    with pytest.raises(ValueError, match="give at least 1"):
        Channel(capacity=0)
