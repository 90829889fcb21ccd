"""What xser saves comes back: every dtype and shape, what is shared, and everything around it."""

import json
import sys
import warnings
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import ltc.utils.serialization as xser
from ltc.checkpointing import safetensors_format
from ltc.debug import metrics
from ltc.support.process import machine_memory
from tests.drawn import drawn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "stress"))
import fuzz_checkpoints

pytestmark = pytest.mark.devices(4)

Point = namedtuple("Point", "x y")

DTYPES = [v for v in {id(v): v for v in vars(torch).values()}.values() if type(v) is torch.dtype]
SHAPES = [(), (0,), (3, 0, 2), (5,), (2, 1, 3, 2, 2)]


def random_bits(dtype, shape):
    """A tensor of any dtype with random bits; booleans stay 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()


def has_elements(dtype):
    """Whether torch can hold the dtype at all: int1 and its like are names so far."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            random_bits(dtype, (2,)).clone()
    except (RuntimeError, NotImplementedError):
        return False
    return not str(dtype).startswith(("torch.q", "torch.bits"))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "saved")


def round_trip(data, path, **options):
    xser.save(data, path)
    return xser.load(path, **options)


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if has_elements(d)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_every_dtype_comes_back_bit_for_bit(dtype, device, path):
    saved = [random_bits(dtype, shape).to(device) for shape in SHAPES]
    loaded = round_trip(saved, path)
    for before, after in zip(saved, loaded, strict=True):
        assert (after.dtype, after.shape, after.device.type) == (dtype, before.shape, "cpu")
        assert bits(after) == bits(before)


@pytest.mark.parametrize("device", ["cpu", "ltc:0", "ltc:3"])
def test_tensors_load_to_any_device(device, path):
    loaded = round_trip(
        {"x": torch.arange(6.0, device="ltc").reshape(2, 3)}, path, map_location=device
    )
    assert str(loaded["x"].device) == device and loaded["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_large_tensors_are_mapped_and_writable_and_the_file_stays(path):
    saved = torch.randn(1 << 19)
    loaded = round_trip(saved, path)
    loaded.zero_()
    assert torch.equal(xser.load(path), saved)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1],
        lambda x: x.flip(0)[1:],
        lambda x: x[:1].expand(5, 6),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x[:1, 1],  # contiguous, though its stride is another
        lambda x: x[:0, 1],
    ],
)
@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_a_view_alone_is_saved_as_what_it_shows(view, device, path):
    x = view(torch.arange(24.0, device=device).reshape(4, 6))
    assert torch.equal(round_trip(x, path), x.cpu().resolve_conj())


def test_a_small_view_of_a_large_tensor_takes_little_space(path, tmp_path):
    xser.save(torch.zeros(1 << 20)[:3], path)
    assert (tmp_path / "saved").stat().st_size < 2000


def test_gradients_and_parameters_are_wanted_as_before(path):
    saved = [
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2),
    ]
    loaded = round_trip(saved, path)
    assert [type(t) for t in loaded] == [type(t) for t in saved]
    assert [t.requires_grad for t in loaded] == [True, True, False, False]


def test_values_that_are_pending_are_computed_by_one_program(path):
    a = torch.ones(3, device="ltc")
    data = {"sum": a + 1, "product": a * 3, "chain": (a + 1) * (a + 2)}
    with metrics.counted() as grown:
        xser.save(data, path)
    assert grown.get("CachedCompile", 0) + grown.get("UncachedCompile", 0) == 1
    assert xser.load(path)["chain"].tolist() == [6, 6, 6]


# --- what is shared -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "ltc"])
@pytest.mark.parametrize("target", ["cpu", "ltc"])
@pytest.mark.parametrize(
    "views",
    [
        lambda x: [x, x],
        lambda x: [x, x.detach()],
        lambda x: [x, x[1]],
        lambda x: [x[1], x],
        lambda x: [x, x.t(), x.view(24), x[:, ::2]],
        lambda x: [x[:3], x[1:]],
        lambda x: [x.t(), x[1:3, 2:4]],
        lambda x: [x, torch.view_as_complex(x.view(4, 3, 2))],
    ],
)
def test_what_shared_memory_shares_it_again(views, device, target, path):
    saved = views(torch.arange(24.0, device=device).reshape(4, 6))
    loaded = round_trip(saved, path, map_location=target)
    for group in (saved, loaded):
        group[0].add_(100)
    for before, after in zip(saved, loaded, strict=True):
        assert torch.equal(after.cpu(), before.cpu())


