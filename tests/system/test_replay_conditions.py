"""What changes between calls of a function that `ltc.compile` replays is seen at the next call."""

import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import operator
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import ltc
from ltc import config
from ltc.debug import metrics
from ltc.errors import StepDiffers
from ltc.support.torch_private import GLOBAL_MODULE_HOOKS, GLOBAL_OPTIMIZER_HOOKS

CALLS, CHANGED = 9, 5  # the change comes before the call of that number


@pytest.fixture(autouse=True)
def replaying():
    """LTC_CHECK, which the tests run under, would record every call."""
    with config.override(LTC_CHECK=0):
        yield


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device="ltc")


# --- hooks and methods --------------------------------------------------------------------------


def trained(compiled, change) -> list[float]:
    """The weights after some steps, before one of which something is changed."""
    model = nn.Linear(3, 1).to("ltc")
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @compiled
    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for number in range(CALLS):
        if number == CHANGED:
            change(model, optimizer)
        step(ones(2, 3))
    return model.weight.tolist()


def no_gradient(parameter):
    parameter.grad.zero_()


def no_gradients(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.zero_()


def other_step(optimizer):
    optimizer.step = lambda: optimizer.param_groups[0]["params"][0].data.zero_()


def zero(model, x):
    return 0 * (x.sum() + model.weight.sum() + model.bias.sum())


CHANGES = {
    "a hook of a parameter": lambda m, o: m.weight.register_hook(lambda gradient: gradient * 0),
    "a hook after its gradient": lambda m, o: m.weight.register_post_accumulate_grad_hook(
        no_gradient
    ),
    "a hook before the step": lambda m, o: o.register_step_pre_hook(no_gradients),
    "a hook after the step": lambda m, o: o.register_step_post_hook(
        lambda *_: m.weight.data.zero_()
    ),
    "another forward of the module": lambda m, o: setattr(m, "forward", lambda x: zero(m, x)),
    "another forward of its class": lambda m, o: setattr(nn.Linear, "forward", zero),
    "another step of the optimizer": lambda m, o: other_step(o),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hooks_and_methods_that_come_later_are_seen(change, monkeypatch):
    found = []
    for compiled in (lambda function: function, ltc.compile):
        monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # put back at the end
        try:
            with metrics.counted() as grown:
                found.append(trained(compiled, change))
        finally:
            monkeypatch.undo()
    assert found[0] == found[1]
    assert grown["ReplayedCalls"] >= 3, dict(grown)


@pytest.mark.parametrize(
    ("hooks", "hook"),
    [
        (GLOBAL_OPTIMIZER_HOOKS[0], no_gradients),
        (GLOBAL_MODULE_HOOKS[0], lambda module, args, output: output * 0),
    ],
    ids=["before every step", "of every module"],
)
def test_hooks_around_everything_are_found_by_the_check(hooks, hook, monkeypatch):
    def change(model, optimizer):
        monkeypatch.setitem(hooks, 0, hook)

    with config.override(LTC_REPLAY_CHECK=2), pytest.raises(StepDiffers):
        trained(ltc.compile, change)


# --- values -------------------------------------------------------------------------------------


def class_attribute():
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    module = Scaled()
    return lambda x: module(x), lambda: setattr(Scaled, "scale", 5.0)


def attribute_that_hides_its_class():
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    module = Scaled()
    return lambda x: module(x), lambda: setattr(module, "scale", 5.0)


def attribute_with_a_default():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * getattr(self, "scale", 1.0)

    module = Scaled()
    return lambda x: module(x), lambda: setattr(module, "scale", 5.0)


def attribute_by_its_text():
    plain = types.SimpleNamespace(scale=1.0)
    return lambda x: x * getattr(plain, "scale", 2.0), lambda: setattr(plain, "scale", 5.0)


def slot():
    @dataclasses.dataclass(slots=True)
    class Settings:
        scale: float = 1.0

    settings = Settings()
    return lambda x: x * settings.scale, lambda: setattr(settings, "scale", 5.0)


def members_of_a_set():
    members = {"a"}
    return lambda x: x * (2 if "a" in members else 3), lambda: (members.clear(), members.add("b"))


def order_of_a_table():
    table = {"a": 1.0, "b": 2.0}

    def step(x):
        for value in table.values():
            x = x * value + 1
        return x

    return step, lambda: table.update(a=table.pop("a"))


def elements_of_an_array():
    array = np.array([1.0])
    return lambda x: x * float(array[0]), lambda: array.fill(5)


def last_element_of_a_long_array():
    array = np.ones(1000)
    return lambda x: x * float(array.sum()), lambda: array.put(999, 5)


def end_of_a_long_text():
    settings = types.SimpleNamespace(text="a" * 1000)
    return lambda x: x * settings.text.count("a"), lambda: setattr(settings, "text", "a" * 999)


def queue():
    queue = collections.deque([1.0, 5.0])
    return lambda x: x * queue[0], lambda: queue.rotate(1)


def user_dict():
    table = collections.UserDict(scale=1.0)
    return lambda x: x * table["scale"], lambda: table.update(scale=5.0)


def class_method():
    class Settings:
        scale = 1.0

        @classmethod
        def scaled(cls, x):
            return x * cls.scale

    return lambda x: Settings.scaled(x), lambda: setattr(Settings, "scale", 5.0)


def method_without_gradients():
    class Work:
        scale = 1.0

        @torch.no_grad()
        def scaled(self, x):
            return x * self.scale

    work = Work()
    return lambda x: work.scaled(x), lambda: setattr(work, "scale", 5.0)


def autograd_function():
    settings = types.SimpleNamespace(scale=1.0)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * settings.scale

    return lambda x: Scale.apply(x), lambda: setattr(settings, "scale", 5.0)


def backward_of_a_function():
    settings = types.SimpleNamespace(scale=1.0)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * settings.scale

    weight = ones(1).requires_grad_()

    def step(x):
        weight.grad = None
        Scale.apply(weight * x).sum().backward()
        return weight.grad.clone()

    return step, lambda: setattr(settings, "scale", 5.0)


class Table:
    def __init__(self):
        self.held = {"scale": 1.0}

    def __getitem__(self, key):
        return self.held[key]

    def __call__(self, x):
        return x * self.held["scale"]

    def __len__(self):
        return int(self.held["scale"])


def item():
    table = Table()
    return lambda x: x * table["scale"], lambda: table.held.update(scale=5.0)


def call():
    table = Table()
    return lambda x: table(x), lambda: table.held.update(scale=5.0)


def length():
    table = Table()
    return lambda x: x * len(table), lambda: table.held.update(scale=5.0)


def context():
    settings = types.SimpleNamespace(scale=1.0)

    class Context:
        def __enter__(self):
            return settings.scale

        def __exit__(self, *error):
            pass

    def step(x):
        with Context() as scale:
            return x * scale

    return step, lambda: setattr(settings, "scale", 5.0)


def code_of_a_function():
    def scaled(x):
        return x * 1.0

    other = (lambda x: x * 5.0).__code__
    return lambda x: scaled(x), lambda: setattr(scaled, "__code__", other)


def negative_zero():
    settings = types.SimpleNamespace(shift=0.0)
    return lambda x: 1 / (x * settings.shift), lambda: setattr(settings, "shift", -0.0)


def base_class_behind_super():
    settings = types.SimpleNamespace(scale=1.0)

    class Scaled(nn.Module):
        def forward(self, x):
            return x * settings.scale

    class Doubled(Scaled):
        def forward(self, x):
            return super().forward(x) * 2

    module = Doubled()
    return lambda x: module(x), lambda: setattr(settings, "scale", 5.0)


def other_method_of_a_base_class():
    class Scaled:
        def scaled(self, x):
            return x * 1.0

    class Doubled(Scaled):
        def scaled(self, x):
            return super().scaled(x) * 2

    work = Doubled()
    return lambda x: work.scaled(x), lambda: setattr(Scaled, "scaled", lambda self, x: x * 5.0)


def descriptor():
    class Field:
        def __set_name__(self, owner, name):
            self.held = {"scale": 1.0}

        def __get__(self, instance, owner):
            return self.held["scale"]

    class Settings:
        scale = Field()

    settings = Settings()
    return lambda x: x * settings.scale, lambda: vars(Settings)["scale"].held.update(scale=5.0)


def partial_method():
    class Work:
        scale = 1.0

        def scaled(self, x, factor):
            return x * factor * self.scale

        doubled = functools.partialmethod(scaled, factor=2.0)

    work = Work()
    return lambda x: work.doubled(x), lambda: setattr(Work, "scale", 5.0)


def other_class():
    class Once:
        def scaled(self, x):
            return x * 1.0

    class Often:
        def scaled(self, x):
            return x * 5.0

    work = Once()
    return lambda x: work.scaled(x), lambda: setattr(work, "__class__", Often)


def all_fields():
    settings = types.SimpleNamespace(alpha=1.0)
    return lambda x: torch.add(x, x, **vars(settings)), lambda: setattr(settings, "alpha", 5.0)


def data_of_a_cpu_tensor():
    scale = torch.tensor(1.0)
    return lambda x: x * scale.item(), lambda: setattr(scale, "data", torch.tensor(5.0))


def view_of_bytes():
    held = bytearray(b"a")
    view = memoryview(held)
    return lambda x: x * view[0], lambda: held.__setitem__(0, 5)


def context_variable():
    scale = contextvars.ContextVar("scale", default=1.0)
    return lambda x: x * scale.get(), lambda: scale.set(5.0)


def default_of_a_context_variable_that_is_set():
    scale = contextvars.ContextVar("scale", default=2.0)
    return lambda x: x * scale.get(1.0), lambda: scale.set(2.0)


def table_in_a_context_variable():
    held, scale = {"value": 1.0}, contextvars.ContextVar("scale")
    scale.set(held)
    return lambda x: x * scale.get()["value"], lambda: held.update(value=5.0)


def context_object():
    scale = contextvars.ContextVar("scale")
    context = contextvars.copy_context()
    context.run(scale.set, 1.0)
    return lambda x: x * context[scale], lambda: context.run(scale.set, 5.0)


def chain_of_tables():
    chain = collections.ChainMap({}, {"scale": 1.0})
    return lambda x: x * chain["scale"], lambda: chain.maps.insert(0, {"scale": 5.0})


class Held:
    scale = 1.0

    def scaled(self, x):
        return x * self.scale


def weak_reference():
    reference, held = weakref.ref(one := Held()), [one]
    return lambda x: x * reference().scale, lambda: setattr(held[0], "scale", 5.0)


def weak_reference_that_dies():
    reference, held = weakref.ref(one := Held()), [one]
    del one
    return lambda x: x * (5.0 if reference() is None else 1.0), held.clear


def weak_method():
    method, held = weakref.WeakMethod((one := Held()).scaled), [one]
    return lambda x: method()(x), lambda: setattr(held[0], "scale", 5.0)


def weak_values():
    table, held = weakref.WeakValueDictionary(one=(one := Held())), [one]
    return lambda x: x * table["one"].scale, lambda: setattr(held[0], "scale", 5.0)


def weak_keys():
    one = Held()
    table = weakref.WeakKeyDictionary({one: 1.0})
    return lambda x: x * table[one], lambda: table.update({one: 5.0})


def function_of_a_type():
    @functools.singledispatch
    def scaled(x):
        return x * 1.0

    return lambda x: scaled(x), lambda: scaled.register(torch.Tensor, lambda x: x * 5.0)


def method_of_a_type():
    settings = {"scale": 1.0}

    class Work:
        @functools.singledispatchmethod
        def scaled(self, x):
            return x

        @scaled.register(torch.Tensor)
        def _(self, x):
            return x * settings["scale"]

    work = Work()
    return lambda x: work.scaled(x), lambda: settings.update(scale=5.0)


def attribute_by_a_getter():
    settings = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))
    get = operator.attrgetter("inner.scale")
    return lambda x: x * get(settings), lambda: setattr(settings.inner, "scale", 5.0)


