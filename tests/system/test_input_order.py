"""Walks that meet the same inputs in another order run the same program, each on its own buffers."""

import itertools

import pytest
import torch

import ltc
from ltc import config
from ltc.debug import graphs, metrics
from ltc.device.recording.tensors import state_of
from ltc.runtime.program_cache import PROGRAMS

pytestmark = pytest.mark.also_native


def meet(*tensors: torch.Tensor) -> None:
    """Let the recording have these as its next inputs, for calls that nobody needs."""
    for tensor in tensors:
        tensor.neg()


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path):
    """No other test has compiled a program that is equal to one here."""
    PROGRAMS.clear()
    with config.override(LTC_CACHE_DIR=tmp_path):
        yield


def compiled(step, *arguments) -> int:
    """How many programs `step` and its mark compile."""
    with metrics.counted() as grown:
        kept = step(*arguments)  # until the mark: what nobody holds is not computed
        ltc.sync()
        del kept
    return grown.get("UncachedCompile", 0)


def drawn(count: int, *shape: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors of the CPU, and the same on the device."""
    plain = [torch.randn(*shape) for _ in range(count)]
    return plain, [x.to("ltc") for x in plain]


def mixed(a, b, c):
    return a / 2 - b * c


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_every_order_of_equal_inputs_is_one_program():
    plain, operands = drawn(3, 4, 5)
    assert compiled(mixed, *operands) == 1
    for order in itertools.permutations(operands):
        meet(*order)
        assert compiled(mixed, *operands) == 0
        meet(*order)
        torch.testing.assert_close(mixed(*operands).cpu(), mixed(*plain))


def update(a, b, c):
    """Each takes in the next one, as it was or as it has become."""
    a.add_(b, alpha=2)
    b.mul_(c)
    c.sub_(a)


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_what_is_updated_stays_in_its_buffer_whatever_the_order():
    plain, operands = drawn(3, 4, 3)
    assert compiled(update, *operands) == 1
    update(*plain)
    before = [state_of(x).buffer for x in operands]
    for order in itertools.permutations(operands):
        meet(*order)
        assert compiled(update, *operands) == 0
        update(*plain)
    # not read before: what is read while another thread records is not written over
    assert all(state_of(x).buffer is buffer for x, buffer in zip(operands, before))
    torch.testing.assert_close([x.cpu() for x in operands], plain)


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_updates_beside_new_results_and_values_that_are_not_read():
    plain, operands = drawn(4, 4, 6)

    def step(a, b, c, d):
        a.add_(b)
        c.copy_(a * 2)  # what it held is not read
        d.zero_()
        return c - a, b.exp()

    assert compiled(step, *operands) == 1
    step(*plain)
    for order in itertools.permutations(operands):
        meet(*order)
        with metrics.counted() as grown:
            results = step(*operands)
            ltc.sync()
        assert grown.get("UncachedCompile", 0) == 0
        expected = step(*plain)
        torch.testing.assert_close([x.cpu() for x in (*results, *operands)], [*expected, *plain])


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_lists_of_tensors():
    plain, operands = drawn(6, 3, 2)

    def step(*tensors):
        torch._foreach_addcmul_(tensors[:2], tensors[2:4], tensors[4:], 0.5)

    assert compiled(step, *operands) == 1
    step(*plain)
    meet(*reversed(operands))
    assert compiled(step, *operands) == 0
    step(*plain)
    torch.testing.assert_close([x.cpu() for x in operands], plain)


@pytest.mark.native("bits are compared with those of a step that reads nothing")
def test_a_training_that_reads_its_parameters_first_compiles_nothing_more():
    def trained(look):
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        model = torch.nn.Sequential(*layers).to("ltc")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, losses = torch.randn(4, 6).to("ltc"), []
        for _ in range(4):
            look(model)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            ltc.sync()
            losses.append(loss.item())
        return losses

    expected = trained(lambda model: None)
    with metrics.counted() as grown:
        for look in (
            lambda model: meet(*model.parameters()),
            lambda model: meet(*reversed([*model.parameters()])),
            lambda model: meet(*model.buffers(), *model.parameters()),
        ):
            assert trained(look) == expected
    assert grown.get("UncachedCompile", 0) == 0


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_a_steady_step_that_meets_its_inputs_otherwise_is_found_at_its_end():
    _, operands = drawn(3, 4, 3)

    def step():
        meet(*reversed(operands))
        update(*operands)
        ltc.sync()

    for _ in range(2):
        step()
    with metrics.counted() as grown:
        for _ in range(3):
            step()
    assert grown["CachedCompile"] == 3
    assert not {"RecordedEntries", "UncachedCompile"} & grown.keys()


def test_the_shown_graph_is_that_of_the_program():
    _, operands = drawn(3, 4)
    shown = graphs.text(mixed(*operands), stage="expanded")
    ltc.sync()
    meet(*reversed(operands))
    assert graphs.text(mixed(*operands), stage="expanded") == shown
