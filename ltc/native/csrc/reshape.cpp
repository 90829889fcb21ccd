// reshape, flatten and reshape_as of a view are copies where the CPU's are, which decides by strides; a tensor of the
// device appears contiguous.
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>

#include "own_kernels.h"
#include "python_side.h"

namespace ltc {
namespace {

// PyTorch's formula stands under this key as under all that have no kernel of their own.
const DispatchKeySet kFormula(DispatchKey::AutogradCPU);

// True if the CPU makes a copy. `known`: what the core has, which may be a view.
bool copies(const Tensor& self, const HeldValue* known, at::IntArrayRef sizes) {
  if (!known || known->is_walked || !known->host.defined()) return copies_in_python(self, sizes);
  if (!known->base || known->host.is_contiguous()) return false;
  if (!has_true_strides(*known)) return copies_in_python(self, sizes);
  const at::DimVector wanted = at::infer_size_dv(sizes, self.numel());
  return !at::detail::computeStride(known->host.sizes(), known->host.strides(), wanted);
}

// The tensor, or a copy of it that is reshaped in its place.
Tensor to_reshape(const Tensor& self, c10::SymIntArrayRef sizes) {
  const bool is_ours = self.device().is_privateuseone() && self.layout() == c10::kStrided;
  if (!is_ours || self.key_set().has_any(modes())) return self;  // a fake tensor, or another one's wrapper
  const auto whole = c10::asIntArrayRefSlowOpt(sizes);
  const auto* held = held_by(self);
  const bool is_walked_whole = held && held->is_walked && !held->base;
  return whole && !is_walked_whole && copies(self, held, *whole) ? self.clone() : self;
}

Tensor reshape(const Tensor& self, c10::SymIntArrayRef sizes) {
  return at::_ops::reshape::redispatch(kFormula, to_reshape(self, sizes), sizes);
}

Tensor reshape_as(const Tensor& self, const Tensor& other) {
  return at::_ops::reshape_as::redispatch(kFormula, to_reshape(self, other.sym_sizes()), other);
}

Tensor flatten(const Tensor& self, int64_t start, int64_t end) {
  const auto dims = self.dim();
  if (dims < 2 || !self.device().is_privateuseone())
    return at::_ops::flatten_using_ints::redispatch(kFormula, self, start, end);
  const auto first = at::maybe_wrap_dim(start, dims), last = at::maybe_wrap_dim(end, dims);
  std::vector<c10::SymInt> sizes(self.sym_sizes().begin(), self.sym_sizes().end());
  if (first < last) {
    for (auto dim = first + 1; dim <= last; dim++) sizes[first] *= sizes[dim];
    sizes.erase(sizes.begin() + first + 1, sizes.begin() + last + 1);
  }
  return at::_ops::flatten_using_ints::redispatch(kFormula, to_reshape(self, sizes), start, end);
}

}  // namespace

// In inference mode no call comes to the key of autograd.
void register_reshape(torch::Library& autograd, torch::Library& device) {
  for (auto* library : {&autograd, &device}) {
    library->impl("reshape", TORCH_FN(reshape));
    library->impl("reshape_as", TORCH_FN(reshape_as));
    library->impl("flatten.using_ints", TORCH_FN(flatten));
  }
}

}  // namespace ltc
