#include <ATen/core/grad_mode.h>

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

// nn.GRUCell and nn.LSTMCell in other calls, as on the CPU; see ltc/device/ops/recurrent_layers.py.
using Bias = const std::optional<Tensor>&;

// Raise in torch's words.
void check_sizes(const Tensor& x, const Tensor& h, const Tensor& wx, const Tensor& wh) {
  TORCH_CHECK(x.size(1) == wx.size(1), "input has inconsistent input_size: got ", x.size(1), " expected ", wx.size(1));
  TORCH_CHECK(h.size(1) == wh.size(1), "hidden0 has inconsistent hidden_size: got ", h.size(1), ", expected ",
              wh.size(1));
}

Tensor gru_cell(const Tensor& x, const Tensor& h, const Tensor& of_x, const Tensor& of_h, Bias x_bias, Bias bias) {
  check_sizes(x, h, of_x, of_h);
  const auto now = at::linear(x, of_x, x_bias).chunk(3, 1), before = at::linear(h, of_h, bias).chunk(3, 1);
  const auto r = (now[0] + before[0]).sigmoid(), z = (now[1] + before[1]).sigmoid();
  const auto n = at::addcmul(now[2], r, before[2]).tanh();
  return at::addcmul(n, z, h - n);
}

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& x, at::TensorList states, const Tensor& of_x,
                                     const Tensor& of_hidden, Bias x_bias, Bias bias) {
  check_sizes(x, states[0], of_x, of_hidden);
  const auto gates = (at::linear(x, of_x, x_bias) + at::linear(states[0], of_hidden, bias)).chunk(4, 1);
  const auto cell = at::addcmul(gates[1].sigmoid() * states[1], gates[0].sigmoid(), gates[2].tanh());
  return {gates[3].sigmoid() * cell.tanh(), cell};
}

}  // namespace

void register_linear(torch::Library& autograd, torch::Library& device, torch::Library& cpu) {
  autograd.impl("linear", TORCH_FN(linear));
  for (auto* library : {&autograd, &device}) {
    library->impl("gru_cell", TORCH_FN(gru_cell));
    library->impl("lstm_cell", TORCH_FN(lstm_cell));
  }
  cpu.impl("linear_backward", TORCH_FN(gradients));
}

}  // namespace ltc
