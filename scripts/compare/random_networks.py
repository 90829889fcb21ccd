"""Random networks on `ltc` against float64 on the CPU, relative to eager PyTorch.

    python scripts/compare/random_networks.py --count 2000                   two thousand new ones
    python scripts/compare/random_networks.py --seed 17 --count 1            one of them again
    python scripts/compare/random_networks.py --tier auto --runs repeated    as users run them
    python scripts/compare/random_networks.py --tier auto --runs repeated --small-steps
                                                               and with programs for small steps
    python scripts/compare/random_networks.py --runs repeated --batch 1      each in its own process
    python scripts/compare/random_networks.py --count 2000 --seed 0 --done done.jsonl
                                                               again: goes on where that has ended
    python scripts/compare/random_networks.py --seed 17 --text               the program of one seed

A network that is wrong, raises on ltc only, ends its process or does not come to an end has failed.
It is printed as the smallest program that still fails. A seed gives the same network in every
run. The exit code is 1 where any failed, and where none reached a tier that it should reach: with
`--runs repeated` each network runs ten times, with other values and at other sizes, so that its
programs are interpreted, compiled, and made ones of symbols. The last line says how often.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

BATCH = 500  # networks that one process tries: what it keeps of them goes with it
# The tiers that networks have to reach, by their runs and what LTC_TIER is.
REACHED = {
    "repeated": {"auto": ("immediate", "compiled", "symbolic"), "native": ("compiled", "symbolic")},
    "steady": {"auto": ("immediate", "compiled", "launched by the core")},
}
PATIENCE_SECONDS = 300  # for one network
SHRINKING_SECONDS = 240
SETTINGS = {
    "LTC_CHECK": "1",  # every graph is verified between passes
    "LTC_CACHE_PROGRAMS": "16",  # hardly any network is like another
    "LTC_MAX_RECORDED": "1000",
    "OMP_NUM_THREADS": "1",
    # With AMX, or AVX512-FP16, PyTorch 2.13 ends the process in some convolutions that are dilated.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}


def compile_at(level: int | None) -> None:
    """The level of LLVM's code generation in this process; None: the one that users have."""
    if level is None:
        return
    from ltc.llvm.compiler import llvm_binding

    llvm_binding.OPTIMIZATION = level


def tries(first: int, count: int) -> None:
    """In a process of its own: one line of JSON before and after each network."""
    from tests.networks.repetition import counted_by_tier, follow_small_steps
    from tests.random_networks import tried

    if os.environ.get("NETWORK_SMALL_STEPS"):
        follow_small_steps()
    for seed in range(first, first + count):
        print(json.dumps({"begins": seed}), flush=True)
        with counted_by_tier() as runs:
            _, verdict = tried(seed)
        print(json.dumps({"seed": seed, "tiers": runs, **vars(verdict)}), flush=True)


def shrinks(seed: int) -> None:
    """In a process of its own: ever smaller networks that fail like that of a seed."""
    from tests.networks.repetition import follow_small_steps
    from tests.random_networks import smallest, tried

    if os.environ.get("NETWORK_SMALL_STEPS"):
        follow_small_steps()

    def say(network) -> None:
        print(json.dumps({"text": network.text()}), flush=True)

    network, verdict = tried(seed)
    say(network)
    if not str(verdict):
        raise SystemExit(f"network {seed} no longer fails")
    smallest(network, verdict, say)


def texts(seed: int) -> None:
    """Prints the program of a seed; that the CPU takes it is not asked."""
    from tests.networks.compose import drawn_network

    print(drawn_network(seed).text())


