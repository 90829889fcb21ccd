"""Mistakes that users make: each error says what is wrong, at which line, and what to do.

`what` and `do` are searched in the text of the error and its notes. `do` is None where torch's own
text, the same as on the CPU, is all that there is to say. The line has the comment "here".
"""

import re
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
import ltc.errors
from ltc import config
from ltc.runtime.executor import executor_of
from tests.explained import line_to_blame
from tests.mistaken_programs import PROGRAMS, faults_of, said_by


def lazy(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="ltc")


# --- on another device ----------------------------------------------------------------------------


def batch_not_moved():
    model, x = nn.Linear(4, 2).to("ltc"), torch.randn(8, 4)
    model(x)  # here


def batch_in_a_dictionary():
    model, batch = nn.Linear(4, 2).to("ltc"), {"x": torch.randn(8, 4)}
    model(batch["x"])  # here


def model_not_moved():
    nn.Linear(4, 2)(lazy(8, 4))  # here


def convolution_not_moved():
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())(lazy(2, 3, 8, 8))  # here


def part_not_moved():
    nn.Sequential(nn.Conv2d(3, 4, 3).to("ltc"), nn.BatchNorm2d(4))(lazy(2, 3, 8, 8))  # here


def embedding_not_moved():
    nn.Embedding(10, 3)(torch.tensor([1, 2], device="ltc"))  # here


def recurrent_layer_not_moved():
    nn.LSTM(3, 4)(lazy(2, 3, 3))  # here


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4)

    def forward(self, x):
        return x * self.scale  # here


def attribute_not_moved():
    Scaled().to("ltc")(lazy(2, 4))


def labels_not_moved():
    labels = torch.randint(0, 2, (8,))
    F.cross_entropy(lazy(8, 2), labels)  # here


def part_of_a_list():
    torch.cat([lazy(2), torch.ones(2)])  # here


def written_into():
    total = torch.zeros(2)
    total.add_(lazy(2))  # here


def device_that_does_not_exist():
    torch.ones(3, device="ltc:1")  # here


# --- shapes and types -----------------------------------------------------------------------------


def doubles_of_numpy():
    nn.Linear(4, 2).to("ltc")(torch.from_numpy(np.random.randn(8, 4)).to("ltc"))  # here


def float_labels():
    F.cross_entropy(lazy(4, 3), lazy(4))  # here


def shapes_in_mid_model():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(33, 8)).to("ltc")
    model(lazy(8, 16))  # here


def wrong_view():
    lazy(3, 4).view(5, -1)  # here


def wrong_einsum():
    torch.einsum("ij,jk->ik", lazy(2, 3), lazy(4, 5))  # here


def truth_of_many():
    if lazy(3) > 0:  # here
        pass


def wrong_in_a_compiled_step():
    @ltc.compile
    def step(x):
        return x @ x.t() @ x.t()  # here

    step(lazy(3, 4))


# --- indices --------------------------------------------------------------------------------------


def word_outside():
    rows = nn.Embedding(10, 4).to("ltc")(torch.tensor([1, 12], device="ltc"))  # here
    rows.cpu()


def row_outside():
    lazy(3, 4).index_select(0, torch.tensor([5], device="ltc")).cpu()  # here


def index_outside():
    lazy(3, 4)[:, torch.tensor([5], device="ltc")].cpu()  # here


def class_outside():
    F.cross_entropy(lazy(3, 4), torch.tensor([0, 7, 1], device="ltc")).item()  # here


def word_outside_in_a_later_step():
    words = nn.Embedding(10, 4).to("ltc")
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    for step in range(6):
        chosen = torch.arange(3) + (9 if step == 5 else 0)
        optimizer.zero_grad()
        words(chosen.to("ltc")).sum().backward()  # here
        optimizer.step()
        ltm.mark_step()
    words.weight.sum().item()


# --- reading --------------------------------------------------------------------------------------


def numpy_of_a_lazy_tensor():
    lazy(3).numpy()  # here


def array_of_a_lazy_tensor():
    np.asarray(lazy(3))  # here


def storage_of_a_lazy_tensor():
    lazy(3).untyped_storage().tolist()  # here


def read_where_none_is_allowed():
    with ltc.no_sync():
        (lazy(3) * 2).nonzero()  # here


