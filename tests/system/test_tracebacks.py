"""A traceback shows the user's frames and one line of ltc's; LTC_DEBUG=1 shows all."""

import gc
import io
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.distributed.data_parallel import DataParallel
from ltc.distributed.parallel_loader import MpDeviceLoader
from ltc.runtime.buffer import Failure, account_of
from ltc.tracebacks import entrance

OWN = str(Path(ltc.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


def lazy(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).to("ltc")


def missing() -> torch.Tensor:
    return lazy(3, 4)[torch.tensor([7]).to("ltc")]


def error_of(call) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("no error")


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in frames_of(error) if f.filename.startswith((OWN, "<ltc"))]


def users_functions(error: BaseException) -> list[str]:
    """What the frames of this file are called, below `error_of`."""
    names = [f.name for f in frames_of(error) if f.filename == __file__]
    return names[names.index("error_of") + 1 :]


# --- every way an error takes ---------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ lazy(7, 7)


def wrong_shape():
    x = lazy(3, 4)
    return x @ x


def wrong_shape_in_a_module():
    return nn.Linear(5, 2).to("ltc")(lazy(3, 4))


def read_elsewhere():
    rows = missing()

    def read():
        return rows.sum().item()

    return read()


def mark():
    rows = missing()
    ltm.mark_step()
    return rows


def end_of_a_step():
    with ltc.step():
        rows = missing()
    return rows


def wait():
    rows = missing()
    torch.ltc.synchronize()
    return rows


def in_backward():
    Doubled.apply(lazy(3, 4).requires_grad_()).sum().backward()


def optimizer_step():
    embedding = nn.Embedding(3, 4).to("ltc")
    optimizer = torch.optim.Adam(embedding.parameters())
    embedding(torch.tensor([9]).to("ltc")).sum().backward()
    ltm.optimizer_step(optimizer, barrier=True)


def step_of_adam():
    weight = lazy(3).requires_grad_()
    weight.grad = lazy(3)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = lazy(5)
    optimizer.step()


def printed():
    return str(missing())


def truth():
    return bool(missing().sum() > 0)


def result_whose_shape_depends_on_data():
    return missing().nonzero()


def two_devices():
    return lazy(3) + torch.ones(3)


def list_of_tensors():
    return torch._foreach_add([lazy(3)], [lazy(5)])


def saved():
    ltm.save({"rows": missing()}, io.BytesIO())


def pickled():
    return pickle.dumps(missing())


def attention():
    return nn.functional.scaled_dot_product_attention(lazy(1, 3, 4), lazy(1, 3, 2), lazy(1, 3, 4))


def under_autocast():
    with torch.autocast("ltc", dtype=torch.bfloat16):
        return torch.mm(lazy(3, 4), lazy(3, 4))


WAYS = [
    wrong_shape, wrong_shape_in_a_module, read_elsewhere, mark, end_of_a_step, wait, in_backward,
    optimizer_step, step_of_adam, printed, truth, result_whose_shape_depends_on_data, two_devices,
    list_of_tensors, saved, pickled, attention, under_autocast,
]  # fmt: skip
BELOW = {"read_elsewhere": ["read"], "in_backward": ["backward"]}


@pytest.mark.native("the error is that of a step that was recorded")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_error_shows_the_users_frames_and_one_line_of_ltcs(way):
    for _ in range(2):  # the first call of an operation takes another way
        error = error_of(way)
        assert len(own_frames(error)) == 1, frames_of(error)
        assert users_functions(error) == [way.__name__, *BELOW.get(way.__name__, [])]
        assert frames_of(error)[-1] in own_frames(error)  # nothing of torch's is below
        assert error.__context__ is None and error.__cause__ is None


# under LTC_DEBUG, printing reads nothing that is pending
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way is not printed], ids=lambda w: w.__name__
)
def test_ltc_debug_shows_every_frame(way):
    with config.override(LTC_DEBUG=1):
        assert len(own_frames(error_of(way))) > 2


@pytest.mark.native("the error is that of a step that was recorded")
def test_the_note_with_the_line_that_asked_stays():
    def asks():  # of a shape that no other test has: the line is that of the first recording
        return lazy(3, 11)[torch.tensor([7]).to("ltc")]

    note, *_ = error_of(asks().cpu).__notes__
    assert note.startswith("while running aten::index.Tensor called at ")
    assert note.endswith(" in asks")


def test_what_torch_shows_of_itself_stays():
    def files(error):
        return [f.filename for f in frames_of(error) if f.filename.startswith(TORCH)]

    on_cpu = error_of(lambda: nn.Linear(5, 2)(torch.ones(3, 4)))
    assert files(error_of(wrong_shape_in_a_module)) == files(on_cpu)


