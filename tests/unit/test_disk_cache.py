"""The cache on disk: whole or not there, safe to share, bounded, and never in the way."""

import hashlib
import os
import stat
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from ltc import config
from ltc.support.disk_cache import DiskCache, default_folder, disk_cache


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def times_told(told) -> int:
    """How many of the warnings are the cache's: what earlier tests left may warn as it goes."""
    return sum("ltc's cache" in str(one.message) for one in told)


def test_what_one_process_writes_another_reads(cache):
    cache.write("name", b"data")
    assert DiskCache(cache.folder).read("name") == b"data"
    assert cache.read("other") is None


def test_only_its_user_can_read_or_write_it(cache):
    cache.write("name", b"data")
    assert stat.S_IMODE(os.stat(cache.folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(cache.folder / "name").st_mode) == 0o600


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b[:-1] + b"?"])
def test_a_damaged_file_is_removed_and_told_of_once(cache, damage):
    for name in ("first", "second"):
        cache.write(name, b"some data")
        path = cache.folder / name
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="first was damaged: it is removed") as told:
        assert cache.read("first") is None and cache.read("second") is None
    assert times_told(told) == 1 and not list(cache.folder.iterdir())
    cache.write("first", b"some data")
    assert cache.read("first") == b"some data"


def test_files_that_others_can_write_to_are_not_read(cache):
    cache.write("name", b"data")
    os.chmod(cache.folder / "name", 0o666)
    with pytest.warns(UserWarning, match="others can write to"):
        assert cache.read("name") is None


def test_a_folder_that_others_can_write_to_gets_nothing(tmp_path):
    os.chmod(tmp_path, 0o777)
    cache = DiskCache(tmp_path)
    with pytest.warns(UserWarning, match="others can write to"):
        cache.write("name", b"data")
    assert not list(tmp_path.iterdir())


def test_nothing_is_read_from_a_folder_that_others_can_write_to(cache):
    """They could exchange files of this user's, or bring one back that was replaced."""
    cache.write("name", b"data")
    os.chmod(cache.folder, 0o770)
    with pytest.warns(UserWarning, match="others can write to") as told:
        later = DiskCache(cache.folder)
        assert later.read("name") is None and later.read("name") is None
    assert times_told(told) == 1


def test_a_file_is_read_only_under_the_name_it_was_written_as(cache):
    cache.write("adds", b"machine code that adds")
    cache.write("subtracts", b"machine code that subtracts")
    os.replace(cache.folder / "subtracts", cache.folder / "adds")
    with pytest.warns(UserWarning, match="adds was damaged: it is removed"):
        assert cache.read("adds") is None
    assert not list(cache.folder.iterdir())


def test_a_file_of_an_earlier_ltc_is_replaced_without_a_word(cache):
    cache.write("name", b"data")
    path = cache.folder / "name"
    path.write_bytes(b"ltc1" + hashlib.sha256(b"data").digest() + b"data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.read("name") is None and not path.exists()


def test_a_folder_that_comes_later_is_looked_at_then(cache):
    assert cache.read("name") is None
    DiskCache(cache.folder).write("name", b"data")
    assert cache.read("name") == b"data"


def test_where_no_folder_can_be_made_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="can not be made") as told:
        cache.write("name", b"data")
        cache.write("name", b"data")
    assert times_told(told) == 1 and cache.read("name") is None


def test_a_full_disk_is_told_of_once_and_leaves_no_rubbish(cache, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    cache.write("before", b"data")
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left") as told:
        cache.write("name", b"data")
        cache.write("name", b"data")
    assert times_told(told) == 1
    assert [path.name for path in cache.folder.iterdir()] == ["before"]
    assert cache.read("before") == b"data"


def test_the_longest_unused_go_first(cache):
    with config.override(LTC_CACHE_MB=1):
        hours_ago = time.time() - 1e5
        for age, name in enumerate(("a", "b", "c")):
            cache.write(name, bytes(300_000))
            os.utime(cache.folder / name, (hours_ago + age, hours_ago + age))
        assert cache.read("a")  # and with that it is the latest
        cache.write("d", bytes(300_000))
        kept = {path.name for path in cache.folder.iterdir()}
    assert kept == {"a", "d"}


def test_writers_and_readers_at_once_see_whole_files(cache):
    def work(number: int) -> bool:
        other = DiskCache(cache.folder)
        seen = []
        for k in range(50):
            other.write(f"{k % 5}", bytes([k % 5]) * 10_000)
            seen.append(other.read(f"{(k + number) % 5}"))
        return all(s is None or (len(s) == 10_000 and len(set(s)) == 1) for s in seen)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
    assert len(list(cache.folder.iterdir())) == 5


def test_the_environment_says_where_and_whether(monkeypatch, tmp_path):
    with config.override(LTC_CACHE=0):
        assert disk_cache() is None
    with config.override(LTC_CACHE_DIR=str(tmp_path)):
        assert disk_cache().folder == tmp_path and disk_cache() is disk_cache()
    with config.override(LTC_CACHE_DIR=None):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_folder() == tmp_path / "ltc"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert default_folder() == tmp_path / ".cache" / "ltc"