def attribute_by_a_partial():
    get = functools.partial(getattr, held := Held(), "scale")
    return lambda x: x * get(), lambda: setattr(held, "scale", 5.0)


def method_of_a_table():
    get = (table := {"scale": 1.0}).get
    return lambda x: x * get("scale"), lambda: table.update(scale=5.0)


def view_of_a_table():
    values = (table := {"scale": 1.0}).values()
    return lambda x: x * sum(values), lambda: table.update(scale=5.0)


def attribute_of_a_function():
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 1.0
    return lambda x: scaled(x), lambda: setattr(scaled, "scale", 5.0)


def attribute_of_an_enumeration():
    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.scale = 1.0
    return lambda x: x * Kind.ONE.scale, lambda: setattr(Kind.ONE, "scale", 5.0)


def property_of_a_metaclass():
    class Scaled(type):
        scale = property(lambda kind: kind.inner)

    class Settings(metaclass=Scaled):
        inner = 1.0

    return lambda x: x * Settings.scale, lambda: setattr(Settings, "inner", 5.0)


def attribute_that_a_class_looks_up():
    class Settings:
        def __getattr__(self, name):
            return self.__dict__["held"][name]

    settings = Settings()
    settings.held = {"scale": 1.0}
    return lambda x: x * settings.scale, lambda: settings.held.update(scale=5.0)


