"""The reference backend: donation, errors, what the calling thread is in, random bits."""

import threading

import numpy as np
import pytest
import torch

from ltc.backends.eager import COMPUTE, EagerBackend
from ltc.backends.interface import BackendImplInterface, BackendRegistrar
from ltc.backends.reference.philox import philox, random_bits
from ltc.errors import BackendMissing
from ltc.ir import build, ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.node import make


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def scalar(slot=0):
    return make(ops.SCALAR, slot=slot, dtype=torch.float64, wrapped=True)


def compiled(inputs, outputs, donated=(), scalars=(), origins=None):
    graph = Graph(tuple(inputs), tuple(scalars), tuple(outputs), origins or {})
    return EagerBackend().compile(graph, 0, frozenset(donated))


def test_every_op_but_inputs_has_a_row():
    assert set(ops.ALL.values()) - set(COMPUTE) == {ops.INPUT, ops.SCALAR}


def test_an_update_is_written_over_the_donated_buffer():
    p, g, rate = given(3), given(3, index=1), scalar()
    computation = compiled([p, g], [p - rate * g], donated=[0], scalars=[rate])
    old, grad = torch.ones(3), torch.full((3,), 2.0)
    (new,) = computation.launch([old, grad], [0.5])
    assert new.data_ptr() == old.data_ptr() and new.tolist() == [0.0, 0.0, 0.0]
    assert grad.tolist() == [2.0, 2.0, 2.0]


def test_what_reads_the_old_value_runs_before_the_write():
    p = given(3)
    computation = compiled([p], [p + 1, build.sum_of(p * p)], donated=[0])
    buffer = torch.full((3,), 2.0)
    new, squares = computation.launch([buffer], [])
    assert squares.item() == 12 and new.tolist() == [3, 3, 3]
    assert new.data_ptr() == buffer.data_ptr()


def test_a_buffer_is_not_donated_where_a_view_of_it_is_read_by_the_write():
    p = given(2, 2)
    computation = compiled([p], [p + build.transpose(p, 0, 1)], donated=[0])
    buffer = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    (new,) = computation.launch([buffer], [])
    assert new.tolist() == [[0, 3], [3, 6]]


def test_two_parameters_that_exchange_values_do_so():
    p, q = given(2), given(2, index=1)
    computation = compiled([p, q], [q + 0.0, p + 0.0], donated=[0, 1])
    new = computation.launch([torch.zeros(2), torch.ones(2)], [])
    assert [n.tolist() for n in new] == [[1, 1], [0, 0]]


def test_outputs_share_no_memory():
    x = given(2, 3)
    y = -x
    outputs = [x, y, build.transpose(y, 0, 1), build.reshape(y, (6,)), y, build.select(y, 0, 1)]
    buffer = torch.arange(6.0).reshape(2, 3)
    made = compiled([x], outputs).launch([buffer], [])
    assert len({m.data_ptr() for m in [*made, buffer]}) == len(made) + 1
    assert all(m.is_contiguous() and m.untyped_storage().nbytes() == m.nbytes for m in made)


def test_an_error_keeps_type_and_text_and_names_overload_and_line():
    x, index = given(3), given(2, index=1, dtype=torch.int64)
    p = given(3, index=2)
    taken = build.take(x, index, 0)
    origins = {taken: Origin("aten::index_select", "train.py:7 in step")}
    computation = compiled([x, index, p], [p + 1, taken], donated=[2], origins=origins)
    parameter = torch.zeros(3)
    with pytest.raises(IndexError, match="index out of range in self") as raised:
        computation.launch([torch.zeros(3), torch.tensor([0, 9]), parameter], [])
    assert raised.value.__notes__ == [
        "while running aten::index_select called at train.py:7 in step"
    ]
    assert raised.value.overwritten == () and parameter.tolist() == [0, 0, 0]


def test_a_launch_ignores_the_modes_of_its_thread():
    x = given(8, 8)
    computation = compiled([x], [build.matmul(x, x)])
    buffer = torch.randn(8, 8)
    expected = buffer @ buffer
    with torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        (made,) = computation.launch([buffer], [])
    assert not made.is_inference() and made.device.type == "cpu"
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    inside = torch.func.vmap(lambda _: computation.launch([buffer], [])[0])(torch.zeros(2))
    assert inside.shape == (2, 8, 8)


def test_a_launch_runs_in_any_thread():
    x = given(4)
    computation, made = compiled([x], [x + 1]), []
    thread = threading.Thread(target=lambda: made.extend(computation.launch([torch.ones(4)], [])))
    thread.start()
    thread.join()
    assert made[0].tolist() == [2, 2, 2, 2]


# Source: the known-answer file kat_vectors of the Random123 distribution, rows "philox4x32 10".
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox(tuple(np.array([c], dtype=np.uint64) for c in counter), key)
    assert tuple(int(w[0]) for w in words) == expected


def test_random_bits_are_the_top_bits_of_the_words():
    words = random_bits(0, 8, 32, 0)
    assert words[:4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert random_bits(0, 8, 24, 0).tolist() == (words >> 8).tolist()
    assert random_bits(0, 1, 63, 0)[0] == (0xE169C58D6627E8D5 >> 1)
    assert random_bits(0, 8, 32, 1).tolist() != words.tolist()


def test_eager_is_a_backend():
    assert isinstance(EagerBackend(), BackendImplInterface)


def test_a_missing_backend_is_named_with_the_nearest():
    BackendRegistrar.register("eager-for-this-test", EagerBackend)
    assert "eager-for-this-test" in BackendRegistrar.names()
    with pytest.raises(BackendMissing, match="Did you mean 'eager-for-this-test'"):
        BackendRegistrar.get("eager-for-this-tst")


def test_half_a_backend_is_told_what_it_lacks():
    class Half:
        name, lowering, computation = "half", None, object

        def devices(self):
            return ()

    BackendRegistrar.register("half-for-this-test", Half)
    what_it_lacks = "Half is not a BackendImplInterface: it lacks compile"
    with pytest.raises(TypeError, match=what_it_lacks):
        BackendRegistrar.get("half-for-this-test")
