"""What a batch is made of arrives as what it was, on the device, or is refused by its name."""

import array
import collections
import copy
import dataclasses
import enum
import functools
import threading
import types
import typing

import attrs
import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ltc.distributed.parallel_loader import MpDeviceLoader, ParallelLoader
from ltc.errors import Unsupported
from ltc.training_loop.transfer import send_cpu_data_to_device
from ltc.utils.utils import DataWrapper
from tests.distributed.random_loaders import FORMS, described, tensors_of

pytestmark = pytest.mark.devices(4)


class Pair(typing.NamedTuple):
    x: torch.Tensor
    size: tuple = (1, 2)


class PairWithMore(Pair):
    """A subclass of a named tuple, which may have attributes."""


class Triple(tuple):
    """A tuple of a class of its own."""


class Names(list):
    """A list that makes its own elements."""

    def append(self, name):
        super().append(name.upper())


class Fields(dict):
    """A dictionary that takes no argument, and refuses changes."""

    def __init__(self, name):
        self.name = name

    def __setitem__(self, key, value):
        raise PermissionError("made once")


class Bag(set):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    parts: tuple = (1, (2, 3))


@attrs.define
class Attrs:
    x: torch.Tensor
    names: list


@attrs.frozen
class FrozenAttrs:
    x: torch.Tensor


class Plain:
    def __init__(self, x):
        self.x, self.size = x, (3, 4)
        self.lock = threading.Lock()


class WithTo:
    """As the batches of graph libraries: `to` changes it, and takes the sizes along."""

    def __init__(self, x):
        self.x, self.calls = x, 0

    def to(self, device, non_blocking=False):
        self.x, self.calls = self.x.to(device), self.calls + 1
        return self


class Marked(torch.Tensor):
    pass


