"""Sparse gradients of embeddings: the optimizers that take them do on ltc what they do on the CPU."""

import io

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics

pytestmark = [pytest.mark.filterwarnings("ignore:Sparse invariant checks"), pytest.mark.also_native]

OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.1),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD, one by one": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}
LAYERS = {
    "embedding": lambda: nn.Embedding(7, 3, sparse=True),
    "padding": lambda: nn.Embedding(7, 3, sparse=True, padding_idx=2),
    "norm": lambda: nn.Embedding(7, 3, sparse=True, max_norm=0.5),
    "bags, mean": lambda: nn.EmbeddingBag(7, 3, sparse=True, mode="mean", padding_idx=1),
    "bags, sum": lambda: nn.EmbeddingBag(7, 3, sparse=True, mode="sum"),
}


def trained(device: str, layer: str, optimizer: str) -> list:
    """Gradients and weights of some steps; rows come several times, and one step has two passes."""
    torch.manual_seed(0)
    embedding, head = LAYERS[layer]().double(), nn.Linear(3, 1).double()
    rows = [torch.randint(0, 7, (4, 3)) for _ in range(3)]
    weights = torch.rand(4, 3).double().to(device) if layer == "bags, sum" else None
    embedding.to(device), head.to(device)
    updated, found = OPTIMIZERS[optimizer](list(embedding.parameters())), []
    for step, picked in enumerate(rows):
        updated.zero_grad()
        for _ in range(2 if step == 1 else 1):
            more = () if weights is None else (None, weights)
            head(embedding(picked.to(device), *more)).square().sum().backward()
        gradient = embedding.weight.grad
        assert gradient.is_sparse
        once = gradient.coalesce()
        found += [gradient.to_dense(), once.indices(), once.values()]
        updated.step()
        if device == "ltc":
            ltm.mark_step()
    return [*found, embedding.weight]


@pytest.mark.parametrize(
    ("layer", "optimizer"),
    [(layer, "SparseAdam") for layer in LAYERS] + [("embedding", name) for name in OPTIMIZERS],
)
def test_a_sparse_gradient_updates_what_it_does_on_the_cpu(layer, optimizer, equal):
    equal(trained("ltc", layer, optimizer), trained("cpu", layer, optimizer))


def test_it_does_so_in_programs_that_run_call_by_call(equal):
    with config.override(LTC_TIER="op_by_op"):
        found = trained("ltc", "embedding", "SparseAdam")
    equal(found, trained("cpu", "embedding", "SparseAdam"))


@pytest.mark.native("it counts the programs that are compiled")
def test_a_step_without_coalescing_is_one_program():
    embedding = nn.Embedding(50, 4, sparse=True).to("ltc")
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    for step in range(4):
        picked = torch.randint(0, 50, (6,)).to("ltc")
        with metrics.counted() as grown:
            optimizer.zero_grad()
            embedding(picked).square().sum().backward()
            optimizer.step()
            ltm.mark_step(wait=True)
        assert step < 2 or (grown["ExecuteTime"], grown["UncachedCompile"]) == (1, 0)


def coordinates(device: str, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    indices = torch.stack([torch.randint(0, 4, (6,)), torch.randint(0, 3, (6,))])
    values = torch.rand(6, 2, dtype=torch.float64)
    return torch.sparse_coo_tensor(indices.to(device), values.to(device), (4, 3, 2))


@pytest.mark.compared
def test_two_sparse_dimensions_compute_as_well(device):
    x, y = coordinates(device, 1), coordinates(device, 2)
    total = x.clone()
    total.add_(y, alpha=3).mul_(2).div_(4)
    dense = torch.ones(4, 3, 2, dtype=torch.float64, device=device)
    dense.sub_(x, alpha=0.5)
    masked = dense.sparse_mask(y.coalesce())
    results = [total, x + y, -x.coalesce(), (x * 3).coalesce() + y.coalesce(), masked, dense + x]
    return [one.to_dense() if one.is_sparse else one for one in results]


def trained_by(compiled) -> list[list[float]]:
    """The weights after steps that each begin with the gradient of the one before."""
    layer = nn.Embedding(5, 2, sparse=True).to("ltc")
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @compiled
    def step(rows):
        optimizer.zero_grad()
        layer(rows).square().sum().backward()
        optimizer.step()

    for number in range(6):
        step(torch.tensor([0, number % 3, 2], device="ltc"))
    return layer.weight.tolist()


def test_a_function_that_is_to_be_replayed_may_make_them():
    with config.override(LTC_CHECK=0), pytest.warns(UserWarning, match="a sparse gradient"):
        found = trained_by(ltc.compile)
    assert found == trained_by(lambda function: function)


def test_a_cpu_tensor_without_memory_may_be_closed_over():
    kept = torch.eye(3).to_sparse()
    step = ltc.compile(lambda x: x.to("ltc") * kept.shape[0])
    with config.override(LTC_CHECK=0):
        for number in range(5):
            assert step(torch.full((2,), float(number))).tolist() == [3.0 * number] * 2


def test_a_profile_tells_what_holds_memory_beside_them(tmp_path):
    layer = nn.Embedding(5, 2, sparse=True).to("ltc")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with ltc.profile(tmp_path / "profile.json"):
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([0, 2], device="ltc")).sum().backward()
            optimizer.step()
            ltm.mark_step()
    assert layer.weight.grad.is_sparse


def test_it_prints_is_saved_and_moved(equal):
    x = coordinates("ltc", 1).coalesce()
    assert repr(x).startswith("tensor(indices=tensor([[") and "device='ltc:0'" in repr(x)
    file = io.BytesIO()
    torch.save({"gradient": x}, file)
    file.seek(0)
    loaded = torch.load(file)["gradient"]
    assert loaded.device.type == "ltc" and loaded.is_coalesced()
    equal(loaded.cpu().to_dense(), coordinates("cpu", 1).to_dense())
    equal(loaded.cpu().to("ltc").to_dense(), coordinates("cpu", 1).to_dense())


def test_what_gradients_do_not_need_is_refused():
    x = coordinates("ltc", 1)
    with pytest.raises(NotImplementedError, match=r"aten::sin.* sparse tensors as gradients alone"):
        x.sin()
    with pytest.raises(NotImplementedError, match=r"Call .to_dense\(\) or .cpu\(\) first"):
        x * x
    with pytest.raises(RuntimeError, match=r"add\(sparse, dense\) is not supported"):
        x.add_(torch.ones(4, 3, 2, device="ltc"))
    with pytest.raises(RuntimeError, match="to have same size"):
        torch.ones(2, device="ltc") + x
    with pytest.raises(NotImplementedError, match="sparse"):
        torch.ones(3, 4, device="ltc").to_sparse_csr()
    layer = nn.Embedding(3, 2, sparse=True, scale_grad_by_freq=True).to("ltc")
    with pytest.raises(RuntimeError, match="not supported with sparse gradients"):
        layer(torch.tensor([1], device="ltc")).sum().backward()
