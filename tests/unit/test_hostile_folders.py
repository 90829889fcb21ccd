"""What other users, other processes and other files can do to the cache: it is made anew, or not used.

Of the tests that need a second user, root gives files to one; others are skipped elsewhere.
"""

import contextlib
import os
import shutil
import stat
import time
import warnings

import pytest

from ltc import config
from ltc.support import disk_cache
from ltc.support.disk_cache import DiskCache, OwnFolder

SOMEBODY = 4321  # a user who is not this one
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def cache(tmp_path):
    made = DiskCache(tmp_path / "cache")
    made.write("name", b"data")
    return made


def later(cache) -> DiskCache:
    """As another process sees it."""
    return DiskCache(cache.folder)


@contextlib.contextmanager
def silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def assert_healed(cache, told_of: str, name: str = "name") -> None:
    """The entry is not read, nothing is raised, one warning is given, and the next write counts."""
    reader = later(cache)
    with pytest.warns(UserWarning, match=told_of) as told:
        assert reader.read(name) is None
        reader.write(name, b"anew")
        assert reader.read(name) == b"anew"
    assert sum("ltc's cache" in str(one.message) for one in told) == 1
    assert later(cache).read(name) == b"anew"


# --- files of others -------------------------------------------------------------------------


@needs_root
def test_a_file_of_another_user_is_removed(cache):
    os.chown(cache.folder / "name", SOMEBODY, SOMEBODY)
    assert_healed(cache, "not a file of this user's; it is removed")


@needs_root
def test_a_hard_link_to_a_file_of_another_user_is_removed_and_the_file_stays(cache, tmp_path):
    """It is whole, of the right name, and under the right key: who wrote it counts all the same."""
    theirs = tmp_path / "theirs"
    shutil.copy(cache.folder / "name", theirs)
    os.chown(theirs, SOMEBODY, SOMEBODY)
    os.unlink(cache.folder / "name")
    os.link(theirs, cache.folder / "name")
    assert_healed(cache, "not a file of this user's; it is removed")
    assert os.stat(theirs).st_uid == SOMEBODY and os.stat(theirs).st_nlink == 1


@needs_root
def test_a_folder_of_another_user_is_used_neither_way(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, SOMEBODY, SOMEBODY)
    cache = DiskCache(folder)
    with pytest.warns(UserWarning, match=f"belongs to user {SOMEBODY}"):
        cache.write("name", b"data")
    assert cache.read("name") is None and not list(folder.iterdir())


@needs_root
def test_a_folder_inside_of_another_users_is_not_used(cache, tmp_path):
    os.chown(tmp_path, SOMEBODY, SOMEBODY)
    try:
        with pytest.warns(UserWarning, match="a folder of its path, belongs to user"):
            assert later(cache).read("name") is None
    finally:
        os.chown(tmp_path, 0, 0)


@needs_root
def test_a_key_of_another_user_is_no_key(cache):
    os.chown(cache.folder / "key", SOMEBODY, SOMEBODY)
    reader = later(cache)
    with pytest.warns(UserWarning, match="key was damaged"):
        assert reader.read("name") is None
        reader.write("name", b"anew")
    assert os.stat(cache.folder / "key").st_uid == 0
    assert later(cache).read("name") == b"anew"


# --- other things in the place of a file -----------------------------------------------------


def as_link(path, elsewhere):
    os.rename(path, elsewhere)
    os.symlink(elsewhere, path)


def as_pipe(path, elsewhere):
    path.unlink()
    os.mkfifo(path, 0o600)


def as_folder(path, elsewhere):
    path.unlink()
    path.mkdir()


def as_device(path, elsewhere):
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: it never ends


def as_huge_file(path, elsewhere):
    os.truncate(path, 3 << 40)  # without blocks on the disk


@pytest.mark.parametrize(
    "put",
    [as_link, as_pipe, as_folder, as_huge_file, pytest.param(as_device, marks=needs_root)],
)
def test_what_is_no_ordinary_file_is_neither_opened_nor_kept(cache, tmp_path, put):
    put(cache.folder / "name", tmp_path / "elsewhere")
    assert_healed(cache, "name is not read: .*it is removed")


def test_a_full_folder_in_the_place_of_a_file_costs_that_file_alone(cache):
    (cache.folder / "name").unlink()
    (cache.folder / "name" / "inside").mkdir(parents=True)
    reader = later(cache)
    with pytest.warns(UserWarning, match="it cannot be removed"):
        assert reader.read("name") is None
        reader.write("name", b"anew")
    reader.write("other", b"data")
    assert reader.read("other") == b"data"


def test_a_link_put_where_a_file_is_being_written_is_not_followed(cache, tmp_path, monkeypatch):
    """Its name can be guessed: the process's number and a count."""
    monkeypatch.setattr(disk_cache, "_numbers", iter([7]))
    (tmp_path / "precious").write_bytes(b"precious")
    os.symlink(tmp_path / "precious", cache.folder / f".name.{os.getpid()}.7")
    with pytest.warns(UserWarning, match="nothing more is kept"):
        cache.write("name", b"anew")
    assert (tmp_path / "precious").read_bytes() == b"precious"


