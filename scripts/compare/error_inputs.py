"""Every call that PyTorch's own table (`op_db`) says must raise, on `ltc` against the CPU.

    python scripts/compare/error_inputs.py                  the whole table
    python scripts/compare/error_inputs.py --op gather      one operator

A case is one error input of one operator.  It is equal where `ltc` raises what eager PyTorch
raises on the CPU: an exception that the same `except` clause catches, with the same text once
device names are levelled.  An error that comes only when the result is read counts as equal too
(whether an index is in range is not known before) and is totalled apart as "late".  A case in which
the CPU raises nothing is not counted.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import warnings
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))
import case_runner
import opinfo
from case_runner import Outcome

# Two names of one thing: the text of an error says which device it was raised for.
LEVELLED = (
    (re.compile(r"torch\.ltc\.(\w+Tensor)"), r"torch.\1"),
    (re.compile(r"\bltc(:\d+)?\b"), "cpu"),
    (re.compile(r"\bPrivateUse1\b"), "CPU"),
    (re.compile(r"\s+"), " "),
)


@cache
def inputs_of(operator: str) -> tuple:
    """The operator's error inputs, the same in every process."""
    torch.manual_seed(zlib.crc32(operator.encode()))
    return tuple(opinfo.operators_by_name()[operator].error_inputs("cpu"))


def case_names(operators=()) -> list[str]:
    """ "operator|index" for every error input of the table."""
    names = []
    for name, op in opinfo.operators_by_name().items():
        if op.error_inputs_func is None or (operators and not {name, op.name} & set(operators)):
            continue
        names += [f"{name}|{index}" for index in range(len(inputs_of(name)))]
    return names


def run_case(name: str, device: str = "ltc") -> Outcome:
    operator, index = name.split("|")
    op, sample = opinfo.operators_by_name()[operator], inputs_of(operator)[int(index)].sample_input
    arguments = (sample.input, sample.args, sample.kwargs)
    expected, _, _ = raised_by(op, opinfo.copied(arguments))
    if expected is None:
        return Outcome(name, "refused", "the CPU raises nothing")
    try:
        on_device = opinfo.moved(op, arguments, device)
    except Exception as error:
        reason = f"moving the arguments: {describe(error)}"
        return Outcome(name, "error", reason, traceback.format_exc()[-4000:])
    found, late, detail = raised_by(op, on_device)
    if is_equal(expected, found):
        return Outcome(name, "late" if late else "equal")
    when = "when read" if late else "at the call"
    got = f"{when}: {describe(found)}" if found is not None else "nothing raised"
    return Outcome(name, "different", f"{got}  --  CPU: {describe(expected)}", detail)


def raised_by(op, arguments) -> tuple[Exception | None, bool, str]:
    """The exception, whether it came only when the result was read, and its traceback."""
    called = False
    try:
        result = opinfo.call(op.op, arguments)
        called = True
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                leaf.detach().cpu()
    except Exception as error:
        return error, called, traceback.format_exc()[-4000:]
    return None, False, ""


def is_equal(expected: Exception, found: Exception | None) -> bool:
    return isinstance(found, type(expected)) and level(str(found)) == level(str(expected))


def level(text: str) -> str:
    """`text` with every device called cpu, and runs of white space as one space."""
    for pattern, replacement in LEVELLED:
        text = pattern.sub(replacement, text)
    return text.strip()


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {level(str(error))[:160]}"


def share_equal(outcomes: list[Outcome]) -> float:
    counted = [outcome for outcome in outcomes if outcome.status != "refused"]
    return 100 * sum(o.status in ("equal", "late") for o in counted) / max(1, len(counted))


def report(outcomes: list[Outcome], target: float) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    remaining = [o for o in outcomes if o.status not in ("equal", "late", "refused")]
    return (
        f"{case_runner.table(remaining)}\n"
        f"{', '.join(f'{count} {status}' for status, count in counts.most_common())}\n"
        f"type and text of eager PyTorch: {share_equal(outcomes):.2f} % (target {target} %)"
    )


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", default=[], help="an operator; may be repeated")
    parser.add_argument("--device", default="ltc", help="the device to test")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for one case")
    parser.add_argument("--target", type=float, default=95, help="percent; below it, exit code 1")
    parser.add_argument("--json", help="write every outcome here")
    parser.add_argument("--table", help="write the cases that are not equal here")
    parser.add_argument(case_runner.WORKER, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(arguments: argparse.Namespace) -> None:
    import ltc  # noqa: F401  (the parent only counts: it needs no device)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case_runner.serve(lambda name: run_case(name, arguments.device))


def main() -> int:
    arguments = arguments_of(sys.argv[1:])
    if arguments.worker:
        work(arguments)
        return 0
    outcomes = case_runner.run(
        Path(__file__).resolve(),
        case_names(arguments.op),
        ["--device", arguments.device],
        arguments.processes,
        arguments.timeout,
    )
    text = report(outcomes, arguments.target)
    print(text)
    if arguments.json:
        case_runner.write(arguments.json, outcomes, {"share_equal": share_equal(outcomes)})
    if arguments.table:
        Path(arguments.table).write_text(text + "\n")
    return int(share_equal(outcomes) < arguments.target)


if __name__ == "__main__":
    sys.exit(main())
