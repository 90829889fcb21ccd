#include "typed.h"

#include <string_view>

#include "python_side.h"

namespace ltc {

Tensor PlainCall::read(const Tensor& given) {
  if (!given.defined()) return given;
  if (is_wrapped_number(given)) return given;
  const auto* held = held_by(given);
  const bool is_taken = held && held->host.defined() && !given.is_complex() &&
                        ((overload_.rule & ANY_STRIDES) || held->host.is_contiguous()) &&
                        !((overload_.rule & NOT_16_BITS) && is_16_bits(given));
  if (!is_taken) {
    is_refused_ = true;
    return Tensor();
  }
  if (target_.defined() && held->host.is_alias_of(target_) && !held->host.is_set_to(target_)) is_refused_ = true;
  return held->host;
}

Tensor PlainCall::written(Tensor& given) {
  auto* held = given.defined() ? held_by(given) : nullptr;
  const bool is_taken = held && held->host.defined() && !given.is_complex() &&
                        !((overload_.rule & NOT_16_BITS) && is_16_bits(given)) && may_be_written(*held) &&
                        !may_overlap(held->host);
  if (is_taken) target_ = held->host;
  else is_refused_ = true;
  return target_;
}

Tensor PlainCall::made(Tensor host) { return host.defined() ? named(holding(in_own_memory(std::move(host)))) : host; }

void PlainCall::finish_write(Tensor& written) {
  auto* impl = written.unsafeGetTensorImpl();
  if (overload_.rule & COUNTS_WRITES) impl->bump_version();
  if (target_.sizes() != impl->sizes()) impl->set_sizes_contiguous(target_.sizes());  // it was resized
  if (is_sketched_) session_.sketch.name_result(written);
}

void PlainCall::end() {
  session_.calls++;
  calls_here.fetch_add(1, std::memory_order_relaxed);
  if (session_.calls >= session_.looks_after) look();
}

namespace {

using Add = void (*)(torch::Library&, const std::string&, CallKernel*);

template <class Operator>
void add_one(torch::Library& to, const std::string& name, CallKernel* general) {
  Typed<Operator>::kernel = general;
  to.impl(name.c_str(), TORCH_FN(Typed<Operator>::call));
}

template <class... Operators>
std::unordered_map<std::string, Add> named() {
  std::unordered_map<std::string, Add> all;
  const auto full = [](std::string name, std::string_view overload) {
    return overload.empty() ? name : name.append(".").append(overload);
  };
  (all.emplace(full(Operators::name, Operators::overload_name), &add_one<Operators>), ...);
  return all;
}

}  // namespace

bool add_typed(torch::Library& to, const std::string& name, CallKernel* general) {
  namespace op = at::_ops;
  static const auto all = named<
      op::alias, op::detach, op::t, op::transpose_int, op::view, op::expand, op::slice_Tensor, op::select_int,
      op::unsqueeze, op::squeeze_dim, op::permute, op::add_Tensor, op::sub_Tensor, op::mul_Tensor,
      op::div_Tensor, op::maximum, op::minimum, op::neg, op::abs, op::exp, op::log, op::sqrt, op::rsqrt,
      op::reciprocal, op::pow_Tensor_Scalar, op::tanh, op::sigmoid, op::relu, op::silu, op::gelu, op::clamp,
      op::clone, op::where_self, op::masked_fill_Scalar, op::eq_Tensor, op::eq_Scalar, op::ne_Scalar,
      op::gt_Tensor, op::gt_Scalar, op::ge_Scalar, op::lt_Tensor, op::lt_Scalar, op::le_Scalar,
      op::threshold_backward, op::tanh_backward, op::sigmoid_backward, op::gelu_backward, op::silu_backward,
      op::sum, op::sum_dim_IntList, op::mean, op::mean_dim, op::argmax, op::_softmax,
      op::_log_softmax, op::_softmax_backward_data, op::_log_softmax_backward_data, op::mm, op::addmm, op::bmm,
      op::linear, op::linear_backward, op::embedding, op::native_layer_norm, op::native_layer_norm_backward,
      op::mse_loss, op::mse_loss_backward, op::nll_loss_forward, op::nll_loss_backward, op::gather,
      op::add__Tensor, op::sub__Tensor, op::mul__Tensor, op::div__Tensor, op::zero_, op::fill__Scalar>();
  const auto found = all.find(name);
  if (found == all.end()) return false;
  found->second(to, name, general);
  return true;
}

}  // namespace ltc
