"""ltc in a notebook: cells that launch replicas, that are interrupted, and what they show."""

import code
import os
import signal
import threading

import ltc
import ltc.core.lazy_model as ltm
from ltc.explaining.explanation import Explanation
from ltc.explaining.history import Explanations
from ltc.explaining.user_stack import UserFrame


class Notebook(code.InteractiveInterpreter):
    """Runs cells one after the other in one process, as IPython does; a failed one is kept."""

    failed: BaseException | None = None

    def cell(self, text: str) -> BaseException | None:
        self.failed = None
        self.runcode(compile(text, "<cell>", "exec"))
        return self.failed

    def runcode(self, compiled) -> None:
        try:
            exec(compiled, self.locals)
        except BaseException as error:  # KeyboardInterrupt is one
            self.failed = error


LAUNCHED = """
import torch, ltc, ltc.core.lazy_model as ltm

def replica(rank, number):
    return ltm.all_reduce("sum", torch.full((2,), float(rank + number), device="ltc")).tolist()
"""


def test_a_cell_launches_replicas_ten_times_in_a_row():
    notebook = Notebook({})
    assert notebook.cell(LAUNCHED) is None
    for number in range(10):
        call = f"made = ltc.launch(replica, ({number},), nprocs=2, start_method='fork')"
        assert notebook.cell(call) is None
        assert notebook.locals["made"] == [[2 * number + 1.0] * 2] * 2
    assert threading.active_count() < 20


TRAINED = """
import torch, ltc, ltc.core.lazy_model as ltm

model = torch.nn.Linear(4, 2).to("ltc")
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train(steps):
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4, device="ltc")).square().mean()
        loss.backward()
        optimizer.step()
        ltm.mark_step()
    return loss.item()

first = train(range(3))
"""


def test_a_cell_may_be_interrupted_and_the_next_one_goes_on():
    notebook = Notebook({})
    assert notebook.cell(TRAINED) is None
    for seconds in (0.05, 0.2):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        assert isinstance(notebook.cell("train(iter(int, 1))"), KeyboardInterrupt)
        timer.join()
        assert notebook.cell("last = train(range(3))") is None
    assert notebook.locals["last"] < notebook.locals["first"]
    ltm.mark_step(wait=True)


def test_explanations_are_shown_as_a_table_in_which_nothing_is_html():
    frame = UserFrame("<cell>", 3, "train")
    told = Explanation("cuts", (frame,), "a <b>cut</b>", "expected x & y", "read it later")
    for shown in (told._repr_html_(), Explanations([told, told])._repr_html_()):
        assert shown.startswith("<table>") and "&lt;cell&gt;:3 in train" in shown
        assert (
            "a &lt;b&gt;cut&lt;/b&gt;<br>expected x &amp; y" in shown and "read it later" in shown
        )
    assert Explanations([told, told])._repr_html_().count("<tr>") == 3
    assert "Nothing to explain" in Explanations()._repr_html_()
    assert hasattr(ltc.explain(), "_repr_html_")