# --- between the check and the use -----------------------------------------------------------


def test_a_folder_exchanged_after_the_check_is_looked_at_again(cache, tmp_path):
    assert cache.read("name") == b"data"
    os.rename(cache.folder, tmp_path / "old")
    cache.folder.mkdir(mode=0o777)
    os.chmod(cache.folder, 0o777)
    shutil.copy(tmp_path / "old" / "name", cache.folder / "name")
    with pytest.warns(UserWarning, match="others can write to"):
        assert cache.read("name") is None
        cache.write("name", b"anew")
    assert [path.name for path in cache.folder.iterdir()] == ["name"]


def test_a_folder_that_is_opened_to_others_later_is_used_no_more(cache):
    assert cache.read("name") == b"data"
    os.chmod(cache.folder, 0o777)
    with pytest.warns(UserWarning, match="others can write to"):
        assert cache.read("name") is None


def test_a_file_exchanged_between_check_and_use_is_not_read(cache, tmp_path, monkeypatch):
    os.symlink(cache.folder / "name", tmp_path / "link")
    status = OwnFolder._status

    def exchange_after(folder, name):
        found = status(folder, name)
        if name == "name":
            os.replace(tmp_path / "link", cache.folder / "name")
            monkeypatch.setattr(OwnFolder, "_status", status)
        return found

    reader = later(cache)
    assert reader.read("none") is None
    monkeypatch.setattr(OwnFolder, "_status", exchange_after)
    with pytest.warns(UserWarning, match="name is not read: .*it is removed"):
        assert reader.read("name") is None


# --- folders and keys that come and go -------------------------------------------------------


def test_a_folder_that_is_made_anew_gets_a_key_that_all_share(cache):
    """A process that lives on writes with the new key, and what it writes is whole for others."""
    shutil.rmtree(cache.folder)
    with silently():
        other = later(cache)
        other.write("name", b"of the other")
        assert cache.read("name") == b"of the other"
        cache.write("own", b"own")
        assert other.read("own") == later(cache).read("own") == b"own"


def test_a_folder_that_is_gone_is_made_again(cache):
    shutil.rmtree(cache.folder)
    with silently():
        assert cache.read("name") is None
        cache.write("name", b"anew")
        assert later(cache).read("name") == b"anew"


def test_a_key_that_is_removed_comes_back_from_whoever_knows_it(cache):
    cache.write("other", b"data")
    (cache.folder / "key").unlink()
    with silently():
        assert later(cache).read("name") is None
        cache.write("third", b"data")
        assert later(cache).read("name") == b"data"


def test_a_key_that_another_process_has_exchanged_counts_at_once(cache):
    key, reader = cache.folder / "key", later(cache)
    assert reader.read("name") == b"data"
    key.unlink()
    other = later(cache)
    other.write("name", b"under the other key")
    with silently():
        assert reader.read("name") == b"under the other key"
        reader.write("more", b"data")
        assert later(cache).read("more") == b"data"


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), bytes(1 << 20)])
def test_a_key_of_another_length_is_made_anew(cache, key):
    (cache.folder / "key").write_bytes(key)
    reader = later(cache)
    with pytest.warns(UserWarning, match="key was damaged") as told:
        assert reader.read("name") is None
        reader.write("name", b"anew")
    assert sum("ltc's cache" in str(one.message) for one in told) == 1
    assert later(cache).read("name") == b"anew"
    assert stat.S_IMODE(os.stat(cache.folder / "key").st_mode) == 0o600


# --- clocks, sizes, masks --------------------------------------------------------------------


def test_what_a_clock_that_went_ahead_has_marked_goes_first(tmp_path):
    cache, names = DiskCache(tmp_path / "cache"), [f"{n:064x}" for n in range(4)]
    with config.override(LTC_CACHE_MB=1):
        for name in names[:3]:
            cache.write(name, bytes(300_000))
        os.utime(cache.folder / names[1], (time.time() + 1e9,) * 2)
        cache.write(names[3], bytes(300_000))
    assert cache.read(names[1]) is None and cache.read(names[3]) is not None


def test_what_leads_to_a_new_folder_is_private_whatever_the_mask(tmp_path):
    before = os.umask(0)
    try:
        cache = DiskCache(tmp_path / "caches" / "ltc")
        with silently():
            cache.write("name", b"data")
            assert later(cache).read("name") == b"data"
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "caches").st_mode) == 0o700


def test_folders_that_are_used_no_more_are_closed(tmp_path):
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    for number in range(5):
        cache = DiskCache(tmp_path / str(number))
        cache.write("name", b"data")
    assert opened() == before + 1  # the last
    del cache
    assert opened() == before


def test_a_fork_that_has_taken_the_number_of_the_folder_keeps_its_own_file(tmp_path):
    tmp_path.chmod(0o700)
    folder = OwnFolder(tmp_path)
    pid = os.fork()
    if not pid:
        number = folder._file
        os.dup2(os.open(os.devnull, os.O_RDONLY), number)  # the process that compiles closes all
        del folder
        os._exit(0 if os.path.exists(f"/proc/self/fd/{number}") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
