"""Show the LLVM backend's stages of a graph, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ltc.backends.llvm.schedule import ProgramStep, planned_steps
from ltc.ir.graph import Graph, show
from ltc.ir.loop_nest import Affine, Guard, Kernel, Product, Unit, Value
from ltc.ir.node import Node, attr_text
from ltc.ir.tensor_type import dtype_name, type_text
from ltc.llvm.compiler import llvm_binding
from ltc.passes.pipeline import Pass

AFTER_PASSES = ("kernels", "llvm", "assembly")


def explained(
    graph: Graph, passes: tuple[Pass, ...], donated: frozenset[int]
) -> Iterator[tuple[str, str]]:
    """(stage, text) after each pass, then of AFTER_PASSES; made only as far as it is asked for.

    Args:
        donated: Positions of the inputs that may be written over.
    """
    for one in passes:
        graph = one.run(graph)
        yield one.name, show(*graph.outputs)
    steps = planned_steps(graph, donated)
    yield "kernels", units_text([step.unit for step in steps], graph.lines)
    yield "llvm", _of_each_kernel(steps, graph, lambda text: text)
    yield "assembly", _of_each_kernel(steps, graph, llvm_binding.assembly)


def _of_each_kernel(steps: list[ProgramStep], graph: Graph, form: Callable[[str], str]) -> str:
    """The form of every kernel's text, equal ones once, behind the users' lines it computes."""
    lines: dict[str, dict[str, None]] = {}
    for step in steps:
        for code in step.codes:
            found = (graph.lines[node] for node in step.writes if node in graph.lines)
            lines.setdefault(code.text, {}).update(dict.fromkeys(found))
    return "\n".join(
        "".join(f"; {line}\n" for line in found) + form(text) for text, found in lines.items()
    )


# --- Kernels and products as text: what they loop over, what they load, compute and store --------


def units_text(units: list[Unit], lines: Mapping[Node, str]) -> str:
    """Units in the order in which they run, with the users' lines they come from.

    A buffer is called %0, %1, ... in the order of its first use.
    """
    names: dict[Node, str] = {}
    blocks = []
    for unit in units:
        if isinstance(unit, Kernel):
            shown = [f"loops over {_extents(unit.space)}", *_body(unit, names)]
            made = unit.writes()
        elif isinstance(unit, Product):
            shown = _product(unit, names)
            made = unit.writes()
        else:
            operands = " ".join(_name(n, names) for n in unit.inputs)
            shown = [f"{_name(unit, names)} = {unit.op} {operands}    {type_text(unit.type)}"]
            made = (unit,)
        found = dict.fromkeys(lines[node] for node in made if node in lines)
        blocks.append(
            "\n  ".join([shown[0] + "".join(f"    {line}" for line in found), *shown[1:]])
        )
    return "\n".join(blocks)


def _product(product: Product, names: dict[Node, str]) -> list[str]:
    operands = " ".join(
        f"{_name(access.node, names)}[{_form(access.offset)}]" for access in product.operands
    )
    head = f"{product.node.op} {operands}    {type_text(product.node.type)}"
    if product.epilogue is None:
        made = ", ".join(_name(node, names) for node in product.results if node is not None)
        return [f"{made} = {head}"]
    return [f"{_name(product.node, names)} = {head}", *_body(product.epilogue, names)]


def _body(kernel: Kernel, names: dict[Node, str]) -> list[str]:
    numbers: dict[Value, str] = {}
    rows = []
    if kernel.base is not None:
        rows.append(f"{_name(kernel.stores[0].node, names)} begins as {_name(kernel.base, names)}")
    for value in kernel.values():
        numbers[value] = f"v{len(numbers)}"
        operands = "".join(f" {numbers[x]}" for x in value.operands)
        what = _computed(value, names) + operands + _guards(value.guards)
        over = f" over i{kernel.depth}..." if value.kind == "reduced" else ""
        rows.append(f"{numbers[value]} = {what}{over}    {dtype_name(value.dtype)}")
    for store in kernel.stores:
        place = f"{_name(store.node, names)}[{_form(store.offset)}]"
        sets = f"{place} {store.sums}=" if store.sums else f"{place} ="
        rows.append(f"{sets} {numbers[store.value]}    {type_text(store.node.type)}")
    return rows


def _computed(value: Value, names: dict[Node, str]) -> str:
    if value.kind == "load":
        node, offset = value.data
        return f"load {_name(node, names)}[{_form(offset)}]"
    if value.kind == "lookup":
        node, offset, step, extent = value.data
        return f"look up {_name(node, names)}[{_form(offset)} + {step}*], of {extent}, at"
    if value.kind == "position":
        return _form(value.data)
    if value.kind == "random":
        return f"random bits at {_form(value.data[0])}"
    if value.kind == "constant":
        return str(value.data)
    if value.kind == "choose":
        return "choose"
    attrs = value.data.attrs if isinstance(value.data, Node) else value.data or ()
    attributes = "".join(f" {key}={attr_text(one)}" for key, one in attrs)
    return f"{value.op}{attributes}"


def _name(node: Node, names: dict[Node, str]) -> str:
    return names.setdefault(node, f"%{len(names)}")


def _extents(space: tuple[int, ...]) -> str:
    return " x ".join(map(str, space)) or "one point"


def _form(form: Affine) -> str:
    terms = [f"i{v}" if c == 1 else f"{c}*i{v}" for v, c in form.terms]
    if form.constant or not terms:
        terms.append(str(form.constant))
    return " + ".join(terms)


def _guards(guards: tuple[Guard, ...]) -> str:
    inside = [f"{guard.low} <= {_form(guard.form)} < {guard.high}" for guard in guards]
    return f" where {' and '.join(inside)}" if inside else ""
