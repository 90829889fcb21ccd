"""spawn: ranks that return values, and a parent that learns of every way a rank can end."""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
import ltc.distributed.parallel_loader as pl
from ltc import config
from ltc.distributed.launch import parent as launched
from ltc.distributed.launch.child import ReturnedValue
from ltc.distributed.launch.error_file import error_recorded
from ltc.distributed.launch.pickled_call import PickledCall
from ltc.errors import PeerFailure

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 600  # of a machine that is busy with other things


def who(rank: int) -> tuple:
    """A rank by every name it has, and what it computes."""
    computed = (torch.ones(2, device=ltm.lazy_device()) * rank).sum().item()
    return (
        rank,
        ltm.get_ordinal(),
        ltm.get_local_ordinal(),
        ltm.xrt_world_size(),
        computed,
        ltc.device_count(),
    )


def expected_of(ranks: int, devices: int) -> list[tuple]:
    return [(rank, rank, rank, ranks, 2.0 * rank, devices) for rank in range(ranks)]


# --- what comes back ----------------------------------------------------------------------------


def test_ranks_know_their_place_and_return_values_twice_in_a_row():
    assert torch.ones(2, device="ltc").sum().item() == 2  # the parent has used the device
    for _ in range(2):
        assert lmp.spawn(who, nprocs=3) == expected_of(3, ltc.device_count())


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_every_start_method_gives_the_same(start_method):
    assert lmp.spawn(who, nprocs=2, start_method=start_method) == expected_of(2, ltc.device_count())


def test_no_number_means_a_process_for_each_device():
    with config.override(LTC_NUM_DEVICES=2):
        assert lmp.spawn(who) == expected_of(2, devices=1)


def test_one_process_is_this_process():
    assert lmp.spawn(lambda rank: (rank, os.getpid()), nprocs=1) == [(0, os.getpid())]
    assert ltm.xrt_world_size(5) == 5  # the place was the function's


def test_a_number_below_one_is_refused():
    with pytest.raises(ValueError, match="nprocs=0"):
        lmp.spawn(who, nprocs=0)


def test_joining_later_gives_the_values():
    ranks = lmp.spawn(who, nprocs=2, join=False, daemon=True, start_method="fork")
    assert len(ranks.pids()) == 2 and all(process.daemon for process in ranks.processes)
    while (values := ranks.join(timeout=0.5)) is None:
        pass
    assert values == expected_of(2, ltc.device_count())


def places_of(rank: int, x: torch.Tensor) -> tuple:
    return x.is_shared(), x.sum().item()


def shares_memory() -> bool:
    """Whether PyTorch has a place for memory that processes share."""
    try:
        torch.ones(1).share_memory_()
    except RuntimeError:
        return False
    return True


def test_the_memory_of_cpu_tensors_is_shared_where_the_system_has_some():
    expected = (shares_memory(), 1000.0)
    assert lmp.spawn(places_of, args=(torch.ones(1000),), nprocs=2) == [expected] * 2


def threads_of(rank: int) -> int:
    return torch.get_num_threads()


