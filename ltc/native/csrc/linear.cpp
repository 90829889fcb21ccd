#include <ATen/core/grad_mode.h>

#include "held_value.h"
#include "modes.h"
#include "own_kernels.h"

namespace ltc {
namespace {

const DispatchKeySet kDirect(DispatchKey::PrivateUse1);
// torch's formula of the gradients stands under this key alone, whatever the device.
const DispatchKeySet kDifferentiable = kDirect | DispatchKeySet(DispatchKey::AutogradNestedTensor);

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool is_ordinary = takes_plain() && is_untransformed(x) && is_untransformed(weight) &&
                           (!bias || is_untransformed(*bias));
  if (!is_ordinary || weight.is_complex()) return at::_ops::linear::redispatch(kPythonDifferentiable, x, weight, bias);
  return at::_ops::linear::redispatch(at::GradMode::is_enabled() ? kDifferentiable : kDirect, x, weight, bias);
}

std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& x, const Tensor& gradient, const Tensor& weight,
                                             std::array<bool, 3> wanted) {
  Tensor of_x, of_weight, of_bias;
  const auto shape = gradient.sizes();
  const auto rows = gradient.reshape({c10::multiply_integers(shape.begin(), shape.end() - 1), shape.back()});
  if (wanted[0]) of_x = rows.mm(weight.conj()).reshape(x.sizes());
  if (wanted[1]) of_weight = rows.t().mm(x.reshape({rows.size(0), x.size(-1)}).conj());
  if (wanted[2]) of_bias = rows.sum(0);
  return {of_x, of_weight, of_bias};
}

}  // namespace

void register_linear(torch::Library& autograd, torch::Library& cpu) {
  autograd.impl("linear", TORCH_FN(linear));
  cpu.impl("linear_backward", TORCH_FN(gradients));
}

}  // namespace ltc