@pytest.mark.native("the error is that of a step that was recorded")
def test_an_error_raised_at_every_read_does_not_grow_and_is_a_new_one_each_time():
    rows = missing()
    errors = [error_of(rows.cpu) for _ in range(4)]
    assert len({id(error) for error in errors}) == 4
    assert len({len(frames_of(error)) for error in errors}) == 1
    assert all(error.__notes__ == errors[0].__notes__ for error in errors)
    errors[0].add_note("the user's own")
    assert error_of(rows.cpu).__notes__ == errors[1].__notes__


def test_an_error_that_the_program_was_handling_stays_its_context():
    def fails_while_handling():
        try:
            raise KeyError("the user's")
        except KeyError:
            wrong_shape()

    error = error_of(fails_while_handling)
    assert isinstance(error.__context__, KeyError) and error.__context__.__context__ is None


# --- threads and ranks ----------------------------------------------------------------------------


@pytest.mark.devices(2)
def test_a_thread_of_data_parallel_shows_the_loops_frames():
    def loop(model, loader, device, context):
        for _, batch in loader:
            model(batch)
            wrong_shape()

    def trains():
        DataParallel(nn.Linear(4, 2), ["ltc:0", "ltc:1"])(loop, [lazy(2, 4).cpu()] * 2)

    error = error_of(trains)
    assert users_functions(error) == ["trains", "loop", "wrong_shape"]
    assert len(own_frames(error)) == 1


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        raise ValueError("no such sample")


def test_a_loader_shows_the_data_sets_frame_each_time_it_is_asked():
    def loads():
        return next(iter(MpDeviceLoader(Samples(), "ltc:0")))

    for _ in range(2):
        error = error_of(loads)
        assert users_functions(error) == ["loads", "__getitem__"]
        assert own_frames(error) == []


def test_a_closure_shows_its_own_frame():
    def said():
        raise ValueError("from the closure")

    def marks():
        ltm.add_step_closure(said)
        ltm.mark_step()

    error = error_of(marks)
    assert users_functions(error) == ["marks", "said"] and own_frames(error) == []


@pytest.mark.native("the error is that of a step that was recorded")
def test_an_error_of_another_thread_shows_where_it_is_read():
    made = []
    thread = threading.Thread(target=lambda: made.append(missing()))
    thread.start()
    thread.join()

    def reads():
        return made[0].cpu()

    error = error_of(reads)
    assert users_functions(error) == ["reads"] and len(own_frames(error)) == 1


@pytest.mark.native("the error is that of a step that was recorded")
def test_two_threads_that_read_one_failure_have_a_traceback_each():
    rows = missing()
    error_of(rows.cpu)
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(lambda _: error_of(rows.cpu), range(16)))
    assert len({len(frames_of(error)) for error in errors}) == 1


def child(rank: int) -> None:
    missing().cpu()


def test_the_traceback_of_a_rank_begins_with_the_users_function():
    with pytest.raises(RuntimeError) as caught:
        ltc.launch(child, nprocs=2, start_method="fork")
    assert caught.value.traceback.count('File "') == 2
    assert ", in child" in caught.value.traceback


# --- the pieces -----------------------------------------------------------------------------------


@pytest.mark.native("the error is that of a step that was recorded")
def test_a_failure_keeps_no_memory_of_its_step():
    gc.collect()  # what other tests left
    before = account_of(0).bytes
    big = torch.ones(1 << 20).to("ltc")
    ltm.mark_step(wait=True)
    bad = big + missing().sum()
    error = error_of(lambda: ltm.mark_step(wait=True))
    del big
    assert account_of(0).bytes == before  # what it was made from is gone, and it has none
    assert bad.nbytes == 4 << 20
    assert isinstance(error, IndexError)


class Demanding(Exception):
    """Its copies cannot be made."""

    def __init__(self, one, two):
        super().__init__("both")


def test_an_error_that_cannot_be_copied_is_raised_itself():
    def raises():
        raise Demanding(1, 2)

    first = error_of(raises)
    failure = Failure(first)
    assert error_of(failure.raise_it) is first
    length = len(frames_of(first))
    assert error_of(failure.raise_it) is first and len(frames_of(first)) == length


def test_an_entrance_keeps_the_name_the_signature_and_the_result():
    def added(x, y=2):
        """x + y"""
        return x + y

    entered = entrance(added)
    assert (entered.__name__, entered.__doc__, entered(1)) == ("added", "x + y", 3)
    assert entered.__wrapped__ is added
