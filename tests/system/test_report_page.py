"""The page of a trace: whole in one file, with the numbers of the trace; in a browser its filters work."""

import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.command_line import main
from ltc.device.policy import Policy
from ltc.profiling import report
from ltc.profiling.analysis.costs import by_kernel, by_line, by_module
from ltc.profiling.analysis.hindrances import hindrances
from ltc.profiling.analysis.steady_steps import steady_steps
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.page.comparison import comparison
from ltc.profiling.page.document import document, timeline_data
from tests.explained import data, in_a_thread
from tests.states import wait_for_the_compiler

MOST_BYTES = 2 << 20
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "link", "input"}


def train():
    model = torch.nn.Sequential(torch.nn.Linear(31, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = model.to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(10):
        optimizer.zero_grad()
        loss = model(data(20, 31)).pow(2).mean()
        loss.backward()
        optimizer.step()
        if number % 3 == 0:
            str(loss.item())  # a read of "<b>" & such
        ltm.mark_step()
    return loss


def train_wide():
    """Steps whose activations are larger than all else."""
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    model = torch.nn.Sequential(*layers).to("ltc")
    for _ in range(3):
        model(torch.ones(4096, 64, device="ltc")).pow(2).mean().backward()
        ltm.mark_step()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "out.json"
    settings = config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CHECK=0)
    with settings, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "calls_are_quick", False)  # so that small steps get a program
        in_a_thread(train)
        wait_for_the_compiler()  # the page shows what a program holds
        with ltc.profile(path):
            in_a_thread(train)
    return json.loads(path.read_text())


def two_ranks(trace):
    """The same, as if another rank had done the like and waited for the first in each step."""
    joined = copy.deepcopy(trace)
    for name in ("processes", "steps"):
        for one in copy.deepcopy(joined["ltc"][name]):
            joined["ltc"][name].append({**one, "pid": one["pid"] + 1, "rank": 1})
    for rank, process in enumerate(joined["ltc"]["processes"]):
        for step in (one for one in joined["ltc"]["steps"] if one["pid"] == process["pid"]):
            took = (step["end_us"] - step["begin_us"]) * (0.1 if rank else 0.8)
            joined["ltc"]["collectives"].append({
                "pid": process["pid"], "ts": step["begin_us"], "dur": took, "name": "wait for a sum",
                "kind": "one_shot_sum", "bytes": 4096, "line": "train.py:7 in step",
                "waited_for": None if rank else 1, "waited_us": 0.0 if rank else took,
            })  # fmt: skip
            joined["traceEvents"].append({
                "ph": "X", "cat": "collective", "name": "wait for a sum", "pid": process["pid"],
                "tid": 2, "ts": step["begin_us"], "dur": took, "args": {"waited_for": 1},
            })  # fmt: skip
    return joined


