"""Faults of ltc's own: LTC_CHECK raises them; without, another way is gone, counted and told."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config, errors
from ltc.aten import registry
from ltc.backends.capabilities import BackendCapabilities
from ltc.backends.interpreter import interpreted
from ltc.backends.llvm import compiling
from ltc.debug import metrics
from ltc.device.evidence import new_programs
from ltc.device.recording.fast_path import build_kernel
from ltc.device.recording.signature import Signature
from ltc.explaining import faults, history
from ltc.ir import ops
from ltc.llvm.emit import elementwise
from ltc.llvm.ops import dispatch
from ltc.passes import pipeline
from ltc.passes.pipeline import Pass
from ltc.runtime import graph_compiler, program, program_of_sizes
from ltc.runtime.program_cache import PROGRAMS
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.noted_at_once("it counts steps until they are followed")


@pytest.fixture(autouse=True)
def nothing_of_before():
    history.forget()


# An error that code of ltc's raises: the program's own, such as a handler of a signal, may raise any.
_of_ltc: dict = {}
exec(
    compile(
        "def failing(*arguments, **keywords):\n    raise KeyError('of this test')\n\n"
        "def blaming(*arguments):\n    raise error",
        str(Path(ltc.__file__).parent / "of_this_test.py"), "exec",
    ),
    _of_ltc,
)  # fmt: skip
failing = _of_ltc["failing"]


def caught() -> KeyError:
    try:
        failing()
    except KeyError as error:
        return error


def test_a_fault_is_counted_and_told_with_its_traceback():
    with config.override(LTC_CHECK=0), metrics.counted() as grown:
        for _ in range(2):
            faults.note(caught(), "a thing of this test")
    assert grown["InternalFaults"] == 2
    told = [one for one in ltc.explain() if one.kind == "faults"]
    assert [one.what for one in told] == ["a thing of this test failed"] * len(told)
    assert all("KeyError: 'of this test'; raised at" in one.difference for one in told)
    assert all("of_this_test.py:2 in failing" in one.difference for one in told)
    assert all("KeyError: 'of this test'" in one.traceback for one in told)
    assert sum(one.times for one in told) == 2


def test_a_fault_is_raised_under_the_check_and_says_so():
    with config.override(LTC_CHECK=1), metrics.counted() as grown:
        with pytest.raises(KeyError) as raised:
            faults.note(caught(), "a thing of this test")
        faults.keep(caught(), "a thing that nobody waits for")
    assert "a thing of this test" in raised.value.__notes__[-1]
    assert grown["InternalFaults"] == 1
    assert [one.what for one in ltc.explain()] == ["a thing that nobody waits for failed"]


def test_an_error_that_was_never_raised_is_told_without_a_place():
    with config.override(LTC_CHECK=0):
        faults.note(ValueError("two\nlines"), "a thing of this test")
    assert ltc.explain()[-1].difference == "ValueError: two lines"


# --- put into ltc -------------------------------------------------------------------------------


def in_a_common_pass(monkeypatch):
    monkeypatch.setattr(pipeline.run, "__defaults__", ((Pass("failing", failing, "a test"),),))


def in_a_pass_of_the_backend(monkeypatch):
    passes = (*compiling.PASSES, Pass("failing", failing, "a test"))
    monkeypatch.setattr(compiling, "PASSES", passes)


def in_the_emitter(monkeypatch):
    monkeypatch.setitem(elementwise.ROWS, ops.TANH, failing)


def in_the_plan(monkeypatch):
    monkeypatch.setattr(compiling, "plan_of", failing)


PLACES = [in_a_common_pass, in_a_pass_of_the_backend, in_the_emitter, in_the_plan]
everywhere = pytest.mark.parametrize("place", PLACES)


@pytest.fixture
def fresh():
    """Programs of a test are neither found where others were kept nor kept for others."""
    PROGRAMS.clear()
    settings = {"LTC_CACHE": 0, "LTC_COMPILE_BEHIND": 0, "LTC_BACKEND": "llvm"}
    with config.override(**settings):
        yield
        ltm.wait_device_ops()
    PROGRAMS.clear()


def trained(device: str, steps: int) -> list[torch.Tensor]:
    """Losses and parameters of a training whose parameters are written in place, and a side result."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for number in range(steps):
        x = torch.linspace(-1, 1, 5 * (3 + number % 2)).reshape(-1, 5).to(device)
        optimizer.zero_grad()
        hidden = model[:2](x)
        loss = F.mse_loss(model[2](hidden), torch.ones(len(x), 2, device=device))
        loss.backward()
        optimizer.step()
        kept += [loss.detach(), hidden.detach()[:0], hidden.detach().t()]
        if device != "cpu":
            ltm.mark_step()
    return [x.cpu() for x in (*kept, *(p.detach() for p in model.parameters()))]


