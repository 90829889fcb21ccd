"""LTC_AUTOTUNE: what may be chosen for a product, how a choice is made, kept and found again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltc import config
from ltc.debug import metrics
from ltc.llvm.gemm import autotune
from ltc.llvm.gemm.blocking import Shape, other_blockings, stored_plain, stored_transposed
from ltc.llvm.gemm.kernel import matmul
from ltc.llvm.gemm.timing import quickest
from ltc.support.bounded_table import BoundedTable
from tests.unit.llvm_kernels import HOST, ISAS, run, tolerance

M, N, K = 70, 90, 300


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "_chosen", BoundedTable("TunedProducts", 64))
    with config.override(LTC_CACHE_DIR=str(tmp_path / "cache"), LTC_AUTOTUNE=1):
        yield tmp_path / "cache"


def product(blocking=None, isa=HOST, dtype=torch.float32, m=M, n=N, k=K, turned=False):
    right = (stored_transposed if turned else stored_plain)(k, n)
    strides = stored_plain(m, k), right, stored_plain(m, n)
    return matmul("kernel", dtype, (), (m, n, k), *strides, isa, blocking=blocking)


def tuned(make) -> int:
    """How many choices `make` had to measure."""
    with metrics.counted() as grown:
        make()
    return grown["llvm.tuned"]


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "m, n, k, turned",
    [(70, 90, 300, False), (70, 90, 300, True), (70, 50, 9000, True), (1, 200, 300, False),
     (61, 40, 9000, False)],
)  # fmt: skip
def test_every_choice_has_the_same_bits(isa, dtype, m, n, k, turned):
    x, y = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    right = y.T.contiguous() if turned else y
    matrix = (stored_transposed if turned else stored_plain)(k, n)
    shape = Shape((), m, n, k, stored_plain(m, k), matrix, stored_plain(m, n))
    with config.override(LTC_AUTOTUNE=0):
        usual = product(None, isa, dtype, m, n, k, turned)
    expected = torch.empty(m, n, dtype=dtype)
    run(usual, isa, x, right, expected)
    assert (expected.double() - x.double() @ y.double()).abs().max() <= tolerance(dtype, k)
    others = other_blockings(dtype, isa, shape)
    assert others
    for blocking in others:
        result = torch.empty(m, n, dtype=dtype)
        run(product(blocking, isa, dtype, m, n, k, turned), isa, x, right, result)
        assert torch.equal(result, expected), blocking


def test_a_choice_is_made_once_and_found_on_disk():
    chosen = []
    assert tuned(lambda: chosen.append(product())) == 1
    assert tuned(product) == 0
    autotune._chosen.clear()
    assert tuned(lambda: chosen.append(product())) == 0
    assert chosen[0].text == chosen[1].text


def test_another_shape_or_number_of_threads_is_another_choice():
    assert tuned(product) == 1
    assert tuned(lambda: product(k=K + 1)) == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert tuned(product) == 1
    finally:
        torch.set_num_threads(threads)


def test_nothing_is_timed_unless_that_is_asked_for():
    with config.override(LTC_AUTOTUNE=0):
        assert tuned(product) == 0


def entry(folder: Path) -> Path:
    """The file of the only choice; the others are machine code."""
    (found,) = [path for path in folder.iterdir() if b'"choice"' in path.read_bytes()]
    return found


def test_a_damaged_choice_is_made_anew_with_a_warning(own_cache):
    product()
    path = entry(own_cache)
    path.write_bytes(path.read_bytes()[:-3])
    autotune._chosen.clear()
    with pytest.warns(UserWarning, match="damaged"):
        assert tuned(product) == 1
    autotune._chosen.clear()
    assert tuned(product) == 0


@pytest.mark.parametrize("text", [b"", b"[1]", b"{}"])
def test_what_is_no_choice_is_removed_and_made_anew(own_cache, text):
    product()
    path = entry(own_cache)
    autotune.disk_cache().write(path.name, text)
    autotune._chosen.clear()
    with pytest.warns(UserWarning, match="damaged"):
        assert tuned(product) == 1


def test_a_choice_of_what_is_no_way_is_made_anew(own_cache):
    product()
    path = entry(own_cache)
    autotune.disk_cache().write(path.name, b'{"choice": "Blocking(vectors=99)"}')
    autotune._chosen.clear()
    assert tuned(product) == 1


def test_without_a_cache_a_choice_holds_for_the_process(own_cache):
    with config.override(LTC_CACHE=0):
        assert tuned(product) == 1
        assert tuned(product) == 0
    assert not own_cache.exists()


def test_what_is_too_large_to_be_timed_is_done_the_usual_way(monkeypatch):
    monkeypatch.setattr("ltc.llvm.gemm.kernel.MOST_TUNED_ELEMENTS", 1000)
    assert tuned(product) == 0


def test_the_quickest_is_the_one_whose_best_time_is_least(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ltc.llvm.gemm.timing.time.perf_counter", lambda: now[0])

    def taking(*seconds):
        waiting = list(seconds)

        def run():
            now[0] += waiting.pop(0) if len(waiting) > 1 else waiting[0]

        return run

    assert quickest({"steady": taking(5, 4), "disturbed": taking(1, 9, 3, 9)}) == "disturbed"


STEP = """
import torch, ltc
import ltc.core.lazy_model as ltm
from ltc.debug import metrics
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(96, 80), torch.nn.ReLU(), torch.nn.Linear(80, 70))
model = model.to("ltc")
x = torch.randn(64, 96).to("ltc")
loss = model(x).square().mean()
loss.backward()
ltm.mark_step()
print(loss.item().hex(), *[metrics.counter_value(n) or 0 for n in ("llvm.tuned", "llvm.compiled")])
"""


def run_process(**settings: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **settings}
    result = subprocess.run(
        [sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_second_process_times_and_compiles_nothing_and_all_have_the_same_bits():
    usual = run_process(LTC_AUTOTUNE="0")
    first, second = run_process(), run_process()
    assert usual[1] == "0" and int(first[1]) > 0
    assert second[1:] == ["0", "0"]
    assert usual[0] == first[0] == second[0]
