"""Views and writes in place: ltc returns what the CPU returns, and says where its tensors differ.

Every tensor of ltc appears contiguous, whatever view made it. From that follow the only
differences, stated by the tests at the end: `view` of a transposed tensor succeeds and aliases,
strides are those of the shape, and writes between overlapping views need no check, because the
values are read before any is written.
"""

import os
import random
import warnings

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.aten.call import CallResult
from ltc.device.immediate.notes import Notes
from ltc.device.recording.tensors import current_device
from ltc.errors import LtcError
from tests.drawn import seeds
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.also_native


def ramp(*shape: int, device: str) -> torch.Tensor:
    """Distinct float64 values from 1 upwards."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape).double() / 7 + 1).to(device)


# --- a write through a view ---------------------------------------------------------------------


@pytest.mark.compared
def test_a_row_written_in_place_changes_its_base(device):
    x = ramp(3, 4, device=device)
    x[0].add_(1)
    return x


@pytest.mark.compared
def test_an_item_set_through_a_flat_view_changes_its_base(device):
    x = ramp(3, 4, device=device)
    x.view(-1)[3] = 5
    return x


@pytest.mark.compared
def test_a_write_at_the_end_of_a_chain_reaches_every_view_of_it(device):
    x = ramp(4, 6, device=device)
    rows = x[1:3]
    turned = rows.t()
    part = turned[2:4]
    part.mul_(10)
    rows[0, 0] = -1
    return x, rows, turned, part


@pytest.mark.compared
def test_a_write_to_the_base_reaches_its_views(device):
    x = ramp(4, 6, device=device)
    view = x[1:3].t()
    x.mul_(2)
    x[1, 2] = 9
    return x, view, view.contiguous()


@pytest.mark.compared
def test_overlapping_siblings_see_each_others_writes(device):
    x = ramp(4, 4, device=device)
    top, middle = x[:2], x[1:3]
    top.add_(1)
    middle.mul_(3)
    top.zero_()
    return x, top, middle


@pytest.mark.compared
def test_an_expanded_view_follows_its_base(device):
    x = ramp(3, device=device)
    view = x.unsqueeze(0).expand(2, 3)
    x.add_(1)
    return x, view, view + 1


@pytest.mark.compared
def test_parts_of_a_split_write_to_their_base(device):
    x = ramp(6, 2, device=device)
    first, second, third = x.split(2)
    second.fill_(7)
    first[1].neg_()
    return x, first, second, third


@pytest.mark.compared
def test_parts_of_an_unbind_write_to_their_base(device):
    x = ramp(3, 2, device=device)
    _, middle, last = x.unbind(0)
    middle.fill_(7)
    return x, last


@pytest.mark.compared
def test_parts_of_a_chunk_write_to_their_base(device):
    x = ramp(6, 2, device=device)
    _, right = x.chunk(2, 1)
    right.fill_(7)
    return x


@pytest.mark.compared
def test_a_diagonal_writes_to_its_base(device):
    x = ramp(4, 4, device=device)
    x.diagonal().fill_(0)
    return x


@pytest.mark.compared
def test_a_window_of_unfold_follows_its_base(device):
    x = ramp(8, device=device)
    windows = x.unfold(0, 3, 2)
    x.add_(1)
    return windows


@pytest.mark.compared
def test_a_strided_view_writes_to_its_base(device):
    x = ramp(4, 4, device=device)
    x.as_strided((2, 2), (4, 1), 5).zero_()
    return x


WINDOWS_THAT_OVERLAP = {
    "unfold": lambda x: x.unfold(0, 5, 2)[2],
    "last_of_unfold": lambda x: x.unfold(0, 5, 2)[..., 1:3][1],
    "strided": lambda x: x.as_strided((4, 4), (2, 1))[1],
    "of_a_transposed": lambda x: x.view(4, 3).t().unfold(1, 2, 1)[:, 1],
    "of_a_window": lambda x: x.unfold(0, 6, 3)[1].unfold(0, 3, 1)[1],
}


@pytest.mark.parametrize("window", WINDOWS_THAT_OVERLAP)
@pytest.mark.compared
def test_a_write_to_one_of_overlapping_windows_reaches_the_base(device, window):
    x = ramp(12, device=device).requires_grad_()
    y = x * 1
    WINDOWS_THAT_OVERLAP[window](y).sin_()
    (y * y).sum().backward()
    return y, x.grad


@pytest.mark.compared
def test_parts_of_complex_numbers_in_overlapping_windows_are_written_to(device):
    x = torch.complex(ramp(12, device=device), ramp(12, device=device))
    x.unfold(0, 4, 2)[1].real.mul_(3)
    x.as_strided((3, 3), (2, 1))[1].imag[1:] = 7
    x.unfold(0, 3, 1)[2].view(torch.float64)[3] = 9
    return x


@pytest.mark.compared
def test_real_and_imaginary_parts_are_views(device):
    x = torch.complex(ramp(3, device=device), ramp(3, device=device))
    torch.view_as_real(x)[..., 0].mul_(2)
    x.real.add_(1)
    x.imag[0] = 5
    return x, x.conj().resolve_conj(), x.conj() + 1, x.conj().imag.resolve_neg()


@pytest.mark.compared
def test_a_view_of_other_dtype_writes_bits(device):
    x = ramp(4, device=device).float()
    bits = x.view(torch.int32)
    bits[0] = 0
    return x, bits


@pytest.mark.compared
def test_slices_with_steps_and_lists_update_in_place(device):
    x = ramp(4, 4, device=device)
    x[1:3, ::2] += 1
    x[..., -1] *= 2
    x[[0, 1], [1, 2]] = 0
    return x


@pytest.mark.compared
def test_index_writes_change_only_what_they_name(device):
    x = ramp(4, 4, device=device)
    x[torch.tensor([0, 2]).to(device)] = 0
    x[:, torch.tensor([1]).to(device)] += 10
    x.index_add_(0, torch.tensor([1, 1]).to(device), ramp(2, 4, device=device))
    x[1:3].scatter_(1, torch.tensor([[0], [1]]).to(device), -5.0)
    return x


@pytest.mark.compared
def test_masked_writes_change_only_what_they_name(device):
    x = ramp(4, 4, device=device)
    x[x > 2] = 0
    x[x == 0] += 3
    x.masked_fill_(x > 2.5, 1.0)
    return x


@pytest.mark.compared
def test_views_before_a_step_mark_alias_after_it(device):
    x = ramp(4, 4, device=device)
    view = x[1:3].t()[1]
    if device != "cpu":
        ltm.mark_step()
    view.fill_(-1)
    x[0] = view.sum()
    return x, view


# --- views in place, data, set ------------------------------------------------------------------


@pytest.mark.compared
def test_in_place_views_change_the_shape_of_one_tensor(device):
    x = ramp(1, 3, device=device)
    x.squeeze_(0)
    x.unsqueeze_(1)
    x.t_()
    x.add_(1)
    return x, list(x.shape)


@pytest.mark.compared
def test_a_tensor_transposed_in_place_keeps_its_views(device):
    x = ramp(2, 3, device=device)
    row = x[0]
    x.transpose_(0, 1)
    x[0].fill_(9)
    return x, row


@pytest.mark.compared
def test_data_shares_values_and_not_versions(device):
    x = ramp(3, device=device).requires_grad_()
    x.data.add_(1)
    x.data[0] = 9
    return x, x._version


@pytest.mark.compared
def test_data_can_be_set_to_another_shape(device):
    x = ramp(3, device=device).requires_grad_()
    y = ramp(2, 2, device=device)
    x.data = y
    y.add_(1)
    return x, list(x.shape)


@pytest.mark.compared
def test_a_detached_tensor_shares_values(device):
    x = ramp(3, device=device)
    y = x.detach()
    y.add_(1)
    x.mul_(2)
    return x, y


@pytest.mark.compared
def test_a_parameters_detached_views_share_its_values(device):
    parameter = nn.Parameter(ramp(2, 2, device=device))
    detached, flat = parameter.detach(), parameter.data.view(-1)
    flat[0] = 100
    detached[1, 1] = -1
    return parameter


@pytest.mark.compared
def test_set_shares_the_other_tensors_values(device):
    x, y = ramp(2, 3, device=device), ramp(4, device=device)
    x.set_(y)
    y.add_(1)
    return x


@pytest.mark.compared
@pytest.mark.parametrize("pending", [True, False])
def test_set_to_a_part_of_another_tensors_storage_shares_its_values(device, pending):
    x = ramp(6, device=device)
    if not pending:
        x.tolist()
    part = torch.empty(0, device=device, dtype=x.dtype)
    part.set_(x.untyped_storage(), 1, (2, 2), (1, 2))
    part.mul_(2)
    x.add_(1)
    return x, part


def test_a_tensor_is_not_set_to_the_storage_of_a_view():
    view = torch.arange(6.0, device="ltc")[2:]
    with pytest.raises(LtcError, match="storage of a view, whose offset is always 0"):
        torch.empty(0, device="ltc").set_(view.untyped_storage(), view.storage_offset(), (2,))


@pytest.mark.compared
def test_set_to_a_storage_in_another_dtype_shares_its_bytes(device):
    x = ramp(3, device=device)
    raw = torch.empty(0, dtype=torch.int64, device=device).set_(x.untyped_storage())
    raw[1] = 0
    odd = torch.arange(3, dtype=torch.int16, device=device).untyped_storage()
    return x, raw, torch.empty(0, dtype=torch.int32, device=device).set_(odd)


@pytest.mark.devices(2)
def test_a_tensor_is_not_set_to_a_storage_of_another_device():
    x = torch.ones(3, device="ltc:1")
    with pytest.raises(RuntimeError, match="on ltc:0 cannot be set to a storage on ltc:1"):
        torch.empty(0, device="ltc:0").set_(x.untyped_storage())


@pytest.mark.compared
def test_what_is_written_to_a_storage_is_in_the_tensors_set_to_it(device):
    storage = torch.UntypedStorage(24, device=device)
    whole = torch.empty(0, dtype=torch.double, device=device).set_(storage)
    part = torch.empty(0, dtype=torch.double, device=device).set_(storage, 1, (2,))
    storage.copy_(torch.arange(3.0, dtype=torch.double).untyped_storage())
    return whole, part


@pytest.mark.compared
def test_resize_keeps_the_shape_asked_for(device):
    return list(ramp(2, 3, device=device).resize_(2, 2).shape)


@pytest.mark.compared
def test_swapped_tensors_exchange_everything(device):
    a, b = ramp(3, device=device), ramp(2, device=device)
    torch.utils.swap_tensors(a, b)
    a.add_(1)
    return a, b


@pytest.mark.compared
def test_parameters_that_are_views_of_one_flat_buffer_train_it(device):
    flat = ramp(10, device=device)
    a, b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    (a.sum() * 2 + b.sum()).backward()
    gradients = torch.zeros(10, device=device, dtype=torch.double)
    gradients[:6].view(2, 3).copy_(a.grad)
    a.grad, b.grad = gradients[:6].view(2, 3), gradients[6:]
    torch.optim.SGD([a, b], 0.1).step()
    return flat, a, b


# --- out=, copies, lists ------------------------------------------------------------------------


@pytest.mark.compared
def test_out_resizes_an_empty_tensor_and_writes_views(device):
    empty = torch.empty(0, device=device, dtype=torch.double)
    torch.add(ramp(3, device=device), 1, out=empty)
    own = ramp(3, device=device)
    torch.mul(own, own, out=own)
    rows = ramp(2, 3, device=device)
    torch.exp(own, out=rows[0])
    return empty, own, rows


@pytest.mark.compared
def test_out_takes_several_tensors(device):
    values = torch.empty(0, device=device, dtype=torch.double)
    indices = torch.empty(0, device=device, dtype=torch.long)
    torch.max(ramp(3, 4, device=device), 1, out=(values, indices))
    return values, indices


@pytest.mark.compared
def test_out_of_stack_and_cat(device):
    stacked = torch.empty(2, 3, device=device, dtype=torch.double)
    torch.stack([ramp(3, device=device), ramp(3, device=device)], out=stacked)
    joined = torch.empty(6, device=device, dtype=torch.double)
    torch.cat([ramp(3, device=device), ramp(3, device=device)], out=joined)
    return stacked, joined


OUTS = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "max": lambda x, out: torch.max(x, 0, out=(out, torch.ones(7, dtype=torch.int64).to(x.device))),
    "index_select": lambda x, out: torch.index_select(
        x, 0, torch.zeros(2, dtype=torch.int64).to(x.device), out=out
    ),
    "inv": lambda x, out: torch.linalg.inv(x, out=out),
    "masked_select": lambda x, out: torch.masked_select(x, x > 0, out=out),
    "arange": lambda x, out: torch.arange(5, out=out),
    "linspace": lambda x, out: torch.linspace(0, 1, 5, out=out),
    "normal": lambda x, out: torch.normal(x, 1.0, out=out),
}


@pytest.mark.parametrize("tier", ["auto", "native"])
@pytest.mark.parametrize("name", OUTS)
def test_an_out_of_another_shape_is_told_of_as_often_as_on_the_cpu(name, tier, capfd):
    """Neither the kernel that says what the result is, nor the one that computes it, sees its shape."""
    told = []
    for device in ("cpu", "ltc", "ltc"):
        x, out = torch.eye(3).to(device), torch.ones(7, device=device)
        with config.override(LTC_TIER=tier), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                OUTS[name](x, out)
            except RuntimeError as error:
                told.append(str(error))
                continue
            ltm.mark_step()
            told.append(([one.filename for one in caught], out.shape))
    assert told[0] == told[1] == told[2]
    assert capfd.readouterr().err == ""


@pytest.mark.compared
def test_copy_broadcasts_casts_and_crosses_devices(device):
    x = ramp(3, 4, device=device)
    x.copy_(ramp(4, device=device))
    x[1].copy_(torch.ones(4))
    x[:, 0] = torch.tensor([1, 2, 3]).to(device)
    whole = torch.zeros(3, dtype=torch.int32, device=device)
    whole.copy_(ramp(3, device=device))
    return x, whole


@pytest.mark.compared
def test_fill_takes_tensors_of_one_element(device):
    x = ramp(3, device=device)
    x.fill_(torch.tensor(3.0))
    x[0] = torch.tensor(2.0, device=device)
    return x


@pytest.mark.compared
def test_list_operations_update_every_tensor(device):
    xs = [ramp(2, 2, device=device), ramp(3, device=device)]
    torch._foreach_add_(xs, 1)
    torch._foreach_mul_(xs, [2.0, 3.0])
    torch._foreach_addcdiv_(xs, xs, xs, 0.5)
    norms = torch._foreach_norm(xs)
    torch._foreach_copy_(xs, [ramp(2, 2, device=device), ramp(3, device=device)])
    torch._foreach_zero_(xs[:1])
    return xs, norms, torch._foreach_sqrt(xs)


@pytest.mark.compared
def test_list_operations_write_through_views(device):
    x = ramp(4, 2, device=device)
    torch._foreach_add_([x[0], x[2]], 1)
    return x


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.compared
def test_a_diagonal_written_in_place_has_its_gradient(device):
    x = ramp(4, 4, device=device).requires_grad_()
    y = x * 1
    y.diagonal().mul_(3)
    y.sum().backward()
    return y, x.grad


@pytest.mark.compared
def test_writes_through_several_views_have_their_gradients(device):
    x = ramp(3, 4, device=device).requires_grad_()
    y = x * 2
    y[0].mul_(y[1].clone())
    y[:, 1].add_(5)
    y.view(-1)[2:5].exp_()
    (y**2).sum().backward()
    return y, x.grad


@pytest.mark.compared
def test_a_write_through_a_chain_of_views_has_its_gradient(device):
    x = ramp(3, 4, device=device).requires_grad_()
    y = x * 2
    view = y.t()[1:3]
    row = view[0]
    row.mul_(3)
    (y * view.sum()).sum().backward()
    return y, x.grad, view, row


@pytest.mark.compared
def test_writes_to_base_and_view_in_turn_have_their_gradients(device):
    x = ramp(3, 4, device=device).requires_grad_()
    y = x.clone()
    view = y[1]
    y.mul_(2)
    view.mul_(3)
    y[2] = view
    y.sum().backward()
    return y, view, x.grad


@pytest.mark.compared
def test_parameters_update_under_no_grad(device):
    parameter = nn.Parameter(ramp(3, device=device))
    (parameter * parameter).sum().backward()
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
        parameter.grad.zero_()
        parameter.copy_(parameter + 1)
    return parameter, parameter.grad, parameter.is_leaf


@pytest.mark.compared
def test_gradients_zeroed_in_place_are_reused(device):
    model = nn.Linear(2, 2).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(ramp(2, 2, device=device)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    zeroed = model.weight.grad.clone()
    model(ramp(2, 2, device=device)).sum().backward()
    return zeroed, model.weight.grad


@pytest.mark.compared
def test_gradients_accumulate_in_the_same_tensor(device):
    x = ramp(3, device=device).requires_grad_()
    (x * 2).sum().backward()
    gradient = x.grad
    (x * 3).sum().backward()
    return gradient, x.grad, gradient is x.grad


@pytest.mark.compared
def test_gradients_of_one_expanded_value_do_not_alias(device):
    x, y = ramp(3, device=device).requires_grad_(), ramp(3, device=device).requires_grad_()
    (x + y).sum().backward()
    x.grad.add_(1)
    x.grad[0] = 7
    return x.grad, y.grad


@pytest.mark.compared
def test_a_view_made_under_no_grad_refuses_a_recorded_write(device, error_of):
    x = ramp(4, device=device).requires_grad_()
    with torch.no_grad():
        view = x[:2]
        view.mul_(2)
    return error_of(lambda: view.add_(1)), x


@pytest.mark.compared
def test_batch_norm_updates_its_running_statistics(device):
    model = nn.BatchNorm1d(3).double().to(device)
    model(ramp(4, 3, device=device))
    model(ramp(4, 3, device=device) * 2)
    return model.running_mean, model.running_var, model.num_batches_tracked


# --- versions and errors ------------------------------------------------------------------------


@pytest.mark.compared
def test_versions_count_writes_as_on_the_cpu(device):
    x = ramp(3, 4, device=device)
    view = x[0]
    before = [x._version, view._version]
    view.add_(1)
    x.mul_(2)
    detached = x.detach()
    detached.add_(1)
    after = [x._version, view._version, detached._version, x.data._version]
    return before, after, view._is_view(), view._base is x


@pytest.mark.compared
def test_a_leaf_that_requires_grad_refuses_a_write(device, error_of):
    x = ramp(3, device=device).requires_grad_()
    return error_of(lambda: x.add_(1)), error_of(lambda: x.view(-1).add_(1))


@pytest.mark.compared
def test_a_saved_value_written_before_backward_is_noticed(device, error_of):
    x = ramp(3, device=device).requires_grad_()
    y = x.exp()
    y.add_(1)
    base = x * 1
    part = base[0:2]
    z = (part * part).sum()
    base.add_(1)
    texts = [error_of(lambda: y.sum().backward()), error_of(z.backward)]
    return ["modified by an inplace operation" in text for text in texts]


@pytest.mark.compared
def test_one_of_several_views_refuses_a_write_that_needs_a_gradient(device, error_of):
    x = ramp(4, 2, device=device).requires_grad_()
    first, _ = (x * 1).split(2)
    return "multiple views" in error_of(lambda: first.add_(1))


@pytest.mark.compared
def test_a_write_of_a_wider_dtype_or_shape_is_refused(device, error_of):
    whole, row = torch.ones(3, dtype=torch.long, device=device), torch.ones(3, device=device)
    return (
        error_of(lambda: whole.add_(1.5)),
        error_of(lambda: row.add_(torch.ones(2, 3, device=device))),
    )


@pytest.mark.compared
def test_an_expanded_tensor_refuses_a_write(device, error_of):
    x = torch.ones(1, 3, device=device).expand(2, 3)
    return error_of(lambda: x.add_(1))[:60]


# --- copies of views ----------------------------------------------------------------------------

VIEWS_OF_A_MATRIX = {
    "whole": lambda x: x.view(4, 6),
    "transposed": lambda x: x.t(),
    "twice": lambda x: x.t().t(),
    "columns": lambda x: x[:, 1:3],
    "rows": lambda x: x[1:3],
    "every_second": lambda x: x[::2],
    "expanded": lambda x: x[:1].expand(5, 6),
    "one_row_expanded": lambda x: x[:1].expand(1, 6),
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(1, 2, 2),
    "moved": lambda x: x.view(2, 2, 6).movedim(0, 2),
    "pieces": lambda x: x.split(2, 1)[1],
    "unbound": lambda x: x.unbind(1)[2],
    "strided": lambda x: x.as_strided((2, 3), (6, 2), 1),
    "nothing": lambda x: x[:, 2:2],
    "one_element": lambda x: x[1, 1],
}
COPIES = {
    "contiguous": lambda y: y.contiguous(),
    "reshape_flat": lambda y: y.reshape(-1),
    "reshape_list": lambda y: y.reshape([1, y.numel()]),
    "reshape_same": lambda y: y.reshape(y.shape),
    "reshape_named": lambda y: y.reshape(shape=(y.numel(), 1)),
    "reshape_as": lambda y: y.reshape_as(torch.empty(y.numel(), device=y.device)),
    "torch_reshape": lambda y: torch.reshape(y, (-1,)),
    "flatten": lambda y: y.flatten(),
    "flatten_from": lambda y: torch.flatten(y, 0),
    "ravel": lambda y: torch.ravel(y),
}


@pytest.mark.parametrize("marks", [False, True], ids=["", "marked"])
@pytest.mark.parametrize("viewed", VIEWS_OF_A_MATRIX)
@pytest.mark.compared
def test_a_copy_of_a_view_shares_no_memory_and_a_view_does(device, viewed, marks):
    bases = [ramp(4, 6, device=device) for _ in COPIES]
    views = [VIEWS_OF_A_MATRIX[viewed](x) for x in bases]
    if marks:
        ltm.mark_step()
    results = []
    for x, y, (copied, copy_of) in zip(bases, views, COPIES.items()):
        if viewed == "nothing" and copied in ("reshape_flat", "torch_reshape"):
            continue  # -1 could be anything
        z = copy_of(y)
        x[1].add_(100)
        if (viewed, copied) != ("expanded", "reshape_same"):  # a view of that refuses the write
            z.mul_(2)
        results.append(z)
    return bases + views + results


@pytest.mark.compared
def test_a_view_that_was_written_to_is_still_copied(device):
    x = ramp(3, 4, device=device)
    y = x.t()
    y.add_(1)
    first = y.contiguous()
    y.zero_()
    second = y.reshape(-1)
    second.add_(5)
    return x, y, first, second


@pytest.mark.compared
def test_what_is_copied_from_a_view_and_to_one_keeps_its_own_strides(device):
    x, y, z = ramp(2, 3, device=device), ramp(3, 2, device=device), ramp(3, 2, device=device)
    turned = x.t()
    y[:].copy_(turned)
    turned.contiguous().add_(10)  # a copy
    z.copy_(turned)
    z[:2].contiguous().add_(5)  # a view
    return x, y, z


@pytest.mark.compared
def test_an_expanded_tensors_copy_takes_a_write(device):
    x = ramp(3, device=device)
    copies = x.expand(2, 3).contiguous(), x[:, None].expand(3, 2).reshape(-1)
    for copy in copies:
        copy.add_(1)
    return x, *copies


@pytest.mark.compared
def test_a_write_to_a_copy_of_a_view_is_no_write_to_what_it_shows(device):
    x = ramp(3, 4, device=device).requires_grad_()
    doubled = x * 1
    copy = doubled.t().reshape(-1)
    copy.mul_(3)
    (doubled.sum() + (copy * copy).sum()).backward()
    return x.grad, doubled.detach(), copy.detach()


def test_a_parameters_copy_keeps_its_value_when_an_optimizer_steps():
    p = nn.Parameter(ramp(3, 4, device="ltc"))
    before = p.t().contiguous()
    p.sum().backward()
    torch.optim.SGD([p], lr=1.0).step()
    torch.testing.assert_close(before.cpu(), ramp(3, 4, device="cpu").t().contiguous())


@pytest.mark.compared
def test_copies_of_views_inside_a_transform_and_a_function_mode(device):
    x = ramp(2, 3, 4, device=device)
    mapped = torch.func.vmap(lambda row: row.t().reshape(-1) * 2)(x)
    with torch.device(device):
        flat = x[0].t().reshape(-1)
        flat.add_(1)
    return mapped, flat, x


def test_copies_of_views_are_compiled_whole():
    def f(x):
        y = x.t()
        return y.contiguous() + y.reshape(4, 3) + torch.flatten(y).view(4, 3) + y.ravel().view(4, 3)

    x = ramp(3, 4, device="ltc")
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).cpu(), 4 * x.cpu().t())


# --- where ltc differs: always contiguous -------------------------------------------------------


def test_a_transposed_tensor_appears_contiguous():
    x = ramp(3, 4, device="ltc").t()
    assert x.is_contiguous() and x.stride() == (3, 1)
    assert x[1:, ::2].is_contiguous() and x[:1].expand(5, 3).is_contiguous()


def test_view_of_a_transposed_tensor_succeeds():
    x = ramp(3, 4, device="ltc")
    torch.testing.assert_close(x.t().view(-1).cpu(), x.cpu().t().reshape(-1))


def test_as_strided_counts_the_elements_of_the_tensor_it_is_given():
    x = ramp(4, 4, device="ltc").t()
    expected = x.cpu().contiguous().as_strided((2, 2), (4, 1), 5)
    torch.testing.assert_close(x.as_strided((2, 2), (4, 1), 5).cpu(), expected)


def test_channels_last_keeps_the_values():
    x = ramp(2, 3, 4, 4, device="ltc").to(memory_format=torch.channels_last)
    assert x.is_contiguous()
    torch.testing.assert_close(x.cpu().contiguous(), ramp(2, 3, 4, 4, device="cpu"))


def test_a_write_between_overlapping_views_reads_all_before_it_writes():
    x = ramp(5, device="ltc")
    x[1:].add_(x[:-1])
    expected = ramp(5, device="cpu")
    expected[1:] += expected[:-1].clone()
    torch.testing.assert_close(x.cpu(), expected)


@pytest.mark.compared
def test_a_filled_0_dim_tensor_promotes_as_a_tensor_not_as_its_number(device):
    exact = torch.zeros((), dtype=torch.float64, device=device)
    exact.fill_(0.3910130012774028)
    whole = torch.full((), 3, dtype=torch.int64, device=device)
    narrow = torch.ones((), dtype=torch.int32, device=device)
    return exact.sin(), exact + narrow, whole + narrow, whole * torch.ones((), device=device)


# --- random programs ----------------------------------------------------------------------------


def test_random_programs_of_views_and_writes_equal_the_cpu(equal):
    """Half of the programs with gradients. LTC_TEST_VIEW_SEED=n repeats the program of seed n.

    Half of them on the reference backend, which compiles nothing: writes are the recorder's.
    """
    compare_random_programs("ltc:0", 80, equal)


@pytest.mark.devices(2)
def test_random_programs_of_views_on_another_device_equal_the_cpu(equal):
    compare_random_programs("ltc:1", 20, equal)


def compare_random_programs(device: str, count: int, equal) -> None:
    chosen = os.environ.get("LTC_TEST_VIEW_SEED")
    for number, seed in enumerate([int(chosen)] if chosen else seeds(count)):
        backend = "eager" if number % 2 else config.value("LTC_BACKEND")
        with config.override(LTC_BACKEND=backend):
            compare_a_random_program(seed, device, bool(seed % 2), equal)


def compare_a_random_program(seed: int, device: str, with_gradient: bool, equal) -> None:
    try:
        expected = random_program(seed, "cpu", with_gradient)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            random_program(seed, device, with_gradient)
        return
    try:
        equal(random_program(seed, device, with_gradient), expected)
    except Exception as error:
        backend = config.value("LTC_BACKEND")
        error.add_note(f"repeat with LTC_TEST_VIEW_SEED={seed} (on {device}, backend {backend})")
        raise


def random_program(seed: int, device: str, with_gradient: bool) -> list[torch.Tensor]:
    """Views of views and writes through them, drawn from the seed; every tensor of the pool."""
    draw = random.Random(seed)
    leaf = (torch.arange(24.0).double().reshape(2, 3, 4) / 24 + 0.5).to(device)
    leaf.requires_grad_(with_gradient)
    pool, sums = [leaf * 1.0], []
    for _ in range(draw.randint(4, 12)):
        tensor = draw.choice(pool)
        if draw.random() < 0.57:
            if tensor.dim():
                pool.append(draw.choice(VIEWS)(tensor, draw))
        elif draw.random() < 0.85:
            draw.choice(WRITES)(tensor, pool, draw)
        else:
            sums.append((tensor * draw.random()).sum())
    total = sum((tensor * (i + 1)).sum() for i, tensor in enumerate(pool)) + sum(sums)
    results = [tensor.detach().cpu() for tensor in pool] + [total.detach().cpu()]
    if with_gradient:
        total.backward()
        results.append(leaf.grad.cpu())
    return results


def selected(tensor, draw):
    dim = draw.randrange(tensor.dim())
    return tensor.select(dim, draw.randrange(tensor.shape[dim]))


def narrowed(tensor, draw):
    dim = draw.randrange(tensor.dim())
    start = draw.randrange(tensor.shape[dim])
    return tensor.narrow(dim, start, draw.randint(1, tensor.shape[dim] - start))


def transposed(tensor, draw):
    return tensor.transpose(draw.randrange(tensor.dim()), draw.randrange(tensor.dim()))


def unsqueezed(tensor, draw):
    return tensor.unsqueeze(draw.randrange(tensor.dim()))


def every_second(tensor, draw):
    return tensor[(slice(None),) * draw.randrange(tensor.dim()) + (slice(None, None, 2),)]


def diagonal(tensor, draw):
    return tensor.diagonal(0, 0, 1) if tensor.dim() >= 2 else tensor.view(tensor.shape)


def squeezed(tensor, draw):
    return tensor.squeeze()


def permuted(tensor, draw):
    return tensor.permute(draw.sample(range(tensor.dim()), tensor.dim()))


def scale(tensor, pool, draw):
    tensor.mul_(draw.choice([0.5, 2.0, 1.5]))


def shift(tensor, pool, draw):
    tensor.add_(draw.random())


def bend(tensor, pool, draw):
    tensor.sin_()


def copy(tensor, pool, draw):
    other = draw.choice(pool)
    if other.shape == tensor.shape:
        tensor.copy_(other.clone() * 2)
    else:
        tensor.fill_(draw.random())


def scale_by_sum(tensor, pool, draw):
    tensor.mul_(draw.choice(pool).mean().clone())


VIEWS = (
    selected,
    narrowed,
    transposed,
    unsqueezed,
    every_second,
    diagonal,
    squeezed,
    permuted,
)
WRITES = (scale, shift, bend, copy, scale_by_sum)


def test_a_view_of_several_links_goes_along_where_its_path_becomes_another(monkeypatch):
    """Values get other names then; what the first link had made was held by no state, and kept its own."""
    moved = {}

    def known(notes, last, key):
        if key[0] is torch.ops.aten.slice.Tensor and not moved:
            old = key[1]
            moved[old] = CallResult(old.recorder, old.call, old.index, old.shape, old.dtype)
            notes.move_to(notes.last, moved)
            return None
        return look_up(notes, last, key)

    with process_of_one_device(LTC_TIER="auto"):
        policy = current_device().recorder().policy
        policy.sketches = False  # calls are noted at once
        base = torch.arange(6.0).reshape(2, 3).to("ltc") * 1
        view = base.t()[1:]
        ltm.mark_step()
        look_up = Notes._known
        monkeypatch.setattr(Notes, "_known", known)
        assert view.sum().item() == 12
        (renamed,) = moved.values()
        calls = current_device().recorder().ended.path_to()
        assert [call.args[0] for call in calls if call.name == "aten::slice.Tensor"] == [renamed]