def number_of_ctypes():
    number = ctypes.c_float(1.0)
    return lambda x: x * number.value, lambda: setattr(number, "value", 5.0)


VALUES = [last_element_of_a_long_array, end_of_a_long_text, class_attribute,
          attribute_that_hides_its_class, attribute_with_a_default,
          attribute_by_its_text, slot, members_of_a_set, order_of_a_table, elements_of_an_array,
          queue, user_dict, class_method, method_without_gradients, autograd_function,
          backward_of_a_function, item, call, length, context, code_of_a_function, negative_zero,
          base_class_behind_super, other_method_of_a_base_class, descriptor, partial_method,
          other_class, all_fields, data_of_a_cpu_tensor, view_of_bytes, chain_of_tables,
          attribute_by_a_partial, method_of_a_table, attribute_of_a_function,
          attribute_of_an_enumeration, attribute_that_a_class_looks_up,
          number_of_ctypes]  # fmt: skip
CONSTANTS = [context_variable, default_of_a_context_variable_that_is_set,
             table_in_a_context_variable, context_object, weak_reference,
             weak_reference_that_dies, weak_method, weak_values, weak_keys, function_of_a_type,
             method_of_a_type, attribute_by_a_getter, view_of_a_table,
             property_of_a_metaclass]  # fmt: skip


