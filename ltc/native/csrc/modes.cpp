#include "modes.h"

#include "session.h"

#include <dlfcn.h>
#include <string_view>
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
Function* found(const char* name) { return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name)); }

// Of a frame: a reference to drop.
struct Frames {
  using Of = void*(void*);
  Of *first = found<Of>("PyThreadState_GetFrame"), *behind = found<Of>("PyFrame_GetBack");
  Of *code_of = found<Of>("PyFrame_GetCode"), *globals_of = found<Of>("PyFrame_GetGlobals");
  void* (*item)(void*, const char*) = found<void*(void*, const char*)>("PyDict_GetItemString");
  const char* (*text)(void*) = found<const char*(void*)>("PyUnicode_AsUTF8");
  void (*drop)(void*) = found<void(void*)>("Py_DecRef");
  bool are_found() const { return first && behind && code_of && globals_of && item && text && drop; }

  const void* code(void* frame) const {
    void* code = code_of(frame);
    drop(code);  // whoever runs it holds it
    return code;
  }

  // A module of ltc's, or code that ltc has made, which has no module.
  bool is_ours(void* frame) const {
    void* globals = globals_of(frame);
    void* name = globals ? item(globals, "__name__") : nullptr;
    const bool is_so = !name || std::string_view(text(name)).starts_with("ltc.");
    if (globals) drop(globals);
    return is_so;
  }
};

// The first frame is the caller's. Code of ltc's own asks Python's kernels, which look through it.
Caller caller(const Frames& frames, void* frame, const Session& session) {
  if (!frame || frames.code(frame) == session.engine) return frame ? Caller::FORMULA : Caller::UNKNOWN;
  if (frames.is_ours(frame)) return Caller::UNKNOWN;
  void* around = frames.behind(frame);
  while (around && frames.is_ours(around) && frames.code(around) != session.engine) {
    void* next = frames.behind(around);
    frames.drop(around);
    around = next;
  }
  if (!around) return Caller::UNKNOWN;
  const bool is_body = frames.code(around) == session.function;
  frames.drop(around);
  return is_body ? Caller::FUNCTION : Caller::OTHER;
}

}  // namespace

// The lock says nothing: torch's bindings let go of it before they dispatch a call.
Caller caller_in_backward() {
  if (!in_backward() || c10::GradMode::is_enabled()) return Caller::NONE;
  static const auto take_lock = found<int()>("PyGILState_Ensure");
  static const auto drop_lock = found<void(int)>("PyGILState_Release");
  static const auto state = found<void*()>("PyThreadState_Get");
  static const Frames frames;
  const Session& session = this_thread();
  if (!session.engine || !take_lock || !drop_lock || !state || !frames.are_found()) return Caller::UNKNOWN;
  const int held = take_lock();
  void* frame = frames.first(state());
  const auto found = caller(frames, frame, session);
  if (frame) frames.drop(frame);
  drop_lock(held);
  return found;
}

}  // namespace ltc
