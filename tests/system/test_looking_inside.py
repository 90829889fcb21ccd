"""What a user can make ltc say about itself: fallbacks, graphs in a file, lines, failing programs."""

import os
import subprocess
import sys

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import graphs, metrics
from ltc.errors import Unsupported


def three_of_five(device="ltc"):
    return torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0]).to(device)


@pytest.mark.native("it looks at the calls that are recorded")
def test_a_fallback_is_counted_under_its_name():
    with metrics.counted() as grown:
        assert three_of_five().nonzero().numel() == 3
    assert grown["aten::nonzero"] == 1


@pytest.mark.native("it looks at the calls that are recorded")
def test_a_fallback_warns_where_that_is_asked_for():
    with (
        config.override(LTC_FALLBACK="warn"),
        pytest.warns(UserWarning, match="aten::nonzero.*test_looking"),
    ):
        three_of_five().nonzero()


@pytest.mark.native("it looks at the calls that are recorded")
def test_a_fallback_is_an_error_where_that_is_asked_for():
    with config.override(LTC_FALLBACK="error"):
        with pytest.raises(Unsupported, match="aten::nonzero .*test_looking.*LTC_FALLBACK=error"):
            three_of_five().nonzero()


def saved_graph(tmp_path, **settings) -> str:
    path = tmp_path / "graphs.txt"
    with config.override(LTC_SAVE_TENSORS_FILE=path, **settings):
        y = three_of_five() * 2 + 1
        ltm.mark_step()
    assert y.sum().item() == 17
    return path.read_text()


def test_the_graph_of_each_step_is_appended_to_a_file(tmp_path):
    text = saved_graph(tmp_path)
    assert text.startswith("[ScheduleSyncTensorsGraph]\nTensorsGraphInfo:\n")
    assert "## BEGIN_GRAPH" in text and "## END_GRAPH" in text and "ROOT=0" in text
    assert "mul" in text and "Hashes: (" in text and "location=" not in text


def test_a_file_of_graphs_that_can_not_be_written_ends_no_training(tmp_path):
    path = tmp_path / "no_such_folder" / "graphs.txt"
    with config.override(LTC_SAVE_TENSORS_FILE=path):
        y = three_of_five() * 2 + 1
        with pytest.warns(
            UserWarning, match=f"LTC_SAVE_TENSORS_FILE={path}: a step was not written"
        ) as told:
            ltm.mark_step()
    assert [one.filename for one in told] == [__file__]
    assert y.sum().item() == 17


def test_graphs_show_the_users_lines_where_that_is_asked_for(tmp_path):
    assert "location=" in saved_graph(tmp_path, LTC_IR_DEBUG=True)
    assert "test_looking_inside.py:" in saved_graph(tmp_path, LTC_IR_DEBUG=True)


def test_a_graph_is_saved_for_graphviz(tmp_path):
    text = saved_graph(tmp_path, LTC_SAVE_TENSORS_FMT="dot")
    assert "digraph G {" in text and '[label="i=0"]' in text


@pytest.mark.native("it looks at the calls that are recorded")
def test_calls_of_different_lines_are_different_recordings_where_that_is_asked_for():
    program = (
        "import torch, ltc\n"
        "import ltc.core.lazy_model as ltm\n"
        "from ltc.debug import metrics\n"
        "x = torch.ones(2, device='ltc')\n"
        "ltm.mark_step()\n"
        "x + 1; ltm.mark_step()\n"
        "before = metrics.counter_value('RecordedEntries')\n"
        "x + 1; ltm.mark_step()\n"
        "print(metrics.counter_value('RecordedEntries') - before)\n"
    )
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "LTC_LINES": lines},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for lines in ("0", "1")
    ]
    assert counts == [0, 1]


@pytest.mark.native("it looks at the calls that are recorded")
def test_an_error_names_the_overload_and_the_users_line():
    table = torch.ones(3, 2, device="ltc")
    rows = table[torch.tensor([0, 7]).to("ltc")]
    with pytest.raises(IndexError) as caught:
        rows.sum().item()
    note, *_ = caught.value.__notes__
    assert "aten::index" in note and "test_looking_inside.py" in note


@pytest.mark.native("it looks at the calls that are recorded")
def test_each_call_runs_at_most_once_though_its_value_is_read_again_and_again():
    x = torch.ones(64, device="ltc").exp()
    with metrics.counted() as grown:
        first = x.sum()
        for _ in range(3):
            first.item()
            x.cpu()
    assert grown["ExecuteTime"] == 1


def pending_sum():
    x = torch.arange(12.0).reshape(3, 4).to("ltc")
    return (x * 2 + 1).relu().sum(1)


@pytest.mark.native("it looks at the calls that are recorded")
def test_what_is_recorded_shows_with_the_users_lines():
    shown = graphs.text(pending_sum(), stage="recorded")
    assert [row.split(" = ")[1].split("(")[0] for row in shown.splitlines()] == [
        "ltc::input",
        "aten::mul.Tensor",
        "aten::add.Tensor",
        "aten::relu",
        "aten::sum.dim_IntList",
    ]
    assert "test_looking_inside.py" in shown.splitlines()[1]


@pytest.mark.native("it looks at the calls that are recorded")
@pytest.mark.parametrize("stage", graphs.stages())
def test_every_stage_shows_and_runs_nothing(stage):
    y = pending_sum()
    with metrics.counted() as grown:
        shown = graphs.text(y, stage=stage)
    assert shown
    assert grown["ExecuteTime"] == 0 and grown["CompileTime"] == 0
    assert y.tolist() == [16.0, 48.0, 80.0]


@pytest.mark.native("it looks at the calls that are recorded")
def test_without_tensors_the_pending_step_shows_without_what_nobody_holds():
    ltm.mark_step()
    y = pending_sum()
    pending_sum().exp()
    assert graphs.text().count("ROOT=") == 1 and "exp" not in graphs.text()
    assert y.sum().item() == 144


def test_a_stage_that_does_not_exist_is_named_beside_those_that_do():
    with pytest.raises(ValueError, match="'kernel'; there are recorded, expanded, simplify"):
        graphs.text(pending_sum(), stage="kernel")


@pytest.mark.native("it looks at the calls that are recorded")
def test_stages_of_the_native_program_name_the_users_line():
    for stage in ("kernels", "llvm", "assembly"):
        with config.override(LTC_BACKEND="llvm"):
            assert "test_looking_inside.py" in graphs.text(pending_sum(), stage=stage)


@pytest.mark.parametrize("tier", ["auto", "native"])
@pytest.mark.parametrize("named", ["nostage", "kernels,recorded"])
def test_a_stage_to_print_that_does_not_exist_is_refused(named, tier):
    x = torch.ones(3).to("ltc")
    message = (
        f"LTC_DUMP={named}: expected some of simplify, .*, llvm, assembly, separated by commas"
    )
    with config.override(LTC_BACKEND="llvm", LTC_DUMP=named, LTC_TIER=tier):
        with pytest.raises(ValueError, match=message):
            (x * 1.625 + len(named)).tolist()
    assert (x * 1.625 + len(named)).tolist() == [1.625 + len(named)] * 3


def test_the_stages_of_a_step_are_printed_where_that_is_asked_for(capsys):
    with config.override(LTC_BACKEND="llvm", LTC_DUMP="split, kernels,llvm"):
        x = torch.arange(77.0).reshape(7, 11).to("ltc")
        assert (x * 3 + 0.25).sum(0).max().item() == 0.25 * 7 + 3 * sum(range(10, 77, 11))
    out = capsys.readouterr().out
    assert "# after split" in out and "# kernels\n" in out and "define void @kernel(" in out
