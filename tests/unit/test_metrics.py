import json
import os
import threading
import time

import pytest

from ltc import config
from ltc.support.observation import metrics, metrics_saver, profiler
from ltc.support.observation.often import Often, counting


@pytest.fixture(autouse=True)
def _empty():
    metrics.clear_all()
    yield
    metrics.clear_all()


def test_a_counter_grows():
    metrics.count("MarkStep")
    metrics.count("MarkStep", 2)
    assert metrics.counter_value("MarkStep") == 3
    assert metrics.counter_names() == ["MarkStep"]


def test_174_what_is_cleared_is_gone_until_it_is_used_again():
    metrics.count("MarkStep")
    metrics.record("ExecuteTime", 5, "time")
    metrics.clear_all()
    assert metrics.counter_names() == metrics.metric_names() == []
    assert metrics.counter_value("MarkStep") is None
    assert metrics.metric_data("ExecuteTime") is None
    assert metrics.metrics_report() == ""
    metrics.count("MarkStep")
    assert metrics.metrics_report() == "Counter: MarkStep\n  Value: 1\n"


def test_counters_and_metrics_are_cleared_apart():
    metrics.count("MarkStep")
    metrics.record("ExecuteTime", 5, "time")
    metrics.clear_counters()
    assert (metrics.counter_names(), metrics.metric_names()) == ([], ["ExecuteTime"])
    metrics.count("MarkStep")
    metrics.clear_metrics()
    assert (metrics.counter_names(), metrics.metric_names()) == (["MarkStep"], [])
    metrics.reset_metrics()
    assert metrics.counter_names() == []


def test_a_counter_at_zero_is_not_there():
    metrics.count("MarkStep", 0)
    assert metrics.counter_names() == [] and metrics.counter_value("MarkStep") is None


def test_metric_data_has_the_count_the_sum_and_the_samples():
    before = time.time()
    for value in (3, 4):
        metrics.record("TensorsGraphSize", value)
    total, accumulator, samples = metrics.metric_data("TensorsGraphSize")
    assert (total, accumulator, [v for _, v in samples]) == (2, 7, [3, 4])
    assert all(before <= t <= time.time() for t, _ in samples)


def test_only_the_latest_samples_are_kept_but_all_are_counted():
    with config.override(LTC_METRICS_SAMPLES=4):
        for value in range(10):
            metrics.record("TensorsGraphSize", value)
    total, accumulator, samples = metrics.metric_data("TensorsGraphSize")
    assert (total, accumulator, [v for _, v in samples]) == (10, 45, [6, 7, 8, 9])


def test_timed_records_nanoseconds_also_when_the_block_raises():
    with pytest.raises(KeyError), metrics.timed("ExecuteTime"):
        time.sleep(0.01)
        raise KeyError
    assert metrics.metric_data("ExecuteTime")[1] >= 10_000_000


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="the kinds are time, bytes, value"):
        metrics.record("ExecuteTime", 1, "seconds")


@pytest.mark.parametrize(
    "nanoseconds,text",
    [
        (14_332, "014.332us"),
        (1_202_113, "001ms202.113us"),
        (9_401_746_001, "09s401ms746.001us"),
        (369_401_746_001, "06m09s401ms746.001us"),
        (93_784_005_006_007, "01d02h03m04s005ms006.007us"),
        (60_000_000_000, "01m00s000ms000.000us"),
        (0, "000.000us"),
    ],
)
def test_a_time_is_written_from_its_largest_part_down(nanoseconds, text):
    assert metrics.time_text(nanoseconds) == text


@pytest.mark.parametrize(
    "n,text", [(0, "0.00B"), (1023, "1023.00B"), (1536, "1.50KB"), (3 << 40, "3.00TB")]
)
def test_bytes_are_written_in_their_largest_unit(n, text):
    assert metrics.bytes_text(n) == text
    assert metrics.bytes_text(2 << 60) == "2048.00PB"


def test_the_report_has_metrics_then_counters_in_alphabetical_order():
    metrics.count("UncachedCompile")
    metrics.count("CachedCompile")
    metrics.record("OutboundData", 1536, "bytes")
    metrics.record("CompileTime", 14_332, "time")
    with config.override(LTC_METRICS_PERCENTILES=(0.5, 0.99)):
        assert metrics.metrics_report() == (
            "Metric: CompileTime\n"
            "  TotalSamples: 1\n"
            "  Accumulator: 014.332us\n"
            "  Percentiles: 50%=014.332us; 99%=014.332us\n"
            "Metric: OutboundData\n"
            "  TotalSamples: 1\n"
            "  Accumulator: 1.50KB\n"
            "  Percentiles: 50%=1.50KB; 99%=1.50KB\n"
            "Counter: CachedCompile\n"
            "  Value: 1\n"
            "Counter: UncachedCompile\n"
            "  Value: 1\n"
        )


