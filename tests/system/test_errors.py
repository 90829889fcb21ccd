"""Errors say what was asked, at the line that asked it, and leave the device as it was."""

import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.device.recording.recorder import device_at

SHAPE = (3, 4)


def lazy(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="ltc")


# --- tensors of two devices ---------------------------------------------------------------------

MIXED_WITH_CPU = {
    "add": lambda x: x + torch.ones(4),
    "cpu first": lambda x: torch.ones(3, 4) * x,
    "matmul": lambda x: x @ torch.ones(4, 2),
    "linear": lambda x: nn.Linear(4, 2)(x),
    "cat": lambda x: torch.cat([x, torch.ones(1, 4)]),
    "loss": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "in place": lambda x: torch.ones(4).add_(x[0]),
    "out": lambda x: torch.add(x[0], 1, out=torch.ones(4)),
    "list": lambda x: torch._foreach_add([x], [torch.ones(3, 4)]),
}


@pytest.mark.parametrize("name", MIXED_WITH_CPU)
def test_a_cpu_tensor_among_lazy_ones_is_refused(name, error_of):
    text = error_of(lambda: MIXED_WITH_CPU[name](lazy(*SHAPE)))
    assert text.startswith("Input tensor is not a lazy tensor: torch.")


def test_the_refused_tensors_type_is_named(error_of):
    text = error_of(lambda: lazy(2).double() + torch.ones(2, dtype=torch.double))
    assert text.startswith("Input tensor is not a lazy tensor: torch.DoubleTensor")


@pytest.mark.devices(2)
def test_two_lazy_devices_are_both_named(error_of):
    text = error_of(lambda: lazy(2) + torch.ones(2, device="ltc:1"))
    assert "ltc:0" in text and "ltc:1" in text


@pytest.mark.compared
def test_cpu_numbers_and_indices_are_accepted(device):
    x = torch.arange(12.0).reshape(3, 4).to(device)
    return (
        x + torch.tensor(2.0),
        (x * torch.tensor(2.0, dtype=torch.double)).dtype,
        x[torch.tensor([0, 2])],
        x[(x > 5).cpu()],
        torch.where(x > 5, x, torch.tensor(0.0)),
    )


# --- wrong shapes, dtypes, arguments ------------------------------------------------------------

WRONG = {
    "matmul": lambda x: x @ x,
    "add": lambda x: x + x.new_ones(3),
    "index": lambda x: x[5],
    "dim": lambda x: x.sum(5),
    "cat": lambda x: torch.cat([x, x.new_ones(1, 5)]),
    "copy_": lambda x: x.copy_(x.new_ones(5)),
    "copy_ of more dimensions": lambda x: x.copy_(x.new_ones(1, *SHAPE)),
    "copy_ of more dimensions of the CPU": lambda x: x.copy_(torch.ones(1, *SHAPE)),
    "view": lambda x: x.view(5),
    "expand": lambda x: x.expand(2, 3),
    "softmax of integers": lambda x: x.long().softmax(0),
    "linear of doubles": lambda x: nn.Linear(4, 2).to(x.device)(x.double()),
    "conv2d": lambda x: F.conv2d(x[None, None], x.new_ones(1, 2, 3, 3)),
    "dtype of out": lambda x: torch.add(x, 1, out=x.long()),
    "gather": lambda x: x.gather(0, x.new_zeros(3, 4)),
    "bernoulli": lambda x: x.bernoulli_(2.0),
    "full bool": lambda x: x.bool() - x.bool(),
}


@pytest.mark.compared
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_eagers_error(device, name):
    x = torch.ones(*SHAPE, device=device)
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as caught:
        WRONG[name](x)
    return type(caught.value), str(caught.value).split("\n")[0].replace("ltc:0", "cpu")


def test_a_wrong_shape_raises_at_the_users_line():
    x = lazy(3, 4)
    try:
        y = x.exp()
        y @ x  # the line the traceback names
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)
        assert any("the line the traceback names" in frame.line for frame in last)
    else:
        pytest.fail("no error")