class Dispatched(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def x():
    return torch.arange(3.0)


def fields():
    batch = Fields(x())
    dict.__setitem__(batch, "x", x())
    return batch


def triple():
    batch = Triple([x()])
    batch.more = x()
    return batch


def marked():
    tensor = x().as_subclass(Marked)
    tensor.note = "front"
    return tensor


def objects():
    batch = numpy.empty((2, 1), object)
    batch[0, 0], batch[1, 0] = x(), [x()]
    return batch


MORE_FORMS = {
    "subclass of a named tuple": lambda: PairWithMore(x()),
    "namedtuple in a dict": lambda: {"p": collections.namedtuple("Point", "a b")(x(), Pair(x()))},
    "return type of topk": lambda: x().topk(2),
    "tuple subclass": triple,
    "list subclass": lambda: Names([x()]),
    "dict subclass": fields,
    "frozen record": lambda: Frozen(x(), (x(), (2,))),
    "attrs": lambda: Attrs(x(), ["a"]),
    "frozen attrs": lambda: FrozenAttrs(x()),
    "object with a lock": lambda: [Plain(x()).__dict__["x"], types.SimpleNamespace(p=Pair(x()))],
    "user list": lambda: collections.UserList([x()]),
    "chain map": lambda: collections.ChainMap({"a": x()}, {"b": x()}),
    "counter": lambda: [collections.Counter("aab"), x()],
    "bounded deque": lambda: collections.deque([[x()]], maxlen=4),
    "marked": marked,
    "with a function of its own": lambda: x().as_subclass(Dispatched),
    "parameter that needs no gradient": lambda: torch.nn.Parameter(x(), requires_grad=False),
    "jagged": lambda: [x(), torch.nested.nested_tensor([x()], layout=torch.jagged).values()],
    "negative view": lambda: torch.complex(x(), x()).imag.neg(),
    "numbers": lambda: (1, 2.5, 3 + 1j, True, None, "text", b"bytes", range(3), torch.Size([1])),
    "nothing": lambda: [torch.empty(0), [], {}, (), torch.tensor(4)],
}  # fmt: skip
EVERY_FORM = {**{name: functools.partial(make, x()) for name, make in FORMS.items()}, **MORE_FORMS}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("form", EVERY_FORM)
def test_every_kind_arrives_as_what_it_was_on_the_device(form, devices):
    if form == "sparse" and devices == 2:
        devices = 1  # torch's constructor of such tensors works on the first device
    batch = EVERY_FORM[form]()
    expected = described(batch)
    loader = ParallelLoader([batch] * 2 * devices, [0, 1][:devices])
    for index in range(devices):
        for arrived in loader.per_device_loader(index):
            assert described(arrived) == expected
            assert {str(t.device) for t in tensors_of(arrived, set())} <= {f"ltc:{index}"}
    loader.close()
    assert described(batch) == expected
    assert {t.device.type for t in tensors_of(batch, set())} <= {"cpu"}


def arrived(batch):
    (there,) = MpDeviceLoader([batch], "ltc")
    return there


def test_sets_of_tensors_arrive_as_sets():
    for kind in (set, frozenset, Bag):
        there = arrived(kind([x(), x()]))
        assert type(there) is kind and len(there) == 2
        assert all(t.is_ltc and t.tolist() == [0, 1, 2] for t in there)


def test_tensors_that_are_keys_arrive_as_keys():
    (key,) = arrived({(x(), 1): 2})
    assert type(key) is tuple and key[0].is_ltc and key[1] == 1


def test_a_default_dictionary_keeps_its_factory_and_an_attribute_stays_one():
    assert arrived(collections.defaultdict(list, a=x()))["b"] == []
    there = arrived(fields())
    assert there.name.is_ltc and there["x"].is_ltc
    assert arrived(triple()).more.is_ltc
    assert arrived(marked()).note == "front"


def test_an_object_is_copied_with_what_it_holds_and_what_cannot_be_copied_is_shared():
    batch = Plain(x())
    there = arrived(batch)
    assert there is not batch and there.x.is_ltc and batch.x.is_cpu
    assert there.size == (3, 4) and there.lock is batch.lock


def test_an_object_that_moves_itself_is_asked_for_a_copy_of_itself():
    batch = WithTo(x())
    for there in MpDeviceLoader([batch] * 3, "ltc"):
        assert there.x.is_ltc and there.calls == 1
    assert batch.x.is_cpu and batch.calls == 0


def test_a_packed_sequence_arrives_as_torch_moves_it():
    there = arrived(pack_sequence([x(), x()[:2]]))
    assert there.data.is_ltc and there.batch_sizes.is_cpu
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(there)
    assert padded.cpu().tolist() == [[0, 0], [1, 1], [2, 0]] and lengths.tolist() == [3, 2]


def test_a_module_arrives_as_another_one():
    model = torch.nn.Linear(2, 1)
    there = arrived({"teacher": model})["teacher"]
    assert there.weight.is_ltc and model.weight.is_cpu
    assert torch.equal(there.weight.detach().cpu(), model.weight.detach())


def test_an_array_of_objects_arrives_with_its_tensors_on_the_device():
    there = arrived(objects())
    assert there.shape == (2, 1) and there[0, 0].is_ltc and there[1, 0][0].is_ltc


def test_plain_memory_is_copied_and_stays_on_the_host():
    batch = {
        "array": numpy.arange(3),
        "masked": numpy.ma.array([1, 2], mask=[0, 1]),
        "view": numpy.zeros((2, 2), order="F"),
        "bytes": bytearray(b"ab"),
        "numbers": array.array("d", [1, 2]),
        "memory": memoryview(bytearray(b"cd")),
    }
    there = arrived(batch)
    assert {name: type(part) for name, part in there.items()} == {
        name: type(part) for name, part in batch.items()
    }
    assert all(there[name] is not part for name, part in batch.items())
    assert there["view"].flags.f_contiguous and there["masked"].mask.tolist() == [False, True]
    assert bytes(there["memory"]) == b"cd"


def test_one_tensor_in_two_places_arrives_as_one():
    tensor = x()
    there = arrived({"a": tensor, "b": [tensor, Pair(tensor)]})
    assert there["a"] is there["b"][0] is there["b"][1].x


def test_a_batch_that_leads_back_to_itself_arrives_so():
    ring = [x()]
    ring.append(Pair(ring))
    there = arrived(ring)
    assert there[1].x is there and type(there[1]) is Pair and there[0].is_ltc
    beginning = Pair([x()])
    beginning.x.append(beginning)
    there = arrived(beginning)
    assert there.x[1] is there and there.x[0].is_ltc


def test_a_gradient_reaches_what_a_batch_was_made_of():
    weight = torch.ones(2, requires_grad=True)
    there = arrived(weight * 3)
    assert there.is_ltc and there.requires_grad and not there.is_leaf
    there.sum().backward()
    assert weight.grad.tolist() == [3, 3]


def test_a_leaf_of_the_device_stays_the_same_object():
    leaf = torch.ones(2, device="ltc:0", requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2, device="ltc:0"))
    there = arrived([leaf, parameter])
    assert there[0] is leaf and there[1] is parameter


def test_tensors_of_another_device_are_moved():
    batch = [torch.ones(2, device="ltc:1"), torch.ones(2, 2, device="ltc:1")[0]]
    there = arrived(batch)
    assert [str(t.device) for t in there] == ["ltc:0"] * 2 and there[1].tolist() == [1, 1]


