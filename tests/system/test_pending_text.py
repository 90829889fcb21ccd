"""A debugger or a log that looks at a pending tensor is told what is known, and cuts no step."""

import inspect
import io
import os
import pdb
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.errors import SyncForbidden
from tests.explained import in_a_thread

pytestmark = pytest.mark.native("the calls that have run leave nothing pending")


def made():
    return torch.ones(2, 3, device="ltc") * 2, f"{__file__}:{inspect.currentframe().f_lineno}"


SHOWN = {
    "print": lambda x: str(x),
    "repr": lambda x: repr(x),
    "f-string": lambda x: f"{x}",
    "a number in an f-string": lambda x: f"{x.sum():.3f}",
    "a list": lambda x: str([x]),
    "a view": lambda x: str(x.t()),
    "a parameter": lambda x: str(torch.nn.Parameter(x)),
    "a percent sign": lambda x: "%s" % x,  # noqa: UP031
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_pending_is_shown_unread(name):
    x, _ = made()
    with metrics.counted() as grown, ltc.no_sync():
        text = SHOWN[name](x)
    assert "<pending ltc:0 tensor float32[" in text
    assert "made by aten::" in text
    assert not grown["EarlySyncLiveTensorsCount"]
    assert not grown["ExecuteTime"]


def test_the_line_that_made_it_is_shown():
    x, place = made()
    with ltc.no_sync():
        assert str(x) == (
            f"<pending ltc:0 tensor float32[2, 3] made by aten::mul.Tensor at {place} in made>"
        )


def test_what_is_computed_prints_as_ever():
    x, _ = made()
    ltm.mark_step()
    with ltc.no_sync():
        assert str(x) == str(x.cpu()).replace(")", ", device='ltc:0')").replace(
            "\n       ", "\n       "
        )
        assert x.tolist() == [[2.0] * 3] * 2


def test_a_view_of_what_is_computed_prints_as_ever():
    x, _ = made()
    ltm.mark_step()
    with ltc.no_sync():
        assert "2., 2." in str(x.t())


def test_any_other_read_is_an_error_at_the_users_line():
    x, _ = made()
    for read in (lambda: x.sum().item(), lambda: x.cpu(), lambda: bool(x[0, 0] > 1), x.nonzero):
        with pytest.raises(SyncForbidden, match="would cut the step"), ltc.no_sync():
            read()
    with pytest.raises(SyncForbidden, match="made by aten::mul.Tensor at .*in made"), ltc.no_sync():
        x.tolist()
    assert x.tolist() == [[2.0] * 3] * 2  # nothing was lost


def test_blocks_may_stand_in_each_other_and_end():
    x, _ = made()
    with ltc.no_sync():
        with ltc.no_sync():
            pass
        assert "pending" in str(x)
    assert "pending" not in str(x)


def test_a_function_may_be_such_a_block():
    @ltc.no_sync()
    def logged(x):
        return str(x)

    assert "pending" in logged(made()[0])


def test_other_threads_read_as_ever():
    x, _ = made()
    ltm.mark_step()
    with ltc.no_sync():
        assert in_a_thread(lambda: (x + 1).sum().item()) == 18.0


def test_under_the_variable_for_debugging_printing_reads_nothing():
    x, _ = made()
    with config.override(LTC_DEBUG=1):
        assert "pending" in str(x)
        assert x.sum().item() == 12.0  # but what is asked for is read


def test_a_tensor_of_the_cpu_prints_as_ever():
    with ltc.no_sync():
        assert str(torch.ones(2)) == "tensor([1., 1.])"
        assert f"{torch.tensor(2.5):.2f}" == "2.50"


def test_pdb_shows_what_is_pending_and_cuts_no_step():
    commands = io.StringIO("p x\np f'{x}'\nc\n")
    said = io.StringIO()
    x, _ = made()
    debugger = pdb.Pdb(stdin=commands, stdout=said, nosigint=True, readrc=False)
    with metrics.counted() as grown:
        debugger.set_trace()
        y = x + 1
    assert said.getvalue().count("<pending ltc:0 tensor float32[2, 3]") == 2
    assert not grown["ExecuteTime"]
    assert y.tolist() == [[3.0] * 3] * 2


def test_a_program_that_runs_under_pdb_prints_its_values():
    program = "import torch, ltc\nx = torch.ones(2, device='ltc') * 2\nprint('value', x)\n"
    path = Path(config.value("LTC_CACHE_DIR")) / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-m", "pdb", "-c", "continue", str(path)],
        input="q\n",
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "value tensor([2., 2.]" in done.stdout


def test_what_has_run_shows_its_value_and_is_not_read():
    texts, reads = [], []

    def steps():
        for _ in range(6):
            with metrics.counted() as grown:
                x = torch.ones(2, 3, device="ltc") * 2
                texts.append((str(x), f"{x.sum():.1f}"))
                ltm.mark_step()
            reads.append(grown["EarlySyncLiveTensorsCount"])

    with config.override(LTC_TIER="auto", LTC_DEBUG=1):
        in_a_thread(steps)
    assert texts[0] == ("tensor([[2., 2., 2.],\n        [2., 2., 2.]], device='ltc:0')", "12.0")
    assert reads == [0] * 6
