"""`python -m ltc`: the commands of ltc.

    python -m ltc info                        print versions, devices, processor, cache, variables, a trial
    python -m ltc cache [--clear]             print folder and size of the disk cache, or empty it
    python -m ltc build                       build the native core: small steps are quicker
    python -m ltc run 2 train.py --epochs 3   run a script on several replicas on this machine
    python -m ltc check train.py --epochs 3   compare a script's first losses: eager, compiled, two replicas
    python -m ltc profile train.py --epochs 3 trace a script's work and times: ltc_profile.json
    python -m ltc report ltc_profile.json     make a page of a trace: ltc_profile.html
    python -m ltc report a.json b.json        compare two traces: b.html
    python -m ltc dump PID                    have a process print the stack of each of its threads

`run` starts one process for each replica. Each process runs the script from its first line, as
`python train.py --epochs 3` would, with its own ltm.get_ordinal() and ltm.xrt_world_size(). A `spawn`
in the script then starts no processes of its own. Each printed line begins with its rank. If one
process dies, all end, and the report names it, the reason, and the collectives in which the others
waited.
`check` ends the script after five backward passes (`--backwards`). It exits with 1 if a run fails, or
if the compiled run computes other losses than PyTorch's kernels.
`profile` runs the script (`-m`: a module, as for Python) and writes a trace for ui.perfetto.dev to the
file of `-o`, also if the script fails. Ranks that the script starts, torchrun's too, are in the same
file. `--html` also makes the page that `report` makes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ltc import config
from ltc.debug.environment import describe, describe_cache
from ltc.debug.script_check import check, run_as_main, run_module_as_main
from ltc.debug.whereabouts import ask
from ltc.distributed.lazy_multiprocessing import launch
from ltc.errors import LtcError, RankFailed
from ltc.native import core_build
from ltc.profiling import report, trace_file
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.page.comparison import sentence
from ltc.profiling.profile import DEFAULT_PATH, html_path, profile_of_processes
from ltc.support.disk_cache import disk_cache
from ltc.support.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit status of the process."""
    parser = _parser()
    asked = parser.parse_args(argv)
    try:
        return _run_command(asked)
    except (config.WrongSetting, LtcError, OSError) as error:
        if config.value("LTC_DEBUG"):
            raise
        print(f"{parser.prog} {asked.command}: {error}", file=sys.stderr)
        return 1


def _run_command(asked: argparse.Namespace) -> int:
    if asked.command == "dump":
        return ask_where(asked.process)
    if asked.command == "build":
        return build_core()
    if asked.command == "report":
        if str(asked.page).endswith(".json"):
            return write_comparison(asked.trace, asked.page, asked.output)
        return write_report(asked.trace, asked.output or asked.page)
    if asked.command in ("run", "check", "profile"):
        _require_script(asked)
    if asked.command == "profile":
        return profile_script(asked.script, asked.arguments, asked.output, asked.html, asked.module)
    if asked.command == "run":
        return run_script(asked.replicas, asked.script, asked.arguments)
    if asked.command == "check":
        text, is_equal = check(asked.script, asked.arguments, asked.backwards)
        print(text)
        return 0 if is_equal else 1
    print(_cache(asked.clear) if asked.command == "cache" else describe())
    return 0


