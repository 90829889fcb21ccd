"""Steps: marked, compiled, closed, traced, and each call by itself."""

import tempfile
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
from torch_xla.experimental import eager_mode_context, is_eager_mode


def marks():
    return met.counter_value("MarkStep") or 0


def main():
    regions()
    limits()
    closures()
    traces()
    x = torch.ones(2, device="xla")
    with eager_mode_context(True):
        assert is_eager_mode() and (x + 1).tolist() == [2.0, 2.0]
    assert not is_eager_mode()
    xm.unlazy([x])
    xm.wait_device_ops()
    fence = [x * 2]
    xm.optimization_barrier_(fence)
    assert fence[0].tolist() == [2.0, 2.0]


def regions():
    x = torch.ones(3, device="xla")
    before = marks()
    with torch_xla.step():
        y = x + 1
    assert marks() == before + 2 and y.tolist() == [2.0] * 3

    @torch_xla.compile
    def add(a, b=1):
        return a + b

    @torch_xla.compile(full_graph=True)
    def double(a):
        return a * 2

    before = marks()
    assert add(x, b=4).tolist() == [5.0] * 3 and double(x).tolist() == [2.0] * 3
    assert torch_xla.compile(lambda a: a - 1, name="less")(x).tolist() == [0.0] * 3
    assert marks() == before + 6 and add.__name__ == "add"
    try:
        with torch_xla.step():
            raise KeyError("in the step")
    except KeyError:
        assert marks() == before + 8
    torch_xla.sync(wait=True)
    xm.mark_step()
    assert marks() == before + 10


def limits():
    x = torch.ones(3, device="xla")
    try:
        torch_xla.compile(lambda a: (a + 1).sum().item(), full_graph=True)(x)
        raise AssertionError("a value was read inside")
    except RuntimeError as error:
        assert "Unexpected execution happens inside the compiled function" in str(error)
    limited = torch_xla.compile(lambda a: a * 3 - 1, max_different_graphs=2)
    for _ in range(3):
        for size in (3, 5):
            assert limited(torch.ones(size, device="xla")).tolist() == [2.0] * size
    try:
        limited(torch.ones(7, device="xla"))
        raise AssertionError("a third graph")
    except RuntimeError as error:
        assert "Maximum number of different graphs allowed per function exceeded: 2" in str(error)


def closures():
    seen = []
    loss = torch.ones(4, device="xla").sum()
    xm.add_step_closure(lambda value: seen.append(value.item()), args=(loss,))
    xm.add_step_closure(lambda: seen.append("behind"), run_async=True)
    assert not seen
    xm.mark_step()
    assert 4.0 in seen


def traces():
    server = xp.start_server(9012)
    before = marks()
    with xp.StepTrace("train", step_num=1):
        with xp.Trace("forward"):
            y = torch.ones(2, device="xla") * 3
    assert marks() == before + 1 and y.tolist() == [3.0, 3.0]
    assert xp.trace_me("named")(lambda a: a + 1)(1) == 2
    assert {"trace.train", "trace.forward", "trace.named"} <= set(met.metric_names())
    xp.trace_detached("localhost:9012", "nowhere", duration_ms=1)
    assert met.counter_value("torch_xla.ignored.profiler_server") == 2 and server is None
    with tempfile.TemporaryDirectory() as folder:
        xp.start_trace(folder)
        with xp.Trace("in the file"):
            torch.ones(2, device="xla").add(1).tolist()
        xp.stop_trace()
        (written,) = Path(folder).glob("plugins/profile/*/*.json")
        assert "in the file" in written.read_text()
        for refused, text in ((xp.stop_trace, "No profile started"), (again, "Only one profile")):
            try:
                refused(*([folder] if refused is again else []))
                raise AssertionError(text)
            except RuntimeError as error:
                assert text in str(error)
        xp.stop_trace()


def again(folder):
    for _ in range(2):
        xp.start_trace(folder)


if __name__ == "__main__":
    main()
