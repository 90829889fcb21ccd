"""Training on ltc follows training on the CPU, step for step, in float64."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

pytestmark = pytest.mark.also_native

STEPS = 5
CLASSES, TOKENS, LENGTH = 10, 20, 6


class Convnet(nn.Module):
    # No bias before a batch norm: its gradient is rounding noise, which Adam would scale to size 1.
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2)
        self.head = nn.Linear(12 * 3 * 3, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.head(F.relu(self.second(x)).flatten(1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, TOKENS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        causal = causal.to(self.head.weight.dtype)
        return self.head(self.layer(self.embedding(tokens), src_mask=causal, is_causal=True))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.recurrent = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, TOKENS)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0])


def mlp():
    return nn.Sequential(
        nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def vectors():
    return torch.randn(8, 20, dtype=torch.double), torch.randint(CLASSES, (8,))


def images():
    return torch.randn(4, 3, 14, 14, dtype=torch.double), torch.randint(CLASSES, (4,))


def sentences():
    tokens = torch.randint(TOKENS, (4, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


NETWORKS = {
    "mlp": (mlp, vectors),
    "convnet": (Convnet, images),
    "transformer": (Transformer, sentences),
    "lstm": (Lstm, sentences),
}
OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 1e-2}),
    "AdamW": (optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    # eps: the gradient of an attention's key bias is rounding noise, which the defaults scale up.
    "RMSprop": (optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "eps": 1e-6}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "eps": 1e-6}),
    "NAdam": (optim.NAdam, {"lr": 1e-2}),
    "Adamax": (optim.Adamax, {"lr": 1e-2}),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
VARIANTS = [
    *((name, form) for name in OPTIMIZERS for form in ("single", "foreach")),
    *((name, "fused") for name in FUSED),
]
# Each network meets some of the variants, and each variant a network: an optimizer sees parameters alone.
TRAININGS = [
    (list(NETWORKS)[(position + position // 4) % 4], *variant)
    for position, variant in enumerate(VARIANTS)
]


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@pytest.mark.compared
@pytest.mark.parametrize("network, optimizer_name, form", TRAININGS)
def test_training_equals_the_cpu(device, network, optimizer_name, form):
    """Clipped and scheduled; losses, parameters, buffers and the optimizer's state."""
    make_model, make_batch = NETWORKS[network]
    make_optimizer, options = OPTIMIZERS[optimizer_name]
    form_options = {"foreach": False} if form == "single" else {form: True}
    model = make_model().double().to(device)
    optimizer = make_optimizer(model.parameters(), **options, **form_options)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for _ in range(STEPS):
        inputs, target = (part.to(device) for part in make_batch())
        optimizer.zero_grad()
        loss = loss_of(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        mark_step(device)
    state = [list(entry.values()) for entry in optimizer.state_dict()["state"].values()]
    return losses, dict(model.state_dict()), state


def mark_step(device: str) -> None:
    if device != "cpu":
        ltm.mark_step()


NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "layer without a weight": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
    "instance": lambda: nn.InstanceNorm1d(6, affine=True),
}


@pytest.mark.native("PyTorch's kernel sums the gradients of weights less exactly")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parameters", ["narrow", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_narrow_floats_have_gradients(name, parameters, dtype):
    """Of few elements and of many: the CPU's kernel is asked about the first alone."""
    for size in (4, 600):
        norm = NORMS[name]()
        x = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact = gradients_of(copy.deepcopy(norm).double(), x.double())
        norm = norm.to(dtype) if parameters == "narrow" else norm
        for mine, theirs in zip(gradients_of(norm.to("ltc"), x.to("ltc")), exact, strict=True):
            error = (mine.cpu().double() - theirs).abs().max() / theirs.abs().max()
            assert error < 16 * torch.finfo(dtype).eps, size


def gradients_of(norm, x):
    x.requires_grad_()
    y = norm(x)
    (y if y.dtype == torch.float64 else y.float()).exp().cumsum(-1).sum().backward()
    return [x.grad, *[p.grad for p in norm.parameters()]]


@pytest.mark.compared
def test_gradients_accumulated_over_steps_equal_the_cpu(device):
    model = mlp().double().to(device)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for micro_step in range(8):
        inputs, target = (part.to(device) for part in vectors())
        (loss_of(model(inputs), target) / 4).backward()
        if micro_step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        mark_step(device)
    return dict(model.state_dict())


