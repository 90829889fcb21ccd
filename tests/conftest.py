"""Settings and fixtures that all tests share; they are those of a user, but for what marks change.

One device, LTC_TIER=auto, and a disk cache that the whole run shares. Graphs are verified.
"""

import contextlib
import os
import signal
import sys
import tempfile

# As many processes as the caller wants devices. Devices of this process are a matter of marks.
os.environ.setdefault("TEST_RANKS", os.environ.pop("LTC_NUM_DEVICES", "2"))
# The tensors here are tiny: on shared cores, threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With AMX, PyTorch 2.13 ends the process in a conv3d of bfloat16 whose window is dilated. (With
# AVX512-FP16 it does so in a rare conv2d of float16; without, products of float8 have no kernel.)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("LTC_CHECK", "1")  # every graph is verified between passes
os.environ.setdefault("LTC_HINTS", "0")  # tests of it turn it on
# Each of the many processes that tests start would compile all of ltc's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A job in the background ignores it, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# One native core serves all processes of the run, whatever folder they keep their programs in.
_user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
_caches = os.environ.get("LTC_CACHE_DIR") or os.path.join(_user, "ltc")
os.environ.setdefault("LTC_NATIVE_DIR", _caches)
if "LTC_CACHE_DIR" not in os.environ:  # the user's own programs are not the tests' business
    _cache = tempfile.TemporaryDirectory(prefix="ltc-tests-")
    os.environ["LTC_CACHE_DIR"] = _cache.name

import random
import tomllib
import warnings
from pathlib import Path

import pytest

import ltc
import ltc.core.lazy_model as ltm
from ltc.native.core import CORE
from tests import compared, marks
from tests.orders import in_another_order
from tests.recorders import forget_paths


def settings() -> dict[str, str]:
    """The variables of ltc's that are set."""
    return {name: text for name, text in os.environ.items() if name.startswith("LTC_")}


# Processes that tests start run as this one does, and none has a core built beside it.
os.environ["LTC_NATIVE"] = "0" if CORE is None else "require"
SETTINGS = settings()


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "compared: the test takes `device` and returns what it computed there; "
        "it passes where ltc returns what the CPU returns, each time of several (tests/compared.py)",
    )
    config.addinivalue_line("markers", marks.NATIVE)
    config.addinivalue_line("markers", marks.ALSO_NATIVE)
    config.addinivalue_line("markers", marks.DEVICES)
    config.addinivalue_line("markers", marks.NOTED_AT_ONCE)


def pytest_collection_modifyitems(items):
    """Shuffle the tests where TEST_ORDER names an order: no test may lean on the one before it."""
    if order := os.environ.get("TEST_ORDER"):
        items[:] = in_another_order(items, random.Random(order))


def pytest_collection_finish():
    """Fail where importing the tests has set what they are to run with.

    Raises:
        pytest.UsageError: a module that they import changes a variable of ltc's.
    """
    if changed := dict(SETTINGS.items() ^ settings().items()):
        raise pytest.UsageError(f"A module that tests import sets {', '.join(sorted(changed))}.")


@pytest.fixture(autouse=True)
def small_steps_are_followed(request, monkeypatch):
    """Also with the native core, but for tests of that."""
    if CORE is not None and "quick_calls" not in request.fixturenames:
        marks.small_steps_are_followed(request.node, monkeypatch)


@pytest.fixture
def quick_calls():
    """Small steps run when their calls are made, where the native core runs them."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a compared test by tests/compared.py; leave every other test to pytest."""
    names = pyfuncitem._fixtureinfo.argnames
    if pyfuncitem.get_closest_marker("compared") is None or "device" not in names:
        return None
    compared.run(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.fixture
def device():
    """The lazy device; a compared test is given "cpu" first."""
    return "ltc:0"


def pytest_generate_tests(metafunc):
    marks.run_twice(metafunc)


@pytest.fixture
def run_as(request):
    """What tests with the mark `also_native` are run as; others have one run."""
    return getattr(request, "param", "user")


@pytest.fixture(autouse=True)
def settings_of_marks(request, run_as):
    """The tier and the devices that the marks of the test ask for."""
    with marks.settings_of(request.node):
        yield


@pytest.fixture(autouse=True)
def fresh_start(settings_of_marks, small_steps_are_followed):
    """Known seeds, the first device current, and nothing left by the test before: no path, no value."""
    for device in ltc.devices():
        with contextlib.suppress(Exception):  # an error that test expected, and did not wait for
            ltm.mark_step(device, wait=True)
    with contextlib.suppress(Exception):  # a mark that raised that error has not waited
        ltm.wait_device_ops()
    ltm.lazy_device(0)
    forget_paths()
    compared.seed_everything()


@pytest.fixture
def equal():
    """assert_equal, for tests that run both devices themselves."""
    return compared.assert_equal


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


def pytest_sessionfinish(session):
    """Hand over what a worker of pytest-xdist has counted."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["reached"] = dict(compared.reached)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add what that worker has counted; one that was killed has handed over nothing."""
    compared.reached.update(getattr(node, "workeroutput", {}).get("reached", {}))


def pytest_terminal_summary(terminalreporter):
    """Tell how many compared tests came to each state."""
    for state, tests in sorted(compared.reached.items()):
        terminalreporter.write_line(f"compared tests that were {state}: {tests}")
