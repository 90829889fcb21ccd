"""Equal values share memory as long as nobody writes to one of them."""

import itertools

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.device.recording.tensors import state_of

pytestmark = [
    pytest.mark.native("only compiled programs have outputs that share memory"),
    pytest.mark.skipif(config.value("LTC_BACKEND") != "llvm", reason="and only those of LLVM"),
]


def place_of(tensor: torch.Tensor) -> int:
    return state_of(tensor).buffer.ready().data_ptr()


def computed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    ltm.mark_step(wait=True)
    return list(tensors)


def three_of_one_value() -> list[torch.Tensor]:
    value = torch.arange(1000.0).to("ltc") * 3
    return computed(value, value.clone(), value.clone())


def test_copies_of_a_value_take_no_memory():
    assert len(set(map(place_of, three_of_one_value()))) == 1


@pytest.mark.parametrize("written, dropped", list(itertools.product(range(3), [None, 0, 1, 2])))
def test_a_write_reaches_one_of_them_alone(written, dropped):
    tensors = three_of_one_value()
    expected = [torch.arange(1000.0) * 3 for _ in tensors]
    if dropped is not None and dropped != written:
        tensors[dropped] = None
    for factor in (2, 3):
        tensors[written].mul_(factor)
        expected[written].mul_(factor)
        computed()
    for tensor, value in zip(tensors, expected):
        assert tensor is None or torch.equal(tensor.cpu(), value)


def test_all_may_be_written_to_in_one_step():
    tensors = three_of_one_value()
    for number, tensor in enumerate(tensors):
        tensor.add_(number)
    computed()
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor.cpu(), torch.arange(1000.0) * 3 + number)


def test_the_last_one_is_written_to_where_it_lies():
    first, second, third = three_of_one_value()
    place = place_of(third)
    del first, second
    third.mul_(2)
    computed()
    assert place_of(third) == place


def test_a_value_that_took_the_place_of_another_is_copied():
    x = torch.arange(1000.0).to("ltc")
    computed()
    for _ in range(3):
        before = x.cpu().clone()
        x.add_(1)
        saved = x.clone()
        computed()
        assert place_of(saved) != place_of(x)
        assert torch.equal(x.cpu(), before + 1) and torch.equal(saved.cpu(), before + 1)


def test_a_first_momentum_lies_where_its_gradient_does_and_outlives_it():
    weight = torch.randn(64, 64).to("ltc").requires_grad_()  # its gradient is no view
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    x = torch.randn(64, 64).to("ltc")
    places = []
    for _ in range(3):
        optimizer.zero_grad()
        (weight * x).square().mean().backward()
        optimizer.step()
        computed()
        momentum = optimizer.state[weight]["momentum_buffer"]
        places.append((place_of(momentum), place_of(weight.grad)))
    assert places[0][0] == places[0][1]
    assert len({momentum for momentum, _ in places}) == 1
    assert all(momentum != gradient for momentum, gradient in places[1:])
