// Attention without dropout is one call of ltc::attention; see ltc/device/ops/sdpa.py.
#include "modes.h"
#include "own_kernels.h"

namespace ltc {
namespace {

using Pair = std::tuple<Tensor, Tensor>;
using Signature = Pair(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, bool,
                       std::optional<double>);

Pair attended(const torch::jit::Stack& given) {
  static const auto attention = c10::Dispatcher::singleton().findSchemaOrThrow("ltc::attention", "").typed<Signature>();
  return attention.redispatch(DispatchKeySet(DispatchKey::PrivateUse1), given[0].toTensor(), given[1].toTensor(),
                              given[2].toTensor(), given[3].toOptional<Tensor>(), given[5].toBool(),
                              given[7].toOptional<double>());
}

bool has_fused_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const IValue& bias) {
  if (!bias.isNone() || query.dim() != 4 || !query.numel() || !key.numel()) return false;
  const auto heads = query.sizes().slice(0, 2);
  return key.sizes().slice(0, 2) == heads && value.sizes().slice(0, 2) == heads &&
         query.size(3) == value.size(3) && query.size(3) == key.size(3);
}

// True if it is an ordinary call without mask and dropout, to which the fused pair applies; Python knows the others.
bool is_simple(const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto type = query.scalar_type();
  const bool is_ordinary = takes_plain() && is_untransformed(query) && is_untransformed(key) &&
                           is_untransformed(value) &&
                           query.device().is_privateuseone() && key.device() == query.device() &&
                           value.device() == query.device();
  return is_ordinary && (type == at::kFloat || type == at::kDouble) && key.scalar_type() == type &&
         value.scalar_type() == type && !query.is_nested() && has_fused_kernel(query, key, value, IValue()) &&
         key.size(2) == value.size(2);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool shares_heads) {
  if ((mask && mask->defined()) || dropout != 0 || !is_simple(query, key, value))
    return at::_ops::scaled_dot_product_attention::redispatch(kPythonDifferentiable, query, key, value, mask, dropout,
                                                              is_causal, scale, shares_heads);
  return std::get<0>(at::_scaled_dot_product_fused_attention_overrideable(query, key, value, /*attn_bias=*/{},
                                                                          /*dropout_p=*/0, is_causal, false, scale));
}

// The elements of a row side by side.
Tensor dense(const IValue& operand) {
  const auto& x = operand.toTensor();
  return x.stride(-1) == 1 ? x : x.contiguous();
}

}  // namespace

bool run_fused_attention(torch::jit::Stack& host) {
  const bool is_gradient = host.size() == 11;  // gradient, then the operands; result, logarithms, drawn
  const size_t query = is_gradient;
  if (is_gradient && !host[7].isNone()) return false;
  if (!has_fused_kernel(host[query].toTensor(), host[query + 1].toTensor(), host[query + 2].toTensor(), host[query + 3]))
    return false;
  torch::jit::Stack made;
  if (is_gradient) {
    auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dense(host[0]), dense(host[1]), dense(host[2]), dense(host[3]), dense(host[5]), host[6].toTensor().contiguous(), 0,
        host[8].toBool(), std::nullopt, host[9].toOptional<double>());
    made = {IValue(of_query), IValue(of_key), IValue(of_value)};
  } else {
    auto [result, logarithms] = at::_scaled_dot_product_flash_attention_for_cpu(
        dense(host[0]), dense(host[1]), dense(host[2]), 0, host[4].toBool(), std::nullopt, host[5].toOptional<double>());
    made = {IValue(result), IValue(logarithms)};
  }
  host = std::move(made);
  return true;
}

void register_attention(torch::Library& autograd) { autograd.impl("scaled_dot_product_attention", TORCH_FN(attention)); }

// (query, key, value, bias, dropout, causal, debugs, scale)
void AttentionKernel::operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, torch::jit::Stack* stack) {
  const torch::jit::Stack given(stack->end() - 8, stack->end());
  if (given[4].toDouble() != 0) return CallKernel::operator()(handle, keys, stack);
  auto [result, logarithms] = attended(given);
  stack->resize(stack->size() - 8);
  const Tensor none;
  torch::jit::push(*stack, std::move(result), std::move(logarithms), none, none, given[0].toTensor().sym_size(-2),
                   given[1].toTensor().sym_size(-2), none, none, none);
}

}  // namespace ltc