@pytest.mark.parametrize("make", VALUES)
def test_values_that_change_later_are_seen(make):
    found = []
    for compiled in (lambda function: function, ltc.compile):
        function, change = make()
        step = compiled(function)
        with metrics.counted() as grown:
            for number in range(CALLS):
                if number == CHANGED:
                    change()
                y = step(ones(1))
        found.append(y.tolist())
    assert found[0] == found[1]
    assert grown["ReplayedCalls"] >= 4, dict(grown)


def test_kinds_of_calls_that_long_values_alone_tell_apart():
    step = ltc.compile(lambda x, text: x * text.count("a"))
    with metrics.counted() as grown:
        found = [step(ones(1), "a" * 200 + "b" * (n % 2) + "a" * (n % 2)).item() for n in range(8)]
    assert found == [200.0, 201.0] * 4
    assert grown["ReplayedCalls"] == 4


@pytest.mark.parametrize("make", CONSTANTS)
def test_a_constant_that_changes_is_found_by_the_check(make):
    function, change = make()
    step = ltc.compile(function)
    with metrics.counted() as grown:
        for _ in range(CHANGED):
            step(ones(1))
    assert grown["ReplayedCalls"] == CHANGED - 2
    change()
    with config.override(LTC_REPLAY_CHECK=1), pytest.raises(StepDiffers):
        step(ones(1))
    assert torch.equal(step(ones(1)), function(ones(1)))


@pytest.mark.parametrize("make", [weakref.ref, weakref.proxy])
def test_a_module_behind_a_weak_reference_alone_is_refused(make):
    model = nn.Linear(1, 1).to("ltc")
    reference = make(model)
    step = ltc.compile(lambda x: (reference() if make is weakref.ref else reference)(x).detach())
    found, expected = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(6):
            with torch.no_grad():
                model.weight.fill_(number)
            found.append(step(ones(1)).item())
            expected.append(model(ones(1)).item())
    assert found == expected
    assert "neither an argument nor found in what it closes over" in step.refusal


def test_a_weak_reference_beside_another_name_is_followed():
    model = nn.Linear(1, 1).to("ltc")
    model.owner = weakref.ref(model)
    step = ltc.compile(lambda x: model(x).detach() * model.owner().in_features)
    with metrics.counted() as grown:
        for _ in range(5):
            step(ones(1))
    assert grown["ReplayedCalls"] == 3