def test_the_cores_are_shared_out():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with config.override(OMP_NUM_THREADS=None):
        assert lmp.spawn(threads_of, nprocs=2, start_method="fork") == [max(cores // 2, 1)] * 2
    with config.override(OMP_NUM_THREADS=3):
        assert lmp.spawn(threads_of, nprocs=2, start_method="fork") == [3, 3]


def test_a_spawn_inside_a_rank_keeps_the_ranks_there_are():
    assert lmp.spawn(spawn_again, nprocs=2, start_method="fork") == [[(0, 2), (1, 2)]] * 2


def spawn_again(rank: int) -> list:
    return lmp.spawn(lambda rank: (rank, ltm.xrt_world_size()), nprocs=2)


def test_a_spawn_inside_one_rank_alone_ends_with_the_others():
    with config.override(LTC_PEER_TIMEOUT=2 * HANG_SECONDS):
        with pytest.raises(lmp.RankFailed, match="Replica 1 is gone") as caught:
            lmp.spawn(spawn_in_rank_0, nprocs=2, start_method="fork")
    assert caught.value.rank == 0


def spawn_in_rank_0(rank: int) -> None:
    if rank == 0:
        spawn_again(rank)


def train_a_little(rank: int) -> list:
    """The weights after a few steps on this rank's own batches."""
    device = ltm.lazy_device()
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    draw = torch.Generator().manual_seed(rank)
    for x in pl.MpDeviceLoader([torch.randn(4, 3, generator=draw) for _ in range(4)], device):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        assert str(model.weight.grad.device) == str(device) == "ltc:0"
        ltm.optimizer_step(optimizer)
    return model.weight.tolist()


def test_ranks_that_train_together_end_with_the_same_weights():
    first, second = lmp.spawn(train_a_little, nprocs=2, start_method="fork")
    assert first == second


def test_gradients_are_those_of_one_process_with_all_batches():
    (weights, _) = lmp.spawn(train_a_little, nprocs=2, start_method="fork")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.cat([torch.randn(4, 3, generator=draw) for draw in draws])
        model(x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(weights), model.weight.detach(), rtol=1e-5, atol=1e-6)


def test_what_a_rank_says_as_it_ends_is_heard(tmp_path):
    member = launched._Member(0, str(tmp_path), prefixed=False)
    member.process = SimpleNamespace(exitcode=None)
    member.take()
    member._report_end.send(ReturnedValue(b"what it returns"))  # after the parent has looked
    member.process.exitcode = 0
    assert not member.failed and not member.finished
    member.take()
    assert member.finished and not member.failed


# --- taking turns -------------------------------------------------------------------------------


def take_turns(rank: int, executor) -> list:
    """When this rank's turns began and ended."""

    def turn():
        began = time.monotonic()
        time.sleep(0.05)
        return began, time.monotonic()

    return [executor.run(turn) for _ in range(3)]


def take_turns_with_an_executor_of_its_own(rank: int) -> list:
    return take_turns(rank, lmp.MpSerialExecutor())


@pytest.mark.parametrize("made", ["before", "in every rank"])
def test_a_serial_executor_lets_one_rank_at_a_time(made):
    if made == "before":
        fn, args = take_turns, (lmp.MpSerialExecutor(),)
    else:
        fn, args = take_turns_with_an_executor_of_its_own, ()
    turns = sorted(sum(lmp.spawn(fn, args=args, nprocs=2, start_method="fork"), []))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns))


def move(rank: int, wrapped) -> tuple:
    module = wrapped._model
    shared = module.weight.is_shared()
    moved = wrapped.to(ltm.lazy_device())
    return shared, str(moved.weight.device), moved.weight.sum().item()


@pytest.mark.parametrize("start_method, shared", [("spawn", shares_memory()), ("fork", False)])
def test_a_wrapped_model_moves_to_every_ranks_device(start_method, shared):
    model = nn.Linear(3, 2)
    total = model.weight.sum().item()
    results = lmp.spawn(
        move, args=(lmp.MpModelWrapper(model),), nprocs=2, start_method=start_method
    )
    assert [result[:2] for result in results] == [(shared, "ltc:0")] * 2
    assert [result[2] for result in results] == pytest.approx([total] * 2)


@pytest.mark.parametrize("by_value", [False, True], ids=["imported", "by value"])
def test_tensors_are_copied_where_no_memory_can_be_shared(by_value, monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("unable to open shared memory object </torch_1> in read-write mode")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", refuse)
    if by_value:
        pytest.importorskip("cloudpickle")
    function = (lambda layer: layer) if by_value else who
    layer = nn.Linear(3, 2)
    fn, (received,) = pickle.loads(pickle.dumps(PickledCall(function, (layer,)))).open()
    assert fn.__name__ == function.__name__
    assert received.weight.equal(layer.weight) and not received.weight.is_shared()
    assert "CPU tensors are copied to the ranks" in caplog.text


# --- a rank that dies ---------------------------------------------------------------------------


class Quiet(BaseException):
    """No Exception, and of more arguments than it is made from."""

    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


def die(how: str) -> None:
    match how:
        case "raise":
            raise KeyError("one", 2)
        case "base":
            raise Quiet("one", 2)
        case "unpicklable":
            raise ValueError(lambda: None)
        case "long":
            raise ValueError("x" * 10_000_000)
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(0)
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)