def test_rates_are_over_the_span_of_the_samples(monkeypatch):
    times = iter([100.0, 102.0])
    monkeypatch.setattr(metrics.time, "time", lambda: next(times))
    metrics.record("TensorsGraphSize", 10)
    metrics.record("TensorsGraphSize", 20)
    report = metrics.metrics_report()
    assert "  ValueRate: 15.00 / second\n  Rate: 1 / second\n" in report


def test_a_percentile_is_the_sample_at_its_share_of_the_sorted_samples():
    for value in reversed(range(100)):
        metrics.record("TensorsGraphSize", value)
    report = metrics.metrics_report()
    assert "Percentiles: 1%=1.00; 5%=5.00; 10%=10.00; 20%=20.00; 50%=50.00; 80%=80.00;" in report
    assert "90%=90.00; 95%=95.00; 99%=99.00" in report


def test_176_the_short_report_has_what_is_asked_for_and_every_fallback():
    for name in ("MarkStep", "CachedCompile", "CreateLtcTensor", "aten::nonzero"):
        metrics.count(name)
    metrics.record("ExecuteTime", 5, "time")
    metrics.record("TensorsGraphSize", 5)
    short = metrics.short_metrics_report()
    assert [line.split(": ")[1] for line in short.splitlines() if not line.startswith(" ")] == [
        "ExecuteTime",
        "CachedCompile",
        "MarkStep",
        "aten::nonzero",
    ]
    custom = metrics.short_metrics_report(["CreateLtcTensor"], ["TensorsGraphSize"])
    assert "Counter: CreateLtcTensor" in custom and "Metric: TensorsGraphSize" in custom
    assert "Counter: aten::nonzero" in custom and "MarkStep" not in custom


def test_178_fallbacks_are_named_until_they_are_cleared():
    metrics.count("aten::_local_scalar_dense", 2)
    metrics.count("MarkStep")
    assert metrics.executed_fallback_ops() == ["aten::_local_scalar_dense"]
    metrics.clear_all()
    assert metrics.executed_fallback_ops() == []


def test_everything_as_plain_data():
    metrics.count("MarkStep")
    metrics.record("OutboundData", 8, "bytes")
    with config.override(LTC_METRICS_PERCENTILES=(0.5,)):
        data = metrics.as_dict()
    assert json.loads(json.dumps(data)) == {
        "counters": {"MarkStep": 1},
        "metrics": {
            "OutboundData": {
                "kind": "bytes",
                "total_samples": 1,
                "accumulator": 8,
                "percentiles": {"50%": 8},
            }
        },
    }


def test_counted_tells_what_grew_inside_its_block_and_keeps_it():
    metrics.count("MarkStep", 5)
    metrics.count("idle")
    with metrics.counted() as grown:
        metrics.count("MarkStep")
        assert grown["MarkStep"] == 1
        metrics.record("ExecuteTime", 5, "time")
    metrics.count("MarkStep")
    assert dict(grown) == {"ExecuteTime": 1, "MarkStep": 1}
    assert grown["idle"] == 0 and "idle" not in grown


def test_counted_survives_a_clearing_inside_its_block():
    metrics.count("MarkStep", 5)
    with metrics.counted() as grown:
        metrics.clear_all()
        metrics.count("MarkStep", 2)
    assert dict(grown) == {"MarkStep": 2}