def nan_in_a_step():
    with config.override(LTC_DEBUG_NANS=1):
        (lazy(4) - 2).log().cpu()  # here


def nan_of_a_parameter():
    model = nn.Linear(3, 2).to("ltc")
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    ltm.mark_step(wait=True)
    with config.override(LTC_DEBUG_NANS=1):
        model(lazy(4, 3)).cpu()


# --- autograd -------------------------------------------------------------------------------------


def backward_twice():
    x = lazy(3).requires_grad_()
    loss = (x * x).sum()
    loss.backward()
    loss.backward()  # here


def leaf_written_to():
    x = lazy(3).requires_grad_()
    x += 1  # here


def saved_value_written_to():
    y = lazy(3).requires_grad_().exp()
    y += 1
    y.sum().backward()  # here


def no_gradient():
    lazy(3).sum().backward()  # here


def gradient_of_integers():
    torch.ones(3, dtype=torch.int64, device="ltc", requires_grad=True)  # here


def other_checkpoint():
    nn.Linear(4, 2).to("ltc").load_state_dict(nn.Linear(5, 2).to("ltc").state_dict())  # here


# --- what there is not ----------------------------------------------------------------------------


def too_large():
    torch.ones(1_000_000, 1_000_000, device="ltc").sum().item()  # here


def sparse_rows():
    torch.eye(3, device="ltc").to_sparse_csr()  # here


def quantized():
    torch.quantize_per_tensor(lazy(3), 0.1, 0, torch.qint8)  # here


def disk_full():
    ltm.save({"x": lazy(1000, 1000)}, "/dev/full")  # here


def wrong_setting():
    torch.backends.ltc.max_in_flight = "many"  # here


def misspelled_setting():
    torch.backends.ltc.max_in_fligth = 2  # here


@dataclass(frozen=True)
class Texts:
    what: str
    do: str | None = None