def one_dies(rank: int, how: str) -> None:
    if rank == 1:
        while len(list(_waiting_ranks().glob("waits-*"))) < ltm.xrt_world_size() - 1:
            time.sleep(0.01)
        die(how)
    wait_for_the_others(rank)


def wait_for_the_others(rank: int) -> None:
    (_waiting_ranks() / f"waits-{rank}").touch()
    while True:
        time.sleep(0.05)


def _waiting_ranks() -> Path:
    """Where a rank that has come to where it waits leaves a file."""
    return Path(config.value("LTC_RENDEZVOUS"))


CAUSES = {
    "raise": "raised KeyError",
    "base": "raised tests.distributed.test_spawn.Quiet",
    "unpicklable": "raised ValueError",
    "long": "raised ValueError",
    "exit": "sys.exit(3)",
    "_exit": "exit code 0 before its function returned",
    "interrupt": "raised KeyboardInterrupt",
    "kill": "killed by SIGKILL",
    "segv": "killed by SIGSEGV",
}
WITH_STACK = {"raise", "base", "unpicklable", "long", "exit", "interrupt", "segv"}


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def patient(monkeypatch):
    """A parent that waits until every rank has said where it is, on however busy a machine."""
    monkeypatch.setattr(launched, "STACKS_SECONDS", HANG_SECONDS)


@pytest.mark.parametrize("how", CAUSES)
def test_a_dead_rank_raises_in_the_parent_and_leaves_no_process(how, patient):
    ranks = lmp.spawn(one_dies, args=(how,), nprocs=3, join=False, start_method="fork")
    with pytest.raises(lmp.RankFailed) as caught:
        ranks.join()
    error = caught.value
    assert (error.rank, error.pid) == (1, ranks.pids()[1])
    assert CAUSES[how] in error.cause and CAUSES[how] in str(error)
    if how in WITH_STACK:
        assert "in die" in error.traceback
    assert sorted(error.waiting) == [0, 2]
    assert all("in wait_for_the_others" in text for text in error.waiting.values())
    assert not any(is_alive(pid) for pid in ranks.pids())


def test_the_exception_of_a_rank_is_the_cause_where_it_can_travel():
    with pytest.raises(lmp.RankFailed) as caught:
        lmp.spawn(one_dies, args=("raise",), nprocs=2)
    assert repr(caught.value.__cause__) == "KeyError('one', 2)"


def wait_in_a_barrier(rank: int) -> None:
    ltm.rendezvous("both are in this function")
    if rank == 1:
        raise LookupError("too early")
    ltm.rendezvous("the end of the epoch")


def test_the_parent_says_in_which_barrier_the_others_were(patient):
    with pytest.raises(lmp.RankFailed, match="LookupError: too early") as caught:
        lmp.spawn(wait_in_a_barrier, nprocs=2, start_method="fork")
    assert caught.value.rank == 1 and "in wait_in_a_barrier" in caught.value.waiting[0]


def wait_in_a_step(rank: int) -> None:
    ltm.rendezvous("both are in this function")
    x = ltm.all_reduce(ltm.REDUCE_SUM, torch.ones(3, device=ltm.lazy_device()))
    if rank == 1:
        os._exit(0)
    x.cpu()


def test_a_rank_that_leaves_a_collective_is_the_one_that_is_named(patient):
    with pytest.raises(lmp.RankFailed) as caught:
        lmp.spawn(wait_in_a_step, nprocs=2, start_method="fork")
    assert caught.value.rank == 1 and "wait_in_a_step" in caught.value.waiting[0]


def meet_where_rank_1_returns(rank: int) -> None:
    if rank == 0:
        ltm.rendezvous("done")


def sum_where_rank_1_returns(rank: int) -> list | None:
    if rank == 0:
        return ltm.all_reduce(ltm.REDUCE_SUM, torch.ones(3, device=ltm.lazy_device())).tolist()


