"""The cache on disk: whole or not there, safe to share, bounded, and never in the way."""

import hashlib
import itertools
import os
import stat
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from ltc import config
from ltc.support import folder_safety
from ltc.support.disk_cache import DiskCache, default_folder, disk_cache


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def times_told(told) -> int:
    """How many of the warnings are the cache's: what earlier tests left may warn as it goes."""
    return sum("ltc's cache" in str(one.message) for one in told)


def entries(cache) -> list[str]:
    """Names of what is kept, without the key of the digests."""
    return sorted(path.name for path in cache.folder.iterdir() if path.name != "key")


def digest(name: str) -> str:
    """What names a file of the cache."""
    return hashlib.sha256(name.encode()).hexdigest()


def test_what_one_process_writes_another_reads(cache):
    cache.write("name", b"data")
    assert DiskCache(cache.folder).read("name") == b"data"
    assert cache.read("other") is None
    assert cache.has("name") and not cache.has("other")
    assert not DiskCache(cache.folder / "none").has("name")


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
    assert times_told(told) == 1 and not entries(cache)
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
    assert not entries(cache)


@pytest.mark.parametrize("former", (b"ltc1", b"ltc2"))
def test_a_file_of_an_earlier_ltc_is_replaced_without_a_word(cache, former):
    cache.write("name", b"data")
    path = cache.folder / "name"
    path.write_bytes(former + hashlib.sha256(b"data").digest() + b"data")
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
    with pytest.warns(UserWarning, match="cannot be made") as told:
        cache.write("name", b"data")
        cache.write("name", b"data")
    assert times_told(told) == 1 and cache.read("name") is None


def test_a_full_disk_is_told_of_once_and_leaves_no_rubbish(cache, monkeypatch):
    def full(*paths, **folders):
        raise OSError(28, "No space left on device")

    cache.write("before", b"data")
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left") as told:
        cache.write("name", b"data")
        cache.write("name", b"data")
    assert times_told(told) == 1
    assert entries(cache) == ["before"]
    assert cache.read("before") == b"data"


def test_the_longest_unused_go_first(cache):
    a, b, c, d = map(digest, "abcd")
    with config.override(LTC_CACHE_MB=1):
        hours_ago = time.time() - 1e5
        for age, name in enumerate((a, b, c)):
            cache.write(name, bytes(300_000))
            os.utime(cache.folder / name, (hours_ago + age, hours_ago + age))
        assert cache.read(a)  # and with that it is the latest
        cache.write(d, bytes(300_000))
        kept = entries(cache)
    assert kept == sorted([a, d])


def test_what_else_lies_in_the_folder_stays(cache):
    """A user may have chosen a folder that holds other things."""
    cache.write(digest("a"), b"data")
    (cache.folder / "thesis.tex").write_bytes(bytes(3 << 20))
    (cache.folder / f".{digest('b')}.17.0").write_bytes(b"what a killed process has left")
    assert cache.count()[0] == 2
    with config.override(LTC_CACHE_MB=1):
        cache.write(digest("c"), b"data")
    cache.clear()
    assert entries(cache) == ["thesis.tex"] and cache.count() == (0, 0)
    cache.write(digest("a"), b"data")
    assert cache.read(digest("a")) == b"data"


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
    assert len(entries(cache)) == 5


# --- other users -----------------------------------------------------------------------------


@pytest.fixture
def other_user(monkeypatch):
    """Whoever this process is, what it has written so far belongs to somebody else."""
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    folder_safety._trusted.cache_clear()
    yield
    monkeypatch.undo()
    folder_safety._trusted.cache_clear()


def test_a_digest_without_the_key_is_not_enough(cache):
    cache.write("name", b"data")
    content = (cache.folder / "name").read_bytes()
    (cache.folder / "name").write_bytes(
        content[:4] + hashlib.sha256(b"name\0" + b"foreign").digest() + b"foreign"
    )
    with pytest.warns(UserWarning, match="name was damaged"):
        assert cache.read("name") is None


def test_what_another_folder_holds_is_damaged_here(cache, tmp_path):
    """A whole file of the same name, as a machine that shares nothing else would write it."""
    other = DiskCache(tmp_path / "other")
    for one in (cache, other):
        one.write("name", b"data")
    os.replace(other.folder / "name", cache.folder / "name")
    with pytest.warns(UserWarning, match="name was damaged"):
        assert cache.read("name") is None


