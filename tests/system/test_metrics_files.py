"""Machines read what was counted: lines of JSON, points and their growth, Prometheus, TensorBoard."""

import importlib.util
import json
import re
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics, metrics_saver
from tests.explained import in_a_thread

EXAMPLES = Path(__file__).parents[2] / "examples" / "metrics"


@pytest.fixture(autouse=True)
def nothing_counted():
    metrics.clear_all()


def steps(count):
    for _ in range(count):
        x = torch.ones(5, device="ltc").exp()
        ltm.mark_step(wait=True)
    return x


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_each_step_appends_a_line_of_json_and_they_add_up(tmp_path):
    path = tmp_path / "steps.jsonl"
    with config.override(LTC_METRICS_FILE=path):
        in_a_thread(steps, 4)  # in a thread of its own: its steps count from 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["counters"]["MarkStep"] for line in lines] == [1, 1, 1, 1]
    assert [line["ordinal"] for line in lines] == [0, 0, 0, 0]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    runs = [line["metrics"]["ExecuteTime"] for line in lines]
    totals = metrics.as_dict()["metrics"]["ExecuteTime"]
    assert sum(run["total_samples"] for run in runs) == totals["total_samples"] == 4
    assert sum(run["accumulator"] for run in runs) == pytest.approx(totals["accumulator"])
    assert {run["kind"] for run in runs} == {"time"}


def test_a_file_that_can_not_be_written_ends_no_training(tmp_path):
    seen: list[float] = []
    with config.override(LTC_METRICS_FILE=tmp_path):  # a folder
        y = torch.ones(5, device="ltc").exp()
        ltm.add_step_closure(seen.append, (3.0,))
        with pytest.warns(
            UserWarning, match=f"LTC_METRICS_FILE={tmp_path}: a step was not written: .*directory"
        ):
            ltm.mark_step()
    assert seen == [3.0]
    torch.testing.assert_close(y.cpu(), torch.ones(5).exp())
    with pytest.raises(IsADirectoryError):
        metrics_saver.save_metrics(str(tmp_path))


def test_a_loop_is_told_once_at_its_own_line_that_the_file_can_not_be_written(tmp_path):
    with config.override(LTC_METRICS_FILE=tmp_path), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            ltm.optimizer_step(torch.optim.SGD([torch.ones(1)]), barrier=True)
    assert [told.filename for told in found] == [__file__]


def test_json_goes_to_each_replicas_own_file(tmp_path):
    with config.override(XRT_SHARD_WORLD_SIZE=2, XRT_SHARD_ORDINAL=1):
        metrics_saver.save_metrics(str(tmp_path / "steps.jsonl"))
    (path,) = tmp_path.iterdir()
    assert path.name == "steps.jsonl.1"
    assert json.loads(path.read_text())["ordinal"] == 1


def test_growth_is_what_was_counted_between_two_points():
    metrics.count("kept")
    before = metrics.totals()
    metrics.count("mine", 3)
    metrics.record("size", 5.0, "bytes")
    between = metrics.totals()
    metrics.record("size", 2.0, "bytes")
    assert metrics.growth(before, between) == {
        "counters": {"mine": 3},
        "metrics": {"size": {"kind": "bytes", "total_samples": 1, "accumulator": 5.0}},
    }
    assert metrics.growth(before)["metrics"]["size"]["accumulator"] == 7.0
    assert metrics.growth(metrics.as_dict())["counters"] == {}


def test_growth_counts_what_was_cleared_from_the_clearing_on():
    metrics.count("mine", 3)
    metrics.record("size", 5.0)
    metrics.record("size", 5.0)
    before = metrics.totals()
    metrics.clear_all()
    metrics.count("mine", 2)
    metrics.record("size", 1.0)
    grown = metrics.growth(before)
    assert grown["counters"] == {"mine": 2}
    assert grown["metrics"]["size"]["accumulator"] == 1.0


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_the_example_for_prometheus_writes_its_text_format(tmp_path):
    path = tmp_path / "ltc.prom"
    metrics.count('odd "name"\n')
    example("prometheus").train(str(path))
    text = path.read_text()
    sample = re.compile(r'^ltc_\w+\{name="((?:[^"\\]|\\.)*)"\} [-+.\de]+$')
    rows = [row for row in text.splitlines() if not row.startswith("#")]
    assert [row for row in rows if not sample.match(row)] == []
    values = dict(row.rsplit(" ", 1) for row in rows)
    assert int(values['ltc_events_total{name="MarkStep"}']) == 100
    assert float(values['ltc_seconds_sum{name="ExecuteTime"}']) > 0
    assert float(values['ltc_bytes_sum{name="OutboundData"}']) >= 100 * 32 * 64 * 4
    assert text.endswith("\n")


def test_the_example_for_tensorboard_writes_a_scalar_for_what_grew():
    written = defaultdict(list)

    class Writer:
        def add_scalar(self, name, value, step):
            written[name].append((step, value))

    example("tensorboard").train(Writer())
    assert written["ltc/MarkStep"] == [(step, 1) for step in range(100)]
    assert [step for step, _ in written["loss"]] == list(range(9, 100, 10))
    assert len(written["ltc/UncachedCompile"]) < 10
