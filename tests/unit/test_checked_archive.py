"""Files of torch.save are read with the checksums that torch.load does not look at."""

import io
import random
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc.checkpointing import checked_archive
from ltc.utils.cached_dataset import CachedDataset
from tests.unit.test_serialization import save_as_torch_xla_did

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "stress"))
import fuzz_checkpoints


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.pt"


def record(path: Path, name: str) -> range:
    """Where the bytes of a record lie in an archive."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.partition("/")[2] == name)
    header = path.read_bytes()[info.header_offset : info.header_offset + 30]
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + 30 + lengths
    return range(start, start + info.file_size)


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


# --- whole files ----------------------------------------------------------------------------------


class Settings:
    rate = 0.5


def test_what_was_saved_is_loaded_as_torch_does(path):
    x = torch.arange(6.0)
    model = nn.Linear(2, 2)
    ltm.save({"x": x.to("ltc"), "tied": [x, x[1:3]], "none": None, "empty": x[:0]}, path)
    loaded, expected = ltm.load(path), torch.load(path)
    assert fuzz_checkpoints.same(loaded, expected)
    loaded["tied"][0][1] = 7
    assert loaded["tied"][1][0] == 7  # one memory, as before
    ltm.save(model.state_dict(), path)
    assert nn.Linear(2, 2).load_state_dict(ltm.load(path)).missing_keys == []


@pytest.mark.devices(4)
@pytest.mark.parametrize("place", ["ltc", torch.device("ltc", 1), {"cpu": "ltc:1"}, None])
def test_tensors_come_to_where_they_are_wanted(path, place):
    torch.save(torch.arange(3.0), path)
    loaded = ltm.load(path, map_location=place)
    assert loaded.device.type == ("cpu" if place is None else "ltc") and loaded.tolist() == [
        0,
        1,
        2,
    ]


@pytest.mark.devices(4)
def test_lazy_tensors_come_back_to_their_device(path):
    torch.save(torch.arange(3, device="ltc:1"), path)
    assert ltm.load(path).device == torch.device("ltc", 1)


def test_classes_are_made_only_where_asked_for(path):
    torch.save(Settings(), path)
    with pytest.raises(Exception, match="weights_only|Weights only"):
        ltm.load(path)
    assert ltm.load(path, weights_only=False).rate == 0.5


def test_open_files_load_also_behind_something_else(path):
    with open(path, "wb") as file:
        file.write(b"12345678")
        torch.save(torch.ones(3), file)
    with open(path, "rb") as file:
        file.seek(8)
        assert ltm.load(file).tolist() == [1, 1, 1]
    content = io.BytesIO()
    torch.save(torch.ones(2), content)
    content.seek(0)
    assert ltm.load(content).tolist() == [1, 1]
    with pytest.raises(ValueError, match="needs the path of a file"):
        ltm.load(content, mmap=True)


def test_mapped_tensors_are_written_to_without_the_file(path):
    torch.save(torch.zeros(1 << 16), path)
    loaded = ltm.load(path, mmap=True)
    loaded += 1
    assert loaded.sum() == 1 << 16 and ltm.load(path).sum() == 0


def test_the_bytes_of_tensors_are_read_once(path):
    torch.save([torch.randn(1 << 20), torch.randn(1 << 21)], path)

    class Counting(io.FileIO):
        count = 0

        def readinto(self, buffer):
            read = super().readinto(buffer)
            self.count += read
            return read

    with Counting(path) as file:
        ltm.load(file)
        assert file.count < 1.01 * path.stat().st_size


# --- damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_is_told_with_file_and_record(path, mmap):
    ltm.save({"a": torch.ones(4), "b": torch.zeros(5, device="ltc")}, path)
    flip(path, record(path, "data/1")[2], 6)
    assert torch.load(path)["b"].tolist() != [0] * 5  # torch itself gives other values
    with pytest.raises(
        xser.DamagedFile, match=r"state.pt has a record 'archive/data/1' that is dam"
    ):
        ltm.load(path, mmap=mmap)


@pytest.mark.parametrize("name", ["data.pkl", "byteorder", "data/0", "version", "data/1"])
def test_every_record_is_checked(path, name):
    torch.save([torch.ones(4), torch.zeros(9, dtype=torch.int64)], path)
    original = path.read_bytes()
    for at in record(path, name):
        flip(path, at, at % 8)
        with pytest.raises(xser.DamagedFile, match=f"{name}' that is damaged.*Take another copy"):
            ltm.load(path)
        path.write_bytes(original)


def test_a_large_record_is_checked_to_its_end(path):
    torch.save(torch.zeros(3 << 20), path)
    for at in (0, 5 << 20, -1):
        flip(path, record(path, "data/0")[at])
        with pytest.raises(xser.DamagedFile, match="data/0"):
            ltm.load(path)
        flip(path, record(path, "data/0")[at])
    assert ltm.load(path).count_nonzero() == 0


@pytest.mark.filterwarnings("ignore")
def test_damaged_archives_are_refused_or_give_what_was_saved():
    """300 of the files of scripts/stress/fuzz_checkpoints.py --kind archive."""
    assert fuzz_checkpoints.run(first=0, count=300, kind="archive") == {}


def test_a_file_of_any_length_is_refused(path):
    torch.save([torch.ones(4)], path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(xser.DamagedFile, match=r"state\.pt"):
            ltm.load(path)


def test_records_may_not_lie_over_each_other(path):
    """Else a small file could ask for many times its size."""
    torch.save([torch.ones(64), torch.ones(64) * 2], path)
    content, bytes_of = bytearray(path.read_bytes()), record(path, "data/0")
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    size = len(bytes_of).to_bytes(4, "little")
    at = content.index(size * 2, directory)  # of data/0: as long as the rest of the file
    content[at : at + 8] = (directory - bytes_of[0]).to_bytes(4, "little") * 2
    path.write_bytes(content)
    with pytest.raises(xser.DamagedFile, match="data/0' that does not end where the next"):
        ltm.load(path)


@pytest.mark.parametrize("tensor", [torch.ones(1), torch.ones(2), torch.ones(24)])
def test_a_record_whose_entry_is_all_zeros_is_not_empty(path, tensor):
    torch.save([tensor, torch.ones(3)], path)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02", content.rindex(b"state/byteorder") - 46 + 1)
    content[entry + 16 : entry + 28] = bytes(12)  # checksum and both sizes
    path.write_bytes(content)
    with pytest.raises(xser.DamagedFile, match="data/0' that does not end where the next"):
        ltm.load(path)


def test_files_without_checksums_are_refused_and_say_what_reads_them(path):
    torch.save([torch.ones(2)], path, _use_new_zipfile_serialization=False)
    with pytest.raises(xser.DamagedFile, match="older format, which has no checksums: torch.load"):
        ltm.load(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save([torch.ones(2)], path)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(
        xser.DamagedFile, match=r"without checksums.*torch\.load reads it unchecked"
    ):
        ltm.load(path)


def test_compressed_archives_are_none_of_torch(path):
    torch.save([torch.ones(64)], path)
    with zipfile.ZipFile(path) as archive:
        held = {i.filename: archive.read(i) for i in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    with pytest.raises(xser.DamagedFile, match="is compressed"):
        ltm.load(path)


def test_what_is_missing_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        ltm.load(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        ltm.load(tmp_path)


def test_reads_out_of_order_are_read_again(path):
    torch.save([torch.arange(64.0)], path)
    place = record(path, "data/0")
    with open(path, "rb") as file:
        archive = checked_archive._Archive(file, "it")
        archive.seek(place[8])
        archive.read(16)
        archive.finish()
    flip(path, place[0])
    with open(path, "rb") as file:
        archive = checked_archive._Archive(file, "it")
        archive.seek(place[8])
        archive.read(16)
        with pytest.raises(xser.DamagedFile, match="data/0"):
            archive.finish()


# --- other readers --------------------------------------------------------------------------------


def test_tensors_of_older_checkpoints_are_checked(tmp_path, monkeypatch):
    path = tmp_path / "old"
    save_as_torch_xla_did({"a": torch.ones(4)}, path, monkeypatch)
    tensor = tmp_path / "old.tensors" / "tensor_0.pt"
    flip(tensor, record(tensor, "data/0")[3])
    with pytest.raises(xser.DamagedFile, match=r"tensor_0\.pt"):
        xser.load(path)
    flip(tensor, record(tensor, "data/0")[3])
    flip(path, record(path, "data.pkl")[40])
    with pytest.raises(xser.DamagedFile, match=r"data\.pkl"):
        xser.load(path)


@pytest.mark.parametrize("compress", [True, False])
def test_samples_of_a_cache_are_checked(tmp_path, compress):
    samples = [torch.arange(64.0) * i for i in range(3)]
    CachedDataset(samples, tmp_path, compress=compress).warmup()
    cached = CachedDataset(None, tmp_path)
    assert torch.equal(cached[2], samples[2])
    (file,) = tmp_path.glob("0/2.pt*")
    content, choose = file.read_bytes(), random.Random(0)
    for _ in range(40):
        damaged = bytearray(content)
        damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        file.write_bytes(damaged)
        try:
            assert torch.equal(cached[2], samples[2])
        except xser.DamagedFile as error:
            assert compress or str(file) in str(error)
