// Attention without dropout is one call of ltc::attention; see ltc/device/ops/sdpa.py.
#include <ATen/ExpandUtils.h>

#include "own_kernels.h"

namespace ltc {
namespace {

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

// (gradient, query, key, value, bias, wanted, result, logarithms, cumulated and longest rows, dropout, causal, seed,
// offset, scale): one that is not differentiated itself is a call of ltc::attention_gradient.
void attention_backward(const c10::OperatorHandle& handle, DispatchKeySet, torch::jit::Stack* stack) {
  const torch::jit::Stack given(stack->end() - 17, stack->end());
  bool is_plain = takes_plain() && !c10::GradMode::is_enabled() && given[12].toDouble() == 0;
  for (const auto& one : given) is_plain &= !one.isTensor() || is_untransformed(one.toTensor());
  if (!is_plain || (!given[4].isNone() && given[5].toBoolList()[3]))
    return handle.redispatchBoxed(kPythonDifferentiable, stack);
  static const auto gradient = c10::Dispatcher::singleton().findSchemaOrThrow("ltc::attention_gradient", "");
  stack->resize(stack->size() - 17);
  torch::jit::push(*stack, given[0], given[1], given[2], given[3], given[4], given[6], given[7], IValue(),
                   given[13], given[16], IValue());
  gradient.redispatchBoxed(DispatchKeySet(DispatchKey::PrivateUse1), stack);
  stack->emplace_back(Tensor());
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
  autograd.impl("_scaled_dot_product_fused_attention_overrideable_backward",
                torch::CppFunction::makeFromBoxedFunction<&attention_backward>());
}

// (query, key, value, bias, dropout, causal, debugs, scale)
void AttentionKernel::operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, torch::jit::Stack* stack) {
  const torch::jit::Stack given(stack->end() - 8, stack->end());
  if (given[4].toDouble() != 0) return CallKernel::operator()(handle, keys, stack);
  static const auto attention = c10::Dispatcher::singleton().findSchemaOrThrow("ltc::attention", "");
  stack->resize(stack->size() - 8);
  torch::jit::push(*stack, given[0], given[1], given[2], given[3], given[5], given[7]);
  attention.redispatchBoxed(DispatchKeySet(DispatchKey::PrivateUse1), stack);
  const Tensor none;
  torch::jit::push(*stack, none, none, given[0].toTensor().sym_size(-2), given[1].toTensor().sym_size(-2), none, none,
                   none);
}

}  // namespace ltc
