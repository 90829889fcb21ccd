// Attention without dropout is one call of ltc::attention; see ltc/device/ops/sdpa.py.
#include <ATen/ExpandUtils.h>

#include "own_kernels.h"

namespace ltc {
namespace {

using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                             bool, std::optional<double>);

// True if a mask may be added to the scores, whose sizes it is spread to; so does none.
bool fits_scores(const IValue& bias, const Tensor& query, const Tensor& key) {
  if (bias.isNone()) return true;
  const auto& mask = bias.toTensor();
  const int64_t scores[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  return mask.dim() >= 2 && (mask.scalar_type() == at::kBool || mask.scalar_type() == query.scalar_type()) &&
         at::is_expandable_to(mask.sizes(), scores);
}

bool has_fused_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const IValue& bias) {
  if (query.dim() != 4 || key.dim() != 4 || !query.numel() || !key.numel()) return false;
  if (!fits_scores(bias, query, key)) return false;
  const auto heads = query.sizes().slice(0, 2);
  return key.sizes().slice(0, 2) == heads && value.sizes().slice(0, 2) == heads &&
         query.size(3) == value.size(3) && query.size(3) == key.size(3);
}

// True if it is an ordinary call without dropout, to which the fused pair applies; Python knows the others.
bool is_simple(const Tensor& query, const Tensor& key, const Tensor& value, const IValue& mask) {
  const auto type = query.scalar_type();
  const auto is_ordinary = [&](const Tensor& one) {
    return is_untransformed(one) && one.device().is_privateuseone() && one.device() == query.device();
  };
  const bool are_ordinary = takes_plain() && is_ordinary(query) && is_ordinary(key) && is_ordinary(value) &&
                            (mask.isNone() || is_ordinary(mask.toTensor()));
  return are_ordinary && (type == at::kFloat || type == at::kDouble) && key.scalar_type() == type &&
         value.scalar_type() == type && !query.is_nested() && has_fused_kernel(query, key, value, mask) &&
         key.size(2) == value.size(2);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool shares_heads) {
  const auto bias = mask && mask->defined() ? IValue(*mask) : IValue();
  if (dropout != 0 || (is_causal && !bias.isNone()) || !is_simple(query, key, value, bias))
    return at::_ops::scaled_dot_product_attention::redispatch(kPythonDifferentiable, query, key, value, mask, dropout,
                                                              is_causal, scale, shares_heads);
  return std::get<0>(at::_scaled_dot_product_fused_attention_overrideable(query, key, value, mask,
                                                                          /*dropout_p=*/0, is_causal, false, scale));
}

// The elements of a row side by side.
Tensor dense(const IValue& operand) {
  const auto& x = operand.toTensor();
  return x.stride(-1) == 1 ? x : x.contiguous();
}

// What a mask adds to each score; undefined where there is none.
std::optional<Tensor> added(const IValue& bias, const Tensor& query, const Tensor& key) {
  if (bias.isNone()) return std::nullopt;
  Tensor mask = bias.toTensor();
  const double none = -std::numeric_limits<double>::infinity();
  if (mask.scalar_type() == at::kBool)
    mask = at::zeros(mask.sizes(), query.options()).masked_fill_(mask.logical_not(), none);
  return mask.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
}

}  // namespace

bool run_fused_attention(torch::jit::Stack& host) {
  const bool is_gradient = host.size() == 11;  // gradient, then the operands; result, logarithms, drawn
  if (is_gradient && !host[7].isNone()) return false;
  const auto* given = &host[is_gradient];
  const auto &query = given[0].toTensor(), &key = given[1].toTensor();
  if (!has_fused_kernel(query, key, given[2].toTensor(), given[3])) return false;
  const auto bias = added(given[3], query, key);
  torch::jit::Stack made;
  if (is_gradient) {
    auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dense(host[0]), dense(host[1]), dense(host[2]), dense(host[3]), dense(host[5]),
        host[6].toTensor().contiguous(), 0, host[8].toBool(), bias, host[9].toOptional<double>());
    made = {IValue(of_query), IValue(of_key), IValue(of_value)};
  } else {
    auto [result, logarithms] = at::_scaled_dot_product_flash_attention_for_cpu(
        dense(host[0]), dense(host[1]), dense(host[2]), 0, host[4].toBool(), bias, host[5].toOptional<double>());
    made = {IValue(result), IValue(logarithms)};
  }
  host = std::move(made);
  return true;
}

void register_attention(torch::Library& autograd) {
  autograd.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

// (query, key, value, bias, dropout, causal, debugs, scale)
void AttentionKernel::operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, torch::jit::Stack* stack) {
  const torch::jit::Stack given(stack->end() - 8, stack->end());
  if (given[4].toDouble() != 0) return CallKernel::operator()(handle, keys, stack);
  static const auto attention = c10::Dispatcher::singleton().findSchemaOrThrow("ltc::attention", "").typed<Signature>();
  auto [result, logarithms] = attention.redispatch(
      DispatchKeySet(DispatchKey::PrivateUse1), given[0].toTensor(), given[1].toTensor(), given[2].toTensor(),
      given[3].toOptional<Tensor>(), given[5].toBool(), given[7].toOptional<double>());
  stack->resize(stack->size() - 8);
  const Tensor none;
  torch::jit::push(*stack, std::move(result), std::move(logarithms), none, none, given[0].toTensor().sym_size(-2),
                   given[1].toTensor().sym_size(-2), none, none, none);
}

}  // namespace ltc