def test_no_count_is_lost_between_threads():
    def work():
        for _ in range(20_000):
            metrics.count("MarkStep")
            metrics.record("TensorsGraphSize", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counter_value("MarkStep") == 80_000
    assert metrics.metric_data("TensorsGraphSize")[:2] == (80_000, 80_000)


def test_a_child_of_fork_counts_although_another_thread_was_counting():
    entered, done = threading.Event(), threading.Event()

    def hold():
        with metrics._lock:
            entered.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        try:
            metrics.count("MarkStep", 7)
            os._exit(metrics.counter_value("MarkStep"))
        finally:
            os._exit(2)  # never on into the parent's tests
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        done.set()
        holder.join()


def test_182_the_metrics_file_gets_one_numbered_block_a_step(tmp_path):
    path = tmp_path / "metrics"
    metrics.count("MarkStep")

    def three_steps():  # in a thread of its own, where numbers begin at 0
        for _ in range(3):
            metrics_saver.save_metrics()

    with config.override(LTC_METRICS_FILE=path):
        thread = threading.Thread(target=three_steps)
        thread.start()
        thread.join()
    text = path.read_text()
    assert text.startswith("[MetricsData; step=0]\nCounter: MarkStep\n")
    assert [f"step={n}]" in text for n in range(4)] == [True, True, True, False]


def test_182_the_metrics_file_carries_the_ordinal_where_there_are_several_replicas(tmp_path):
    with config.override(XRT_SHARD_WORLD_SIZE=2, XRT_SHARD_ORDINAL=1):
        metrics_saver.save_metrics(str(tmp_path / "metrics"))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.1"]


def test_metrics_can_go_to_a_stream_and_go_nowhere_unasked(capsys):
    metrics_saver.save_metrics()
    assert capsys.readouterr() == ("", "")
    metrics_saver.save_metrics("STDERR")
    assert capsys.readouterr().err.startswith("[MetricsData; step=")


@pytest.fixture
def marks(monkeypatch):
    marks = []
    monkeypatch.setattr(profiler, "_mark_step", lambda: marks.append(1))
    return marks


def test_189_a_step_trace_marks_its_step_once_and_owns_the_barrier_meanwhile(marks):
    with profiler.StepTrace("train", step_num=1):
        assert profiler.get_tracer_marked_step() and not marks
    assert not profiler.get_tracer_marked_step() and marks == [1]
    assert metrics.metric_data("trace.train")[0] == 1


def test_a_step_trace_whose_body_raises_marks_its_step_too(marks):
    with pytest.raises(KeyError), profiler.StepTrace("train"):
        raise KeyError
    assert not profiler.get_tracer_marked_step() and marks == [1]


def test_the_barrier_of_one_thread_is_not_that_of_another(marks):
    seen = []
    with profiler.StepTrace("train"):
        thread = threading.Thread(target=lambda: seen.append(profiler.get_tracer_marked_step()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_trace_alone_marks_nothing(marks):
    with profiler.Trace("part"):
        assert not profiler.get_tracer_marked_step()
    assert not marks


# --- what happens often ---


@pytest.fixture(scope="module")
def often():
    return Often(("Reads", "Looks"), (("ReadTime", "time"), ("ReadBytes", "bytes")))


def test_what_happens_often_is_there_for_whoever_looks(often):
    with metrics.counted() as grown:
        for number in range(3):
            often.happened(10 * number, 4)
        assert metrics.counter_value("Reads") == metrics.counter_value("Looks") == 3
    assert (grown["Reads"], grown["ReadTime"], grown["ReadBytes"]) == (3, 3, 3)
    total, summed, samples = metrics.metric_data("ReadTime")
    assert (total, summed, [value for _, value in samples]) == (3, 30, [0, 10, 20])
    assert time.time() - 60 < samples[0][0] <= samples[-1][0] <= time.time()
    assert metrics.as_dict()["metrics"]["ReadBytes"]["accumulator"] == 12


def test_a_counter_grows_by_what_came_each_time():
    often = Often((), (("BiteTime", "time"),), ("Crumbs", "Guests"))
    with metrics.counted() as grown:
        often.happened(7, 2, 0)
        often.happened(8, 3, 1)
    assert dict(grown) == {"BiteTime": 2, "Crumbs": 5, "Guests": 1}
    assert metrics.metric_data("BiteTime")[:2] == (2, 15)


def test_a_counter_without_a_lock_is_there_for_whoever_looks():
    count = counting("Steps")
    with metrics.counted() as grown:
        for _ in range(5):
            count()
        assert metrics.counter_value("Steps") == grown["Steps"] == 5
        count()
    assert dict(grown) == {"Steps": 6}
    count()
    metrics.clear_counters()
    assert metrics.counter_value("Steps") is None
    count()
    assert metrics.counter_value("Steps") == 1


def test_threads_that_count_at_once_lose_nothing():
    count = counting("Laps")

    def run() -> None:
        for _ in range(2000):
            count()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.totals()
    assert metrics.counter_value("Laps") == 8000


def test_what_happened_before_the_clearing_is_gone_too(often):
    often.happened(1, 1)
    metrics.clear_all()
    assert metrics.counter_names() == metrics.metric_names() == []
    often.happened(1, 1)
    metrics.clear_counters()
    assert metrics.counter_names() == [] and metrics.metric_names() == ["ReadBytes", "ReadTime"]


def test_nobody_looks_for_a_long_while(often):
    for _ in range(10_000):
        often.happened(1, 1)
    assert len(often._times) < 1000
    assert metrics.counter_value("Reads") == 10_000


def test_threads_at_once_lose_nothing(often):
    def make() -> None:
        for _ in range(2000):
            often.happened(1, 1)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.totals()
    assert metrics.counter_value("Reads") == metrics.metric_data("ReadTime")[0] == 8000