EVERY_PASS = [*pipeline.PIPELINE, *compiling.PASSES]


def with_a_fault(passes: tuple[Pass, ...], name: str) -> tuple[Pass, ...]:
    return tuple(Pass(name, failing, p.why) if p.name == name else p for p in passes)


@pytest.mark.parametrize("name", [p.name for p in EVERY_PASS])
def test_a_fault_in_each_pass_is_told_or_raised(name, fresh, monkeypatch):
    monkeypatch.setattr(
        pipeline.run, "__defaults__", (with_a_fault(pipeline.run.__defaults__[0], name),)
    )
    monkeypatch.setattr(compiling, "PASSES", with_a_fault(compiling.PASSES, name))
    told_or_raised(lambda x: x.tanh().sum(1), torch.rand(3, 5))


def recurrence(x: torch.Tensor) -> torch.Tensor:
    weights = [torch.full((6, n), 0.1, device=x.device) for n in (4, 2)]
    biases = [torch.zeros(6, device=x.device) for _ in range(2)]
    hidden = torch.zeros(1, 3, 2, device=x.device)
    made, _ = torch.gru(x, hidden, [*weights, *biases], True, 1, 0.0, False, False, False)
    return made


EMITTERS = {
    "_matmul": (lambda x: x[0, 0] @ x[0, 1], (2, 3, 4, 4)),
    "attention_codes": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 3, 4, 4)),
    "recurrence_codes": (recurrence, (5, 3, 4)),
    "kernels_of": (lambda x: F.conv2d(x, x[:, :, :2, :2] + 1), (3, 3, 8, 8)),
    **{
        op: (function, (4, 5))
        for op, function in {
            ops.CUMSUM: lambda x: x.cumsum(1),
            ops.CUMPROD: lambda x: x.cumprod(1),
            ops.ARGMAX: lambda x: x.argmax(1),
            ops.ARGMIN: lambda x: x.argmin(1),
            ops.SCATTER: lambda x: x.scatter_add(0, (x * 0).long(), x),
            ops.PUT: lambda x: x.index_put(((x[:2, 0] * 0).long(),), x[2]),
        }.items()
    },
}


@pytest.mark.parametrize("emitter", EMITTERS, ids=str)
def test_a_fault_in_each_emitter_is_told_or_raised(emitter, fresh, monkeypatch):
    function, shape = EMITTERS[emitter]
    if isinstance(emitter, str):
        monkeypatch.setattr(dispatch, emitter, failing)
    else:
        row = replace(dispatch.PRIMITIVES[emitter], codes=failing)
        monkeypatch.setitem(dispatch.PRIMITIVES, emitter, row)
    told_or_raised(function, torch.rand(shape))


def told_or_raised(function, x: torch.Tensor) -> None:
    """With a fault put into ltc: told, and the value is right; or raised under LTC_CHECK."""
    with config.override(LTC_CHECK=0, LTC_TIER="native"), metrics.counted() as grown:
        lazy = x.to("ltc")
        torch.testing.assert_close(function(lazy).cpu(), function(x))
    assert grown["InternalFaults"] >= 1
    PROGRAMS.clear()
    with config.override(LTC_CHECK=1, LTC_TIER="native"):
        made = function(x.to("ltc"))
        with pytest.raises(KeyError, match="of this test"):
            made.cpu()


@everywhere
@pytest.mark.parametrize("tier", ["native", "auto"])
def test_without_the_check_a_training_goes_on_and_the_fault_is_told(
    place, tier, fresh, monkeypatch
):
    place(monkeypatch)
    with config.override(LTC_CHECK=0, LTC_TIER=tier), metrics.counted() as grown:
        found = trained("ltc", 12)
        ltm.wait_device_ops()
    torch.testing.assert_close(found, trained("cpu", 12))
    assert grown["InternalFaults"] == sum(one.times for one in ltc.explain(last=1000)
                                          if one.kind == "faults")  # fmt: skip
    if tier == "native":
        assert grown["InternalFaults"] >= 2  # one of each size, and of the first steps
        assert grown["InternalFaults"] == grown["UncachedCompile"]
        told = [one for one in ltc.explain() if one.kind == "faults"]
        assert all("test_internal_faults.py" in one.line for one in told)
        assert all("in failing" in one.traceback for one in told)


