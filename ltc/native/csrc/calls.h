// A call of an overload: run here on PyTorch's CPU kernel, or left to Python.
#pragma once

#include "overload.h"
#include "session.h"

namespace ltc {

// The kernel of one overload.
struct CallKernel : c10::OperatorKernel {
  explicit CallKernel(const c10::OperatorHandle& handle) : overload(handle) {}
  void operator()(const c10::OperatorHandle& handle, DispatchKeySet, torch::jit::Stack* stack);
  // Python runs a call, which does not run here.
  void left(Session& session, torch::jit::Stack* stack);
  Overload overload;

 private:
  // Returns true if the sketch of the recording has summed the call up.
  bool run(Session& session, torch::jit::Stack* stack);
  void run_beside_walk(Session& session, torch::jit::Stack* stack);
  void leave(Session& session, torch::jit::Stack* stack);
  void learn(Session& session, torch::jit::Stack* stack);
};

// A result of the CPU's as a value of the device.
Tensor in_own_memory(Tensor host);

// False if certainly each element has a place of its own.
bool may_overlap(const Tensor& host);

inline bool is_16_bits(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace ltc
