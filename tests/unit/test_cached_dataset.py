import json

import pytest
import torch

from ltc.utils.cached_dataset import CachedDataset


class Counting:
    def __init__(self, n):
        self.n, self.computed = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.computed.append(index)
        return torch.full((2,), float(index)), {"label": index}


@pytest.mark.parametrize("compress", [True, False])
def test_a_sample_is_computed_once_and_then_read(tmp_path, compress):
    source = Counting(5)
    cached = CachedDataset(source, tmp_path / "cache", compress=compress)
    for _ in range(2):
        tensor, labels = cached[3]
        assert tensor.tolist() == [3, 3] and labels == {"label": 3}
    assert source.computed == [3] and len(cached) == 5


def test_a_warm_cache_needs_no_data_set_and_knows_its_own_form(tmp_path):
    source = Counting(5)
    CachedDataset(source, tmp_path, max_files_per_folder=2).warmup()
    assert source.computed == [0, 1, 2, 3, 4]
    cached = CachedDataset(None, tmp_path, max_files_per_folder=1000, compress=False)
    assert [labels["label"] for _, labels in cached] == [0, 1, 2, 3, 4]
    assert cached[-1][1] == {"label": 4}
    metadata = json.loads((tmp_path / "METADATA").read_text())
    assert metadata == {"length": 5, "max_files_per_folder": 2, "compress": True}
    assert sorted(len(list(folder.iterdir())) for folder in tmp_path.glob("[0-9]*")) == [1, 2, 2]


def test_a_missing_sample_without_a_data_set_is_an_error(tmp_path):
    CachedDataset(Counting(5), tmp_path)[0]
    with pytest.raises(RuntimeError, match="Sample 1 is not in"):
        CachedDataset(None, tmp_path)[1]


def test_an_empty_folder_without_a_data_set_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="holds no METADATA"):
        CachedDataset(None, tmp_path)


def test_another_data_set_is_refused(tmp_path):
    CachedDataset(Counting(5), tmp_path)
    with pytest.raises(RuntimeError, match="caches 5 samples, but the data set has 6"):
        CachedDataset(Counting(6), tmp_path)


def test_a_sample_out_of_range_is_an_index_error(tmp_path):
    with pytest.raises(IndexError, match="Sample 5 is out of range: the data set has 5 samples"):
        CachedDataset(Counting(5), tmp_path)[5]


def test_workers_of_a_loader_share_the_cache(tmp_path):
    cached = CachedDataset(Counting(8), tmp_path)
    loader = torch.utils.data.DataLoader(cached, batch_size=4, num_workers=2)
    assert torch.cat([labels["label"] for _, labels in loader]).tolist() == list(range(8))
    assert [labels["label"] for _, labels in CachedDataset(None, tmp_path)] == list(range(8))
