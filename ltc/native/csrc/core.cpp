// What Python calls: by ctypes for numbers, by operators for tensors.
#include <torch/library.h>

#include "own_kernels.h"
#include "python_side.h"
#include "typed.h"

namespace ltc {
namespace {

// Hand the value of a storage to Python, and those of all that lie in its memory: of each a tensor over
// its storage, its value, the place of its base (-1: none), its links, the number by which it is asked for, and whether
// it is to become independent.
IValue taken(c10::StorageImpl* storage) {
  c10::List<IValue> all(c10::AnyType::get());
  auto* asked = held_by(storage);
  if (asked && asked->is_walked) catch_up();
  if (!asked || !asked->host.defined()) return IValue(std::move(all));
  const auto members = relatives(*asked);
  for (const auto& one : members) {
    auto* held = held_by(one.get());
    const auto base = std::find(members.begin(), members.end(), held->base);
    const int64_t place = held->base ? base - members.begin() : -1;
    all.push_back(c10::ivalue::Tuple::create(
        {IValue(over(one.get(), held->host.sizes(), held->host.dtype())), IValue(held->host), IValue(place),
         links_of(*held), IValue(number_of(*held)), IValue(held->is_watched)}));
  }
  for (const auto& one : members) {
    leave_family(*held_by(one.get()));
    held_by(one.get())->release();
  }
  return IValue(std::move(all));
}

void take(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  stack->push_back(taken(reinterpret_cast<c10::StorageImpl*>(torch::jit::pop(*stack).toInt())));
}

void take_numbered(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  stack->push_back(taken(numbered(torch::jit::pop(*stack).toInt()).get()));
}

// The session's calls are Python's from now on, which is told what they were.
void end_walk(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* session = reinterpret_cast<Session*>(torch::jit::pop(*stack).toInt());
  session->gate.stop_following();
  auto walk = std::move(session->walk);
  stack->push_back(walk ? walk->caught_up() : IValue());
}

// See Walk::view; None where the tensor is no view of the walk that is under way.
void walked_view(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* held = held_by(reinterpret_cast<c10::StorageImpl*>(torch::jit::pop(*stack).toInt()));
  const auto walk = this_thread().walk;
  stack->push_back(walk && held && held->is_walked && held->base ? walk->view(*held) : IValue());
}

// Kernels are never removed.
auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;
auto& kernels = *new std::unordered_map<std::string, CallKernel*>;

CallKernel* kernel_of(const std::string& name) {
  const auto found = kernels.find(name);
  return found == kernels.end() ? nullptr : found->second;
}

// Give a tensor a number, by which `numbered` finds it; 0 where it is no tensor of this device's.
void number_tensor(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* held = attached(torch::jit::pop(*stack).toTensor());
  stack->push_back(held ? number_of(*held) : 0);
}

// The tensor of a number, which has no value here; False where it has one, or is a view; None where it is gone.
void numbered_tensor(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto storage = numbered(torch::jit::pop(*stack).toInt());
  const auto* held = held_by(storage.get());
  const bool is_free = held && !held->host.defined() && !held->is_walked && !held->base;
  stack->push_back(is_free ? IValue(empty_over(storage)) : held ? IValue(false) : IValue());
}

// (tensor, value) -> its number: the core has the value from now on.
void hold(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  Tensor host = torch::jit::pop(*stack).toTensor();
  auto* held = attached(torch::jit::pop(*stack).toTensor());
  held->hold(std::move(host));
  stack->push_back(number_of(*held));
}

// (tensor, number of its base, links as `links_of` gives them) -> whether the core has the view's value from now on.
void join(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto links = torch::jit::pop(*stack);
  const auto storage = numbered(torch::jit::pop(*stack).toInt());
  const Tensor tensor = torch::jit::pop(*stack).toTensor();
  const auto* base = held_by(storage.get());
  auto* held = base && base->host.defined() ? attached(tensor) : nullptr;
  if (!held || held->base || held->host.defined()) return stack->push_back(false);
  c10::impl::ExcludeDispatchKeyGuard below(above_cpu());
  Derivation derived{base->host, nullptr};
  for (const IValue& described : links.toTupleRef().elements().vec()) {
    const auto parts = described.toTupleRef().elements();
    auto* kernel = kernel_of(parts[0].toStringRef());
    if (!kernel) return stack->push_back(false);
    if (kernel->overload.rule < 0) kernel->overload.prepare();  // Python alone has called it
    derived.add(kernel->overload, parts[1].toTupleRef().elements().vec(), parts[2].toInt());
  }
  const auto& host = derived.host;
  const bool has_bits = host.is_neg() || host.is_conj();  // which are a tensor's, not its memory's
  if (has_bits || !host.is_alias_of(base->host)) return stack->push_back(false);
  join_family(tensor, empty_over(storage), std::move(derived.link), false);
  held->hold(host);
  stack->push_back(true);
}

template <class Kernel>
void add(torch::Library& to, const std::string& name, const c10::OperatorHandle& handle) {
  auto kernel = std::make_unique<Kernel>(handle);
  kernels.emplace(kernel->overload.name, kernel.get());
  if (add_typed(to, name, kernel.get())) return void(kernel.release());  // it is never removed
  to.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

torch::Library& library(torch::Library::Kind kind, const std::string& name, std::optional<DispatchKey> key) {
  libraries.push_back(std::make_unique<torch::Library>(kind, name, key, __FILE__, __LINE__));
  return *libraries.back();
}

using KeptTrack = std::shared_ptr<const Track>;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// What Python calls with tensors; what the core asks, Python defines.
void ltc_define() {
  auto& own = library(torch::Library::DEF, "ltc_core", std::nullopt);
  own.def("end_walk(int session) -> Any", torch::CppFunction::makeFromBoxedFunction<&end_walk>());
  own.def("walked_view(int storage) -> Any", torch::CppFunction::makeFromBoxedFunction<&walked_view>());
  own.def("number(Tensor tensor) -> int", torch::CppFunction::makeFromBoxedFunction<&number_tensor>());
  own.def("numbered(int number) -> Any", torch::CppFunction::makeFromBoxedFunction<&numbered_tensor>());
  own.def("hold(Tensor tensor, Tensor value) -> int", torch::CppFunction::makeFromBoxedFunction<&hold>());
  own.def("join(Tensor tensor, int base, Any links) -> bool", torch::CppFunction::makeFromBoxedFunction<&join>());
  own.def("take(int storage) -> Any", torch::CppFunction::makeFromBoxedFunction<&take>());
  own.def("take_numbered(int number) -> Any", torch::CppFunction::makeFromBoxedFunction<&take_numbered>());
}

// A kernel for each overload of aten and ltc that Python has one for; how many there are.
int64_t ltc_register() {
  auto& aten = library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1);
  auto& own = library(torch::Library::IMPL, "ltc", DispatchKey::PrivateUse1);
  int64_t count = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_aten = name.name.rfind("aten::", 0) == 0;
    if (!is_aten && name.name.rfind("ltc::", 0) != 0) continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle || !handle->hasKernelForDispatchKey(DispatchKey::PrivateUse2)) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (full == "aten::_local_scalar_dense") continue;  // see `reads.cpp`
    auto& to = is_aten ? aten : own;
    if (full == "aten::_scaled_dot_product_fused_attention_overrideable") add<AttentionKernel>(to, full, *handle);
    else add<CallKernel>(to, full, *handle);
    count++;
  }
  auto* in_place = kernel_of("aten::add_.Tensor");
  auto* out_of_place = kernel_of("aten::add.Tensor");
  if (in_place && out_of_place) in_place->overload.out_of_place = &out_of_place->overload;
  register_guard();
  register_reads(aten);
  auto& autograd = library(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1);
  register_linear(autograd, aten, library(torch::Library::IMPL, "aten", DispatchKey::CPU));
  register_attention(autograd);
  register_reshape(autograd, aten);
  return count;
}

