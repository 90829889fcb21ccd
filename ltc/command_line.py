"""`python -m ltc`: what is done with ltc from a command line.

    python -m ltc info                        versions, devices, processor, cache, variables, a program
    python -m ltc cache [--clear]             where compiled programs are kept, and how much; remove them
    python -m ltc run 2 train.py --epochs 3   a script on several replicas of this machine
    python -m ltc check train.py --epochs 3   a script's first losses: eager, compiled, on two replicas
    python -m ltc profile train.py --epochs 3 what a script does and how long: ltc_profile.json
    python -m ltc report ltc_profile.json     a page that shows it: ltc_profile.html
    python -m ltc dump PID                    have a process print where each of its threads is

`run` starts one process for each replica. Each runs the script from its first line, as
`python train.py --epochs 3` would, and knows its place: ltm.get_ordinal(), ltm.xrt_world_size(). A
`spawn` in the script starts no processes of its own then. Each line printed is headed by its rank;
where one process dies, all end, and the report says which one, why, and what the others waited for.
`check` ends the script after five backward passes (`--backwards`), and with 1 where a run fails or the
compiled one computes something else than PyTorch's kernels. `profile` runs the script as it is (`-m` for
a module, as Python has it) and writes a trace for ui.perfetto.dev, `-o` says where, also where it fails;
ranks that it starts, torchrun's too, are in the same file; `--html` makes a page of it as well, as
`report` does (`-o` says where).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ltc.debug.environment import describe, describe_cache
from ltc.debug.script_check import check, run_as_main, run_module_as_main
from ltc.debug.whereabouts import ask
from ltc.distributed.lazy_multiprocessing import RankFailed, launch
from ltc.profiling import report, trace_file
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.profile import DEFAULT_PATH, html_path, profile_of_processes
from ltc.support.disk_cache import disk_cache
from ltc.support.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments ask for; the status that a process ends with."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m ltc",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ltc {VERSION}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="info | cache | run | check | profile | report | dump",
    )
    commands.add_parser("info", help="what a report of a fault needs")
    cache = commands.add_parser("cache", help="the compiled programs on disk")
    cache.add_argument("--clear", action="store_true", help="remove them")
    run = commands.add_parser("run", help="a script on several replicas")
    run.add_argument("replicas", type=int, help="how many processes")
    compare = commands.add_parser("check", help="a script eager, compiled, and on two replicas")
    compare.add_argument("--backwards", type=int, default=5, help="passes of each (5)")
    for command in (run, compare):
        command.add_argument("script", help="the program")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    look = commands.add_parser("profile", help="a trace of what a script does, and how long")
    look.add_argument("-o", "--output", default=DEFAULT_PATH, help=f"the trace ({DEFAULT_PATH})")
    look.add_argument(
        "--html", nargs="?", const=True, metavar="PAGE", help="a page of it; beside it if not said"
    )
    look.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    look.add_argument("script", help="the program")
    look.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    page = commands.add_parser("report", help="a page that shows a file of ltc.profile")
    page.add_argument("trace", help="the file")
    page.add_argument("page", nargs="?", help="the page; beside the file if not said")
    page.add_argument("-o", "--output", metavar="PAGE", help="the same")
    dump = commands.add_parser("dump", help="have a process print where each of its threads is")
    dump.add_argument("process", type=int, help="its number; those it has started print it, too")
    asked = parser.parse_args(argv)
    if asked.command == "dump":
        return ask_where(asked.process)
    if asked.command == "report":
        return write_report(asked.trace, asked.output or asked.page)
    if asked.command in ("run", "check") and not Path(asked.script).is_file():
        parser.error(f"there is no file {asked.script}")
    if asked.command == "profile":
        if not asked.module and not Path(asked.script).is_file():
            parser.error(f"there is no file {asked.script}")
        return profile_script(asked.script, asked.arguments, asked.output, asked.html, asked.module)
    if asked.command == "run":
        return run_script(asked.replicas, asked.script, asked.arguments)
    if asked.command == "check":
        text, is_equal = check(asked.script, asked.arguments, asked.backwards)
        print(text)
        return 0 if is_equal else 1
    print(_cache(asked.clear) if asked.command == "cache" else describe())
    return 0


def ask_where(process: int) -> int:
    """Have a process print where it is; 0, or 1 where it cannot be asked."""
    try:
        asked = ask(process)
    except (ProcessLookupError, PermissionError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"printed to the standard error of {', '.join(map(str, asked))}")
    return 0


def write_report(trace: str, page: str | None = None) -> int:
    """Write the page of a file of ltc.profile; 0, or 1 where there is none, or it is something else."""
    path = Path(page) if page else Path(trace).with_suffix(".html")
    try:
        told = trace_file.read(trace)
        report.write(told, path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{verdict(told).sentence}\n{path}")
    return 0


def run_script(replicas: int, script: str, arguments: Sequence[str]) -> int:
    """Run the script in a process for each replica; 0, or 1 where a process failed."""
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
    html: str | bool | None = None,
    is_module: bool = False,
) -> int:
    """Run the script here and write what it did; the status that it ended with."""
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
                print(f"ltc: what {script} did is in {written}", file=sys.stderr)
    if isinstance(status, str):
        print(status, file=sys.stderr)
        return 1
    return status or 0


def _cache(clear: bool) -> str:
    cache = disk_cache()
    if clear and cache is not None:
        cache.clear()
    return describe_cache()