@pytest.mark.parametrize("function", [meet_where_rank_1_returns, sum_where_rank_1_returns])
def test_a_rank_that_returns_before_its_first_collective_is_named(function):
    with config.override(LTC_PEER_TIMEOUT=2 * HANG_SECONDS):
        with pytest.raises(lmp.RankFailed, match="gone .*, before its first collective") as caught:
            lmp.spawn(function, nprocs=2, start_method="fork")
    assert caught.value.rank == 0 and "Replica 1 is gone" in caught.value.cause


def return_a_function(rank: int):
    return lambda: rank


def test_a_value_that_can_not_travel_is_named():
    with pytest.raises(lmp.RankFailed) as caught:
        lmp.spawn(return_a_function, nprocs=2, start_method="fork")
    said = f"rank {caught.value.rank} returned <function"
    assert said in caught.value.cause and "which cannot be pickled: " in caught.value.cause


@pytest.mark.parametrize("with_cloudpickle", [False, True])
@pytest.mark.parametrize("has_main", [False, True])
def test_an_argument_that_can_not_travel_is_named(with_cloudpickle, has_main, monkeypatch):
    main = SimpleNamespace(__spec__=None, __file__=__file__ if has_main else None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    if with_cloudpickle:
        pytest.importorskip("cloudpickle")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        pickle.PicklingError, match=r"args\[1\] of spawn is .*, of type lock, which"
    ):
        lmp.spawn(who, args=(1, threading.Lock()), nprocs=2)


def leave_work_that_fails(rank: int) -> None:
    ltm.add_step_closure(lambda: 1 / 0, run_async=True)
    ltm.mark_step()


def test_an_error_behind_the_function_fails_the_rank():
    with pytest.raises(lmp.RankFailed, match="ZeroDivisionError"):
        lmp.spawn(leave_work_that_fails, nprocs=2, start_method="fork")


# --- a parent that dies -------------------------------------------------------------------------

PARENT = """
import os, sys, time
import ltc.distributed.lazy_multiprocessing as lmp

def wait(rank, folder):
    os.symlink(os.environ["LTC_RENDEZVOUS"], os.path.join(folder, str(os.getpid())))
    time.sleep(600)

if __name__ == "__main__":
    lmp.spawn(wait, args=(sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


@pytest.fixture
def waiting(tmp_path):
    """Start a program whose ranks wait, with a start method.

    Gives its process, its ranks' pids, and the folder of the launch.
    """
    started = []

    def start(start_method: str):
        script, folder = tmp_path / "parent.py", tmp_path / "pids"
        script.write_text(PARENT)
        folder.mkdir()
        command = [sys.executable, str(script), str(folder), start_method]
        parent = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
        )
        started.append(parent)
        while len(list(folder.iterdir())) < 2:
            assert parent.poll() is None
            time.sleep(0.05)
        found = list(folder.iterdir())
        return parent, [int(path.name) for path in found], os.readlink(found[0])

    yield start
    for parent in started:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_their_parent_and_so_does_their_folder(waiting, number, start_method):
    parent, pids, folder = waiting(start_method)
    assert os.path.isdir(folder)
    parent.send_signal(number)
    parent.wait()
    deadline = time.monotonic() + HANG_SECONDS
    while any(map(is_alive, pids)) or os.path.exists(folder):
        assert time.monotonic() < deadline, (pids, folder)
        time.sleep(0.05)


# --- functions of a notebook --------------------------------------------------------------------

CELL = """
import torch, ltc
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp

factor = 3

class Net(torch.nn.Linear):
    pass

def cell(rank, model):
    assert isinstance(model, Net)
    return rank * factor, model.weight.is_shared(), ltm.xrt_world_size()

for _ in range(2):
    print(lmp.spawn(cell, args=(Net(2, 2),), nprocs=2))