def test_the_device_works_after_an_error():
    x = lazy(3, 4)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            x @ x
    assert (x @ x.t()).sum().item() == 36


# --- errors that only running shows -------------------------------------------------------------


def test_an_index_out_of_range_is_reported_with_the_users_line():
    table, far = lazy(3, 6), torch.tensor([7], device="ltc")  # a program of this file alone
    with pytest.raises((IndexError, RuntimeError)) as caught:
        rows = F.embedding(far, table)
        rows.cpu()
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "out of" in text and "test_errors.py" in text


INDEXED = {
    "embedding": lambda x, index: F.embedding(index, x),
    "index": lambda x, index: x[index],
    "index_select": lambda x, index: x.index_select(0, index),
    "gather": lambda x, index: x.gather(0, index[:, None]),
    "scatter": lambda x, index: x.scatter(0, index[:, None], 1.0),
    "index_put": lambda x, index: x.index_put((index,), x.new_ones(x.shape[1])),
    "cross entropy": lambda x, index: F.cross_entropy(x[:1], index),
}


@pytest.mark.parametrize("bad", [7, -7])
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_outside_is_an_index_error_with_the_users_line(name, bad):
    with pytest.raises(IndexError, match=f"out of range|{bad} is out of bounds") as caught:
        INDEXED[name](lazy(3, 6), torch.tensor([bad], device="ltc")).cpu()
    assert any("test_errors.py" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", INDEXED)
def test_checks_of_indices_may_be_turned_on_in_a_running_program(name):
    table = torch.ones(5, 4)  # of a shape that no other test has: nothing is compiled yet
    with config.override(LTC_CHECK_INDEX=0):
        unchecked = INDEXED[name](table.to("ltc"), torch.tensor([2], device="ltc")).cpu()
    assert torch.equal(unchecked, INDEXED[name](table, torch.tensor([2])))
    with pytest.raises(IndexError):
        INDEXED[name](table.to("ltc"), torch.tensor([7], device="ltc")).cpu()


@pytest.mark.native("the error is that of a step that was recorded")
def test_a_tensor_that_failed_says_so_each_time_it_is_read():
    failed = F.embedding(torch.tensor([7], device="ltc"), lazy(3, 4)) + 1
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            failed.cpu()
    assert lazy(2).sum().item() == 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


def good_batch():
    return torch.arange(8) % 10, torch.arange(8) % 5


BAD_BATCHES = {
    "a token": (torch.tensor([0, 1, 2, 3, 99, 5, 6, 7]), torch.arange(8) % 5),
    "a label": (torch.arange(8) % 10, torch.tensor([0, 1, 2, 3, 4, 99, 1, 2])),
}


@pytest.mark.parametrize("bad", BAD_BATCHES)
@pytest.mark.parametrize("form", ["foreach", "single"])
def test_a_bad_batch_fails_its_step_and_no_other(bad, form, equal):
    """That error with the user's line, parameters bit-equal to before, and the next step right."""

    def make(device):
        torch.manual_seed(2)
        model = Classifier().double().to(device)
        return model, torch.optim.Adam(model.parameters(), 1e-2, foreach=form == "foreach")

    def step(model, optimizer, batch, device):
        tokens, labels = (part.to(device) for part in batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            ltm.mark_step()
        return loss.detach()

    model, optimizer = make("ltc")
    for _ in range(2):
        step(model, optimizer, good_batch(), "ltc")
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}

    with pytest.raises((IndexError, RuntimeError)) as caught:
        step(model, optimizer, BAD_BATCHES[bad], "ltc")
        ltm.wait_device_ops()
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "out of" in text and "test_errors.py" in text

    after = {name: value.cpu() for name, value in model.named_parameters()}
    assert all(torch.equal(after[name], before[name]) for name in after)

    reference, reference_optimizer = make("cpu")
    for _ in range(3):
        loss = step(reference, reference_optimizer, good_batch(), "cpu")
    for state in optimizer.state.values():
        state["step"].fill_(2)  # a number on the CPU, which the failed step may have counted
    equal(step(model, optimizer, good_batch(), "ltc"), loss)
    equal(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_a_read_names_no_error_of_another_step():
    with pytest.raises((IndexError, RuntimeError)):
        F.embedding(torch.tensor([9], device="ltc"), lazy(3, 4)).cpu()
    ltm.mark_step()
    ltm.wait_device_ops()
    assert (lazy(3) + 1).tolist() == [2, 2, 2]


# --- what ltc does not do -----------------------------------------------------------------------


def test_numpy_of_a_lazy_tensor_says_what_to_call():
    with pytest.raises(TypeError, match=r"cpu\(\)"):
        lazy(2).numpy()


@pytest.mark.native("the error is that of a step that was recorded")
def test_an_index_outside_a_tensor_of_equal_numbers_is_an_error():
    """Such a tensor is nowhere in memory: a program could do without looking at the index."""
    index = torch.tensor([9], device="ltc")
    for table in (torch.ones(4, device="ltc"), torch.ones(1, device="ltc").expand(4)):
        rows = table[index]
        with pytest.raises(IndexError, match="out of bounds|out of range"):
            rows.cpu()


@pytest.mark.native("the error is that of a step that was recorded")
def test_a_number_that_can_not_be_read_leaves_the_next_step_at_its_beginning():
    recorder = device_at(0).recorder()
    with config.override(LTC_MAX_RECORDED="x"), pytest.raises(ValueError, match="RECORDED=x"):
        total = lazy(*SHAPE) * 2
        ltm.mark_step(wait=True)
    assert recorder.last is recorder.root
    assert (total + 1).sum().item() == 36


# --- the CPU's words for values out of range -------------------------------------------------------

OUT_OF_RANGE = {
    "a negative class": lambda d: F.one_hot(torch.tensor([0, -1]).to(d), 3),
    "a class too large": lambda d: F.one_hot(torch.tensor([[0], [5]]).to(d), 3),
    "a negative class of unknown many": lambda d: F.one_hot(torch.tensor([0, -1]).to(d)),
    "no classes": lambda d: F.one_hot(torch.tensor([0, 1]).to(d), 0),
    "classes that are floats": lambda d: F.one_hot(torch.tensor([0.0, 1.0]).to(d), 3),
    "a rank above one": lambda d: torch.quantile(torch.rand(5).to(d), 1.5),
    "a negative rank": lambda d: torch.quantile(torch.rand(5).to(d), -0.1),
    "a rank among others": lambda d: torch.quantile(
        torch.rand(5).to(d), torch.tensor([0.5, 1.5]).to(d)
    ),
    "a rank that is no number": lambda d: torch.quantile(
        torch.rand(5).to(d), torch.tensor(torch.nan).to(d)
    ),
    "a rank of what is not NaN": lambda d: torch.nanquantile(
        torch.rand(2, 5).to(d), torch.tensor([-1.0]).to(d), dim=1
    ),
    "ranks of another dtype": lambda d: torch.quantile(
        torch.rand(5).to(d), torch.tensor([0.5], dtype=torch.float64).to(d)
    ),
    "quantiles of integers": lambda d: torch.quantile(torch.arange(5).to(d), 0.5),
    "quantiles of none": lambda d: torch.quantile(torch.rand(0).to(d), 0.5),
}


@pytest.mark.parametrize("case", OUT_OF_RANGE)
@pytest.mark.compared
def test_values_out_of_range_are_refused_in_the_cpus_words(device, case):
    """Thrice: the first time may be on another tier."""
    texts = []
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            OUT_OF_RANGE[case](device).cpu()
        texts.append(str(caught.value).splitlines()[0])
    return texts


@pytest.mark.compared
def test_ones_of_classes_and_quantiles_of_many_ranks(device):
    classes = torch.tensor([[0, 2], [1, 1]]).to(device)
    x = torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, q = x.to(device).requires_grad_(), torch.tensor([0.2, 0.9], dtype=torch.float64).to(device)
    found = torch.quantile(x, q, dim=1)
    found.sum().backward()
    none = F.one_hot(classes[:0], 3)
    return F.one_hot(classes, 4), F.one_hot(classes), none, found.detach(), x.grad