class Worker:
    """Processes that try networks, one after the other; a network that ends one has failed."""

    def __init__(self, options: argparse.Namespace, kernels: str) -> None:
        """Prepare a worker.

        Args:
            options: With backend, the LTC_BACKEND or nothing; tier, the LTC_TIER; level, of code
                generation.
            kernels: The folder of the kernels that a process before has compiled.
        """
        self.level = options.level
        self.environment = os.environ | SETTINGS | {"LTC_CACHE_DIR": kernels}
        self.environment |= {"LTC_BACKEND": options.backend} if options.backend else {}
        if options.level == 0:  # XLA's passes over graphs stay: ltc's lowering meets all of them
            flags = self.environment.get("XLA_FLAGS", "")
            self.environment["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
        self.environment["LTC_TIER"] = "auto" if options.tier == "changing" else options.tier
        self.environment["NETWORK_TIERS"] = options.tier
        self.environment["NETWORK_RUNS"] = options.runs
        if options.runs == "steady":
            self.environment["LTC_CHECK"] = (
                "0"  # what looks at each kernel is no launch of the core
            )
        self.environment["NETWORK_SMALL_STEPS"] = "1" if options.small_steps else ""
        self.batch = options.batch

    def results(self, first: int, count: int) -> Iterator[dict]:
        """A verdict for each seed."""
        limit = first + count
        while first < limit:
            begun = first
            process = self._process("--tries", first, min(limit - first, self.batch))
            for line in self._lines(process):
                if "seed" in line:
                    yield line
                    first = line["seed"] + 1
                else:
                    begun = line["begins"]
            if process.wait() != 0:
                yield {"seed": begun, "raised": f"ended its process with {process.returncode}"}
                first = begun + 1

    def shrunk(self, seed: int) -> str:
        """The smallest program found for a seed, as far as there was time for it."""
        process = self._process("--shrinks", seed, 0)
        stop = threading.Timer(SHRINKING_SECONDS, process.kill)
        stop.start()
        found = [line["text"] for line in self._lines(process)]
        stop.cancel()
        process.wait()
        return found[-1] if found else ""

    def _process(self, what: str, first: int, count: int) -> subprocess.Popen:
        command = [sys.executable, __file__, what, str(first), "--count", str(count)]
        level = [] if self.level is None else ["--level", str(self.level)]
        return subprocess.Popen(
            [*command, *level],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def _lines(self, process: subprocess.Popen) -> Iterator[dict]:
        """Give the lines it prints; stop if it prints nothing for too long."""
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not ready.select(PATIENCE_SECONDS):
                    process.kill()
                line = process.stdout.readline()
                if not line:
                    return
                if line.startswith("{"):
                    yield json.loads(line)


class Run:
    """Everything that is counted and printed."""

    def __init__(self, options: argparse.Namespace, first: int) -> None:
        self.options, self.first = options, first
        self.counts: Counter[str] = Counter()
        self.tiers: Counter[str] = Counter()
        self.begun, self.printed = time.monotonic(), time.monotonic()
        self.lock = threading.Lock()
        self.failures: list[int] = []

    def is_over(self) -> bool:
        minutes = self.options.minutes
        return bool(minutes) and time.monotonic() - self.begun > 60 * minutes

    def take(self, result: dict, worker: Worker) -> None:
        with self.lock:
            self._count(result)
            if self.options.done:
                with open(self.options.done, "a") as file:
                    file.write(json.dumps(result) + "\n")
        if why := _failure(result):
            self._report(result["seed"], f"run {result.get('run', 0)}: {why}", worker)
        with self.lock:
            if time.monotonic() - self.printed > self.options.every:
                self.printed = time.monotonic()
                print(self.summary(), flush=True)

    def take_done(self) -> set[int]:
        """Count the results of the runs before that wrote to the same file; return their seeds."""
        if not self.options.done or not os.path.exists(self.options.done):
            return set()
        with open(self.options.done) as file:
            results = [json.loads(line) for line in file]
        for result in results:
            self._count(result)
            if _failure(result):
                self.failures.append(result["seed"])
        return {result["seed"] for result in results}

    def _count(self, result: dict) -> None:
        self.counts["networks"] += 1
        for name in ("strict", "widened", "unjudged"):
            self.counts[name] += result.get(name, 0)
        self.tiers.update(result.get("tiers", {}))
        self.counts["wrong"] += bool(result.get("wrong"))
        self.counts["raised"] += bool(result.get("raised"))

    def _report(self, seed: int, why: str, worker: Worker) -> None:
        with self.lock:
            self.failures.append(seed)
            print(f"\nseed {seed}: {why}", flush=True)
        text = worker.shrunk(seed) if self.options.shrink else ""
        with self.lock:
            print(f"\nseed {seed}, shrunk: {why}\n{_function_of(text)}", flush=True)

    def summary(self) -> str:
        c, seconds = self.counts, time.monotonic() - self.begun
        judged = max(1, c["strict"] + c["widened"] + c["unjudged"])
        return (
            f"{c['networks']} networks from seed {self.first} on in {seconds / 60:.1f} minutes: "
            f"{c['wrong']} wrong, {c['raised']} raised; {judged} results, judged strictly "
            f"{100 * c['strict'] / judged:.2f} %, with roundings {c['widened']}, "
            f"not {c['unjudged']}; runs of programs: "
            + ", ".join(f"{count} {tier}" for tier, count in self.tiers.most_common())
        )

    def unreached(self) -> list[str]:
        """The tiers that no program has reached and that repeated ones should."""
        reached = REACHED.get(self.options.runs, {}).get(self.options.tier, ())
        return [tier for tier in reached if not self.tiers[tier]]


def _failure(result: dict) -> str:
    return result.get("raised") or result.get("wrong") or ""


def _function_of(text: str) -> str:
    """The part of a program that differs from others'."""
    start = text.find("def network")
    return text[start : text.find("if __name__")].rstrip() if start >= 0 else ""


def run(options: argparse.Namespace) -> int:
    first = (
        random.SystemRandom().randrange(2**40) if options.seed == "random" else int(options.seed)
    )
    count = options.count or (10**9 if options.minutes else 1000)
    print(f"seeds {first} to {first + count - 1}", flush=True)
    whole, batches = Run(options, first), queue.SimpleQueue()
    size = max(1, min(options.batch, -(-count // options.processes)))
    done = whole.take_done()
    for start in range(first, first + min(count, size * 10**5), size):
        end = min(start + size, first + count)
        while start in done:  # a batch that was broken off goes on from its first seed left
            start += 1
        if start < end:
            batches.put((start, end - start))

    def work(kernels: str) -> None:
        worker = Worker(options, kernels)
        while not whole.is_over():
            try:
                batch = batches.get_nowait()
            except queue.Empty:
                return
            for result in worker.results(*batch):
                whole.take(result, worker)
                if whole.is_over():
                    return

    with tempfile.TemporaryDirectory(prefix="ltc-networks-", ignore_cleanup_errors=True) as kernels:
        threads = [threading.Thread(target=work, args=(kernels,)) for _ in range(options.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(whole.summary())
    if whole.failures:
        print("failed:", *sorted(whole.failures))
    if unreached := whole.unreached():
        print("no program was:", *unreached)
    return int(bool(whole.failures or unreached))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=0, help="networks (default 1000)")
    parser.add_argument("--seed", default="random", help="the first seed, or random")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--minutes", type=float, default=0, help="stop after this time")
    parser.add_argument("--backend", default="", help="the value of LTC_BACKEND")
    parser.add_argument(
        "--tier",
        default="native",
        choices=["native", "auto", "op_by_op", "changing"],
        help="the value of LTC_TIER; auto: nearly all run on PyTorch's kernels, call by call; "
        "changing: another one after each mark, and each network three times",
    )
    parser.add_argument(
        "--runs", choices=["once", *REACHED], default="once", help="runs of a network"
    )
    small = "small steps get programs as well, though the native core runs them as quickly without"
    parser.add_argument("--small-steps", action="store_true", help=small)
    parser.add_argument("--batch", type=int, default=BATCH, help="networks that a process tries")
    level = (
        "of LLVM's code generation, in place of the one that users have: at 0 the same kernels are "
        "compiled in half the time, and XLA's programs in three quarters"
    )
    parser.add_argument("--level", type=int, choices=(0, 1, 2, 3), help=level)
    done = "a file that gets a line for each network: those that it names are not run again"
    parser.add_argument("--done", default="", help=done)
    parser.add_argument("--every", type=float, default=60, help="seconds between lines")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="print failures as drawn"
    )
    parser.add_argument("--text", action="store_true", help="print the program of --seed")
    parser.add_argument("--tries", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shrinks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tries is not None:
        compile_at(options.level)
        return tries(options.tries, options.count) or 0
    if options.shrinks is not None:
        compile_at(options.level)
        return shrinks(options.shrinks) or 0
    if options.text:
        return texts(int(options.seed)) or 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
