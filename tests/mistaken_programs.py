"""Mistakes that take a process of their own: settings, imports, loops, ranks, files, the command line.

Each is a program as a user would have it. `what` and `do` are searched in what it writes; the line to blame ends
in "# here". `what` is "" where the program works on ltc, which the newcomer did not expect.
"""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HERE = re.compile(r"# here\s*$")
_TRAINING = """
    import torch
    from torch import nn
    import ltc
    import ltc.core.lazy_model as ltm

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr={rate})
    x, y = torch.randn(32, 8).to("ltc"), torch.randint(4, (32,)).to("ltc")
    for step in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ltm.mark_step()
"""


@dataclass(frozen=True)
class Mistake:
    """A program, the texts that it has to write, and how it is started.

    Attributes:
        program: Its text, without arguments of the command line.
        what: A pattern of the text that names the fault; "" where the program works.
        do: A pattern of the cure; None where torch's or Python's text is all that there is to say.
        words: The arguments behind `python`, in which FILE is the program; () for FILE alone.
        settings: Environment variables, in which FOLDER is the program's folder.
        needs: A package without which the program cannot run.
    """

    program: str
    what: str
    do: str | None = None
    words: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    def text(self) -> str:
        """Return the program's text."""
        return textwrap.dedent(self.program)

    def line(self) -> int | None:
        """Return the number of the line to blame; None if no line is."""
        lines = self.text().splitlines()
        return next((k for k, one in enumerate(lines, 1) if _HERE.search(one)), None)


def said_by(mistake: Mistake, folder: Path) -> tuple[str, int]:
    """Run a program in a folder of its own; return what it wrote and its exit code."""
    file = folder / "train.py"
    file.write_text(mistake.text())
    names = {"FILE": str(file), "FOLDER": str(folder)}
    words = [names.get(one, one) for one in mistake.words or ("FILE",)]
    settings = {
        name: value.replace("FOLDER", str(folder)) for name, value in mistake.settings.items()
    }
    environment = (
        os.environ | {"PYTHONPATH": str(ROOT), "LTC_CHECK": "", "LTC_HINTS": "1"} | settings
    )
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, cwd=folder
    )
    return done.stdout + done.stderr, done.returncode