TEXTS = {
    batch_not_moved: Texts(
        r"FloatTensor of shape \[8, 4\]. It is on cpu: x at .*\(Argument 'input' of aten::linear",
        r"x\.to\('ltc'\)",
    ),
    batch_in_a_dictionary: Texts(r"on cpu: batch\['x'\] at", r"batch\['x'\]\.to\('ltc'\)"),
    model_not_moved: Texts(
        r"shape \[2, 4\]. It is on cpu: the parameter 'weight' of Linear", r"model\.to\('ltc'\)"
    ),
    convolution_not_moved: Texts("the parameter 'weight' of Conv2d", r"model\.to\('ltc'\)"),
    part_not_moved: Texts("the parameter 'weight' of BatchNorm2d", r"model\.to\('ltc'\)"),
    embedding_not_moved: Texts("the parameter 'weight' of Embedding", r"model\.to\('ltc'\)"),
    recurrent_layer_not_moved: Texts("input tensor at ltc:0 and parameter tensor at cpu"),
    attribute_not_moved: Texts(
        "the attribute 'scale' of Scaled, which model.to.. does not move", "register_buffer"
    ),
    labels_not_moved: Texts(
        r"LongTensor of shape \[8\]. It is on cpu: labels", r"labels\.to\('ltc'\)"
    ),
    part_of_a_list: Texts(r"Argument 'tensors' of aten::cat", r"move it with \.to\('ltc'\)"),
    written_into: Texts(r"shape \[2\]. It is on cpu: total", r"total\.to\('ltc'\)"),
    device_that_does_not_exist: Texts("ltc:1 does not exist", "Set LTC_NUM_DEVICES"),
    doubles_of_numpy: Texts("mat1 and mat2 must have the same dtype, but got Double and Float"),
    float_labels: Texts("expected target dtype to be Long or Byte, but got Float"),
    shapes_in_mid_model: Texts(r"shapes cannot be multiplied \(8x32 and 33x8\)"),
    wrong_view: Texts(r"shape '\[5, -1\]' is invalid for input of size 12"),
    wrong_einsum: Texts("subscript j has size 4 for operand 1"),
    truth_of_many: Texts("more than one value is ambiguous"),
    wrong_in_a_compiled_step: Texts(r"shapes cannot be multiplied \(3x3 and 4x3\)"),
    word_outside: Texts("index 12 is out of bounds for dimension 0 with size 10"),
    row_outside: Texts("index 5 is out of bounds for dimension 0 with size 3"),
    index_outside: Texts("index 5 is out of bounds for dimension 1 with size 4"),
    class_outside: Texts(r"Target 7 is out of bounds.\s+A target names one of 4 classes"),
    word_outside_in_a_later_step: Texts(
        r"index 1[01] is out of bounds for dimension 0 with size 10[\s\S]*in the step after \d+ step marks"
    ),
    numpy_of_a_lazy_tensor: Texts("can't convert ltc:0 device type tensor", r"Tensor\.cpu\(\)"),
    array_of_a_lazy_tensor: Texts("can't convert ltc:0 device type tensor", r"Tensor\.cpu\(\)"),
    storage_of_a_lazy_tensor: Texts("A lazy tensor has no storage to read", r"tensor\.cpu\(\)"),
    read_where_none_is_allowed: Texts("no_sync", r"Read it after ltm.mark_step\(\)"),
    nan_in_a_step: Texts(
        r"aten::log called at .*gives NaN: 4 of 4 elements.*\n.*\n.*aten::sub", "LTC_DEBUG_NANS=0"
    ),
    backward_twice: Texts("backward through the graph a second time", "retain_graph=True"),
    leaf_written_to: Texts("a leaf Variable that requires grad is being used in an in-place"),
    saved_value_written_to: Texts("modified by an inplace operation", "set_detect_anomaly"),
    no_gradient: Texts("does not require grad and does not have a grad_fn"),
    gradient_of_integers: Texts("Only Tensors of floating point and complex dtype"),
    other_checkpoint: Texts(r"size mismatch for weight: copying a param .*\[2, 5\]"),
    too_large: Texts("Tried to allocate 4000000000000 bytes", "Smaller batches.*memory_snapshot"),
    sparse_rows: Texts("torch.sparse_csr", r"x\.cpu\(\)"),
    quantized: Texts("aten::quantize_per_tensor gives a quantized tensor", r"x\.cpu\(\)"),
    disk_full: Texts("Could not save /dev/full: No space left on device"),
    wrong_setting: Texts("LTC_MAX_IN_FLIGHT=many", "expected an integer of at least 1"),
    misspelled_setting: Texts("no setting max_in_fligth", "Did you mean max_in_flight?"),
}


@pytest.mark.parametrize("mistake", TEXTS, ids=lambda one: one.__name__)
def test_a_mistake_is_named_with_its_line_and_its_cure(mistake):
    with pytest.raises(Exception) as caught:
        mistake()
    assert parts_missing(mistake, caught.value) == [], text_of(caught.value)


def parts_missing(mistake, error: Exception) -> list[str]:
    """Return the parts that the message of a mistake in `TEXTS` lacks: "what", "where", "do"."""
    text, expected = text_of(error), TEXTS[mistake]
    lines = [f"{one.filename}:{one.lineno}" for one in _frames(error) if one.line]
    blamed = line_to_blame(Scaled.forward if mistake is attribute_not_moved else mistake)
    place, _, _ = blamed.partition(" in ")
    found = {
        "what": re.search(expected.what, text),
        "where": place in text or place in lines,
        "do": expected.do is None or re.search(expected.do, text),
    }
    return [part for part, is_there in found.items() if not is_there]


def text_of(error: BaseException) -> str:
    """Return the message of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistaken_program_says_what_is_wrong_and_where(name, tmp_path):
    mistake = PROGRAMS[name]
    if mistake.needs:
        pytest.importorskip(mistake.needs)
    said, code = said_by(mistake, tmp_path)
    assert faults_of(mistake, said, code) == [], said


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def test_a_parameter_with_nan_is_named():
    with pytest.raises(ltc.errors.NotFinite, match="The parameter 'bias' of Linear"):
        nan_of_a_parameter()


def test_the_step_of_an_error_is_counted_by_its_marks():
    ltm.mark_step()
    before = executor_of(0).marks
    with pytest.raises(IndexError) as caught:
        word_outside_in_a_later_step()
    assert f"in the step after {before + 5} step marks" in caught.value.__notes__