def test_the_same_tensor_twice_is_the_same_tensor_twice(path):
    x = torch.ones(2)
    a, b, c = round_trip([x, x, x.clone()], path)
    assert a is b and a is not c


def test_shared_tensors_are_stored_once(path, tmp_path):
    x = torch.zeros(1 << 16)
    xser.save([x, x.detach(), x[5:], torch.nn.Parameter(x)], path)
    assert (tmp_path / "saved").stat().st_size < x.nbytes + 2000


def test_parts_of_one_buffer_that_do_not_overlap_are_tensors_of_their_own(path):
    flat = torch.arange(10.0)
    xser.save({"a": flat[:4], "b": flat[4:]}, path)
    assert safetensors.torch.load_file(path)["b"].tolist() == list(range(4, 10))


def test_tied_weights_are_tied_after_loading(path):
    a, b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    model = torch.nn.Sequential(a, b).to("ltc")
    loaded = round_trip(model.state_dict(), path, map_location="ltc")
    loaded["0.weight"].fill_(7)
    assert loaded["1.weight"].eq(7).all()


# --- what is around tensors ---------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.bfloat16, torch.device("ltc:1"), torch.Size([2, 3]), float("inf")])
)
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(OrderedDict, st.dictionaries(keys, inner))
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=20,
)