// The overloads whose calls were left to Python, with how many were: "name count" lines. How long it is.
int64_t ltc_left(char* text, int64_t size) {
  std::string all;
  for (const auto& [name, one] : kernels)
    if (const auto count = one->overload.left_to_python.load()) all += name + " " + std::to_string(count) + "\n";
  if (int64_t(all.size()) < size) std::copy_n(all.c_str(), all.size() + 1, text);
  return int64_t(all.size());
}

// The next call of the session's thread asks Python to begin.
void ltc_arm(Session* session, bool is_armed) { session->is_armed = is_armed; }

Session* ltc_session() { return &this_thread(); }

// Python looks behind so many calls, and hears of each read behind so many, but of those that `reads_pass`.
void ltc_enter(Session* session, int64_t looks_after, int64_t reads_until, bool reads_pass) {
  session->looks_after = looks_after;
  session->reads_until = reads_until;
  session->reads_pass = reads_pass;
  session->gate.run();
}

// Another thread's calls are not summed up any more, either; it waits for one under way.
void ltc_leave(Session* session) {
  session->gate.close();
  if (session == &this_thread()) return;
  session->gate.stop_summing();
  session->gate.wait();
}

// The calls since Python last asked; how many of them came before the last read that it has not heard of, or -1;
// the cuts passed since, and how many calls came before the last of them.
void ltc_calls(Session* session, int64_t* found) {
  session->looks_after -= session->calls;
  session->reads_until -= session->calls;
  found[0] = std::exchange(session->calls, 0), found[1] = std::exchange(session->read_at, -1);
  found[2] = std::exchange(session->cuts.passed, 0), found[3] = session->cuts.passed_at;
}

