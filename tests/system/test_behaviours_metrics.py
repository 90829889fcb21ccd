"""Section 6.13 of the parity inventory, on the device."""

import itertools
import re
import time

import pytest
import torch

import ltc  # noqa: F401
import ltc.core.lazy_model as ltm
import ltc.debug.metrics as met
from ltc import config
from ltc.debug import profiler


@pytest.fixture(autouse=True)
def _cleared():
    ltm.mark_step()
    ltm.wait_device_ops()
    met.clear_all()


def add_and_multiply():
    device = ltm.lazy_device()
    x = torch.ones(3, 5, device=device)
    y = x * 2 + 1
    ltm.mark_step()
    return y


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_174_cleared_names_come_back_with_the_same_operation():
    add_and_multiply()
    assert "MarkStep" in met.counter_names() and "TensorsGraphSize" in met.metric_names()
    ltm.wait_device_ops()
    met.clear_all()
    assert met.counter_names() == met.metric_names() == []
    assert met.counter_value("MarkStep") is None
    assert "MarkStep" not in met.metrics_report()
    add_and_multiply()
    assert met.counter_value("MarkStep") == 1
    assert "Counter: MarkStep\n  Value: 1\n" in met.metrics_report()


NAMES = [
    "CreateLtcTensor",
    "DestroyLtcTensor",
    "UncachedCompile",
    "MarkStep",
    "TensorsGraphSize",
    "InputOutputAliasCount",
    "TensorToData",
    "DeviceLockWait",
    "DeviceDataCacheMiss",
]


sizes = itertools.count(1000)  # each gives a program that no test has compiled before


def a_step_of_everything():
    device, size = ltm.lazy_device(), next(sizes)
    weight = torch.ones(size, device=device)
    ltm.mark_step()
    weight.add_(torch.randn(size).to(device))
    ltm.mark_step()
    weight.cpu()
    del weight
    ltm.mark_step()


@pytest.mark.native("the report of a step has the metrics of its compilation")
@pytest.mark.parametrize("name", NAMES)
def test_175_the_report_names_what_a_step_does(name):
    a_step_of_everything()
    assert re.search(rf"^(Counter|Metric): {name}$", met.metrics_report(), re.MULTILINE)


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_175_a_repeated_step_finds_its_program():
    for _ in range(3):
        add_and_multiply()
    met.clear_all()
    add_and_multiply()
    assert met.counter_value("CachedCompile") == 1
    assert met.counter_value("UncachedCompile") is None


def test_176_the_short_report_has_the_fallback_of_a_tensor_read_as_a_condition():
    x = torch.ones((), device=ltm.lazy_device())
    ltm.mark_step()
    if x:
        pass
    short = met.short_metrics_report()
    assert "Counter: MarkStep" in short and "aten::_local_scalar_dense" in short
    assert "aten::_local_scalar_dense" in met.short_metrics_report(["CachedCompile"], [])
    assert "CreateLtcTensor" not in short


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_the_wait_for_a_program_under_way_is_the_time_it_takes(monkeypatch):
    monkeypatch.setenv("LTC_MAX_IN_FLIGHT", "1")
    x = torch.randn(1000, 1000, device=ltm.lazy_device())
    for _ in range(6):  # of the second on it is known that they take long
        x = (x @ x @ x).tanh()
        ltm.mark_step()
    ltm.wait_device_ops()
    launches, waited, _ = met.metric_data("DeviceLockWait")
    assert launches == 6
    assert waited > met.metric_data("ExecuteTime")[1] / 100


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_177_the_execution_time_is_the_time_on_the_device():
    device = ltm.lazy_device()
    x, y = (torch.randn(2000, 2000, device=device) for _ in range(2))
    x @ y  # the first product of a process also starts threads
    ltm.mark_step()
    ltm.wait_device_ops()
    met.clear_all()
    begin = time.perf_counter()
    z = x @ y @ y  # noqa: F841
    ltm.mark_step()
    ltm.wait_device_ops()
    wall = time.perf_counter() - begin
    _, nanoseconds, _ = met.metric_data("ExecuteTime")
    least = 2 * 2 * 2000**3 / 1e13  # no processor multiplies and adds faster
    assert least < nanoseconds / 1e9 <= wall


def test_178_a_read_is_the_one_fallback_of_item():
    x = torch.ones((), device=ltm.lazy_device()) + 1
    assert x.item() == 2
    assert met.executed_fallback_ops() == ["aten::_local_scalar_dense"]
    met.clear_all()
    assert met.executed_fallback_ops() == []


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_179_tracing_is_timed_for_each_operation():
    x = torch.ones(next(sizes), device=ltm.lazy_device())  # a size not recorded before
    y = x + 1
    z = y * 2  # noqa: F841
    assert met.metric_data("LazyTracing")[0] > 1


PARTS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6}
UNITS = {"B": 2**-20, "KB": 2**-10, "MB": 1, "GB": 2**10, "TB": 2**20, "PB": 2**30}


def number_of(text):
    """Seconds for a time, megabytes for bytes, else the plain number."""
    if match := re.fullmatch(r"([\d.]+)([KMGTP]?B)", text):
        return float(match[1]) * UNITS[match[2]]
    parts = re.findall(r"([\d.]+)(ms|us|d|h|m|s)", text)
    return sum(float(n) * PARTS[u] for n, u in parts) if parts else float(text)


def parsed(report):
    """(metric, label) -> number, for every number of the report."""
    numbers, name = {}, None
    for line in report.splitlines():
        label, _, text = line.strip().partition(": ")
        if not line.startswith(" "):
            name = text
        elif label == "Percentiles":
            for item in text.split("; "):
                percent, _, value = item.partition("=")
                numbers[name, percent] = number_of(value)
        else:
            numbers[name, label] = number_of(text.removesuffix(" / second"))
    return numbers


def test_180_every_number_of_the_report_can_be_read_back():
    add_and_multiply()
    ltm.wait_device_ops()
    numbers = parsed(met.metrics_report())
    assert numbers["MarkStep", "Value"] == 1
    for name in met.metric_names():
        total, accumulator, _ = met.metric_data(name)
        assert numbers[name, "TotalSamples"] == total
        unit = {"time": 1e-9, "bytes": 2**-20, "value": 1}[met.as_dict()["metrics"][name]["kind"]]
        # Bytes and values are written with two decimals of their unit.
        assert numbers[name, "Accumulator"] == pytest.approx(accumulator * unit, rel=5e-3)
        assert (name, "99%") in numbers


def test_180_times_and_bytes_read_as_documented():
    assert number_of("09s401ms746.001us") == pytest.approx(9.401746001)
    assert number_of("1.50KB") == pytest.approx(1.5 / 1024)


def test_182_every_step_appends_a_block_to_the_metrics_file(tmp_path):
    path = tmp_path / "metrics"
    with config.override(LTC_METRICS_FILE=path):
        for _ in range(3):
            add_and_multiply()
    heads = re.findall(r"^\[MetricsData; step=(\d+)\]$", path.read_text(), re.MULTILINE)
    first = int(heads[0])  # the thread may have saved before
    assert [int(head) - first for head in heads] == [0, 1, 2]


def test_189_a_step_trace_marks_exactly_one_step():
    with profiler.StepTrace("train", step_num=1):
        x = torch.ones(2, device=ltm.lazy_device()) + 1  # noqa: F841
        assert met.counter_value("MarkStep") is None
    assert met.counter_value("MarkStep") == 1