def test_links_are_not_followed(cache, tmp_path):
    cache.write("name", b"data")
    os.rename(cache.folder / "name", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", cache.folder / "name")
    with pytest.warns(UserWarning, match="name is not read"):
        assert cache.read("name") is None
    cache.write("name", b"new")
    assert cache.read("name") == b"new" and not (cache.folder / "name").is_symlink()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(cache):
    cache.write("other", b"data")
    os.mkfifo(cache.folder / "name", 0o600)
    with pytest.warns(UserWarning, match="it is not a file"):
        assert cache.read("name") is None


def test_another_users_folder_gets_nothing_and_gives_nothing(tmp_path, other_user):
    cache = DiskCache(tmp_path)
    with pytest.warns(UserWarning, match="belongs to user") as told:
        cache.write("name", b"data")
        assert cache.read("name") is None
    assert times_told(told) == 1 and not list(tmp_path.iterdir())


def test_a_folder_in_one_that_others_can_write_to_is_not_used(cache, tmp_path):
    """They could put another one in its place; in /tmp, which has the sticky bit, they can not."""
    cache.write("name", b"data")
    os.chmod(tmp_path, 0o777)
    with pytest.warns(UserWarning, match="a folder of its path"):
        assert DiskCache(cache.folder).read("name") is None
    os.chmod(tmp_path, 0o1777)
    assert DiskCache(cache.folder).read("name") == b"data"


def test_a_link_to_the_folder_is_followed_where_nobody_else_can_change_it(cache, tmp_path):
    cache.write("name", b"data")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to("../links/second")
    (tmp_path / "links" / "second").symlink_to(cache.folder)
    assert DiskCache(tmp_path / "links" / "first").read("name") == b"data"
    os.chmod(tmp_path / "links", 0o777)
    with pytest.warns(UserWarning, match="others can write to .*links, a folder of its path"):
        assert DiskCache(tmp_path / "links" / "first").read("name") is None


@pytest.mark.parametrize("target", ["open/inside/..", "open"])
def test_the_folder_itself_is_looked_at_wherever_a_link_ends(tmp_path, target):
    """With the sticky bit others may not exchange it, but they can bring files."""
    (tmp_path / "open" / "inside").mkdir(parents=True)
    os.chmod(tmp_path / "open", 0o1777)
    (tmp_path / "link").symlink_to(target)
    assert folder_safety.danger(tmp_path / "link") == f"others can write to {tmp_path / 'open'}"


def test_two_dots_after_a_link_lead_out_of_what_it_names(tmp_path):
    """As they do for the system, and not back to where the link lies."""
    (tmp_path / "open" / "inside").mkdir(parents=True)
    os.chmod(tmp_path / "open", 0o1777)
    (tmp_path / "link").symlink_to("open/inside")
    assert (
        folder_safety.danger(tmp_path / "link" / "..") == f"others can write to {tmp_path / 'open'}"
    )


def test_links_in_a_circle_lead_nowhere(tmp_path):
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    with pytest.warns(UserWarning, match="too many links"):
        assert DiskCache(tmp_path / "one").read("name") is None


def test_another_users_link_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(folder_safety, "_trusted", lambda: frozenset())
    monkeypatch.setattr(folder_safety, "_of_parent", lambda path, status: None)
    assert "link" in folder_safety.danger(tmp_path / "link")


def test_processes_that_start_together_make_one_key(tmp_path):
    """Each writes an entry, and then all read all of them."""
    script = """if True:
        import sys
        from pathlib import Path
        from ltc.support.disk_cache import DiskCache
        cache = DiskCache(Path(sys.argv[1]))
        cache.write(sys.argv[2], sys.argv[2].encode())
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "cache"), str(number)])
        for number in range(4)
    ]
    assert [process.wait() for process in processes] == [0] * 4
    cache = DiskCache(tmp_path / "cache")
    assert [cache.read(str(number)) for number in range(4)] == [b"0", b"1", b"2", b"3"]


def test_a_key_made_between_two_looks_is_not_taken_for_damaged(cache, monkeypatch):
    """Another process makes it after this one has seen that there is none."""
    cache.folder.mkdir(mode=0o700)
    made = DiskCache._made_key

    def made_late(self, folder):
        monkeypatch.undo()
        DiskCache(cache.folder).write("other", b"of another process")
        return made(self, folder)

    monkeypatch.setattr(DiskCache, "_made_key", made_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("name", b"data")
    later = DiskCache(cache.folder)
    assert (later.read("name"), later.read("other")) == (b"data", b"of another process")


def test_a_damaged_key_is_made_anew(cache):
    cache.write("name", b"data")
    (cache.folder / "key").write_bytes(b"short")
    later = DiskCache(cache.folder)
    with pytest.warns(UserWarning, match="key was damaged"):
        assert later.read("name") is None
        later.write("name", b"new")
    assert DiskCache(cache.folder).read("name") == b"new"


def test_where_files_have_one_name_only_there_is_a_key_all_the_same(cache, monkeypatch):
    def refused(*paths, **folders):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    cache.write("name", b"data")
    assert DiskCache(cache.folder).read("name") == b"data"


def test_what_cannot_be_parsed_is_removed(cache):
    cache.write("number", b"17")
    assert cache.read_as("number", int) == 17
    cache.write("number", b"seventeen")
    with pytest.warns(UserWarning, match="number was damaged"):
        assert cache.read_as("number", int) is None
    assert not entries(cache)


def test_a_clock_that_was_put_back_makes_nothing_eternal(cache):
    cache.write("name", b"data")
    tomorrow = time.time() + 1e5
    os.utime(cache.folder / "name", (tomorrow, tomorrow))
    assert cache.read("name") == b"data"
    assert os.stat(cache.folder / "name").st_mtime < tomorrow


def test_any_byte_that_is_changed_is_noticed(cache):
    cache.write("name", b"some data")
    path = cache.folder / "name"
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, bit in itertools.product(range(len(whole)), range(8)):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            assert cache.read("name") is None and not path.exists()


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
