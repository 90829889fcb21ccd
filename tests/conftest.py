"""What every test shares: four devices, checked graphs, and tests that compare ltc with the CPU.

A compared test runs three times: on the CPU, and on ltc with each of the two backends.
"""

import contextlib
import os
import signal
import sys
import tempfile

# As many processes as the caller wants devices, where a test starts some of each.
os.environ.setdefault("TEST_RANKS", os.environ.get("LTC_NUM_DEVICES", "2"))
os.environ.setdefault("LTC_NUM_DEVICES", "4")  # read at import, so set before it
# The tensors here are tiny: on shared cores, threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With AMX, PyTorch 2.13 ends the process in a conv3d of bfloat16 whose window is dilated. (With
# AVX512-FP16 it does so in a rare conv2d of float16; without, products of float8 have no kernel.)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("LTC_TIER", "native")  # what is tested is what is compiled
os.environ.setdefault("LTC_CHECK", "1")  # every graph is verified between passes
# Each of the many processes that tests start would compile all of ltc's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A job in the background ignores it, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "LTC_CACHE_DIR" not in os.environ:  # the user's own programs are not the tests' business
    _cache = tempfile.TemporaryDirectory(prefix="ltc-tests-")
    os.environ["LTC_CACHE_DIR"] = _cache.name

import random
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.llvm.native import thread_pool
from ltc.llvm.native.launch_ring import Ring

# Both devices compute in float64 what the tests compare closely; what differs is the order of
# sums, some units in the last place. float32 results pass through fewer than 1e4 roundings.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.complex128: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "compared: the test takes `device` and returns what it computed there; "
        "it passes where ltc returns what the CPU returns",
    )


def pytest_collection_modifyitems(items):
    """Shuffle the tests where LTC_TEST_ORDER names an order: no test may lean on the one before it."""
    if order := os.environ.get("LTC_TEST_ORDER"):
        random.Random(order).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a compared test on the CPU and with each backend; leave every other test to pytest."""
    names = pyfuncitem._fixtureinfo.argnames
    if pyfuncitem.get_closest_marker("compared") is None or "device" not in names:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    on_cpu = run_on("cpu", pyfuncitem.obj, arguments)
    assert on_cpu is not None, "a compared test returns what is to be compared"
    for backend in dict.fromkeys((config.value("LTC_BACKEND"), "eager")):
        with config.override(LTC_BACKEND=backend):
            assert_equal(run_on("ltc:0", pyfuncitem.obj, arguments), on_cpu, backend)
    return True


def run_on(device: str, test, arguments: dict):
    """What the test returns when it is given that device."""
    seed_everything()
    return test(**{**arguments, "device": device})


@pytest.fixture
def device():
    """The lazy device; a compared test is given "cpu" first."""
    return "ltc:0"


@pytest.fixture(autouse=True, scope="session")
def queue_is_compiled():
    """Its code is needed when the first program takes long: not in the midst of a count."""
    if config.value("LTC_BACKEND") == "llvm" and thread_pool.is_possible():
        Ring()


@pytest.fixture(autouse=True)
def fresh_start():
    """Known seeds, the first device current, and nothing left pending by the test before."""
    for device in ltc.devices():
        with contextlib.suppress(Exception):  # an error that test expected, and did not wait for
            ltm.mark_step(device, wait=True)
    with contextlib.suppress(Exception):  # a mark that raised that error has not waited
        ltm.wait_device_ops()
    ltm.lazy_device(0)
    seed_everything()


def seed_everything() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def equal():
    """assert_equal, for tests that run both devices themselves."""
    return assert_equal


def assert_equal(on_ltc, on_cpu, path: str = "result") -> None:
    """Compare nested results: tensors within the tolerance of their dtype, all else by ==."""
    if isinstance(on_cpu, torch.Tensor):
        assert isinstance(on_ltc, torch.Tensor), f"{path} is {type(on_ltc)} on ltc"
        rtol, atol = TOLERANCES.get(on_cpu.dtype, (0, 0))
        torch.testing.assert_close(
            on_ltc.detach().cpu(),
            on_cpu.detach(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text: f"{path}: {text}",
        )
    elif isinstance(on_cpu, dict):
        assert on_ltc.keys() == on_cpu.keys(), path
        for key in on_cpu:
            assert_equal(on_ltc[key], on_cpu[key], f"{path}[{key!r}]")
    elif isinstance(on_cpu, (list, tuple)) and not isinstance(on_cpu, torch.Size):
        assert len(on_ltc) == len(on_cpu), path
        for index, (mine, theirs) in enumerate(zip(on_ltc, on_cpu)):
            assert_equal(mine, theirs, f"{path}[{index}]")
    else:
        assert on_ltc == on_cpu, path


@pytest.fixture
def error_of():
    """The text of the RuntimeError that a call raises; fails where it raises none."""

    def text(call) -> str:
        with pytest.raises(RuntimeError) as caught:
            call()
        return str(caught.value)

    return text


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> str:
    """A PYTHONPATH with which torch finds ltc by its entry points, as where it is installed."""
    root = Path(__file__).parents[1]
    about = tmp_path_factory.mktemp("installed") / "ltc-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ltc\nVersion: 0\n")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return f"{about.parent}{os.pathsep}{root}"


@pytest.fixture(autouse=True)
def quiet_known_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
