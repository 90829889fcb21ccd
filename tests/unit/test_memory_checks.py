"""What LTC_CHECK finds: memory that is read and nobody wrote, and what is written out of place."""

import random
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config, errors
from ltc.backends.llvm import schedule
from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.liveness import Lifetimes
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.node import Node, make
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.native.kernel_run import EntryCall, KernelRun, entry_address
from ltc.llvm.ops import memory_checks
from ltc.llvm.ops.memory_checks import CheckRow, CheckRows, MemoryFinding
from ltc.passes import memory_planner


def done(*rows: CheckRow) -> MemoryFinding | None:
    """What the kernel finds that follows the rows, whose buffers are tensors."""
    buffers = list({id(t): t for row in rows for t in (row.buffer, row.other)}.values())
    frame = torch.tensor([tensor.data_ptr() for tensor in buffers])
    number = {id(tensor): k for k, tensor in enumerate(buffers)}
    table = torch.tensor([
        [row.action, number[id(row.buffer)], row.shift, number[id(row.other)], *row[4:]]
        for row in rows
    ])  # fmt: skip
    fault = torch.zeros(1, dtype=torch.int64)
    code = memory_checks.rows_code(CheckRows(0, len(rows)), None)
    arguments = (table.data_ptr(), frame.data_ptr(), fault.data_ptr(), *code.numbers)
    words = torch.zeros(1 + len(arguments), dtype=torch.int64)
    pairs = tuple(n for argument in arguments for n in (0, argument))
    KernelRun([EntryCall(entry_address(code.text, code.name), pairs, 1)], 1).launch(
        words.data_ptr()
    )
    (word,) = fault.tolist()
    assert word == 0 or word & 0xFF == 1
    return memory_checks.finding(word >> 8) if word else None


def filled(buffer: torch.Tensor, shift: int, nbytes: int, word: int) -> CheckRow:
    return CheckRow(memory_checks.FILL, buffer, shift, buffer, 0, nbytes, word)


def looked_at(buffer: torch.Tensor, shift: int, nbytes: int, word: int) -> CheckRow:
    return CheckRow(memory_checks.LOOK, buffer, shift, buffer, shift, nbytes, word)


@pytest.mark.parametrize("dtype", memory_checks.POISONS, ids=str)
def test_no_byte_of_one_poison_is_the_same_in_the_other(dtype):
    first, second = (struct.pack("<q", word) for word in memory_checks.POISONS[dtype])
    assert all(a != b for a, b in zip(first, second))


FLOATS = [dtype for dtype in memory_checks.POISONS if dtype.is_floating_point]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_poison_is_a_signalling_nan(dtype):
    elements = torch.tensor([memory_checks.POISONS[dtype][0]]).view(dtype)
    quiet = {torch.float64: 51, torch.float32: 22, torch.float16: 9, torch.bfloat16: 6}[dtype]
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert elements.isnan().all() and not (elements.view(whole) & 1 << quiet).any()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 100])
def test_a_filling_covers_its_bytes_and_no_others(nbytes):
    word = memory_checks.POISONS[torch.float64][0]
    memory = torch.zeros(120, dtype=torch.uint8)
    assert done(filled(memory, 3, nbytes, word)) is None
    pattern = torch.frombuffer(bytearray(struct.pack("<q", word) * 20), dtype=torch.uint8)
    assert torch.equal(memory[3 : 3 + nbytes], pattern[:nbytes])
    assert not memory[:3].any() and not memory[3 + nbytes :].any()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 100])
def test_a_look_tells_the_first_byte_that_changed(nbytes):
    word = memory_checks.POISONS[torch.bfloat16][0]
    for changed in range(-1, nbytes + 1):
        memory = torch.zeros(120, dtype=torch.uint8)
        done(filled(memory, 5, nbytes, word))
        memory[5 + changed :] += 1
        if changed == -1:
            memory[5:] -= 1  # only the byte before is another
        inside = 0 <= changed < nbytes
        found = done(looked_at(memory, 5, nbytes, word))
        assert found == (MemoryFinding(0, 5 + changed) if inside else None)


def test_a_look_may_be_before_the_first_byte():
    memory = torch.zeros(128, dtype=torch.uint8)
    memory[60] = 1
    assert done(looked_at(memory[64:], -64, 64, 0)) == MemoryFinding(0, -4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16, torch.bool], ids=str)
def test_a_comparison_tells_the_first_element_that_differs(dtype):
    before = torch.ones(23, dtype=dtype)
    for differs in (None, 0, 1, 7, 8, 21, 22):
        now, kept = before.clone(), torch.zeros(23, dtype=dtype)
        if differs is not None:
            now[differs:] = 0
        copied = CheckRow(memory_checks.COPY, before, 0, kept, 0, before.nbytes)
        found = done(
            copied, CheckRow(memory_checks.COMPARE, kept, 0, now, 0, now.nbytes, dtype.itemsize)
        )
        assert found == (None if differs is None else MemoryFinding(1, differs))


