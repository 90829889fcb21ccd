"""Modules, optimizers and their schedules: what they hold, the hooks around them, and who steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.device.recording.tensors import is_lazy
from ltc.replay.conditions import Conditions, FoundTensor, Number, Obstacle
from ltc.replay.containers import same_places
from ltc.replay.objects import attribute, visit_class
from ltc.support.torch_private import GLOBAL_MODULE_HOOKS, GLOBAL_OPTIMIZER_HOOKS, hooks_of_tensor

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_STEP = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


# --- hooks --------------------------------------------------------------------------------------


def visit_hooks(use: Conditions, tables: Sequence[Any]) -> None:
    """That those without hooks have none, in one condition; what the others hold."""
    empty = [use.constant(table) for table in tables if not table]
    if empty:
        use.require(f"not ({' or '.join(empty)})")
    for table in tables:
        use.visit_new(table or None)


def _visit_hooks_of_users(use: Conditions, hooks: dict[int, Any]) -> None:
    """A profiler's own hook comes and goes, and changes nothing."""
    there = _of_users(hooks)
    for hook in there:
        use.visit_new(hook)
    users = f"{use.constant(_of_users)}({use.constant(hooks)})"
    use.require(f"[*map(id, {users})] == {[*map(id, there)]}")


def _of_users(hooks: dict[int, Any]) -> list[Any]:
    """Those that are not ltc's."""
    own = __name__.partition(".")[0] + "."
    return [
        hook for hook in hooks.values() if not str(attribute(hook, "__module__")).startswith(own)
    ]


def visit_hooks_of_tensor(use: Conditions, tensor: torch.Tensor, expression: str) -> None:
    for name in hooks_of_tensor:
        use.visit(getattr(tensor, name), f"{expression}.{name}")


# --- modules ------------------------------------------------------------------------------------


def visit_module(use: Conditions, module: torch.nn.Module) -> None:
    attributes = vars(module)
    table = use.constant(attributes)
    use.require(f"{use.constant(module)}.__class__ is {use.constant(type(module))}")
    use.require(f"len({table}) == {len(attributes)}")  # a new one may hide its class's
    for key, value in attributes.items():
        if key in _TABLES or key in use.names or not key.startswith("_"):
            use.visit(value, f"{table}[{key!r}]")
    visit_hooks(use, [attributes[key] for key in _HOOKS if key in attributes])
    _visit_method(use, type(module), "forward")
    if use.is_new(GLOBAL_MODULE_HOOKS):
        use.constant(GLOBAL_MODULE_HOOKS)
        visit_hooks(use, GLOBAL_MODULE_HOOKS)
        _visit_method(use, torch.nn.Module, "__call__")


def _visit_method(use: Conditions, kind: type, name: str) -> None:
    """Of a class of torch's too, where somebody may put another; then the rest of a user's class."""
    expression = f"{use.constant(kind)}.{name}"
    if expression not in use.methods and hasattr(kind, name):
        use.methods.add(expression)
        use.visit(getattr(kind, name), expression)
    visit_class(use, kind)


# --- optimizers ---------------------------------------------------------------------------------


def visit_optimizer(use: Conditions, optimizer: torch.optim.Optimizer) -> None:
    name, attributes = use.constant(optimizer), vars(optimizer)
    _visit_method(use, type(optimizer), "step")
    table = use.constant(attributes)
    use.require(f"len({table}) == {len(attributes)}")  # such as another `step`
    for key in sorted(({"step"} | use.names).intersection(attributes)):
        if key not in ("param_groups", "state", "defaults"):
            use.visit(attributes[key], f"{table}[{key!r}]")
    hooks = [attributes[key] for key in _HOOKS_OF_STEP if key in attributes]
    visit_hooks(use, hooks)
    if use.is_new(GLOBAL_OPTIMIZER_HOOKS):
        use.constant(GLOBAL_OPTIMIZER_HOOKS)
        for every in GLOBAL_OPTIMIZER_HOOKS:
            _visit_hooks_of_users(use, every)
    groups = use.constant(optimizer.param_groups)
    use.require(
        f"{name}.param_groups is {groups}", f"len({groups}) == {len(optimizer.param_groups)}"
    )
    for place, group in enumerate(optimizer.param_groups):
        use.require(f"{groups}[{place}] is {use.constant(group)}")
        _visit_group(use, group, use.constant(group))
    _visit_state(use, optimizer, name)


def visit_schedule(use: Conditions, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    """The numbers by which it counts its steps, and what it sets the rates of."""
    table = use.constant(vars(schedule))
    for key, value in vars(schedule).items():
        if isinstance(value, (int, float, list, torch.optim.Optimizer)):
            use.visit(value, f"{table}[{key!r}]")


def _visit_group(use: Conditions, group: dict, name: str) -> None:
    use.require(f"len({name}) == {len(group)}")
    for key, value in group.items():
        expression = f"{name}[{key!r}]"
        if key == "params":
            use.require(f"list(map(id, {expression})) == {list(map(id, value))}")
            for parameter in value:
                use.visit_new(parameter)
        elif value.__class__ is float:
            use.require(f"{expression}.__class__ is float")
            use.numbers.append(Number(expression, value, group, key, None))
        elif value.__class__ is tuple and all(part.__class__ is float for part in value):
            use.require(f"len({expression}) == {len(value)}")
            for index, part in enumerate(value):
                use.numbers.append(Number(f"{expression}[{index}]", part, group, key, index))
        else:
            use.visit(value, expression)


def _visit_state(use: Conditions, optimizer: torch.optim.Optimizer, name: str) -> None:
    state = use.constant(optimizer.state)
    use.require(f"{name}.state is {state}", f"len({state}) == {len(optimizer.state)}")
    for parameter, entries in optimizer.state.items():
        if not isinstance(entries, dict):
            raise Obstacle(f"{type(optimizer).__name__} keeps what is no table of a parameter")
        table = use.constant(entries)
        use.require(
            f"{state}[{use.constant(parameter)}] is {table}", same_places(use, entries, table)
        )
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and not is_lazy(value):
                counter = use.constant(value)
                use.require(f"{table}[{key!r}] is {counter}")
                use.counters.append(FoundTensor(value, counter, True))
            else:
                use.visit(value, f"{table}[{key!r}]")