class Elements(HTMLParser):
    """What a page is made of; raises AssertionError where an element is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.found, self.text = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)

    def of(self, tag):
        return [attributes for found, attributes in self.found if found == tag]


def test_the_page_is_whole_and_asks_for_nothing(trace):
    page = document(trace)
    elements = Elements(page)
    assert not any("src" in attributes for _, attributes in elements.found)
    assert {link["href"][:5] for link in elements.of("link")} == {"data:"}
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)  # but for the name of SVG
    assert "default-src 'none'" in page
    assert len(page) < MOST_BYTES


def test_the_page_has_each_part_and_the_navigation_leads_there(trace):
    elements = Elements(document(two_ranks(trace)))
    parts = [section["id"] for section in elements.of("section")]
    assert {"steps", "modules", "lines", "kernels", "memory", "why", "collectives"} <= set(parts)
    assert [link["href"] for link in elements.of("a")] == [f"#{name}" for name in parts]


def test_the_page_shows_the_numbers_of_the_trace(trace):
    text = " ".join(Elements(document(trace)).text)
    assert verdict(trace).sentence[1:] in text
    assert by_kernel(trace)[0].words in text and by_module(trace)[0].name in text
    assert "loss = model(data(20, 31)).pow(2).mean()" in text  # the source, beside its cost
    assert "the step was cut by a read" in text
    assert 'str(loss.item())  # a read of "<b>" & such' in text


def test_the_costs_of_lines_and_modules_are_those_of_the_kernels(trace):
    kernels = sum(cost.seconds for cost in by_kernel(trace))
    assert kernels > 0
    for costs in (by_line(trace), by_module(trace)):
        assert sum(cost.seconds for cost in costs) == pytest.approx(kernels)


def test_a_rank_that_comes_last_is_named(trace):
    joined = two_ranks(trace)
    assert verdict(joined).kind == "peers-bound"
    assert "rank 1 was the last to arrive in" in verdict(joined).sentence
    assert "waits of each rank for each other" in document(joined)


def test_a_long_run_fits_in_a_page(trace):
    long = copy.deepcopy(trace)
    steady = steady_steps(trace)
    step = steady.steps[-1]
    length = step["end_us"] - step["begin_us"]
    inside = [e for e in steady.events("kernel", "launch", "mark") if e["ts"] >= step["begin_us"]]
    inside *= max(1, 400 // max(len(inside), 1))
    for number in range(1, 100):
        shift = number * length
        long["ltc"]["steps"].append({
            **step, "number": 10 + number, "begin_us": step["begin_us"] + shift,
            "end_us": step["end_us"] + shift,
        })  # fmt: skip
        long["traceEvents"] += [{**e, "ts": e["ts"] + shift} for e in inside]
    assert len(long["traceEvents"]) > 30_000
    assert len(document(long)) < MOST_BYTES


def test_a_trace_of_nothing_has_a_page(tmp_path):
    with ltc.profile(tmp_path / "out.json", html=tmp_path / "page.html") as run:
        pass
    assert verdict(run.trace).kind == "idle"
    Elements((tmp_path / "page.html").read_text())


@pytest.mark.parametrize("name", ["programs", "steps", "memory", "explanations"])
def test_a_trace_that_lacks_a_table_has_a_page(name, trace):
    lacking = copy.deepcopy(trace)
    lacking["ltc"][name] = []
    for process in lacking["ltc"]["processes"]:
        process["limits"] = process["counters"] = process["machine"] = None  # not known
    Elements(document(lacking))


def test_the_command_writes_the_page_beside_the_file(trace, tmp_path, capsys):
    (tmp_path / "out.json").write_text(json.dumps(trace))
    assert main(["report", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out.html")
    Elements((tmp_path / "out.html").read_text())


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', "no JSON"])
def test_what_is_no_trace_is_refused_in_a_sentence(text, tmp_path, capsys):
    (tmp_path / "out.json").write_text(text)
    assert main(["report", str(tmp_path / "out.json")]) == 1
    assert "is not a trace of ltc.profile" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a trace"):
        report.write({"traceEvents": []}, tmp_path / "page.html")


def test_names_cannot_end_the_script_that_holds_them(trace):
    wicked = copy.deepcopy(trace)
    for event in wicked["traceEvents"]:
        event["name"] = "</script><script>alert(1)</script>"
    assert "<script>alert" not in document(wicked)


def without_kernel_events(trace):
    """The same, whose kernels have only their totals."""
    events = [event for event in trace["traceEvents"] if event.get("cat") != "kernel"]
    return copy.deepcopy({**trace, "traceEvents": events})


def in_parts(trace):
    """The same, as if its costliest product had a first part that packs an operand."""
    parted = without_kernel_events(trace)
    for program in parted["ltc"]["programs"]:
        products = [one for one in program["kernels"] if one["multiply_adds"]]
        if products:
            whole = max(products, key=lambda one: one["seconds"])
            first = {**whole, "name": f"part 1 of {whole['name']}", "multiply_adds": 0}
            program["kernels"].insert(program["kernels"].index(whole), first)
    return parted


def test_a_kernel_of_several_parts_is_one_row(trace):
    names = [cost.name for cost in by_kernel(in_parts(trace))]
    assert not any(name.startswith("part ") for name in names)
    assert len(names) == len(by_kernel(without_kernel_events(trace)))


def test_the_timeline_names_kernels_in_words_and_has_their_codes_beside(trace):
    steps = trace["ltc"]["steps"]
    drawn = json.loads(timeline_data(trace, steps, [0] * len(steps)))
    rows = [step["spans"] for step in drawn["steps"]]
    spans = [row[place : place + 6] for row in rows for place in range(0, len(row), 6)]
    kernels = [one for one in spans if drawn["categories"][one[1]] == "kernel"]
    words, codes = ({drawn["names"][one[place]] for one in kernels} for place in (2, 3))
    assert words and not any("->" in name for name in words)
    assert any("->" in text for text in codes)


def test_no_share_is_above_all(trace):
    fast = copy.deepcopy(trace)
    for program in fast["ltc"]["programs"]:
        for kernel in program["kernels"]:
            kernel["copy_share"] = 3.5
    shares = re.findall(r"([\d.]+) %", document(fast))
    assert shares and max(map(float, shares)) <= 100


def test_the_parts_of_a_step_are_the_headline_s(trace):
    steady = steady_steps(trace)
    assert sum(steady.parts.values()) <= 1 + 1e-9
    assert steady.device_share == steady.parts["running"]
    ranks = two_ranks(trace)
    waited = steady_steps(ranks).parts["peers"]
    assert waited > 0.5
    assert f"collectives take {100 * waited:.0f} % of a step" in verdict(ranks).sentence


def with_a_loader(trace):
    """The same, as if the loader's batch took the second half of each step, and nothing else ran."""
    loading = copy.deepcopy(trace)
    loading["traceEvents"] = [e for e in loading["traceEvents"] if e.get("cat") not in PARTS_RUN]
    for step in loading["ltc"]["steps"]:
        half = (step["end_us"] - step["begin_us"]) / 2
        loading["traceEvents"].append({
            "ph": "X", "cat": "user", "name": "enumerate(DataLoader)#_Iter.__next__", "args": {},
            "pid": step["pid"], "tid": step["tid"], "ts": step["begin_us"] + half, "dur": half,
        })  # fmt: skip
    return loading