PROGRAMS = {
    # --- settings and imports
    "two_ltc_devices": Mistake(
        """
        import torch, ltc
        torch.ones(2, device="ltc:0") + torch.ones(2, device="ltc:1")  # here
        """,
        r"two devices, ltc:0 and ltc:1",
        r"Move one of them: \.to\('ltc:0'\)",
        settings={"LTC_NUM_DEVICES": "2"},
    ),
    "generator_before_import": Mistake(
        """
        import torch
        print(torch.Generator("ltc").initial_seed() >= 0)
        """,
        "",
    ),
    "device_before_import": Mistake(
        """
        import torch
        print(torch.ones(2, device="ltc"))
        """,
        "",
    ),
    "no_import_and_no_autoload": Mistake(
        """
        import torch
        torch.ones(2, device="ltc")  # here
        """,
        "ltc",
        settings={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    "misspelled_variable": Mistake(
        """
        import torch, ltc
        torch.ones(2, device="ltc")
        """,
        "LTC_NUM_DEVICE\\b",
        "LTC_NUM_DEVICES",
        settings={"LTC_NUM_DEVICE": "2"},
    ),
    "value_of_another_type": Mistake(
        """
        import torch, ltc
        torch.ones(2, device="ltc")
        """,
        "LTC_MAX_IN_FLIGHT=many",
        "integer",
        settings={"LTC_MAX_IN_FLIGHT": "many"},
    ),
    "unknown_tier": Mistake(
        """
        import torch, ltc
        torch.ones(2, device="ltc")
        """,
        "LTC_TIER=fast",
        "auto",
        settings={"LTC_TIER": "fast"},
    ),
    "unknown_backend": Mistake(
        """
        import torch, ltc
        print(torch.ones(2, device="ltc"))
        """,
        "cuda",
        "llvm",
        settings={"LTC_BACKEND": "cuda"},
    ),
    "old_torch": Mistake(
        """
        import torch
        torch.__version__ = torch.torch_version.TorchVersion("2.6.0")
        import ltc  # here
        """,
        r"needs torch",
        "pip install",
        settings={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    # --- loops
    "nan_loss": Mistake(
        _TRAINING.format(rate="1e30") + "        print(loss.item())  # here\n",
        "NaN",
        "LTC_DEBUG_NANS=1",
    ),
    "reading_in_the_loop": Mistake(
        """
        import os

        os.environ["LTC_NATIVE"] = "0"  # with the core it is hardly slower
        import torch
        from torch import nn
        import ltc
        from ltc.device.evidence import hints

        hints.PATIENCE_SECONDS = 0.5
        model, state = nn.GRUCell(64, 64).to("ltc"), torch.zeros(1, 64).to("ltc")
        with torch.no_grad():
            for step in range(200_000):
                state = model(state, state).sin().cos().tanh().exp().log1p().sigmoid()
                state.argmax().item()  # here
                if hints._has_said:
                    break
        """,
        "slower than eager PyTorch",
        "Cure: ",
    ),
    "no_mark_and_no_optimizer": Mistake(
        """
        import torch, ltc
        x = torch.zeros(4, device="ltc")
        for step in range(12_000):
            x = x + step
        print(x.sum().item())
        """,
        "",
    ),
    "step_too_large": Mistake(
        """
        import torch, ltc
        import ltc.core.lazy_model as ltm
        x = torch.ones(1000, 1000, device="ltc")
        for step in range(4):
            kept = [x + k for k in range(20)]  # here
            ltm.mark_step()
        """,
        "calls with .* MiB of results were recorded",
        "use smaller batches",
        settings={"LTC_MAX_PENDING_BYTES": "40000000", "LTC_TIER": "native"},
    ),
    "value_in_a_debugger": Mistake(
        """
        import torch, ltc
        loss = torch.ones(3, device="ltc").exp().mean()  # here
        print(repr(loss))
        """,
        r"pending ltc:0 tensor float32\[\] made by aten::mean at",
        settings={"LTC_DEBUG": "1", "LTC_TIER": "native"},
    ),
    "computed_value_in_a_debugger": Mistake(
        """
        import torch, ltc
        loss = torch.ones(3, device="ltc").exp().mean()
        assert repr(loss) == "tensor(2.7183, device='ltc:0')" and f"{loss:.2f}" == "2.72"
        """,
        "",
        settings={"LTC_DEBUG": "1", "LTC_TIER": "auto"},
    ),
    "numpy_of_the_whole": Mistake(
        """
        import numpy as np, torch, ltc
        np.mean(torch.ones(3, device="ltc"))  # here
        """,
        "unexpected keyword argument 'axis'|unsupported|convert",
    ),
    "inductor": Mistake(
        """
        import torch, ltc
        model = torch.compile(torch.nn.Linear(3, 2).to("ltc"), backend="inductor")
        model(torch.ones(4, 3, device="ltc"))  # here
        """,
        "inductor",
        r"torch\.compile\(",
    ),
    # --- loaders and ranks
    "worker_raises": Mistake(
        """
        import torch, ltc
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, k): raise KeyError("no such file")  # here
        next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
        """,
        "no such file",
    ),
    "device_tensor_in_a_worker": Mistake(
        """
        import torch, ltc
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, k): return torch.ones(2, device="ltc").cpu() * k
        print(sum(one.sum().item() for one in torch.utils.data.DataLoader(Data(), num_workers=1)))
        """,
        "",
    ),
    "lambda_for_processes": Mistake(
        """
        import ltc.distributed.lazy_multiprocessing as lmp
        if __name__ == "__main__":
            print(sum(lmp.spawn(lambda rank: rank + 1, nprocs=2)))
        """,
        "",
        needs="cloudpickle",
    ),
    "spawn_without_a_guard": Mistake(
        """
        import ltc.distributed.lazy_multiprocessing as lmp
        def work(rank): return rank
        lmp.spawn(work, nprocs=2)  # here
        """,
        "left with exit code",
        "__main__",
    ),
    "rank_raises": Mistake(
        """
        import ltc.distributed.lazy_multiprocessing as lmp
        import ltc.core.lazy_model as ltm, torch
        def work(rank):
            if rank == 1:
                raise ValueError("bad batch")  # here
            ltm.all_reduce("sum", torch.ones(2, device="ltc")).cpu()
        if __name__ == "__main__":
            lmp.spawn(work, nprocs=2)
        """,
        "Rank 1.*ValueError: bad batch",
    ),
    "rank_is_killed": Mistake(
        """
        import os, signal
        import ltc.distributed.lazy_multiprocessing as lmp
        import ltc.core.lazy_model as ltm, torch
        def work(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ltm.all_reduce("sum", torch.ones(2, device="ltc")).cpu()
        if __name__ == "__main__":
            lmp.spawn(work, nprocs=2)  # here
        """,
        "killed by SIGKILL",
        "dmesg",
    ),
    "rank_skips_a_collective": Mistake(
        """
        import ltc.distributed.lazy_multiprocessing as lmp
        import ltc.core.lazy_model as ltm, torch
        def work(rank):
            total = torch.ones(2, device="ltc")
            if rank == 0:
                total = ltm.all_reduce("sum", total)  # here
            ltm.all_reduce("max", total).cpu()
        if __name__ == "__main__":
            lmp.spawn(work, nprocs=2)
        """,
        "all_reduce",
    ),
    # --- files
    "disk_full_of_tensors": Mistake(
        """
        import torch, ltc
        import ltc.utils.serialization as xser
        xser.save({"x": torch.ones(1000, 1000, device="ltc")}, "/dev/full")  # here
        """,
        "Could not save /dev/full .*No space left on device; the file that was there is unchanged",
    ),
    "disk_full_of_torch": Mistake(
        """
        import torch, ltc
        torch.save({"x": torch.ones(1000, 1000, device="ltc")}, "/dev/full")  # here
        """,
        "No space|unexpected pos",
    ),
    "cache_folder_read_only": Mistake(
        """
        import torch, ltc
        print(torch.ones(2, device="ltc").sum().item())
        """,
        "ltc's cache: /proc/ltc cannot be made",
        "LTC_CACHE=0",
        settings={"LTC_CACHE_DIR": "/proc/ltc", "LTC_TIER": "native"},
    ),
    "cache_folder_open_to_others": Mistake(
        """
        import os
        os.makedirs(os.environ["LTC_CACHE_DIR"]), os.chmod(os.environ["LTC_CACHE_DIR"], 0o777)
        import torch, ltc
        print(torch.ones(2, device="ltc").sum().item())  # here
        """,
        "others can write to",
        "Set LTC_CACHE_DIR to another folder",
        settings={"LTC_CACHE_DIR": "FOLDER/open", "LTC_TIER": "native"},
    ),
    "file_of_ltc_on_a_machine_without": Mistake(
        """
        import os, subprocess, sys, torch
        make = "import torch, ltc; torch.save(torch.ones(2, device='ltc'), 'x.pt')"
        subprocess.run([sys.executable, "-c", make], check=True)
        torch.load("x.pt")  # here
        """,
        "don't know how to restore data location",
        settings={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    # --- the command line
    "run_of_no_process": Mistake(
        "",
        "argument replicas: .* got '0'",
        "an integer of at least 1",
        words=("-m", "ltc", "run", "0", "FILE"),
    ),
    "run_of_less_than_none": Mistake(
        "",
        "argument replicas: .* got '-1'",
        "an integer of at least 1",
        words=("-m", "ltc", "run", "-1", "FILE"),
    ),
    "run_of_a_word": Mistake(
        "",
        "argument replicas: .* got 'two'",
        "an integer of at least 1",
        words=("-m", "ltc", "run", "two", "FILE"),
    ),
    "report_of_a_missing_file": Mistake(
        "",
        "There is no file missing.json",
        "writes one",
        words=("-m", "ltc", "report", "missing.json"),
    ),
    "misspelled_option": Mistake("", "--clean", "--clear", words=("-m", "ltc", "cache", "--clean")),
    "dump_of_another_program": Mistake(
        "",
        "Process 1 .* is no program of ltc's",
        "No signal was sent",
        words=("-m", "ltc", "dump", "1"),
    ),
    "option_behind_the_script": Mistake(
        "",
        "is given --backwards",
        "stands before it",
        words=("-m", "ltc", "check", "FILE", "--backwards", "0"),
    ),
}


def faults_of(mistake: Mistake, said: str, code: int) -> list[str]:
    """Return the parts of a message that are missing: "what", "where", "do"; "works" if it should work."""
    if not mistake.what:
        return [] if code == 0 and "Error" not in said else ["works"]
    line = mistake.line()
    found = {
        "what": re.search(mistake.what, said, re.S),
        "where": line is None or re.search(rf'train\.py(:|", line ){line}\b', said),
        "do": mistake.do is None or re.search(mistake.do, said),
    }
    return [part for part, is_there in found.items() if not is_there]