// The calls of the step so far, of which Python has counted `since`; they are left uncounted: another thread may ask.
int64_t ltc_calls_of_step(Session* session, int64_t since) {
  return session->cuts.passed ? session->calls - session->cuts.passed_at : since + session->calls;
}

// The recording may end here, and the next one begin: Python need not ask the policy.
bool ltc_passes_cut(Session* session, bool is_read) { return session->passes_cut(is_read); }

// See SettledCuts.
void ltc_settle(Session* session, int64_t settles) { session->cuts.settle(SettledCuts::Settles(settles)); }

// So many settled ends in a row may be passed, and if `reads_pass` also by reads.
void ltc_limit_cuts(Session* session, int64_t most, bool reads_pass) {
  session->cuts.most = most;
  session->reads_pass = reads_pass;
}

// An optimizer has made its step, or the recording in which it did has ended. True if one had in this recording.
bool ltc_note_trained(Session* session, bool has_trained) { return std::exchange(session->has_trained, has_trained); }

// Begin to sum up what the session's thread calls; end it, with what was found.
void ltc_sketch(Session* session) {
  session->begin_sum();
  session->cuts.begin();
  session->has_trained = false;
}

// Before it so many ends were passed, the last of a path of those sums, behind those.
void ltc_sketched(Session* session, int64_t* found) {
  session->gate.stop_summing();
  const auto sketch = std::exchange(session->sketch, Sketch());
  const auto& cuts = session->cuts;
  const int64_t words[] = {int64_t(sketch.exact), int64_t(sketch.shape), sketch.calls, sketch.entries, sketch.bytes,
                           sketch.inputs, cuts.reads, cuts.marks, int64_t(cuts.behind.exact),
                           int64_t(cuts.behind.shape), int64_t(cuts.before.exact), int64_t(cuts.before.shape)};
  std::copy(std::begin(words), std::end(words), found);
  session->cuts.hear(sketch);
}

// A call that Python runs in this thread is as long as so many more.
void ltc_lengthen(int64_t calls) {
  if (auto& session = this_thread(); session.gate.sums()) session.sketch.calls += calls;
}