def test_a_digest_tells_any_change_of_one_byte():
    for nbytes in (1, 8, 29):
        memory, word = torch.arange(40, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        assert done(CheckRow(memory_checks.DIGEST, memory, 0, word, 0, nbytes)) is None
        for changed in (None, *range(nbytes + 1)):
            now = memory.clone()
            if changed is not None:
                now[changed] += 1
            found = done(CheckRow(memory_checks.VERIFY, now, 0, word, 0, nbytes))
            assert (found is not None) == (changed is not None and changed < nbytes)


def test_what_is_found_first_is_told():
    memory = torch.ones(64, dtype=torch.uint8)
    looks = [looked_at(memory, 0, 8, 0x0101010101010101), *[looked_at(memory, 16, 8, 0)] * 2]
    assert done(*looks) == MemoryFinding(1, 16)


def test_the_bytes_that_a_kernel_reserves_are_read_from_its_text():
    text = "%v1 = alloca [16 x float], align 64\n%v2 = alloca [3 x i16], align 64\n%v3 = load i64"
    assert memory_checks.stack_bytes(text) == 70 and memory_checks.stack_bytes("ret void") == 0


def test_values_have_their_guards_for_themselves():
    drawn, bytes_of = random.Random(0), {}
    lifetimes = []
    for name in range(60):
        first = drawn.randrange(20)
        bytes_of[name] = drawn.randrange(1, 300)
        lifetimes.append(
            memory_planner.Lifetime(name, bytes_of[name], first, first + drawn.randrange(6))
        )
    hosts = [memory_planner.OutputBuffer("output", 1000, 12)]
    places, size = memory_planner.plan(lifetimes, hosts, 2, guard=64)
    assert {host for host, _ in places.values()} == {memory_planner.BLOCK, "output"}
    ends = {memory_planner.BLOCK: size, "output": 1000}
    for one in lifetimes:
        host, offset = places[one.name]
        low, high = offset - 64, offset + memory_planner.aligned(one.nbytes) + 64
        assert offset % 64 == 0 and low >= 0 and high <= ends[host]
        for other in lifetimes:
            if other is one or other.last < one.first or one.last < other.first:
                continue
            place, start = places[other.name]
            end = start + memory_planner.aligned(other.nbytes) + 64
            assert place != host or (end <= low + 64 and start - 64 < low) or start - 64 >= high


# --- programs ------------------------------------------------------------------------------------


@pytest.fixture
def as_kernel(monkeypatch):
    """Makes `body(builder)` the kernel of TAKE: x is %p0, the index %p1, the result %p2."""

    def use(body) -> None:
        in_loops, reference = schedule.is_native, schedule._step

        def step(unit, kernels):
            if not (isinstance(unit, Node) and unit.op is ops.TAKE):
                return reference(unit, kernels)
            b = Builder(width=1)
            body(b)
            code = KernelCode(function_text("kernel", 3, b), (*unit.inputs, unit), 1)
            # a unit that is no Node makes the step native
            return schedule.ProgramStep(code, unit.inputs, (unit,), (code,))

        monkeypatch.setattr(schedule, "_step", step)
        monkeypatch.setattr(
            schedule, "is_native", lambda node: node.op is not ops.TAKE and in_loops(node)
        )

    return use


def given(*shape, index=0, dtype=torch.float32) -> Node:
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def launched(graph: Graph, *buffers: torch.Tensor, donated=()):
    with config.override(LTC_CHECK=1):
        computation = LlvmBackend().compile(graph, 0, frozenset(donated))
    return computation.launch(list(buffers), [])


def taken() -> list[float]:
    """One element of three that the program has made, by the kernel of `as_kernel`."""
    x, index = given(3), given(1, index=1, dtype=torch.int64)
    node = build.take(x + 1.0, index, 0)
    graph = Graph((x, index), (), (node,), {node: Origin("aten::take", "user.py:7 in f")})
    buffers = torch.tensor([1.0, 2, 3]), torch.tensor([0])
    return launched(graph, *buffers)[0].tolist()


def copy(source: str, target: str, element: int = 0, to: int = 0):
    """The body of a kernel that copies one float."""

    def body(b: Builder) -> None:
        value = b.effect(f"load float, ptr {b.address(source, element, 'float')}")
        b.emit(f"store float {value}, ptr {b.address(target, to, 'float')}")

    return body


def test_a_kernel_that_does_what_it_should_is_left_alone(as_kernel):
    as_kernel(copy("%p0", "%p2"))
    assert taken() == [2]


def test_the_message_names_the_kernel_the_fault_and_the_line_and_what_to_do(as_kernel):
    as_kernel(lambda b: None)
    with pytest.raises(errors.MemoryFault) as raised:
        taken()
    assert str(raised.value) == (
        "LTC_CHECK looked at the kernel of take f32[1]: element 0 of the value of take f32[1] was "
        "not written, or was made from unwritten memory: two runs over different fillings "
        "of that memory give different values. This is a fault of ltc, not of the program: please report it. "
        "LTC_BACKEND=eager runs the program without generated kernels."
    )
    assert raised.value.__notes__ == ["while running aten::take called at user.py:7 in f"]


@pytest.mark.parametrize(
    "body",
    [
        copy("%p2", "%p2"), copy("%p0", "%p2", element=3), copy("%p0", "%p2", element=-1),
        copy("%p0", "%p2", to=1),
    ],
    ids=["the result's memory", "behind an operand", "before an operand", "beside the result"],
)  # fmt: skip
def test_what_nobody_wrote_is_found_where_a_kernel_reads_it(as_kernel, body):
    as_kernel(body)
    with pytest.raises(errors.MemoryFault, match="element 0 of the value of take f32"):
        taken()


def both(*bodies):
    def body(b: Builder) -> None:
        for one in bodies:
            one(b)

    return body


@pytest.mark.parametrize(
    ("target", "to", "found"),
    [
        ("%p2", 1, r"wrote beside the value of take f32\[1\]: byte 4 changed"),
        ("%p2", -1, r"wrote beside the value of take f32\[1\]: byte -4 changed"),
        ("%p0", 3, r"wrote beside the value of add f32\[3\]: byte 12 changed"),
        ("%p0", 2, r"the value of add f32\[3\], which it reads, has changed since it was made"),
    ],
)
def test_what_is_written_where_it_may_not_is_found(as_kernel, target, to, found):
    as_kernel(both(copy("%p0", "%p2"), copy("%p0", target, to=to)))
    with pytest.raises(errors.MemoryFault, match=found):
        taken()


def test_an_index_that_nobody_wrote_is_found_in_integers_as_well(as_kernel):
    x, index = given(3, dtype=torch.int64), given(1, index=1, dtype=torch.int64)

    def body(b: Builder) -> None:
        total = b.value(f"add i64 {b.effect('load i64, ptr %p0')}, {b.effect('load i64, ptr %p2')}")
        b.emit(f"store i64 {total}, ptr %p2")

    as_kernel(body)
    graph = Graph((x, index), (), (build.take(x, index, 0),))
    with pytest.raises(errors.MemoryFault, match="made from unwritten memory"):
        launched(graph, torch.tensor([1, 2, 3]), torch.tensor([0]))


def test_a_value_whose_memory_is_given_away_too_early_is_found_by_its_last_reader(monkeypatch):
    """Two steps early: what has its place is written well, and by another step."""
    x, w = given(16, 16), given(16, 16, index=1)
    kept = make(ops.MATMUL, x, w)
    second = make(ops.MATMUL, make(ops.TANH, kept), w)
    third = make(ops.MATMUL, make(ops.TANH, second), w)
    result = make(ops.MATMUL, third, kept)
    graph = Graph((x, w), (), (result,))
    buffers = torch.randn(16, 16), torch.randn(16, 16)
    launched(graph, *buffers)
    all_of = Lifetimes.all

    def shorter(self):
        lives = all_of(self)
        return [replace(x, last=x.first) if x.name is kept else x for x in lives]

    monkeypatch.setattr(Lifetimes, "all", shorter)
    with pytest.raises(errors.MemoryFault, match="which it reads, has changed since it was made"):
        launched(graph, *buffers)


def test_a_step_that_writes_over_its_operand_runs_twice_and_writes_once():
    p, x = given(5, 7), given(5, 7, index=1)
    shifted = x - build.max_of(x, (1,), keepdim=True)  # in the place of another value
    graph = Graph((p, x), (), (p + 1.0, make(ops.EXP, shifted)))
    parameter, operand = torch.zeros(5, 7), torch.randn(5, 7)
    result, other = launched(graph, parameter, operand, donated=[0])
    assert result is parameter and torch.equal(parameter, torch.ones(5, 7))
    torch.testing.assert_close(other, (operand - operand.amax(1, keepdim=True)).exp())


def test_a_check_begins_with_the_next_step_and_ends_with_its_block():
    x = torch.randn(5, device="ltc")

    def compiled(checked) -> int:
        with config.override(LTC_CHECK=checked), metrics.counted() as grown:
            (x * 3).cpu()
        return grown["UncachedCompile"]

    ltm.mark_step(wait=True)
    assert [compiled(checked) for checked in (0, 1, 0, 1)] == [1, 1, 0, 0]


def test_faults_in_the_generator_are_found():
    """Some of them; all: python scripts/compare/seeded_faults.py."""
    names = ("sums are never begun", "the mask of a rest is one lane too wide")
    script = str(Path(__file__).parents[2] / "scripts" / "compare" / "seeded_faults.py")
    chosen = [word for name in names for word in ("--fault", name)]
    done = subprocess.run([sys.executable, script, *chosen], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("LTC_CHECK looked at the kernel of") == 2
    assert done.stdout.endswith("2 of 2 as they should be\n")