@pytest.mark.compared
def test_the_gradient_read_after_the_mark_equals_the_cpu(device):
    model = mlp().double().to(device)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    read = []
    for _ in range(3):
        inputs, target = (part.to(device) for part in vectors())
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()
        mark_step(device)
        read.append([parameter.grad.clone() for parameter in model.parameters()])
    return read, dict(model.state_dict())


@pytest.mark.compared
def test_a_closure_optimizer_equals_the_cpu(device):
    model = mlp().double().to(device)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    inputs, target = (part.to(device) for part in vectors())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(inputs), target)
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(2)]


@pytest.mark.compared
def test_a_reloaded_optimizer_continues_as_before(device):
    model = mlp().double().to(device)
    first = optim.Adam(model.parameters(), 1e-2)
    batch = [part.to(device) for part in vectors()]
    train_once(model, first, batch)
    second = optim.Adam(model.parameters(), 1e-2)
    second.load_state_dict(first.state_dict())
    train_once(model, second, batch)
    return dict(model.state_dict())


def train_once(model, optimizer, batch):
    inputs, target = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs), target)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_steady_training_records_and_compiles_nothing_new():
    """Adam's bias corrections and a cosine schedule change numbers in each step, not the graph."""
    model = mlp().to("ltc")
    optimizer = optim.Adam(model.parameters(), 1e-3)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)

    def step():
        inputs, target = vectors()
        train_once(model, optimizer, (inputs.float().to("ltc"), target.to("ltc")))
        schedule.step()
        ltm.mark_step()

    for _ in range(5):
        step()
    with metrics.counted() as grown:
        for _ in range(200):
            step()
        ltm.wait_device_ops()
    assert grown["RecordedEntries"] == 0
    assert grown["UncachedCompile"] == 0
    assert grown["CachedCompile"] == 200


@pytest.mark.native("it counts the programs that are compiled")
def test_batches_of_two_sizes_compile_two_programs():
    model = mlp().to("ltc")
    optimizer = optim.SGD(model.parameters(), 0.01)

    def step(size):
        batch = torch.randn(size, 20).to("ltc"), torch.randint(CLASSES, (size,)).to("ltc")
        train_once(model, optimizer, batch)
        ltm.mark_step()

    for size in (8, 4, 8, 4):
        step(size)
    with metrics.counted() as grown:
        for size in (8, 4, 4, 8):
            step(size)
    assert grown["UncachedCompile"] == 0


@pytest.mark.native("it looks at the calls that are recorded")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_transformer_records_its_recomputation(reentrant, equal):
    """The second forward of every layer is part of the step, and no merge of equals undoes it."""

    def run(device, with_checkpoints):
        torch.manual_seed(3)
        embedding = nn.Embedding(TOKENS, 16).double().to(device)
        layers = [
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double().to(device)
            for _ in range(12)
        ]
        hidden = embedding(sentences()[0][: 3 + reentrant].to(device))  # a graph not seen before
        for layer in layers:
            if with_checkpoints:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            else:
                hidden = layer(hidden)
        hidden.square().mean().backward()
        return [p.grad for layer in layers for p in layer.parameters()]

    def graph_size(with_checkpoints):
        before = total_graph_size()
        gradients = run("ltc", with_checkpoints)
        ltm.mark_step()
        return total_graph_size() - before, gradients

    plain_size, _ = graph_size(False)
    recomputed_size, gradients = graph_size(True)
    equal(gradients, run("cpu", True))
    assert recomputed_size > plain_size


def total_graph_size() -> float:
    """Nodes of all graphs that were cut so far."""
    data = metrics.metric_data("TensorsGraphSize")
    return data[1] if data else 0.0


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": optim.swa_utils.get_swa_multi_avg_fn}])
def test_averages_of_whole_numbers_are_those_of_one_by_one(options):
    """The buffers of batch norm count in int64; torch has no list kernel for their average."""
    found = []
    for device in ("cpu", "ltc"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        made = {name: make() for name, make in options.items()} if device == "ltc" else {}
        averaged = optim.swa_utils.AveragedModel(model, use_buffers=True, **made)
        for number in range(4):
            for _ in range(number):
                model(torch.randn(5, 3).to(device))
            averaged.update_parameters(model)
        found.append([x.cpu() for x in averaged.state_dict().values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