def same(a, b):
    """Equal in value, type and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return a == b and {type(x) for x in a} == {type(x) for x in b}
    return a == b and repr(a) == repr(b)


@drawn()
@given(data=nested)
def test_nested_data_come_back_as_they_were(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "nested"
    assert same(round_trip(data, path), data)


def test_numbers_keep_every_bit(path):
    saved = [float("nan"), -0.0, 1e-320, 10**400, -(1 << 63), 0.1]
    loaded = round_trip(saved, path)
    assert repr(loaded) == repr(saved)


def test_containers_that_are_shared_stay_shared(path):
    inner = [torch.ones(1)]
    a, b = round_trip((inner, inner), path)
    assert a is b


def test_any_depth_is_saved(path):
    data = []
    for _ in range(20_000):
        data = [data]
    depth, inner = 0, round_trip(data, path)
    while inner:
        depth, inner = depth + 1, inner[0]
    assert depth == 20_000


def test_the_versions_in_a_state_dict_survive(path):
    model = torch.nn.BatchNorm1d(3)
    loaded = round_trip(model.state_dict(), path)
    assert type(loaded) is OrderedDict and loaded._metadata == model.state_dict()._metadata


def test_a_counter_is_a_counter(path):
    assert same(round_trip(Counter("abca"), path), Counter("abca"))


def test_a_named_tuple_whose_class_is_gone_has_the_same_names(path):
    gone = namedtuple("Gone", "left right")
    gone.__module__ = "no_such_module"
    loaded = round_trip(gone(1, [2]), path)
    assert type(loaded).__name__ == "Gone" and loaded._asdict() == {"left": 1, "right": [2]}


class Opaque:
    pass


@pytest.mark.parametrize(
    "odd, name",
    [
        (Opaque(), "Opaque"),
        (len, "builtin_function"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
    ],
)
def test_what_can_not_be_saved_is_named_with_its_place(odd, name, path, tmp_path):
    with pytest.raises(TypeError, match=rf"data\['model'\]\[1\].*{name}"):
        xser.save({"model": [1, odd]}, path)
    assert not list(tmp_path.iterdir())


def test_data_inside_themselves_are_an_error(path):
    data = {"list": []}
    data["list"].append(data)
    with pytest.raises(ValueError, match=r"data\['list'\]\[0\] contains itself"):
        xser.save(data, path)


# --- the file -----------------------------------------------------------------------------------


def test_any_safetensors_reader_reads_the_tensors(path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to("ltc")
    xser.save({"model": model.state_dict(), "step": 3}, path)
    read = safetensors.torch.load_file(path)
    assert read.keys() == {f"model.{name}" for name in model.state_dict()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[f"model.{name}"], tensor.cpu())


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        {"__metadata__": torch.ones(1)},
        torch.ones(()),
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"\ud800": torch.ones(1)},
        {"": torch.ones(1)},
    ],
)
def test_every_file_is_a_valid_safetensors_file(data, path):
    xser.save(data, path)
    with safe_open(path, "pt") as file:
        assert all(isinstance(file.get_tensor(name), torch.Tensor) for name in file.keys())  # noqa: SIM118  no dict
        assert all(isinstance(text, str) for text in file.metadata().values())
    assert repr(xser.load(path)) == repr(data)


def test_a_plain_safetensors_file_loads_as_names_and_tensors(path):
    safetensors.torch.save_file({"b": torch.ones(2), "a": torch.zeros(0, 3)}, path)
    loaded = xser.load(path, map_location="ltc")
    assert loaded["b"].tolist() == [1, 1] and loaded["a"].shape == (0, 3)


def test_a_subset_is_read_by_key_and_nothing_else(path):
    data = {
        "model": OrderedDict({"fc.weight": torch.ones(2), "fc.bias": torch.zeros(2)}),
        "step": 7,
        "list": [{"x": torch.full((2,), 5.0)}],
    }
    xser.save(data, path)
    with open(path, "r+b") as file:  # damage one tensor: the others can still be read
        content = file.read()
        file.seek(content.index(torch.full((2,), 5.0).numpy().tobytes()))
        file.write(b"?")
    loaded = xser.load(path, keys=["model.fc.weight", "step"])
    assert loaded["step"] == 7 and loaded["model.fc.weight"].tolist() == [1, 1]
    with pytest.raises(xser.DamagedFile, match="'list.0.x' is damaged"):
        xser.load(path, keys="list.0")


def test_a_missing_key_is_named_with_those_there_are(path):
    xser.save({"a": {"b": torch.ones(1)}}, path)
    with pytest.raises(KeyError, match="nothing at 'a.c'.*'a.b'"):
        xser.load(path, keys=["a.c"])


def test_the_names_can_be_asked_for(path):
    xser.save({"a": torch.ones(1), "b": [torch.ones(2, dtype=torch.float64)]}, path)
    assert sorted(xser.names(path)) == ["a", "b.0"]


def test_a_flipped_byte_is_reported_with_the_tensors_name(path):
    xser.save({"good": torch.zeros(4), "bad": torch.arange(4.0)}, path)
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        content[content.index(torch.arange(4.0).numpy().tobytes()) + 5] ^= 1
        file.seek(0)
        file.write(content)
    with pytest.raises(xser.DamagedFile, match="tensor 'bad' is damaged"):
        xser.load(path)


def test_the_same_data_make_the_same_bytes(path, tmp_path):
    data = {"x": torch.arange(5), "y": [1.5, "z"]}
    xser.save(data, path)
    xser.save(data, path + "2")
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "saved2").read_bytes()


def test_progress_is_shown_on_request(path, capfd):
    xser.save(torch.ones(4), path, progress=True)
    xser.load(path, progress=True)
    assert "100%" in capfd.readouterr().err
    xser.save(torch.ones(4), path)
    assert capfd.readouterr().err == ""


# --- crafted files ------------------------------------------------------------------------------


def craft(path, change) -> None:
    """Change the tree of a saved file, and let its checksums agree."""
    content = Path(path).read_bytes()
    length = fuzz_checkpoints.header_length(content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header["__metadata__"]
    tree = json.loads(metadata["ltc.tree"])
    metadata["ltc.tree"] = json.dumps(change(tree) or tree)
    Path(path).write_bytes(fuzz_checkpoints.summed(header, data))


def with_view(path, shape, strides, offset=0, dtype="float32") -> None:
    """A file of 96 bytes with a view of them that has this layout."""
    x = torch.arange(24.0)
    xser.save([x, x[1:5]], path)
    layout = {"shape": shape, "strides": strides, "offset": offset, "dtype": dtype}

    def change(tree):
        for node in tree:
            if node[0] == "tensor" and "shape" in node[2]:
                node[2].update(layout)

    craft(path, change)


BEYOND = {
    "longer": ([25], [1]),
    "offset": ([1], [1], 24),
    "wider": ([13], [1], 0, "float64"),
    "stride": ([2, 2], [24, 1]),
    "a product that wraps": ([1 << 32, 1 << 26], [0, 1 << 58]),
    "negative": ([2], [-1], 3),
    "2 TB of one element": ([1 << 39], [0]),
    "2 TB in two dimensions": ([1 << 20, 1 << 19], [0, 0]),
    "2 TB of overlapping rows": ([1 << 38, 2], [0, 1]),
    "more than addresses": ([1 << 58], [0]),
}


@pytest.mark.parametrize("device", ["cpu", "ltc"])
@pytest.mark.parametrize("layout", BEYOND.values(), ids=BEYOND)
def test_a_view_that_can_not_be_is_refused(path, layout, device):
    with_view(path, *layout)
    with pytest.raises(xser.DamagedFile, match="a view "):
        xser.load(path, map_location=device)


@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_a_view_that_repeats_elements_takes_no_memory(path, device):
    rows = machine_memory.total() // 2 // 96  # made out, they would be half of the memory
    with_view(path, [rows, 24], [0, 1])
    view = xser.load(path, map_location=device)[1]
    assert view.shape == (rows, 24)
    if device == "cpu":  # an ltc device makes out what is read of a view
        assert view.stride() == (0, 1) and view[rows - 1].tolist() == list(range(24))
    with_view(path, [20, 5], [1, 1])
    found = xser.load(path, map_location=device)[1]
    assert found.tolist() == torch.arange(24.0).as_strided((20, 5), (1, 1)).tolist()


def chain(kind, times, first=("int", 1)):
    """A table in which each node holds the one before it so many times."""
    return lambda tree: [list(first), *([kind, [n] * times] for n in range(60))]


ENDLESS = {
    "lists": chain("list", 2),
    "tuples": chain("tuple", 2),
    "wide lists": chain("list", 100),
    "empty lists": chain("list", 2, ("list", [])),
    "named tuples": lambda tree: [
        ["int", 1], *(["namedtuple", "m", "N", ["a", "b"], [n, n]] for n in range(60)),
    ],
    "dicts": lambda tree: [
        ["str", "a"], ["str", "b"], ["int", 1],
        *(["dict", [0, n + 2, 1, n + 2]] for n in range(60)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("change", ENDLESS.values(), ids=ENDLESS)
def test_data_of_more_places_than_can_be_walked_are_refused(path, change):
    xser.save([1], path)
    craft(path, change)
    with pytest.raises(xser.DamagedFile, match="more than .* places"):
        xser.load(path)
    with pytest.raises(xser.DamagedFile, match="more than .* places"):
        xser.load(path, keys=["0"])


def test_no_save_writes_what_no_load_would_read(path):
    row = [0] * 1000
    data = [row] * 1000
    xser.save(data, path)
    assert xser.load(path) == data
    endless = [1]
    for _ in range(60):
        endless = [endless, endless]
    with pytest.raises(ValueError, match=r"cannot be saved: .* more than \d+ places"):
        xser.save(endless, path)
    assert xser.load(path) == data


# --- old files ----------------------------------------------------------------------------------


def save_as_torch_xla_did(data, path, monkeypatch):
    """A structure with references in `path`, and tensors in a folder beside it."""
    import sys
    from types import ModuleType

    class TensorReference:
        def __init__(self, tid):
            self.tid = tid

    TensorReference.__module__ = "torch_xla.utils.serialization"
    TensorReference.__qualname__ = "TensorReference"
    for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torch_xla.utils.serialization"].TensorReference = TensorReference
    path.with_name(path.name + ".tensors").mkdir()
    references = {}
    for number, (key, tensor) in enumerate(data.items()):
        torch.save(tensor, f"{path}.tensors/tensor_{number}.pt")
        references[key] = TensorReference(number)
    torch.save({"model": references, "step": 4}, path)
    monkeypatch.undo()


def test_files_of_torch_xla_load(tmp_path, monkeypatch):
    path = tmp_path / "old"
    save_as_torch_xla_did({"a": torch.ones(2), "b": torch.zeros(3)}, path, monkeypatch)
    loaded = xser.load(path, map_location="ltc")
    assert loaded["step"] == 4 and loaded["model"]["a"].tolist() == [1, 1]
    assert loaded["model"]["b"].device.type == "ltc"


def test_155_a_new_save_over_an_old_one_removes_its_tensors(tmp_path, monkeypatch):
    path = tmp_path / "old"
    save_as_torch_xla_did({"a": torch.ones(2)}, path, monkeypatch)
    xser.save({"a": torch.zeros(1)}, path)
    assert xser.load(path)["a"].tolist() == [0]
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_an_old_file_that_would_run_code_does_not(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    (tmp_path / "old.tensors").mkdir()
    torch.save({"x": Bomb()}, tmp_path / "old")
    with pytest.raises(pickle.UnpicklingError):
        xser.load(tmp_path / "old")


def test_offsets_of_files_beyond_4_gb_are_offsets():
    begin = 1 << 40
    said = {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]}
    assert safetensors_format._checked_entry("x", said, "file").begin == begin