PARTS_RUN = {"launch", "kernel", "compile", "record", "wait"}


def test_the_input_pipeline_is_a_row_of_its_own(trace):
    loading = with_a_loader(trace)
    assert steady_steps(loading).parts["input"] == pytest.approx(0.5, abs=0.01)
    assert verdict(loading).kind == "input-bound"
    assert "input pipeline" in [one.name for one in hindrances(loading)]
    assert "input pipeline (DataLoader)" in " ".join(Elements(document(loading)).text)


def test_memory_is_told_by_its_owners(tmp_path):
    with config.override(LTC_TIER="native", LTC_CHECK=0):
        with ltc.profile(tmp_path / "out.json") as run:
            in_a_thread(train_wide)
    text = " ".join(Elements(document(run.trace)).text)
    assert "parameters" in text and "activations" in text
    activations = [
        one for one in run.trace["ltc"]["memory"][0]["holders"] if one["kind"] == "value"
    ]
    assert {one["module"] for one in activations} >= {"0"}
    for peak in run.trace["ltc"]["memory"]:
        assert sum(one["bytes"] for one in peak["holders"]) == peak["peak_bytes"]


def test_two_runs_stand_side_by_side(trace, tmp_path, capsys):
    slower = copy.deepcopy(trace)
    for step in slower["ltc"]["steps"]:
        step["end_us"] = step["begin_us"] + 2 * (step["end_us"] - step["begin_us"])
    for name, one in (("before", slower), ("after", trace)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    paths = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
    assert main(["report", *paths, "-o", str(tmp_path / "two.html")]) == 0
    assert "2.00 times as fast" in capsys.readouterr().out
    elements = Elements((tmp_path / "two.html").read_text())
    assert [one["id"] for one in elements.of("section")] == ["step", "modules", "lines", "kernels"]


def test_a_missing_second_run_is_told(trace, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(trace))
    assert main(["report", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "There is no file" in capsys.readouterr().err


# --- in a browser ---------------------------------------------------------------------------------

TRIED = """
<script>
const shown = (selector) => all(selector).filter((row) => !row.hidden).length;
const tried = { spans: all("#timeline rect").length, kernels: shown("#kernels tbody tr") };
filter.value = "no such words"; filter.dispatchEvent(new Event("input")); tried.none = shown("[data-filter]");
filter.value = "ReLU".toLowerCase(); filter.dispatchEvent(new Event("input")); tried.relu = shown("#kernels tbody tr");
filter.value = ""; filter.dispatchEvent(new Event("input")); tried.back = shown("#kernels tbody tr");
const box1 = one("[data-kind=cuts]"); box1.click(); tried.cuts = shown("[data-of=cuts]");
const first = one("#kernels th:nth-child(4) button"); first.click(); first.click();
tried.orders = all("#kernels tbody tr").map((row) => Number(row.cells[3].dataset.order));
const press = (key) => dispatchEvent(new KeyboardEvent("keydown", { key }));
const before = document.documentElement.dataset.theme; press("t");
const button = one("#memory button.more");
const seen = () => all("#memory tbody tr.beyond").filter((row) => getComputedStyle(row).display !== "none").length;
tried.folded = [seen()]; button?.click(); tried.folded.push(seen());
tried.beyond = all("#memory tbody tr.beyond").length;
tried.widths = [document.documentElement.scrollWidth, innerWidth];
tried.themes = [before, document.documentElement.dataset.theme];
const which = one("#which").textContent; press("["); tried.moved = one("#which").textContent !== which;
press("/"); tried.focused = document.activeElement === filter;
document.body.dataset.tried = JSON.stringify(tried);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_in_a_browser_it_opens_without_errors_and_its_filters_work(trace, tmp_path):
    tried = tried_in_a_browser(document(two_ranks(trace)), tmp_path)
    assert tried["spans"] > 10
    assert tried["none"] == tried["cuts"] == 0
    assert 0 < tried["relu"] < tried["kernels"] == tried["back"]
    assert tried["orders"] == sorted(tried["orders"])
    assert sorted(tried["themes"]) == ["dark", "light"]
    assert tried["moved"]
    assert tried["focused"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_a_narrow_window_has_all_of_the_page(trace, tmp_path):
    page, least = tried_in_a_browser(document(trace), tmp_path, "--window-size=500,900")["widths"]
    assert page <= least


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_a_long_table_is_folded(trace, tmp_path):
    many = copy.deepcopy(trace)
    for peak in many["ltc"]["memory"]:
        peak["holders"] *= 50
    tried = tried_in_a_browser(document(many), tmp_path)
    assert tried["beyond"] > 0
    assert tried["folded"] == [0, tried["beyond"]]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_a_comparison_opens_in_a_browser_without_errors(trace, tmp_path):
    page = comparison([trace, trace], ["a.json", "b.json"])
    (tmp_path / "two.html").write_text(page)
    done = browse(tmp_path / "two.html", tmp_path)
    assert "CONSOLE" not in done.stderr, done.stderr


def tried_in_a_browser(page, folder, *options):
    (folder / "page.html").write_text(page.replace("</body>", TRIED))
    done = browse(folder / "page.html", folder, *options)
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(re.search(r'data-tried="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))


def browse(page, folder, *more):
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    own = f"--user-data-dir={folder / 'profile'}"
    command = [CHROMIUM, *options, *more, own, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True)
