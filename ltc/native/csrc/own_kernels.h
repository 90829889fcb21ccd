// Kernels of the core's own, for what PyTorch's CPU kernels do not do as this device wants it.
#pragma once

#include <torch/library.h>

#include "calls.h"

namespace ltc {

// F.linear as one call, see ltc/device/ops/linear_layers.py; and the cells of recurrent layers.
void register_linear(torch::Library& autograd, torch::Library& device, torch::Library& cpu);

// Tensors in another shape.
void register_reshape(torch::Library& autograd, torch::Library& device);

// F.scaled_dot_product_attention.
void register_attention(torch::Library& autograd);

// `_scaled_dot_product_fused_attention_overrideable`.
struct AttentionKernel : CallKernel {
  using CallKernel::CallKernel;
  void operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, torch::jit::Stack* stack);
};

// Run `ltc::attention` or `ltc::attention_gradient` by torch's kernel that keeps no matrix of scores; false where
// it does not take these operands.
bool run_fused_attention(torch::jit::Stack& host);

// The device guard, in place of the one in Python.
void register_guard();

// Make the step of `ltc::adam_`; false, with nothing changed, where PyTorch has to refuse or convert operands.
bool run_adam(const torch::jit::Stack& host);

// Draw random numbers; false, with nothing drawn, where Python has to.
bool run_random(const Overload& overload, torch::jit::Stack& host);

// Python has drawn a tensor, maybe by a program: then the core launches it for such calls from now on.
void keep_program(uint64_t key, const Tensor& drawn);

// Numbers that are read.
void register_reads(torch::Library& library);

}  // namespace ltc
