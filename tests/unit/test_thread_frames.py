"""Looking where threads are: safe beside threads that begin, end and let others run."""

import ast
import gc
import sys
import threading
from pathlib import Path

from ltc.support.process.thread_frames import thread_frames

PACKAGE = Path(__file__).parents[2] / "ltc"


def test_every_running_thread_has_its_frame():
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    frames = thread_frames()
    leave.set()
    thread.join()
    assert frames[threading.get_ident()].f_back is sys._getframe()
    assert frames[thread.ident].f_code.co_filename == threading.__file__
    assert thread.ident not in thread_frames()


def test_no_garbage_collection_begins_while_python_makes_the_frames(monkeypatch):
    during, collected_in = [], []

    def looked():
        during.append(True)
        held = [[] for _ in range(1000)]  # new ones start a collection where they are on
        during.clear()
        return held

    def note(phase, info):
        collected_in.append(bool(during))

    monkeypatch.setattr(sys, "_current_frames", looked)
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        sys._current_frames()
        assert any(collected_in)  # without the pause there would be some
        collected_in.clear()
        thread_frames()
        assert not any(collected_in) and gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)


def test_collection_that_was_off_stays_off():
    gc.disable()
    try:
        thread_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_else_asks_python_for_the_frames():
    asking = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "_current_frames"
    }
    assert asking == {"thread_frames.py"}