def test_things_that_hold_no_tensor_are_handed_on():
    color = enum.Enum("Color", "RED")
    batch = [color.RED, len, threading.Lock(), Plain, torch.float32, torch.device("cpu"), object()]
    assert all(a is b for a, b in zip(arrived(batch), batch, strict=True))


class Wrapped(DataWrapper):
    def __init__(self, parts):
        self.parts = parts

    def get_tensors(self):
        return self.parts

    def from_tensors(self, tensors):
        return Wrapped(tensors)


def test_a_data_wrapper_says_what_is_in_it():
    there = arrived([Wrapped([x(), Pair(x())])])[0]
    assert there.parts[0].is_ltc and there.parts[1].x.is_ltc and type(there.parts[1]) is Pair


def test_libraries_batches_arrive_as_theirs():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"ids": x()})
    output = transformers.modeling_outputs.BaseModelOutput(
        last_hidden_state=x(), attentions=(x(), x())
    )
    there, made = arrived([encoding, output])
    assert type(there) is type(encoding) and there["ids"].is_ltc and encoding["ids"].is_cpu
    assert type(made) is type(output) and made.last_hidden_state is made["last_hidden_state"]
    assert made.attentions is made["attentions"] and type(made.attentions) is tuple
    assert made.attentions[1].is_ltc


# --- what is refused -------------------------------------------------------------------------------


class NoCopy(Plain):
    def __copy__(self):
        raise RuntimeError("there is one of me")


class Wrong(WithTo):
    def to(self, device):
        """Return nothing."""


def storage():
    return x().untyped_storage()


REFUSED = {
    "nested": (lambda: torch.nested.nested_tensor([x()]), Unsupported, "layout=torch.jagged"),
    "quantized": (
        lambda: torch.quantize_per_tensor(x(), 0.1, 0, torch.quint8), Unsupported, "dequantize"),
    "meta": (lambda: x().to("meta"), Unsupported, "It has no data"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), Unsupported, r"torch.sparse_csr.*to_sparse\(\)"),
    "bsr": (lambda: torch.ones(2, 2).to_sparse_bsr((1, 1)), Unsupported, r"to_sparse\(\)"),
    "mkldnn": (lambda: x().to_mkldnn(), Unsupported, "to_dense"),
    "storage": (storage, Unsupported, "no storages"),
    "generator": (lambda: (t for t in [x()]), TypeError, "generator.*Pass a list"),
    "iterator": (lambda: iter([x()]), TypeError, "list_iterator.*Pass a list"),
    "values": (lambda: {"a": x()}.values(), TypeError, "dict_values.*Pass a list"),
    "partial": (lambda: functools.partial(print, [x()]), TypeError, "functools.partial.*to.device"),
    "exception": (lambda: ValueError(x()), TypeError, "ValueError that holds tensors"),
    "no copy": (lambda: NoCopy(x()), TypeError, "NoCopy.*there is one of me.*DataWrapper"),
    "enum": (lambda: enum.Enum("E", {"X": x()}).X, TypeError, "E that holds.*returns the object itself"),
    "wrong to": (lambda: Wrong(x()), TypeError, "Wrong.to.*returned a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("inside", [lambda part: part, lambda part: {"a": [part, 1]}, Pair])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_moved_is_refused_by_its_name(kind, inside):
    make, error, text = REFUSED[kind]
    loader = MpDeviceLoader([x(), inside(make())], "ltc")
    consumer = iter(loader)
    assert next(consumer).tolist() == [0, 1, 2]
    with pytest.raises(error, match=text):
        next(consumer)


def test_an_upload_by_hand_keeps_kinds_and_leaves_parameters():
    parameter, memory = torch.nn.Parameter(x()), numpy.zeros(2)
    data = {"p": Pair(x()), "w": parameter, "n": memory, "t": (x(), 1), "meta": x().to("meta")}
    there = send_cpu_data_to_device(data, "ltc")
    assert type(there["p"]) is Pair and there["p"].x.is_ltc and there["p"].size == (1, 2)
    assert there["w"] is parameter and there["n"] is memory and there["meta"] is data["meta"]
    assert type(there["t"]) is list and there["t"][0].is_ltc


def test_a_batch_may_be_as_deep_as_memory_allows():
    deep = leaf = []
    for _ in range(20_000):
        leaf.append([])
        leaf = leaf[0]
    leaf.append(x())
    there = arrived(deep)
    for chain in (deep, there):
        while isinstance(chain[0], list):  # taken apart by hand: del recurses in C
            chain = chain[0]
        last = chain[0]
    assert last.is_ltc and copy.copy(last).tolist() == [0, 1, 2]
