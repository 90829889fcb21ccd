import logging
import threading
import types

import pytest

from ltc import config
from ltc.debug import metrics
from ltc.errors import InvalidGraph
from ltc.llvm.compiler import llvm_binding, llvm_private
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.native import kernel_cache
from ltc.llvm.native import runner as runner_threads
from ltc.llvm.native.kernel_cache import Compiling


def text_of(number: int) -> str:
    """A kernel that stores its number, the longer the larger that is."""
    b = Builder(width=1)
    for k in range(number + 1):
        b.emit(f"store volatile i64 {20261122 + k}, ptr %p0, align 8")
    return function_text("kernel", 1, b)


TEXTS = {str(number): text_of(number) for number in range(20)}


@pytest.fixture(params=[1, 2, 4])
def threads(request, monkeypatch):
    monkeypatch.setattr(kernel_cache, "thread_count", lambda: request.param)


def test_machine_code_is_the_same_whichever_thread_makes_it(threads):
    alone = {name: llvm_binding.compiler().object_code(text) for name, text in TEXTS.items()}
    with metrics.counted() as grown, Compiling() as side_by_side:
        for name, text in TEXTS.items():
            side_by_side.begin(name, text)
        assert dict(side_by_side.finished()) == alone
    assert grown["llvm.compiled"] == len(TEXTS)


def test_what_llvm_refuses_reaches_who_asked(threads):
    with Compiling() as side_by_side:
        for name, text in TEXTS.items():
            side_by_side.begin(name, text)
        side_by_side.begin("wrong", "define void @kernel() { ret i64 0 }")
        with pytest.raises(InvalidGraph, match="LLVM refuses a generated kernel"):
            list(side_by_side.finished())


def test_what_llvm_finds_wrong_after_reading_it_is_refused():
    unsound = (
        "define i64 @f() {\na:\n  br label %b\nb:\n  ret i64 %x\n"
        "c:\n  %x = add i64 1, 1\n  br label %b\n}"
    )
    with pytest.raises(InvalidGraph, match="does not dominate"):
        llvm_binding.emitter().object_code(unsound)


def test_no_helper_is_left(threads):
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), Compiling() as side_by_side:
        for name, text in TEXTS.items():
            side_by_side.begin(name, text)
        raise ZeroDivisionError
    assert set(threading.enumerate()) <= before


def test_what_nobody_takes_is_not_compiled(monkeypatch):
    monkeypatch.setattr(kernel_cache, "thread_count", lambda: 1)
    with metrics.counted() as grown, Compiling() as side_by_side:
        side_by_side.begin("one", TEXTS["1"])
    assert not grown["llvm.compiled"]


def test_a_program_without_threads_to_spare_is_compiled_all_the_same(threads, monkeypatch):
    def refuses(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with Compiling() as side_by_side:
        side_by_side.begin("one", TEXTS["1"])
        assert [name for name, _ in side_by_side.finished()] == ["one"]


def test_a_kernel_told_of_early_is_compiled_once(tmp_path, monkeypatch, threads):
    monkeypatch.setenv("LTC_CACHE_DIR", str(tmp_path))
    texts = {kernel_cache.kernel_name(text): text for text in TEXTS.values()}
    for expected in (len(texts), 0):
        with metrics.counted() as grown, kernel_cache.Loading() as one:
            for text in list(texts.values())[::2]:
                one.begin(text)
            kernels = one.load(texts)
        assert grown["llvm.compiled"] == expected
        assert list(kernels) and set(kernels) == set(texts)


def compiled_by_a_program() -> int:
    """How many texts a program without kernels has compiled."""
    with metrics.counted() as grown, kernel_cache.Loading() as program:
        program.begin_runner()
        program.load({})
    return grown["llvm.compiled"]


def test_what_runs_kernels_is_compiled_beside_the_first_ones(threads, tmp_path, monkeypatch):
    source, names = runner_threads.runner_source()
    text = llvm_binding.marked(source, names)
    monkeypatch.setattr(runner_threads, "has_runner", lambda: False)
    with config.override(LTC_CACHE=1, LTC_CACHE_DIR=str(tmp_path)):
        assert compiled_by_a_program() == 1
        with metrics.counted() as grown:
            llvm_binding.object_code(llvm_binding.name_of(text), text, names)
        assert not grown["llvm.compiled"], "whoever makes the runner finds it on disk"
        assert compiled_by_a_program() == 0
    with config.override(LTC_CACHE=0):
        assert compiled_by_a_program() == 0, "nobody would find it"


def test_what_runs_kernels_is_made_once(tmp_path):
    runner_threads.runner()
    with config.override(LTC_CACHE=1, LTC_CACHE_DIR=str(tmp_path)):
        assert compiled_by_a_program() == 0


def without(monkeypatch, name: str) -> None:
    """Have llvmlite lack a function, as far as ltc looks for it by name."""
    real = llvm_binding._binding()
    functions = {f"LLVMPY_{one}": getattr(real.ffi.lib, f"LLVMPY_{one}") for one in KNOWN}
    functions.pop(name, None)
    library = types.SimpleNamespace(_name=real.ffi.lib._name, **functions)
    changed = types.ModuleType(real.__name__)
    vars(changed).update(vars(real), ffi=types.SimpleNamespace(lib=library))
    monkeypatch.setattr(llvm_binding, "_binding", lambda: changed)


KNOWN = (*llvm_private._LONG, *llvm_private._SHORT)


@pytest.fixture
def asked_anew():
    """Whether llvmlite has what is looked for by name is found out in the test, and after it."""
    llvm_binding._has_private_names.cache_clear()
    yield
    llvm_binding._has_private_names.cache_clear()


@pytest.mark.parametrize("name", KNOWN)
def test_where_llvmlite_lacks_a_name_kernels_are_compiled_in_turn(
    asked_anew, monkeypatch, caplog, name
):
    monkeypatch.setattr(kernel_cache, "thread_count", lambda: 4)
    alone = {name: llvm_binding.emitter().object_code(text) for name, text in TEXTS.items()}
    llvm_binding._has_private_names.cache_clear()
    without(monkeypatch, f"LLVMPY_{name}")
    with caplog.at_level(logging.WARNING, "ltc"), metrics.counted() as grown:
        with Compiling() as compiling:
            for number, text in TEXTS.items():
                compiling.begin(number, text)
            assert dict(compiling.finished()) == alone
    assert grown["llvm.compiled"] == grown["llvm.compiled_in_turn"] == len(TEXTS)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"llvmlite has no function LLVMPY_{name}" in said


def test_where_llvmlite_has_all_names_kernels_are_compiled_side_by_side(asked_anew):
    with metrics.counted() as grown:
        llvm_binding.emitter().object_code(TEXTS["0"])
    assert grown["llvm.compiled"] == 1 and not grown["llvm.compiled_in_turn"]


def test_a_function_that_takes_other_arguments_is_not_called(asked_anew, monkeypatch):
    monkeypatch.setitem(llvm_private._SHORT, "SetTarget", 3)
    llvm_private.functions_of.cache_clear()
    try:
        with metrics.counted() as grown:
            llvm_binding.emitter().object_code(TEXTS["0"])
    finally:
        llvm_private.functions_of.cache_clear()
    assert grown["llvm.compiled_in_turn"] == 1


def test_what_llvm_refuses_in_turn_reaches_who_asked(asked_anew, monkeypatch):
    without(monkeypatch, "LLVMPY_SetTarget")
    with pytest.raises(InvalidGraph, match="LLVM refuses a generated kernel"):
        llvm_binding.emitter().object_code("define void @kernel() { ret i64 0 }")
