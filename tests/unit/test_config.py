import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ltc import config

ROOT = Path(config.__file__).parent
SOURCES = {path: path.read_text() for path in ROOT.rglob("*.py")}


def test_every_variable_is_in_the_table():
    used = {name for text in SOURCES.values() for name in re.findall(r"\bLTC_[A-Z0-9_]+", text)}
    assert used <= {flag.name for flag in config.FLAGS}


def test_every_variable_of_the_table_is_read_somewhere():
    elsewhere = "".join(text for path, text in SOURCES.items() if path != ROOT / "config.py")
    unread = [flag.name for flag in config.FLAGS if f'"{flag.name}"' not in elsewhere]
    assert not unread


def test_the_environment_is_read_through_the_table_alone():
    """But by xu, whose callers name the variable, and where the variable is another package's."""
    of_torch_xla = ROOT / "compat" / "torch_xla" / "extras" / "model_comparator.py"
    allowed = {ROOT / "config.py", ROOT / "utils" / "utils.py", of_torch_xla}
    pattern = re.compile(r"os\.(environ|getenv)")
    found = {path for path, text in SOURCES.items() if pattern.search(text)}
    assert {path for path in found if path.parent.name != "integrations"} <= allowed


def test_what_the_compiler_reads_is_in_the_names_of_programs():
    """But for what changes no program: its threads, memory and progress, and what is printed."""
    changes_none = {"LTC_THREADS", "LTC_PREFAULT_MB", "LTC_PROGRESS", "LTC_DUMP"}
    folders = [ROOT / name for name in ("aten", "ir", "passes", "llvm", "backends/llvm")]
    texts = [text for path, text in SOURCES.items() if set(folders) & set(path.parents)]
    read = {name for text in texts for name in re.findall(r'config\.value\("(\w+)"', text)}
    in_programs = {flag.name for flag in config.FLAGS if flag.in_programs}
    assert read - changes_none <= in_programs and "LTC_CHECK_INDEX" in read


def test_no_name_stands_for_two_flags():
    names = [name for flag in config.FLAGS for name in (flag.name, flag.older) if name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("flag", config.FLAGS, ids=lambda flag: flag.name)
def test_every_default_is_what_its_own_text_reads_as(flag):
    with config.override(**{flag.name: flag.default}):
        assert config.value(flag.name) == flag.default


def test_an_unset_variable_and_an_empty_one_have_the_default():
    with config.override(LTC_SYNC_WAIT=None):
        assert config.value("LTC_SYNC_WAIT") is False
    with config.override(LTC_SYNC_WAIT=""):
        assert config.value("LTC_SYNC_WAIT") is False


def test_a_callers_default_counts_only_where_nothing_is_set():
    with config.override(XRT_SHARD_WORLD_SIZE=None):
        assert config.value("XRT_SHARD_WORLD_SIZE", 7) == 7
    with config.override(XRT_SHARD_WORLD_SIZE=2):
        assert config.value("XRT_SHARD_WORLD_SIZE", 7) == 2


@pytest.mark.parametrize("text", ["1", "true", "0", "False"])
def test_a_boolean_is_written_as_a_digit_or_a_word(text):
    with config.override(LTC_CHECK=text):
        assert config.value("LTC_CHECK") is (text in ("1", "true"))


def test_a_number_is_a_number():
    with config.override(LTC_MAX_ASYNC_QUEUE="5"):
        assert config.value("LTC_MAX_ASYNC_QUEUE") == 5


@pytest.mark.parametrize(
    "name,text,message",
    [
        ("LTC_CHECK", "yes", "LTC_CHECK=yes: expected 1, 0, true or false"),
        ("LTC_MAX_IN_FLIGHT", "0", "LTC_MAX_IN_FLIGHT=0: expected an integer of at least 1"),
        ("LTC_MAX_PENDING_BYTES", "1e9", "=1e9: expected an integer of at least 1. It sets: bytes"),
        ("LTC_FALLBACK", "shout", "LTC_FALLBACK=shout: expected one of count, warn, error"),
        ("LTC_METRICS_PERCENTILES", "0.5:2", "expected numbers from 0 to 1"),
    ],
)
def test_a_text_that_can_not_be_read_is_named(name, text, message):
    with config.override(**{name: text}), pytest.raises(ValueError, match=message):
        config.value(name)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(KeyError, match="Did you mean LTC_SYNC_WAIT"):
        config.value("LTC_SYNC_WAITS")


def test_a_variable_that_is_nearly_ltcs_is_told_and_another_programs_is_not(monkeypatch):
    for name in ("LTC_TEIR", "LTC_NUM_DEVICE", "LTC_HOME", "LTC_WALLET_URL"):
        monkeypatch.setenv(name, "1")
    found = dict(config.misspelled_variables())
    assert found.pop("LTC_TEIR") == "LTC_TIER" and found.pop("LTC_NUM_DEVICE") == "LTC_NUM_DEVICES"
    assert not {"LTC_HOME", "LTC_WALLET_URL"} & set(found)


@pytest.mark.parametrize("ordinal, told", [(0, 1), (1, 0)])
def test_the_first_use_of_a_device_tells_a_misspelled_variable_once(ordinal, told):
    program = "import torch, ltc\nfor _ in range(3):\n    torch.ones(2, device='ltc').tolist()\n"
    variables = {"LTC_TEIR": "native", "XRT_SHARD_ORDINAL": str(ordinal)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count("LTC_TEIR is set, and ltc does not read it. Did you mean LTC_TIER?")
        == told
    )


def test_an_older_name_counts_where_the_newer_is_not_set():
    with config.override(LTC_CACHE_PROGRAMS=None):
        os.environ["COMPILATION_CACHE_SIZE"] = "9"
        try:
            assert config.value("LTC_CACHE_PROGRAMS") == 9
            assert config.value("COMPILATION_CACHE_SIZE") == 9
            with config.override(LTC_CACHE_PROGRAMS=3):
                assert config.value("LTC_CACHE_PROGRAMS") == 3
        finally:
            del os.environ["COMPILATION_CACHE_SIZE"]


def test_an_override_ends_with_its_block_also_when_that_raises():
    with config.override(LTC_DUMP="fuse"):
        with pytest.raises(ZeroDivisionError), config.override(LTC_DUMP="simplify"):
            assert config.value("LTC_DUMP") == "simplify"
            raise ZeroDivisionError
        assert config.value("LTC_DUMP") == "fuse"


def test_a_reader_gives_what_each_variable_is_set_to():
    read = config.reader("LTC_SYNC_WAIT", "LTC_NUM_DEVICES")
    with config.override(LTC_SYNC_WAIT=None, LTC_NUM_DEVICES=None, CPU_NUM_DEVICES=3):
        assert read() == (False, 3)
        with config.override(LTC_SYNC_WAIT="1"):
            assert read() == (True, 3)
        assert read() == (False, 3)
        with config.override(LTC_SYNC_WAIT="yes"), pytest.raises(ValueError, match="LTC_SYNC_WAIT"):
            read()