// The session's calls are counted; if Python's, `since`, and the core's are any, they are summed up, and others begin.
// What `ltc_calls` finds comes first, then whether calls run here, then what `ltc_sketched` finds.
void ltc_cut(Session* session, int64_t since, int64_t* found) {
  ltc_calls(session, found);
  found[4] = session->gate.runs();
  if (!(found[2] ? session->sketch.calls : since + found[0])) return;
  ltc_sketched(session, found + 5);
  session->begin_sum();
}

// Begin to learn what Python follows; end it. The track is the caller's to drop; null where there is none of so many
// calls.
void ltc_learn(Session* session) { session->learner = std::make_shared<Learner>(); }

KeptTrack* ltc_learned(Session* session, int64_t calls) {
  const auto learner = std::move(session->learner);
  auto track = learner ? learner->learned() : nullptr;
  return track && int64_t(track->steps.size()) == calls ? new KeptTrack(std::move(track)) : nullptr;
}

void ltc_drop_track(KeptTrack* track) { delete track; }

// The session's calls are followed along a track, until Python ends the walk. `has_host_values`: a value of the device
// is a tensor of the CPU's.
void ltc_walk(Session* session, KeptTrack* track, bool has_host_values) {
  session->walk = std::make_shared<Walk>(*track, has_host_values);
  session->gate.follow();
}

// From now on walks along a track may end here; see Exit.
void ltc_keep_exit(KeptTrack* track, const int64_t* words) { (*track)->exit = std::make_shared<const Exit>(words); }

// The recording that the core follows ends, if the core can end it; see Walk::finish.
int64_t ltc_finish(Session* session, int64_t kernels, int64_t frame_bytes, int64_t threads) {
  const auto walk = session->walk;
  const auto outcome = walk && session->gate.follows() ? walk->finish({kernels, frame_bytes, threads}) : NOT_LAUNCHED;
  if (outcome == LAUNCHED) session->gate.stop_following(), session->walk.reset();
  return outcome;
}

int64_t ltc_frame() { return frame_of_thread(); }

// How many calls were followed.
int64_t ltc_walked(Session* session) { return session->walk ? session->walk->position() : 0; }

// How many numbers were read since the last time, or else copies made for the CPU, and their bytes.
int64_t ltc_take_reads(bool of_numbers, int64_t* bytes) {
  auto& read = reads_here[of_numbers];
  *bytes = read.bytes.exchange(0);
  return read.count.exchange(0);
}

// A backward begins, run by that code of Python's; the code of the one around it, if there is one.
const void* ltc_begin_backward(Session* session, const void* engine, const void* function) {
  session->function = function;
  return std::exchange(session->engine, engine);
}

void ltc_end_backward(Session* session, const void* outer) {
  session->engine = outer;
  for (auto& one : session->watched)
    if (auto storage = one.lock(); storage)
      if (auto* held = held_by(storage.get()); held && std::exchange(held->is_watched, false) && held->base)
        if (!held->is_walked || held->pending >= 0) leave_family(*held);
  session->watched.clear();
}

int64_t ltc_take_uploads(int64_t* found, int64_t room) { return take_uploads(found, room); }

int64_t ltc_bytes() { return bytes_held; }

int64_t ltc_ran() { return calls_here; }

int64_t ltc_followed() { return followed_here; }

// The strides of a view that the core has, as the CPU's would be. Returns how many: none where it is no view, or
// contiguous; -1 where Python has to look, -2 of one that is followed.
int64_t ltc_view_strides(c10::StorageImpl* storage, int64_t* strides, int64_t room) {
  const auto* held = held_by(storage);
  if (!held) return -1;
  if (held->is_walked) return held->base ? -2 : 0;
  if (!held->host.defined()) return -1;
  if (!held->base) return 0;
  const auto found = held->host.strides();
  if (!has_true_strides(*held) || int64_t(found.size()) > room) return -1;
  if (held->host.is_contiguous()) return 0;
  std::copy(found.begin(), found.end(), strides);
  return int64_t(found.size());
}
}
#pragma GCC visibility pop

}  // namespace ltc