def test_an_integer_that_becomes_a_float_is_another_value():
    settings = types.SimpleNamespace(scale=1)
    step = ltc.compile(lambda x: x * settings.scale)
    for _ in range(5):
        assert step(ones(1, dtype=torch.int64)).dtype == torch.int64
    settings.scale = 1.0
    assert step(ones(1, dtype=torch.int64)).dtype == torch.float32


def test_a_float_argument_that_is_the_other_zero_is_another_value():
    step = ltc.compile(lambda x, shift: 1 / (x * shift))
    found = [step(ones(1), zero).item() for zero in [0.0] * 5 + [-0.0]]
    assert found == [float("inf")] * 5 + [float("-inf")]


def test_a_large_array_is_refused():
    array = np.ones(100_000)
    step = ltc.compile(lambda x: x * float(array[0]))
    with pytest.warns(UserWarning, match=r"numpy.ndarray of 800000 bytes"):
        for _ in range(4):
            step(ones(1))


def test_fields_that_the_code_does_not_name_may_change():
    @dataclasses.dataclass
    class Run:
        scale: float = 2.0
        number: int = 0

    run = Run()
    step = ltc.compile(lambda x: x * run.scale)
    with metrics.counted() as grown:
        for _ in range(6):
            run.number += 1
            step(ones(1))
    assert grown["ReplayedCalls"] == 4


# --- names of attributes, and of globals ---------------------------------------------------------

TRAINING = """
import torch, torch.nn.functional as F

model = torch.nn.Linear(3, 1, device="ltc")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scale = 1.0

def train(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    sizes = [p.grad.size(0) for p in model.parameters()]
    model.weight.data.mul_(1.0)
    optimizer.step()
    return loss.detach() * {scale} * sum(sizes) * (lambda y: y.size(0))(x)

def loops(compiled, x):
    global {name}
    found = []
    step_of = compiled(train)
    for {name} in range({count}):
        found.append(step_of(x))
    return torch.stack(found)
"""


def looped(compiled, **parts):
    torch.manual_seed(0)
    names = {"__name__": "training"}
    exec(compile(TRAINING.format(**{"scale": "1", **parts}), "training.py", "exec"), names)
    return names["loops"](compiled, ones(2, 3))


@pytest.mark.native("the bits of replayed calls are compared with those of recorded ones")
@pytest.mark.parametrize("name", ["step", "data", "grad", "size", "mean", "zero_grad", "backward"])
def test_a_global_with_the_name_of_an_attribute_may_change(name):
    with metrics.counted() as grown:
        found = looped(ltc.compile, name=name, count=70)
    assert torch.equal(found, looped(lambda function: function, name=name, count=70))
    assert grown["ReplayedCalls"] == 67


@pytest.mark.parametrize(
    "scale",
    [
        "scale",
        "(lambda: scale)()",
        "[scale for _ in range(1)][0]",
        "globals()['scale']",
        "type('Made', (), {'of': lambda self: scale})().of()",
    ],
)
def test_a_global_that_the_code_loads_is_looked_at(scale):
    found = looped(ltc.compile, name="scale", count=5, scale=scale)
    assert torch.equal(found, looped(lambda f: f, name="scale", count=5, scale=scale))
    assert found[-1] > found[1] > found[0] == 0


def test_a_name_may_be_an_attribute_and_a_global():
    found = looped(ltc.compile, name="size", count=5, scale="size * x.size(0)")
    assert torch.equal(found, looped(lambda f: f, name="size", count=5, scale="size * x.size(0)"))


def test_a_method_called_print_prints_nothing():
    class Log:
        def print(self, x):
            return x * 2

    log = Log()
    step = ltc.compile(lambda x: log.print(x))
    with metrics.counted() as grown:
        assert [step(ones(1)).item() for _ in range(5)] == [2.0] * 5
    assert grown["ReplayedCalls"] == 3


# --- tensors that are changed besides their elements --------------------------------------------

weight = torch.ones(2, 3, device="ltc")


def transposes(x):
    x.t_()
    return x * 2


def adds_a_dimension(x):
    x.unsqueeze_(0)
    return x * 2


def wants_gradients(x):
    x.requires_grad_()
    return x.detach() * 2


