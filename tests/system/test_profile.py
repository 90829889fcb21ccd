"""What ltc.profile writes: lanes, spans, kernels with their places, memory, ranks."""

import json
import os
import threading
import time
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import profiler
from ltc.distributed.lazy_multiprocessing import spawn
from ltc.native.core import CORE
from ltc.profiling import trace_file
from ltc.support.observation import spans


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn, self.act = nn.Linear(width, width), nn.GELU()

    def forward(self, x):
        return x + self.act(self.attn(x))


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """Steps of a small model on one device."""

    def __init__(self, device="ltc:0", width=16):
        self.device = torch.device(device)
        self.model = Model(width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.x = torch.randn(8, width).to(device)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        ltm.mark_step()
        return loss


def warm(count=3, **options):
    """A training whose program is compiled."""
    training = Training(**options)
    for _ in range(count):
        training.step()
    ltm.wait_device_ops()
    return training


def read(path):
    return json.loads(path.read_text())


def events(trace, *categories):
    return [e for e in trace["traceEvents"] if e["ph"] != "M" and e["cat"] in categories]


def assert_nested(trace):
    """Spans of one lane are inside one another, or apart."""
    lanes = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        open_until = []
        for event in sorted(lane, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 0.002:  # they are rounded
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, event
            open_until.append(end)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.json"


@pytest.mark.native("kernels in a profile are those of compiled programs")
def test_steps_launches_and_kernels_lie_in_lanes(path):
    training = warm()
    with ltc.profile(path) as one:
        for _ in range(3):
            training.step()
    trace = read(path)
    assert trace == one.trace
    assert_nested(trace)
    assert [e["name"] for e in events(trace, "step")] == ["step 0", "step 1", "step 2"]
    lanes = {
        (e["tid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    (name,) = {name for tid, name in lanes if tid == events(trace, "mark")[0]["tid"]}
    assert name == threading.current_thread().name
    assert len(events(trace, "launch")) == 3 and len(events(trace, "record")) == 3
    for step in trace["ltc"]["steps"]:
        length = step["end_us"] - step["begin_us"]
        assert 0 < step["record_us"] < length and step["compile_us"] == 0
    (process,) = trace["ltc"]["processes"]
    assert process["pid"] == os.getpid() and process["counters"]["MarkStep"] == 3
    assert process["limits"]["copy_bytes_per_s"] > 1e8 and process["limits"]["fma_per_s"] > 1e8


@pytest.mark.native("kernels in a profile are those of compiled programs")
def test_a_kernel_says_what_it_computes_and_for_whom(path):
    training = warm()
    with ltc.profile(path):
        training.step()
    (program,) = read(path)["ltc"]["programs"]
    products = [kernel for kernel in program["kernels"] if kernel["multiply_adds"]]
    assert {k["module"] for k in products} == {"layers.0.attn", "layers.1.attn"}
    assert all(k["multiply_adds"] == 8 * 16 * 16 for k in products)
    forward = [k for k in products if not k["forward"]]
    assert {k["ops"][0] for k in forward} == {"aten::linear"}
    assert all("test_profile.py" in k["line"] and k["line"].endswith("forward") for k in forward)
    back = [k for k in products if k["forward"]]
    assert all(k["line"].endswith("in step") and k["forward"].endswith("forward") for k in back)
    assert {k["read_bytes"] for k in forward} == {4 * (8 * 16 + 16 * 16 + extra) for extra in (0,)}
    assert any("AdamW" in k["modules"] for k in program["kernels"])


@pytest.mark.native("kernels in a profile are those of compiled programs")
def test_kernels_sum_to_their_launch(path):
    training = warm(width=256)
    with ltc.profile(path):
        for _ in range(3):
            training.step()
    trace = read(path)
    kernels = sum(e["dur"] for e in events(trace, "kernel"))
    launches = sum(e["dur"] for e in events(trace, "launch"))
    assert 0 < kernels <= launches  # the rest is what Python does for a launch
    assert sum(k["seconds"] for p in trace["ltc"]["programs"] for k in p["kernels"]) == (
        pytest.approx(kernels / 1e6, rel=1e-3)
    )


def in_new_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def at_once(function):
    function()


@pytest.mark.parametrize(
    ("tier", "kind", "run"),
    [
        ("auto", "op_by_op", in_new_thread),  # which has recorded nothing yet
        ("op_by_op", "op_by_op", at_once),
    ],
)
def test_calls_that_are_not_compiled_are_shown(path, tier, kind, run):
    settings = {"LTC_TIER": tier, "LTC_CACHE": 0, "LTC_NUM_DEVICES": 1, "LTC_CHECK": 0}
    with config.override(**settings), ltc.profile(path):
        run(lambda: Training(width=24).step())
    trace = read(path)
    assert_nested(trace)
    kernels = [k for program in trace["ltc"]["programs"] for k in program["kernels"]]
    products = [k for k in kernels if k["multiply_adds"]]
    assert {k["module"] for k in products} == {"layers.0.attn", "layers.1.attn"}
    one = 8 * 24 * 24  # a gradient is two, but for that of what has none itself
    assert {k["multiply_adds"] for k in products} == {one, 2 * one}
    assert kind in {program["tier"] for program in trace["ltc"]["programs"]}


@pytest.mark.native("kernels in a profile are those of compiled programs")
def test_it_says_why_it_compiled_and_where_a_step_was_cut(path):
    training = warm(width=8)
    with ltc.profile(path):
        training.x = torch.randn(5, 8).to("ltc:0")
        loss = training.model(training.x).sum()
        if loss.item() < 1e9:
            training.step()
    trace = read(path)
    kinds = {one["kind"] for one in trace["ltc"]["explanations"]}
    assert {"recompiles", "cuts"} <= kinds
    assert events(trace, "compile") and events(trace, "cut") and events(trace, "upload")
    assert all(one["line"] for one in trace["ltc"]["explanations"])


def test_regions_closures_and_fallbacks_are_shown(path):
    with ltc.profile(path):
        x = torch.ones(4, device="ltc:0")
        with profiler.Trace("prepare", batch=3), record_function("inside"):
            x = x * 2
        ltm.add_step_closure(lambda: time.sleep(0))
        ltm.mark_step()
        x.nonzero()
    trace = read(path)
    assert_nested(trace)
    assert {"prepare", "inside"} <= {e["name"] for e in events(trace, "user")}
    assert events(trace, "closure")
    assert events(trace, "fallback") or CORE is not None  # which runs it as any other call


@pytest.mark.native("a profile counts the memory of programs, and none of immediate calls")
def test_memory_is_counted_and_the_peak_has_holders(path):
    training = warm(width=64)
    with ltc.profile(path):
        training.step()
    trace = read(path)
    assert {e["name"] for e in events(trace, "memory")} >= {"live bytes ltc:0"}
    peak = next(one for one in trace["ltc"]["memory"] if one["device"] == "ltc:0")
    names = {one["name"] for one in peak["holders"]}
    assert {"layers.0.attn.weight", "exp_avg of layers.1.attn.weight"} <= names
    held = sum(one["bytes"] for one in peak["holders"])
    assert held >= peak["peak_bytes"] > 6 * 64 * 64 * 4


@pytest.mark.devices(2)
def test_each_thread_has_its_lane(path):
    trainings = [warm(device=f"ltc:{n}") for n in (0, 1)]
    both = threading.Barrier(2)  # a thread that begins behind another may get its number

    def train(training):
        ltc.device(training.device.index)
        both.wait()
        for _ in range(2):
            training.step()
        both.wait()

    with ltc.profile(path):
        threads = [
            threading.Thread(target=train, args=(one,), name=f"trainer {k}")
            for k, one in enumerate(trainings)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = read(path)
    assert_nested(trace)
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"trainer 0", "trainer 1", "trainer 0: steps"} <= named
    assert len(trace["ltc"]["steps"]) == 4


def test_the_file_is_whole_where_the_block_raises(path):
    training = warm()
    with pytest.raises(ZeroDivisionError), ltc.profile(path):
        training.step()
        1 / 0
    assert len(read(path)["ltc"]["steps"]) == 1
    assert os.listdir(path.parent) == [path.name]
    assert spans.timeline is None


def test_a_missing_folder_is_told_before_the_block_runs(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        ltc.profile(tmp_path / "missing" / "out.json").__enter__()
    with pytest.raises(IsADirectoryError, match="but that is a folder"):
        ltc.profile(tmp_path).__enter__()
    assert spans.timeline is None
    monkeypatch.chdir(tmp_path)
    with ltc.profile("here.json"):
        (tmp_path / "elsewhere").mkdir()
        os.chdir("elsewhere")
    assert (tmp_path / "here.json").is_file()


def test_blocks_lie_inside_one_another_and_come_again(tmp_path):
    training, inner = warm(), ltc.profile(tmp_path / "inner.json")
    with ltc.profile(tmp_path / "outer.json"):
        training.step()
        for _ in range(2):
            with inner:
                training.step()
    assert len(read(tmp_path / "inner.json")["ltc"]["steps"]) == 1
    assert len(read(tmp_path / "outer.json")["ltc"]["steps"]) == 3
    with inner:
        pass
    assert read(tmp_path / "inner.json")["ltc"]["steps"] == []
    assert spans.timeline is None


def test_a_function_is_profiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = warm()

    @ltc.profile
    def plain():
        return training.step()

    @ltc.profile("named.json", html=True)
    def named():
        return training.step()

    assert plain().item() == pytest.approx(named().item(), rel=0.5)
    assert len(read(tmp_path / "ltc_profile.json")["ltc"]["steps"]) == 1
    assert len(read(tmp_path / "named.json")["ltc"]["steps"]) == 1
    assert "<table" in (tmp_path / "named.html").read_text()


def test_the_child_of_a_fork_writes_nothing(path):
    training = warm()
    with ltc.profile(path):
        training.step()
        ltm.wait_device_ops()
        child = os.fork()
        if not child:
            try:
                training.step()
                ltm.wait_device_ops()
                os._exit(0 if spans.timeline is None else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        training.step()
    assert len(read(path)["ltc"]["steps"]) == 2


def test_nothing_is_kept_without_a_block():
    training = warm()
    before = training.model.__class__.__call__, record_function.__enter__
    assert spans.timeline is None
    training.step()
    assert (training.model.__class__.__call__, record_function.__enter__) == before


def test_a_replayed_call_is_a_step_where_nobody_marks(path):
    training = Training()

    @ltc.compile
    def train(x):
        training.optimizer.zero_grad()
        loss = training.model(x).square().mean()
        loss.backward()
        training.optimizer.step()
        return loss

    with config.override(LTC_CHECK=0):
        for _ in range(4):
            train(training.x)
        with ltc.profile(path):
            for _ in range(3):
                train(training.x)
    trace = read(path)
    assert_nested(trace)
    assert len(trace["ltc"]["steps"]) == len(events(trace, "call")) == 3
    assert trace["ltc"]["processes"][0]["counters"]["ReplayedCalls"] == 3
    modules = {k["module"] for program in trace["ltc"]["programs"] for k in program["kernels"]}
    assert {"layers.0.attn", "layers.1.attn"} <= modules


def _rank(rank, path):
    torch.manual_seed(0)
    training = Training()
    with ltc.profile(path):
        for number in range(2):
            if rank and number:
                time.sleep(0.5)  # the other waits for it
            training.optimizer.zero_grad()
            training.model(training.x).square().mean().backward()
            ltm.optimizer_step(training.optimizer)
            ltm.mark_step()
            ltm.wait_device_ops()


def test_ranks_write_one_file(path):
    with config.override(LTC_NUM_DEVICES=1):
        spawn(_rank, args=(path,), nprocs=2, start_method="fork")
    trace = read(path)
    assert_nested(trace)
    assert [p["rank"] for p in sorted(trace["ltc"]["processes"], key=lambda p: p["rank"])] == [0, 1]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert sorted(name.partition(",")[0] for name in names) == ["rank 0", "rank 1"]
    pids = {p["rank"]: p["pid"] for p in trace["ltc"]["processes"]}
    waits = [row for row in trace["ltc"]["collectives"] if row["pid"] == pids[0]]
    assert waits and waits[-1]["waited_for"] == 1 and waits[-1]["waited_us"] > 10_000


def test_files_of_several_machines_are_merged(path, tmp_path):
    training = warm()
    traces = []
    for rank in range(2):
        with config.override(XRT_SHARD_ORDINAL=rank, XRT_SHARD_WORLD_SIZE=2):
            with ltc.profile(tmp_path / f"{rank}.json") as one:
                training.step()
        traces.append(one.trace)
    elsewhere = traces[1]
    elsewhere["ltc"]["processes"][0]["clock"]["boot"] = "another"
    trace_file.write(elsewhere, tmp_path / "1.json")
    whole = trace_file.merge([tmp_path / "0.json", tmp_path / "1.json"], path)
    assert read(path) == whole
    pids = [process["pid"] for process in whole["ltc"]["processes"]]
    assert len(set(pids)) == 2  # both have the same on their machines
    ids = {program["id"] for program in whole["ltc"]["programs"]}
    assert {e["args"]["program"] for e in events(whole, "kernel")} == ids and len(ids) == 2
    first, second = (step["begin_us"] for step in whole["ltc"]["steps"])
    assert first < second
    with pytest.raises(ValueError, match="is not a trace"):
        trace_file.merge([__file__], path)


@pytest.mark.native("kernels in a profile are those of compiled programs")
def test_torchs_profiler_sees_launches_and_kernels(tmp_path):
    training = warm()
    with torch_profile(activities=[ProfilerActivity.CPU]) as looked:
        training.step()
    names = {row.key for row in looked.key_averages()}
    assert any(name.startswith("ltc::launch") for name in names)
    assert any(name.startswith("ltc::kernel matmul") for name in names)
    assert {"ltc::mark_step", "aten::linear"} <= names
    looked.export_chrome_trace(str(tmp_path / "torch.json"))
    shown = {e["name"]: e for e in read(tmp_path / "torch.json")["traceEvents"] if "dur" in e}
    launch = next(e for name, e in shown.items() if name.startswith("ltc::launch"))
    kernel = next(e for name, e in shown.items() if name.startswith("ltc::kernel"))
    assert launch["ts"] <= kernel["ts"] <= launch["ts"] + launch["dur"]
