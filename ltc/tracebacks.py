"""Shorten an error's traceback to the user's frames and one line of ltc's.

Wherever the user's program, or torch for it, calls a function of ltc, an error that leaves it is
shortened. So the frames above are as they would be with any other device. LTC_DEBUG=1 shows all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
import typing_extensions

from ltc import config

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_PACKAGES = tuple(os.path.join(_STANDARD, folder) + os.sep for folder in _INSTALLED)
_AROUND_CALLS = (contextlib.__file__, typing_extensions.__file__)  # `deprecated` stands there
_GENERATED = ("<ltc", "<frozen", "<eval_with_key>")  # files that nobody wrote


def is_users(filename: str) -> bool:
    """Return True if the file is neither ltc's nor torch's, nor runs `with` blocks and decorators."""
    return filename not in _AROUND_CALLS and not filename.startswith((_OWN, _TORCH, *_GENERATED))


def is_of_the_program(filename: str) -> bool:
    """Return True if the file is the user's own: of no installed package, nor of Python itself."""
    if not is_users(filename) or filename.startswith(_STANDARD):
        return False
    return not any(f"{os.sep}{folder}{os.sep}" in filename for folder in _INSTALLED)


def is_of_python(filename: str) -> bool:
    """Return True if the file is of Python's own library."""
    return filename.startswith(_STANDARD) and not filename.startswith(_PACKAGES)


def raised_in(error: BaseException) -> str:
    """Return the file of the innermost frame of an error's traceback; "" if it has none."""
    traceback, file = error.__traceback__, ""
    while traceback is not None:
        file, traceback = _file_of(traceback), traceback.tb_next
    return file


def is_ltcs(filename: str) -> bool:
    """Return True if the file is ltc's own, or code that ltc has generated."""
    return filename.startswith((_OWN, "<ltc"))


def shown_of_torch(filename: str) -> str | None:
    """A file of torch's from "torch" on; "" of one that is ltc's, None of any other."""
    if is_ltcs(filename):
        return ""
    return os.path.join("torch", filename[len(_TORCH) :]) if filename.startswith(_TORCH) else None


def _is_library(filename: str) -> bool:
    """Return True if the file is torch's or Python's: shown where a frame of the user's called it."""
    if filename.startswith((_TORCH, *_GENERATED)):
        return True
    return is_of_python(filename)


# --- leaving ltc --------------------------------------------------------------------------------


def shorten(error: BaseException) -> None:
    """Called where an error leaves ltc, before a bare `raise`: ltc's inner frames go.

    So it does of its causes. What ltc dealt with itself on the way is no context of it.
    """
    if config.value("LTC_DEBUG"):
        return
    seen: set[int] = set()  # errors may refer to one another in a circle
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__context__ = _users_context(one)
        one.__traceback__ = _chain(_shown(one.__traceback__))
        one = one.__cause__


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback to keep of an error that is raised elsewhere: frames hold their values."""
    if config.value("LTC_DEBUG"):
        return traceback
    return _chain(entry for entry in _shown(traceback) if not is_ltcs(_file_of(entry)))


def another(error: BaseException, traceback: TracebackType | None) -> BaseException:
    """An error like this one, to be raised with that traceback: one that is raised again grows."""
    try:
        made = copy.copy(error)
    except Exception:  # its class takes other arguments than it keeps
        made = error
    if made.__class__ is not error.__class__:
        made = error
    if made is not error:
        made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
        made.__notes__ = list(getattr(error, "__notes__", ()))
    return made.with_traceback(traceback)


def entrance(function: Callable) -> Callable:
    """Return `function` with its errors shortened; a generator function's too."""
    if inspect.isgeneratorfunction(function):
        return _generator_entrance(function)

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return entered


def _generator_entrance(function: Callable) -> Callable:
    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            return (yield from function(*args, **kwargs))
        except BaseException as error:
            shorten(error)
            raise

    return entered


def clear_frames(error: BaseException, function: Callable) -> None:
    """Let go of the variables of that function's calls, which the error has left."""
    for entry in _entries(error.__traceback__):
        if entry.tb_frame.f_code is function.__code__:
            entry.tb_frame.clear()


def make_entrances(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Let each function that a module defines under one of these names be an entrance."""
    for name in names:
        found = namespace.get(name)  # None if it is defined elsewhere and imported at its first use
        if inspect.isfunction(found) and found.__module__ == namespace["__name__"]:
            namespace[name] = entrance(found)


# --- what is shown ------------------------------------------------------------------------------


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _file_of(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _shown(traceback: TracebackType | None) -> list[TracebackType]:
    """Return the user's frames, the frames of torch and Python that they called, and ltc's last
    entrance.
    """
    shown: list[TracebackType] = []
    inside: list[TracebackType] = []  # of ltc, and of what it called, since the user's last one
    for entry in _entries(traceback):
        file = _file_of(entry)
        if is_ltcs(file):
            inside.append(entry)
        elif not _is_library(file):
            inside.clear()
            shown.append(entry)
        elif shown and not inside:
            shown.append(entry)
    return shown + _one_line(inside)


def _one_line(inside: list[TracebackType]) -> list[TracebackType]:
    """The first that is a function of its own, with a line to show."""
    told = [e for e in inside if _file_of(e) != __file__]
    written = [e for e in told if not _file_of(e).startswith("<")]
    return (written or told)[:1]


def _chain(entries: Iterable[TracebackType]) -> TracebackType | None:
    chain = None
    for entry in reversed(list(entries)):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def _users_context(error: BaseException) -> BaseException | None:
    """The error that the user's program was handling, beyond those that ltc dealt with itself."""
    context, seen = error.__context__, {id(error)}
    while context is not None and id(context) not in seen and _is_inner(context):
        seen.add(id(context))
        context = context.__context__
    return None if context is not None and id(context) in seen else context


def _is_inner(error: BaseException) -> bool:
    """Return True if ltc has caught the error: a traceback begins where its error was caught."""
    return error.__traceback__ is not None and is_ltcs(_file_of(error.__traceback__))
