// nn.GRUCell and nn.LSTMCell in other calls, as on the CPU; see ltc/device/ops/recurrent_layers.py.
#include "own_kernels.h"

namespace ltc {
namespace {

using Bias = const std::optional<Tensor>&;

void check_sizes(const Tensor& x, const Tensor& hidden, const Tensor& of_x, const Tensor& of_hidden) {
  TORCH_CHECK(x.size(1) == of_x.size(1), "input has inconsistent input_size: got ", x.size(1), " expected ",
              of_x.size(1));
  TORCH_CHECK(hidden.size(1) == of_hidden.size(1), "hidden0 has inconsistent hidden_size: got ", hidden.size(1),
              ", expected ", of_hidden.size(1));
}

Tensor gru(const Tensor& x, const Tensor& hidden, const Tensor& of_x, const Tensor& of_hidden, Bias x_bias, Bias bias) {
  check_sizes(x, hidden, of_x, of_hidden);
  const auto now = at::linear(x, of_x, x_bias).chunk(3, 1), before = at::linear(hidden, of_hidden, bias).chunk(3, 1);
  const auto r = (now[0] + before[0]).sigmoid(), z = (now[1] + before[1]).sigmoid();
  const auto n = at::addcmul(now[2], r, before[2]).tanh();
  return at::addcmul(n, z, hidden - n);
}

std::tuple<Tensor, Tensor> lstm(const Tensor& x, at::TensorList states, const Tensor& of_x, const Tensor& of_hidden,
                                Bias x_bias, Bias bias) {
  check_sizes(x, states[0], of_x, of_hidden);
  const auto gates = (at::linear(x, of_x, x_bias) + at::linear(states[0], of_hidden, bias)).chunk(4, 1);
  const auto cell = at::addcmul(gates[1].sigmoid() * states[1], gates[0].sigmoid(), gates[2].tanh());
  return {gates[3].sigmoid() * cell.tanh(), cell};
}

}  // namespace

void register_cells(torch::Library& autograd, torch::Library& device) {
  for (auto* library : {&autograd, &device}) {
    library->impl("gru_cell", TORCH_FN(gru));
    library->impl("lstm_cell", TORCH_FN(lstm));
  }
}

}  // namespace ltc