def transposes_a_global(x):
    weight.t_()
    return x * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [(transposes, r"changes the shape of args\[0\]"),
     (adds_a_dimension, r"changes the shape of args\[0\]"),
     (wants_gradients, r"changes the requires_grad of args\[0\] from False to True"),
     (transposes_a_global, "changes the shape of the object at 'weight'")],
)  # fmt: skip
def test_a_call_that_changes_the_layout_of_a_tensor_is_refused(function, reason):
    kept = weight.shape
    step = ltc.compile(function)
    with pytest.warns(UserWarning, match=reason):
        for _ in range(6):
            x, other = ones(2, 3), ones(2, 3)
            step(x)
            after = weight.shape
            function(other)
            assert (x.shape, x.requires_grad) == (other.shape, other.requires_grad)
            if function is transposes_a_global:
                assert after != kept  # until it was called once more
            assert weight.shape == kept


# --- odd objects, and numbers that come out -----------------------------------------------------


class AttributeDict(dict):
    __getattr__ = dict.__getitem__  # raises KeyError for an attribute that is not there


def test_an_object_may_raise_another_error_for_an_attribute_that_it_lacks():
    settings = AttributeDict(scale=2.0)
    step = ltc.compile(lambda x: x * settings.scale)
    assert [step(ones(1)).item() for _ in range(4)] == [2.0] * 4
    settings["scale"] = 3.0
    assert step(ones(1)).item() == 3.0


def test_what_is_called_may_raise_another_error_for_an_attribute_that_it_lacks():
    class Doubles:
        def __getattr__(self, name):
            raise RuntimeError(name)

        def __call__(self, x):
            return x * 2

    step = ltc.compile(Doubles())
    assert [step(ones(1)).item() for _ in range(4)] == [2.0] * 4


Pair = collections.namedtuple("Pair", ["rate", "others"])


