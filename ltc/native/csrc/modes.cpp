#include "modes.h"

#include "session.h"

#include <dlfcn.h>
#include <torch/csrc/autograd/function.h>

namespace ltc {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool replays_a_write() {
  const auto node = torch::autograd::get_current_node();
  return node && node->name() == "torch::autograd::CopySlices";
}

namespace {

// A function of the interpreter's, looked for in the process: the library needs no symbol of one
// interpreter's.
template <class Function>
Function* found(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

// The lock says nothing: torch's bindings let go of it before they dispatch a call.
bool called_by_python() {
  static const auto take_lock = found<int()>("PyGILState_Ensure");
  static const auto drop_lock = found<void(int)>("PyGILState_Release");
  static const auto state = found<void*()>("PyThreadState_Get");
  static const auto frame_of = found<void*(void*)>("PyThreadState_GetFrame");
  static const auto code_of = found<void*(void*)>("PyFrame_GetCode");
  static const auto drop = found<void(void*)>("Py_DecRef");
  const void* engine = this_thread().engine;
  if (!engine || !take_lock || !drop_lock || !state || !frame_of || !code_of || !drop) return true;
  const int held = take_lock();
  void* frame = frame_of(state());
  void* code = frame ? code_of(frame) : nullptr;
  if (code) drop(code);  // whoever runs it holds it
  if (frame) drop(frame);
  drop_lock(held);
  return code != engine;
}

}  // namespace ltc
