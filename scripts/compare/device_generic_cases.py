"""Device-generic tests of torch's modules and optimizers, made of the tables that torch itself tests with.

PyTorch's test files are in no wheel; its tables of modules, optimizers and their inputs are. These tests do
with them what PyTorch's own tests of modules and optimizers do: compare with the CPU. torch_device_tests.py
runs them.
"""

import copy
import pickle

import ltc  # noqa: F401  first: torch's tests look for devices when they are imported

# isort: split
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import module_db, modules
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase, freeze_rng_state, run_tests
from torch.utils._pytree import tree_leaves, tree_map_only

FLOATS = (torch.float32, torch.float64)
SUMS = {"atol": 1e-4, "rtol": 1e-4}  # of float32 gradients, which are added in another order


def on_cpu(values):
    """The same values on the CPU, with gradients of their own."""

    def moved(tensor):
        return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, moved, values)


class TestModules(TestCase):
    """Each module of torch.nn, with each of its inputs."""

    def _made(self, module_info, device, dtype, training):
        for given in module_info.module_inputs_func(
            module_info, device=device, dtype=dtype, requires_grad=True, training=training
        ):
            if given.forward_input is not None:
                build = given.constructor_input
                with freeze_rng_state():
                    module = module_info.module_cls(*build.args, **build.kwargs)
                    if isinstance(module, LazyModuleMixin):  # its first call makes its parameters
                        module = module.to(dtype)
                        module(*on_cpu(given.forward_input.args))
                yield module.to(device, dtype).train(training), given.forward_input

    @modules(module_db, allowed_dtypes=FLOATS)
    def test_forward_and_gradients_are_those_of_the_cpu(self, device, dtype, module_info, training):
        for module, given in self._made(module_info, device, dtype, training):
            plain, args, kwargs = copy.deepcopy(module).cpu(), given.args, given.kwargs
            plain_args, plain_kwargs = on_cpu(args), on_cpu(kwargs)
            torch.manual_seed(0)
            found = module(*args, **kwargs)
            torch.manual_seed(0)
            expected = plain(*plain_args, **plain_kwargs)
            if _draws(module):
                continue
            self.assertEqual(found, expected, exact_device=False)
            _backward(found), _backward(expected)
            leaves = [*module.parameters(), *tree_leaves((args, kwargs))]
            plain_leaves = [*plain.parameters(), *tree_leaves((plain_args, plain_kwargs))]
            for one, other in zip(leaves, plain_leaves):
                if isinstance(one, torch.Tensor) and one.is_leaf:
                    close = SUMS if dtype is torch.float32 else {}
                    self.assertEqual(one.grad, other.grad, exact_device=False, **close)

    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_a_pickled_module_computes_the_same(self, device, dtype, module_info, training):
        for module, given in self._made(module_info, device, dtype, training):
            if _draws(module):
                continue
            again = pickle.loads(pickle.dumps(module))
            found = module.eval()(*given.args, **given.kwargs)
            self.assertEqual(again.eval()(*given.args, **given.kwargs), found)

    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_a_state_dict_can_be_loaded(self, device, dtype, module_info, training):
        for module, _ in self._made(module_info, device, dtype, training):
            state = copy.deepcopy(module.state_dict())
            module.load_state_dict(state, strict=True)
            self.assertEqual(module.state_dict(), state)


def _draws(module) -> bool:
    dropout = getattr(module, "dropout", 0)
    return module.training and (
        "Dropout" in type(module).__name__ or bool(dropout) or type(module).__name__ == "RReLU"
        or type(module).__name__.startswith("Transformer")
    )  # fmt: skip


def _backward(output) -> None:
    leaves = output if isinstance(output, (tuple, list)) else [output]
    total = sum(
        one.sum() for one in leaves if isinstance(one, torch.Tensor) and one.is_floating_point()
    )
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()


class TestOptimizers(TestCase):
    """Each optimizer of torch.optim, with each of its settings."""

    @optims(optim_db, dtypes=FLOATS)
    def test_steps_are_those_of_the_cpu(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device=device):
            found, expected = (
                self._trained(optim_info.optim_cls, settings.kwargs, one, dtype)
                for one in (device, "cpu")
            )
            self.assertEqual(found, expected, exact_device=False, msg=str(settings))

    @optims(optim_db, dtypes=(torch.float32,))
    def test_a_state_dict_resumes(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device=device):
            torch.manual_seed(0)
            weight = torch.randn(4, 3, device=device, dtype=dtype, requires_grad=True)
            optimizer = optim_info.optim_cls([weight], **settings.kwargs)
            self._step(optimizer, weight)
            twin = weight.detach().clone().requires_grad_()
            other = optim_info.optim_cls([twin], **settings.kwargs)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            self._step(optimizer, weight), self._step(other, twin)
            self.assertEqual(twin, weight)

    def _trained(self, optimizer_class, settings, device, dtype):
        torch.manual_seed(0)
        weight = torch.randn(4, 3, dtype=dtype).to(device).requires_grad_()
        settings = tree_map_only(torch.Tensor, lambda one: one.to(device), dict(settings))
        optimizer = optimizer_class([weight], **settings)
        for _ in range(3):
            self._step(optimizer, weight)
        return weight.detach()

    def _step(self, optimizer, weight):
        def closure():
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            return loss

        if type(optimizer).__name__ == "SparseAdam":
            optimizer.zero_grad()
            weight.grad = torch.ones_like(weight).cpu().to_sparse().to(weight.device)
            optimizer.step()
        else:
            optimizer.step(closure)


instantiate_device_type_tests(TestModules, globals(), only_for="privateuse1")
instantiate_device_type_tests(TestOptimizers, globals(), only_for="privateuse1")

if __name__ == "__main__":
    run_tests()