def test_numbers_that_come_out_are_plain():
    def numbers(x, rate):
        kept = [rate * 2, {"rate": rate}]
        return x * rate, rate * 2, kept, Pair(rate, (rate + 1,))

    step = ltc.compile(numbers)
    for _ in range(4):
        _, double, (in_list, in_dict), pair = step(ones(1), 0.5)
        found = [double, in_list, in_dict["rate"], pair.rate, pair.others[0]]
        assert found == [1.0, 1.0, 0.5, 0.5, 1.5]
        assert {type(number) for number in found} == {float}


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.devices(2)
def test_another_current_device():
    weights = [torch.full((2,), float(n), device=f"ltc:{n}") for n in range(2)]

    @ltc.compile
    def made():
        x = torch.ones(2, device="ltc") * 3
        return x + weights[x.device.index]

    found = []
    for number in range(3 * CALLS):
        with torch.ltc.device(number // CHANGED % 2), metrics.counted() as grown:
            result = made()
            found.append((result.device.index, result.tolist()))
    expected = [number // CHANGED % 2 for number in range(3 * CALLS)]
    assert found == [(n, [3.0 + n] * 2) for n in expected]
    assert grown["ReplayedCalls"] == 1


# --- tensors are inputs, wherever they are held ---------------------------------------------------


class Slotted:
    __slots__ = ("held",)


class WithAttribute:
    pass


def in_an_attribute(w):
    thing = WithAttribute()
    thing.held = w
    return (lambda: thing.held), functools.partial(setattr, thing, "held")


def in_a_slot(w):
    thing = Slotted()
    thing.held = w
    return (lambda: thing.held), functools.partial(setattr, thing, "held")


def in_an_attribute_of_an_attribute(w):
    thing = WithAttribute()
    thing.inner = WithAttribute()
    thing.inner.held = w
    return (lambda: thing.inner.held), functools.partial(setattr, thing.inner, "held")


def in_a_class(w):
    class Holder:
        held = w

        def get(self):
            return self.held

    holder = Holder()
    return (lambda: holder.get()), functools.partial(setattr, Holder, "held")


def in_a_module(w):
    module = nn.Module()
    module.held = w
    return (lambda: module.held), functools.partial(setattr, module, "held")


def in_a_buffer(w):
    module = nn.Module()
    module.register_buffer("held", w)
    return (lambda: module.held), functools.partial(setattr, module, "held")


def in_a_list_of_a_module(w):
    module = nn.Module()
    module.parts = [{"held": w}]
    return (lambda: module.parts[0]["held"]), functools.partial(module.parts[0].__setitem__, "held")


def in_a_queue(w):
    queue = collections.deque([w])
    return (lambda: queue[0]), functools.partial(queue.__setitem__, 0)


def in_a_wrapped_table(w):
    table = collections.UserDict(held=w)
    return (lambda: table["held"]), functools.partial(table.__setitem__, "held")


def in_a_chain_of_tables(w):
    chain = collections.ChainMap({}, {"held": w})
    return (lambda: chain["held"]), functools.partial(chain.maps[1].__setitem__, "held")


def in_an_attribute_of_a_function(w):
    def get():
        return get.held

    get.held = w
    return (lambda: get()), functools.partial(setattr, get, "held")


def in_a_closure_of_a_function(w):
    def get():
        return w

    def change(other):
        nonlocal w
        w = other

    return (lambda: get()), change


def in_a_partial(w):
    held = [w]
    get = functools.partial(held.__getitem__, 0)
    return (lambda: get()), functools.partial(held.__setitem__, 0)


def by_a_property(w):
    class Holder:
        kept = w
        held = property(lambda self: self.kept)

    holder = Holder()
    return (lambda: holder.held), functools.partial(setattr, Holder, "kept")


def by_an_item(w):
    class Holder:
        def __init__(self):
            self.parts = {"held": w}

        def __getitem__(self, key):
            return self.parts[key]

    holder = Holder()
    return (lambda: holder["held"]), functools.partial(holder.parts.__setitem__, "held")


def in_a_global_of_another_module(w):
    module = types.ModuleType("holder")
    exec("def get():\n    return held", module.__dict__)
    module.held = w
    return (lambda: module.get()), functools.partial(setattr, module, "held")


def in_a_named_tuple(w):
    held = collections.namedtuple("Holder", ["held"])
    table = {"of": held(w)}
    return (lambda: table["of"].held), lambda other: table.update(of=held(other))


def in_a_data_class(w):
    @dataclasses.dataclass
    class Holder:
        held: torch.Tensor

    holder = Holder(w)
    return (lambda: holder.held), functools.partial(setattr, holder, "held")


def as_a_key(w):
    table = {w: 1.0}

    def put(other):
        table.clear()
        table[other] = 1.0

    return (lambda: next(iter(table))), put


def in_a_set(w):
    held = {w}

    def put(other):
        held.clear()
        held.add(other)

    return (lambda: next(iter(held))), put


HOLDERS = [as_a_key, in_a_set, in_an_attribute, in_a_slot, in_an_attribute_of_an_attribute, in_a_class, in_a_module,
           in_a_buffer, in_a_list_of_a_module, in_a_queue, in_a_wrapped_table,
           in_a_chain_of_tables, in_an_attribute_of_a_function, in_a_closure_of_a_function,
           in_a_partial, by_a_property, by_an_item, in_a_global_of_another_module,
           in_a_named_tuple, in_a_data_class]  # fmt: skip


def tensors_of(device, compiled, hold):
    """The results and the tensors, while the held one is written to, exchanged, moved and a view."""
    base = torch.arange(12.0).reshape(4, 3).to(device)
    w = torch.ones(3).to(device)
    get, put = hold(w)

    def function(x):
        held = get()
        held.add_(x.sum())
        return held * 2 + base[0]

    step = compiled(function)
    for number in range(20):
        if number == 5:
            w.mul_(0.5)  # another value
        if number in (7, 16):
            put(base[number % 3])  # a view of what is used otherwise too
        if number == 10:
            put(base[2])  # another view
        if number == 13:
            put(w)
        if number == 15:
            w.data = torch.full((3,), 7.0).to(device)
        yield step(torch.full((2,), float(number)).to(device))
        yield from (base, w, get())


@pytest.mark.parametrize("tier", ["native", "auto"])
@pytest.mark.parametrize("hold", HOLDERS)
def test_a_tensor_is_an_input_wherever_it_is_held(hold, tier):
    expected = [x.tolist() for x in tensors_of("cpu", lambda function: function, hold)]
    with config.override(LTC_TIER=tier), metrics.counted() as grown:
        found = [x.tolist() for x in tensors_of("ltc", ltc.compile, hold)]
    assert found == expected
    assert grown["ReplayedCalls"] >= 8, dict(grown)
    assert not grown["ReplayRefused"]