print(ltc.launch(lambda rank: print("hello") or rank, nprocs=2))
"""


def run_cell(program: str, *before: str, piped: bool = False) -> subprocess.CompletedProcess:
    """Run the program as a cell, or from a pipe: its functions are in no file."""
    text = "\n".join([*before, program])
    return subprocess.run(
        [sys.executable, *(["-"] if piped else ["-c", text])],
        input=text if piped else None,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("piped", [False, True])
def test_functions_and_classes_of_a_cell_travel_by_value(piped):
    pytest.importorskip("cloudpickle")
    done = run_cell(CELL, piped=piped)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    shared = shares_memory()
    assert printed[:2] == [f"[(0, {shared}, 2), (3, {shared}, 2)]"] * 2
    assert sorted(printed[2:4]) == ["[rank 0] hello", "[rank 1] hello"]
    assert printed[4] == "[0, 1]"


def test_without_cloudpickle_the_error_says_what_to_install():
    done = run_cell(CELL, "import sys; sys.modules['cloudpickle'] = None")
    assert done.returncode == 1
    assert "pip install 'ltc[notebook]'" in done.stderr and "start_method='fork'" in done.stderr


def run_script(folder: Path, first_lines: str) -> subprocess.CompletedProcess:
    """A script that spawns without a guard, after these lines."""
    script = folder / "unguarded.py"
    script.write_text(
        f"{first_lines}import ltc.distributed.lazy_multiprocessing as lmp\n"
        "def f(rank): return rank\n"
        "lmp.spawn(f, nprocs=2)\n"
    )
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    done = run_script(tmp_path, "")
    assert done.returncode == 1 and "if __name__ == '__main__'" in done.stderr


def test_a_rank_that_ends_while_it_starts_is_told_so(tmp_path):
    done = run_script(tmp_path, "import os\nif __name__ != '__main__': os._exit(7)\n")
    assert done.returncode == 1 and "exit code 7 while it started Python" in done.stderr


# --- torchrun -----------------------------------------------------------------------------------

TORCHRUN = """
import os
import torch
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
import ltc.distributed.parallel_loader as pl

def train(rank):
    assert rank == ltm.get_ordinal() == int(os.environ["RANK"])
    assert ltm.get_local_ordinal() == int(os.environ["LOCAL_RANK"])
    assert ltm.xrt_world_size() == int(os.environ["WORLD_SIZE"])
    batches = list(pl.MpDeviceLoader([torch.ones(2)] * 3, ltm.lazy_device()))
    return rank, sum(batch.sum().item() for batch in batches)

if __name__ == "__main__":
    values = lmp.spawn(train, nprocs=2)
    ltm.master_print("values:", values)
"""


def under_torchrun(folder, text):
    """Run a script in two processes of torchrun's."""
    script = folder / "train.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_under_torchrun_the_ranks_are_torchruns(tmp_path):
    done = under_torchrun(tmp_path, TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "values: [(0, 6.0), (1, 6.0)]\n"


FAILS = """
import torch
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp

def train(rank):
    if rank == 1:
        raise ValueError("bad batch")
    ltm.all_reduce("sum", torch.ones(2, device="ltc")).cpu()

if __name__ == "__main__":
    lmp.spawn(train)
"""


def test_torchruns_summary_has_the_error_of_the_rank_that_failed(tmp_path):
    done = under_torchrun(tmp_path, FAILS)
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1" in summary and "ValueError: bad batch" in summary
    script = tmp_path / "train.py"
    assert f'File "{script}", line 8, in train' in summary


def test_an_error_that_follows_from_another_ranks_is_in_no_file(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(PeerFailure), error_recorded():
        raise PeerFailure("Rank 1 ended before its function returned.")
    assert not file.exists()
    with pytest.raises(KeyError), error_recorded():
        {}["word"]
    assert json.loads(file.read_text())["message"]["message"] == "KeyError: 'word'"


def test_the_alias_package_has_the_three_modules():
    import lazy_tensor_core.distributed.data_parallel as dp
    import lazy_tensor_core.distributed.lazy_multiprocessing as multiprocessing
    import lazy_tensor_core.distributed.parallel_loader as loader

    assert multiprocessing is lmp and loader is pl
    assert dp.DataParallel.__module__ == "ltc.distributed.data_parallel"