def _require_script(asked: argparse.Namespace) -> None:
    """End with an error if there is no script; tell of options that stand behind it, and are its own."""
    if not getattr(asked, "module", False) and not Path(asked.script).is_file():
        asked.parser.error(f"there is no file {asked.script}")
    own = set(asked.parser.options) - {"-h", "-m", "-o"}  # letters that many scripts take
    behind = [word for word in asked.arguments if word.partition("=")[0] in own]
    if behind:
        print(
            f"{asked.parser.prog}: {asked.script} is given {behind[0]}, since it stands behind the "
            f"script; an option of {asked.command} stands before it.",
            file=sys.stderr,
        )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the option or command that is nearest to an unknown one."""

    def __init__(self, **settings: Any) -> None:
        self.commands: Mapping[str, Any] = {}
        super().__init__(**settings)

    @property
    def options(self) -> list[str]:
        return re.findall(r"(?<=[\[ ])--?[a-z-]+", self.format_usage())

    def add_subparsers(self, **settings: Any) -> Any:
        made = super().add_subparsers(**settings)
        self.commands = made.choices
        return made

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition(": ")
        if kind == "unrecognized arguments":
            message += config.did_you_mean(words.split()[0], self.options)
        if self.commands and "invalid choice: " in message:
            message = message.partition(" (choose")[0]
            message += f"; there are {', '.join(self.commands)}."
            message += config.did_you_mean(message.split("'")[1], self.commands)
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; of a command's parser, what it does not know is its own error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.commands:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


_EXAMPLES = {
    "info": "> report.txt",
    "cache": "--clear",
    "build": "&& python train.py",
    "run": "2 train.py --epochs 3",
    "check": "--backwards 20 train.py --epochs 1",
    "profile": "--html -o trace.json train.py --epochs 1",
    "report": "before.json after.json -o difference.html",
    "dump": "4711",
}


def _count(text: str) -> int:
    """Read a number of at least 1."""
    try:
        return config.at_least(1)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    name = Path(sys.argv[0]).name
    parser = _Parser(
        prog="ltc" if name == "ltc" else "python -m ltc",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"ltc {VERSION}", help="print the version of ltc"
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="info | cache | build | run | check | profile | report | dump",
    )
    commands.add_parser("info", help="print the facts for a fault report")
    cache = commands.add_parser(
        "cache", help="print folder and size of the disk cache, or empty it"
    )
    cache.add_argument("--clear", action="store_true", help="remove the compiled programs")
    commands.add_parser("build", help="build the native core with this machine's C++ compiler")
    run = commands.add_parser("run", help="run a script on several replicas")
    run.add_argument("replicas", type=_count, help="number of replicas, one process each")
    compare = commands.add_parser(
        "check", help="compare a script eager, compiled, and on two replicas"
    )
    compare.add_argument(
        "--backwards", type=_count, default=5, help="number of backward passes of each run (5)"
    )
    for command in (run, compare):
        command.add_argument("script", help="file of the script")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    look = commands.add_parser("profile", help="trace a script's work and times")
    look.add_argument(
        "-o", "--output", default=DEFAULT_PATH, help=f"file of the trace ({DEFAULT_PATH})"
    )
    look.add_argument("--html", action="store_true", help="also make a page, beside the trace")
    look.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    look.add_argument("script", help="file of the script")
    look.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    _add_report(commands)
    dump = commands.add_parser("dump", help="have a process print its threads' stacks")
    dump.add_argument(
        "process", type=_count, help="number of the process; its descendants print, too"
    )
    for name, command in commands.choices.items():
        command.set_defaults(parser=command)
        command.epilog = f"example: {parser.prog} {name} {_EXAMPLES[name]}"
    return parser


def _add_report(commands: Any) -> None:
    page = commands.add_parser("report", help="make a page of a trace of ltc.profile")
    page.add_argument("trace", help="file of the trace")
    page.add_argument(
        "page",
        nargs="?",
        metavar="page | other trace",
        help="file of the page, default: beside the trace; or a .json to compare with",
    )
    page.add_argument("-o", "--output", metavar="PAGE", help="the same as an option")


def ask_where(process: int) -> int:
    """Have a process print its threads' stacks; return 0, or 1 if it cannot be asked."""
    try:
        asked = ask(process)
    except (ProcessLookupError, PermissionError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"printed to the standard error of {', '.join(map(str, asked))}")
    return 0


def build_core() -> int:
    """Build the native core, unless it is there; return 0, or 1 if it cannot be built."""
    try:
        built = core_build.build()
    except core_build.CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    if built.failure:
        print(built.failure, file=sys.stderr)
        return 1
    print("the native core is built and tested: programs use it from now on")
    return 0


def write_report(trace: str, page: str | None = None) -> int:
    """Write the page of a trace; return 0, or 1 if the file is missing or is no trace."""
    path = Path(page) if page else Path(trace).with_suffix(".html")
    try:
        (told,) = _traces(trace)
        report.write(told, path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{verdict(told).sentence}\n{path}")
    return 0


def write_comparison(before: str, after: str, page: str | None = None) -> int:
    """Write the page of two traces; return 0, or 1 if a file is missing or is no trace."""
    path = Path(page) if page else Path(after).with_suffix(".html")
    try:
        told = _traces(before, after)
        report.write_comparison(told, (before, after), path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{sentence(told)}\n{path}")
    return 0


def _traces(*paths: str) -> list[dict[str, Any]]:
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"There is no file {path}. ltc.profile, or the command profile, writes one."
            )
    return [trace_file.read(path) for path in paths]


def run_script(replicas: int, script: str, arguments: Sequence[str]) -> int:
    """Run the script in a process for each replica; return 0, or 1 if a process failed."""
    try:
        launch(_run_here, args=(script, list(arguments)), nprocs=replicas)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run_here(rank: int, script: str, arguments: list[str]) -> None:
    """Run the script in this process as its main program."""
    run_as_main(script, arguments)


def profile_script(
    script: str,
    arguments: Sequence[str],
    output: str | os.PathLike[str],
    html: bool = False,
    is_module: bool = False,
) -> int:
    """Run the script here and write its trace; return the script's exit status."""
    status: int | str | None = 0
    try:
        with profile_of_processes(output, html=html):
            if is_module:
                run_module_as_main(script, arguments)
            else:
                run_as_main(script, arguments)
    except SystemExit as end:
        status = end.code
    finally:
        for written in (output, html_path(output, html)):
            if written and Path(written).is_file():
                print(f"ltc: the profile of {script} is in {written}", file=sys.stderr)
    if isinstance(status, str):
        print(status, file=sys.stderr)
        return 1
    return status or 0


def _cache(clear: bool) -> str:
    cache = disk_cache()
    if clear and cache is not None:
        cache.clear()
    return describe_cache()