@everywhere
def test_under_the_check_the_fault_is_raised_at_the_mark(place, fresh, monkeypatch):
    place(monkeypatch)
    with config.override(LTC_CHECK=1, LTC_TIER="native"), metrics.counted() as grown:
        y = torch.ones(3, 5, device="ltc").tanh() + 1
        with pytest.raises(KeyError, match="of this test") as raised:
            ltm.mark_step()
    assert any("test_internal_faults.py" in note for note in raised.value.__notes__)
    assert grown["InternalFaults"] == 0
    assert y is not None


def test_a_program_that_a_fault_left_to_the_reference_fails_as_on_the_cpu(fresh, monkeypatch):
    in_the_plan(monkeypatch)
    with config.override(LTC_CHECK=0, LTC_TIER="native"):
        table = torch.ones(4, 2, device="ltc")
        rows = F.embedding(torch.tensor([9], device="ltc"), table)
        with pytest.raises(IndexError):
            rows.tolist()
        assert (table * 2).tolist() == [[2.0, 2.0]] * 4


@pytest.mark.parametrize(
    "error",
    [
        errors.Unsupported("of this test"), errors.CodeRefused("of this test"),
        errors.OutOfMemory("of this test", 8), MemoryError("of this test"),
        OSError("of this test"), config.WrongSetting("of this test"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_the_program_or_the_system_is_to_blame_for_is_no_fault(error, fresh, monkeypatch):
    monkeypatch.setitem(_of_ltc, "error", error)
    monkeypatch.setattr(compiling, "plan_of", _of_ltc["blaming"])
    with config.override(LTC_CHECK=0, LTC_TIER="native"), metrics.counted() as grown:
        y = torch.ones(3, 6, device="ltc").tanh() + 1
        with pytest.raises(Exception, match=r"of this test|out of memory|allocate"):
            ltm.mark_step()
    assert grown["InternalFaults"] == 0
    assert y is not None


def test_what_the_programs_own_code_raises_within_the_compiler_is_no_fault(fresh, monkeypatch):
    """A handler of a signal that was sent again and again, say."""

    def handler(*arguments):
        raise KeyError("of the program")

    monkeypatch.setattr(compiling, "plan_of", handler)
    with config.override(LTC_CHECK=0, LTC_TIER="native"):
        y = torch.ones(3, 8, device="ltc").tanh() + 1
        with pytest.raises(KeyError, match="of the program"):
            ltm.mark_step()
    assert y is not None


def test_a_backend_whose_buffers_are_its_own_raises_the_fault(fresh, monkeypatch):
    monkeypatch.setattr(compiling, "plan_of", failing)
    monkeypatch.setattr(graph_compiler, "capabilities", lambda: BackendCapabilities())
    with config.override(LTC_CHECK=0, LTC_TIER="native"):
        y = torch.ones(3, 7, device="ltc").tanh() + 1
        with pytest.raises(KeyError, match="of this test"):
            ltm.mark_step()
    assert y is not None


@pytest.fixture(params=[ValueError, TypeError, KeyError, AttributeError, NameError])
def broken_rule(request, monkeypatch):
    def bad_rule(x):
        raise request.param("of this test")

    monkeypatch.setitem(registry.RULES, "aten::erfc", registry.Rule(bad_rule, {}, False))
    registry.rule_of.cache_clear()
    yield request.param
    registry.rule_of.cache_clear()


def test_a_rules_fault_is_told_and_raised_under_the_check(broken_rule, fresh):
    x = torch.rand(4, 3)
    with config.override(LTC_CHECK=0, LTC_TIER="native"), metrics.counted() as grown:
        found = x.to("ltc").erfc()
        ltm.mark_step()
        torch.testing.assert_close(found.cpu(), x.erfc())
    assert grown["InternalFaults"] == grown["RuleFault::aten::erfc"] == 1
    assert any("the rule of aten::erfc" in one.what for one in ltc.explain())
    with config.override(LTC_CHECK=1, LTC_TIER="native"):
        again = (x + 1).to("ltc").erfc()
        with pytest.raises(broken_rule, match="of this test"):
            ltm.mark_step(wait=True)
    assert again is not None


def test_a_fault_in_the_second_run_of_a_failed_program_is_told(fresh, monkeypatch):
    monkeypatch.setattr(program, "salvage", failing)
    with config.override(LTC_CHECK=0, LTC_TIER="native"), metrics.counted() as grown:
        table = torch.ones(4, 3, device="ltc")
        rows = F.embedding(torch.tensor([9], device="ltc"), table)
        with pytest.raises(IndexError):
            rows.tolist()
    assert grown["InternalFaults"] == grown["SalvageFailed"] == 1
    with config.override(LTC_CHECK=1, LTC_TIER="native"):
        rows = F.embedding(torch.tensor([8], device="ltc"), table)
        with pytest.raises(KeyError, match="of this test"):
            rows.tolist()


def test_the_search_for_names_tells_a_fault_of_its_own(fresh, monkeypatch):
    def look(wanted):
        {}["of this test"]

    exec(
        compile("def look(wanted):\n    {}['of this test']", new_programs.__file__, "exec"),
        ns := {},
    )
    monkeypatch.setattr(new_programs, "_look", ns["look"])
    with config.override(LTC_CHECK=0), metrics.counted() as grown:
        new_programs.name_holders({object()})
    assert grown["InternalFaults"] == 1
    with config.override(LTC_CHECK=1), pytest.raises(KeyError):
        new_programs.name_holders({object()})
    monkeypatch.setattr(new_programs, "_look", look)  # the program's own code
    with config.override(LTC_CHECK=1), metrics.counted() as grown:
        new_programs.name_holders({object()})
    assert grown["InternalFaults"] == 0


@pytest.mark.parametrize("place", ["TracedEnd", "resizable_and_keep"])
def test_a_fault_in_what_sizes_that_change_need_is_told_and_raised_under_the_check(
    place, monkeypatch
):
    monkeypatch.setattr(program_of_sizes, place, failing)

    def run(rows: int) -> None:
        x = torch.rand(rows, 3)
        y = (x.to("ltc:0") * 2).tanh().sum(1)
        ltm.mark_step()
        torch.testing.assert_close(y.cpu(), (x * 2).tanh().sum(1))

    settings = {"LTC_TIER": "auto", "LTC_CACHE": 0, "LTC_COMPILE_BEHIND": 0}
    with process_of_one_device(LTC_CHECK=0, **settings):
        with metrics.counted() as grown:
            for rows in range(10, 20):
                run(rows)
        assert grown["InternalFaults"] >= 1 and grown["SymbolicPrograms"] == 0
        assert any("symbols failed" in one.what for one in ltc.explain(20))
    with process_of_one_device(LTC_CHECK=1, **settings):
        with pytest.raises(KeyError, match="of this test"):
            for rows in range(10, 20):
                run(rows)


def test_a_fault_where_calls_run_one_by_one_is_told_and_raised_under_the_check(monkeypatch):
    """In a side exit: the compiled program then gives what the calls did not."""
    monkeypatch.setattr(interpreted, "run_by_kernel", failing)

    def exits() -> None:
        for function in (torch.exp, torch.exp, torch.exp, torch.sin):
            x = torch.rand(3, 5)
            y = function((x.to("ltc:0") * 2).tanh() + 1).sum(0)
            ltm.mark_step()
            torch.testing.assert_close(y.cpu(), function((x * 2).tanh() + 1).sum(0))

    settings = {"LTC_TIER": "auto", "LTC_CACHE": 0, "LTC_COMPILE_BEHIND": 0}
    with process_of_one_device(LTC_CHECK=0, **settings):
        with metrics.counted() as grown:
            exits()
        assert grown["SideExits"] == grown["InternalFaults"] == 1
    with process_of_one_device(LTC_CHECK=1, **settings):
        with pytest.raises(KeyError, match="of this test"):
            exits()


def test_a_fault_in_the_text_of_a_kernel_is_raised(monkeypatch):
    """A kernel leaves to the thorough way what PyTorch refuses, and nothing else."""
    namespace: dict = {}
    kernel = build_kernel(Signature(torch.ops.aten.sin.default), namespace)
    with process_of_one_device(LTC_TIER="op_by_op"):
        x = torch.ones(3, device="ltc:0") + 1
        monkeypatch.setitem(namespace, "call", failing)
        with pytest.raises(KeyError, match="of this test"):
            kernel(x)
