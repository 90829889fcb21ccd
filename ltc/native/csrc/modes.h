// What a thread has switched on that changes calls.
#pragma once

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ltc {

// Under these keys a call of the CPU's means something else than its name.
inline c10::DispatchKeySet modes() {
  return c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                             c10::DispatchKey::FuncTorchDynamicLayerBackMode};
}

inline bool in_some_mode() {
  return c10::InferenceMode::is_enabled() || c10::impl::tls_local_dispatch_key_set().included_.has_any(modes());
}

// Under this key Python's kernels lie that stand above autograd.
const c10::DispatchKeySet kPythonDifferentiable(c10::DispatchKey::AutogradPrivateUse2);

// True if no transformation, mode or subclass sees the calls above autograd, nor changes them by its operands.
inline bool takes_plain() {
  return !c10::impl::tls_local_dispatch_key_set().included_.has_any(modes()) &&
         !at::impl::PythonTorchFunctionTLS::stack_len();
}

inline bool is_untransformed(const at::Tensor& tensor) {
  return !tensor.defined() || (!tensor.key_set().has_any(modes()) && !tensor._fw_grad(0).defined());
}

// The keys above the CPU's kernels, which a call below autograd does not ask again.
inline const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

inline c10::DispatchKeySet above_cpu() {
  return c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet{c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python};
}

// True while a backward runs on this thread.
bool in_backward();

// True if the backward replays the views that the forward wrote through, to write through them again.
bool replays_a_write();

// Who makes the call that is under way in a backward that is not differentiated itself: a formula of autograd's own,
// the body of a Function's backward, or other code of Python's, a hook or what such a body calls; UNKNOWN where Python
// has to look; NONE where there is no such backward.
enum class Caller : uint8_t { NONE, FORMULA, FUNCTION, OTHER, UNKNOWN };
Caller caller_in_backward();

}  // namespace ltc
