// What Python calls: by ctypes for numbers, by operators for tensors.
#include <torch/library.h>

#include <algorithm>
#include <thread>
#include <unordered_map>

#include "calls.h"
#include "modes.h"
#include "own_kernels.h"
#include "python_side.h"
#include "typed.h"
#include "uploads.h"

namespace ltc {
namespace {

IValue described(const Link* link) {
  c10::List<IValue> links(c10::AnyType::get());
  std::vector<const Link*> all;
  for (; link; link = link->before.get()) all.push_back(link);
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    c10::List<IValue> arguments(c10::AnyType::get());
    for (const auto& argument : (*one)->arguments) arguments.push_back(argument);
    links.push_back(c10::ivalue::Tuple::create(
        {IValue((*one)->overload->name), IValue(std::move(arguments)), IValue((*one)->index)}));
  }
  return IValue(std::move(links));
}

// Hand the value of a storage to Python, and those of all that lie in its memory: of each a tensor over
// its storage, its value, the place of its base (-1: none), its links, and the number by which it is asked for.
IValue taken(c10::StorageImpl* storage) {
  c10::List<IValue> all(c10::AnyType::get());
  auto* asked = held_by(storage);
  if (asked && asked->is_walked) catch_up();
  if (!asked || !asked->host.defined()) return IValue(std::move(all));
  const auto members = relatives(*asked);
  std::vector<Tensor> tensors;  // hold the storages meanwhile
  for (auto* one : members) {
    const auto& host = held_by(one)->host;
    tensors.push_back(over(one, host.sizes(), host.dtype()));
  }
  for (auto* one : members) {
    auto* held = held_by(one);
    const auto base = std::find(members.begin(), members.end(), held->base.get());
    const int64_t place = held->base ? base - members.begin() : -1;
    all.push_back(c10::ivalue::Tuple::create(
        {IValue(tensors[all.size()]), IValue(held->host), IValue(place), described(held->link.get()), IValue(number_of(*held))}));
  }
  for (auto* one : members) {
    auto* held = held_by(one);
    leave_family(*held);
    held->release();
  }
  return IValue(std::move(all));
}

void take(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* storage = reinterpret_cast<c10::StorageImpl*>(torch::jit::pop(*stack).toInt());
  stack->push_back(taken(storage));
}

// The session's calls are Python's from now on, which is told what they were.
void end_walk(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* session = reinterpret_cast<Session*>(torch::jit::pop(*stack).toInt());
  session->is_walking = false;
  auto walk = std::move(session->walk);
  stack->push_back(walk ? walk->caught_up() : IValue());
}

// See Walk::view; None where the tensor is no view of the walk that is under way.
void walked_view(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* held = held_by(reinterpret_cast<c10::StorageImpl*>(torch::jit::pop(*stack).toInt()));
  const auto walk = this_thread().walk;
  stack->push_back(walk && held && held->is_walked && held->base ? walk->view(*held) : IValue());
}

void take_numbered(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* held = numbered(torch::jit::pop(*stack).toInt());
  stack->push_back(held ? taken(held->storage) : IValue());
}

std::vector<std::unique_ptr<torch::Library>>& libraries() {
  static auto* all = new std::vector<std::unique_ptr<torch::Library>>;  // kernels are never removed
  return *all;
}

std::unordered_map<std::string, CallKernel*>& kernels() {
  static auto* all = new std::unordered_map<std::string, CallKernel*>;
  return *all;
}

CallKernel* kernel_of(const std::string& name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second;
}

// The tensor of a number, which has no value here; None where it is gone, or a view.
void numbered_tensor(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto* held = numbered(torch::jit::pop(*stack).toInt());
  const bool is_free = held && !held->host.defined() && !held->is_walked && !held->base;
  stack->push_back(is_free ? IValue(over(held->storage, {0}, caffe2::TypeMeta::Make<float>())) : IValue());
}

// (number, value): the core has it from now on.
void hold(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  Tensor host = torch::jit::pop(*stack).toTensor();
  numbered(torch::jit::pop(*stack).toInt())->hold(std::move(host));
}

// (tensor, number of its base, links as `described` gives them) -> whether the core has the view's value from now on.
void join(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto links = torch::jit::pop(*stack);
  const auto* base = numbered(torch::jit::pop(*stack).toInt());
  const Tensor tensor = torch::jit::pop(*stack).toTensor();
  auto* held = base && base->host.defined() ? attached(tensor) : nullptr;
  if (!held || held->base || held->host.defined()) return stack->push_back(false);
  c10::impl::ExcludeDispatchKeyGuard below(above_cpu());
  Tensor host = base->host;
  std::shared_ptr<const Link> last;
  for (const IValue& described : links.toTupleRef().elements().vec()) {
    const auto parts = described.toTupleRef().elements();
    const auto* kernel = kernel_of(parts[0].toStringRef());
    if (!kernel) return stack->push_back(false);
    auto link = std::make_shared<Link>(std::move(last), &kernel->overload, parts[1].toTupleRef().elements().vec(), parts[2].toInt());
    host = shown(host, *link);
    last = std::move(link);
  }
  const bool is_plain = host.is_alias_of(base->host) && !host.is_neg() && !host.is_conj();  // these are bits of a tensor
  if (!is_plain) return stack->push_back(false);
  join_family(tensor, over(base->storage, {0}, caffe2::TypeMeta::Make<float>()), std::move(last), false);
  held->hold(std::move(host));
  stack->push_back(true);
}

template <class Kernel>
void add(torch::Library& to, const std::string& name, const c10::OperatorHandle& handle) {
  auto kernel = std::make_unique<Kernel>(handle);
  kernels().emplace(kernel->overload.name, kernel.get());
  if (add_typed(to, name, kernel.get())) return void(kernel.release());  // it is never removed
  to.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

torch::Library& library(torch::Library::Kind kind, const std::string& name, std::optional<DispatchKey> key) {
  libraries().push_back(std::make_unique<torch::Library>(kind, name, key, __FILE__, __LINE__));
  return *libraries().back();
}

}  // namespace
}  // namespace ltc

#pragma GCC visibility push(default)
extern "C" {

void ltc_define() {
  using namespace ltc;
  auto& own = library(torch::Library::DEF, "ltc_core", std::nullopt);
  own.def("rule(str overload) -> int");
  own.def("lend(Tensor tensor, int number) -> Tensor?");
  own.def("lend_to_walk(Tensor tensor, int number) -> Tensor?");
  own.def("end_at_read(bool is_number) -> bool");
  own.def("may_look() -> bool");
  own.def("look() -> ()");
  own.def("note_uploads() -> ()");
  own.def("begin() -> ()");
  own.def("may_read(Tensor value, bool is_number) -> bool");
  own.def("words(str overload) -> str");
  own.def("may_learn() -> bool");
  own.def("learned_values(Tensor[] tensors, Any numbers, int operands, int made, int inputs, bool is_view) -> int[]");
  own.def("is_plain(Tensor tensor) -> bool");
  own.def("open(Tensor[] tensors, int[] numbers) -> bool");
  own.def("draw() -> int");
  own.def("undraw() -> ()");
  own.def("copies(Tensor tensor, int[] sizes) -> bool");
  own.def("catch_up() -> ()");
  own.def("end_walk(int session) -> Any", torch::CppFunction::makeFromBoxedFunction<&end_walk>());
  own.def("walked_view(int storage) -> Any", torch::CppFunction::makeFromBoxedFunction<&walked_view>());
  own.def("numbered(int number) -> Any", torch::CppFunction::makeFromBoxedFunction<&numbered_tensor>());
  own.def("hold(int number, Tensor value) -> ()", torch::CppFunction::makeFromBoxedFunction<&hold>());
  own.def("join(Tensor tensor, int base, Any links) -> bool", torch::CppFunction::makeFromBoxedFunction<&join>());
  own.def("take(int storage) -> Any", torch::CppFunction::makeFromBoxedFunction<&take>());
  own.def("take_numbered(int number) -> Any", torch::CppFunction::makeFromBoxedFunction<&take_numbered>());
}

// A kernel for each overload of aten and ltc that Python has one for; how many there are.
int64_t ltc_register() {
  using namespace ltc;
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
  register_linear(autograd, library(torch::Library::IMPL, "aten", DispatchKey::CPU));
  register_attention(autograd);
  register_reshape(autograd, aten);
  return count;
}

// The overloads whose calls were left to Python, with how many were: "name count" lines. How long it is.
int64_t ltc_left(char* text, int64_t size) {
  std::string all;
  for (const auto& [name, one] : ltc::kernels())
    if (const auto count = one->overload.left_to_python.load())
      all += name + " " + std::to_string(count) + "\n";
  if (int64_t(all.size()) < size) std::copy_n(all.c_str(), all.size() + 1, text);
  return int64_t(all.size());
}

// The next call of the session's thread asks Python to begin.
void ltc_arm(void* session, bool is_armed) { static_cast<ltc::Session*>(session)->is_armed = is_armed; }

void* ltc_session() { return &ltc::this_thread(); }

// Python looks behind so many calls, and hears of each read behind so many, but of those that `reads_pass`.
void ltc_enter(void* session, int64_t looks_after, int64_t reads_until, bool reads_pass) {
  auto& one = *static_cast<ltc::Session*>(session);
  one.looks_after = looks_after;
  one.reads_until = reads_until;
  one.reads_pass = reads_pass;
  one.is_entered = true;
}

// Waits for a call under way, but for the caller's own.
void ltc_leave(void* session) {
  auto& one = *static_cast<ltc::Session*>(session);
  one.is_entered = one.is_walking = false;
  if (&one == &ltc::this_thread()) return;
  while (one.is_inside) std::this_thread::yield();
}

// The calls since Python last asked; how many of them came before the last read that it has not heard of, or -1;
// the cuts passed since, and how many calls came before the last of them.
void ltc_calls(void* session, int64_t* found) {
  auto& one = *static_cast<ltc::Session*>(session);
  one.looks_after -= one.calls;
  one.reads_until -= one.calls;
  found[0] = std::exchange(one.calls, 0), found[1] = std::exchange(one.read_at, -1);
  found[2] = std::exchange(one.cuts.passed, 0), found[3] = one.cuts.passed_at;
}

// The calls of the step so far, of which Python has counted `since`; they are left uncounted: another thread may ask.
int64_t ltc_calls_of_step(void* session, int64_t since) {
  const auto& one = *static_cast<ltc::Session*>(session);
  return one.cuts.passed ? one.calls - one.cuts.passed_at : since + one.calls;
}

// The recording may end here, and the next one begin: Python need not ask the policy.
bool ltc_passes_cut(void* session, bool is_read) { return static_cast<ltc::Session*>(session)->passes_cut(is_read); }

// What Python heard of last is settled: 1; else 0: nothing is, any more. So many in a row may be passed.
void ltc_settle(void* session, int64_t is_settled, int64_t most, bool reads_pass) {
  auto& one = *static_cast<ltc::Session*>(session);
  if (is_settled > 0) one.cuts.settle();
  if (!is_settled) one.cuts.forget();
  one.cuts.most = most;
  one.reads_pass = reads_pass;
}

// An optimizer has made its step, or the recording in which it did has ended.
void ltc_note_trained(void* session, bool has_trained) { static_cast<ltc::Session*>(session)->has_trained = has_trained; }

// Begin to sum up what the session's thread calls; end it, with what was found.
void ltc_sketch(void* session) {
  auto& one = *static_cast<ltc::Session*>(session);
  one.sketch.begin();
  one.cuts.begin();
  one.has_trained = false;
}

// A read ends it, or a mark. Before it so many ends were passed, the last of a path of those sums, behind those.
void ltc_sketched(void* session, bool is_read, int64_t* found) {
  auto& one = *static_cast<ltc::Session*>(session);
  const auto sketch = std::exchange(one.sketch, ltc::Sketch());
  const auto &cuts = one.cuts;
  const int64_t words[] = {int64_t(sketch.exact), int64_t(sketch.shape), sketch.calls, sketch.entries, sketch.bytes,
                           sketch.inputs, cuts.reads, cuts.marks, int64_t(cuts.behind.exact), int64_t(cuts.behind.shape),
                           int64_t(cuts.before.exact), int64_t(cuts.before.shape)};
  std::copy(std::begin(words), std::end(words), found);
  one.cuts.hear(sketch, is_read);
}

// A call that Python runs in this thread is as long as so many more.
void ltc_lengthen(int64_t calls) {
  if (auto& sketch = ltc::this_thread().sketch; sketch.is_on) sketch.calls += calls;
}

// The session's calls are counted; if Python's, `since`, and the core's are any, they are summed up, and others begin.
// What `ltc_calls` finds comes first, then whether calls run here, then what `ltc_sketched` finds.
void ltc_cut(void* session, int64_t since, int64_t looks_after, bool is_read, int64_t* found) {
  auto& one = *static_cast<ltc::Session*>(session);
  ltc_calls(session, found);
  found[4] = one.is_entered;
  if (!(found[2] ? one.sketch.calls : since + found[0])) return;
  ltc_sketched(session, is_read, found + 5);
  one.sketch.begin();
  one.looks_after = looks_after;
}

// Begin to learn what Python follows; end it. The track is the caller's to drop; null where there is none.
void ltc_learn(void* session) { static_cast<ltc::Session*>(session)->learner = std::make_shared<ltc::Learner>(); }

void* ltc_learned(void* session) {
  const auto learner = std::move(static_cast<ltc::Session*>(session)->learner);
  auto track = learner ? learner->learned() : nullptr;
  return track ? new std::shared_ptr<const ltc::Track>(std::move(track)) : nullptr;
}

int64_t ltc_track_calls(void* track) {
  return int64_t((*static_cast<std::shared_ptr<const ltc::Track>*>(track))->steps.size());
}

void ltc_drop_track(void* track) { delete static_cast<std::shared_ptr<const ltc::Track>*>(track); }

// The session's calls are followed along a track, until Python ends the walk. `has_host_values`: a value of the device
// is a tensor of the CPU's.
void ltc_walk(void* session, void* track, bool has_host_values) {
  auto& one = *static_cast<ltc::Session*>(session);
  one.walk = std::make_shared<ltc::Walk>(*static_cast<std::shared_ptr<const ltc::Track>*>(track), has_host_values);
  one.is_walking = true;
}

// From now on walks along a track may end here; see Exit.
void ltc_keep_exit(void* track, const int64_t* words) {
  (*static_cast<std::shared_ptr<const ltc::Track>*>(track))->exit = std::make_shared<const ltc::Exit>(words);
}

// The recording that the core follows ends, if the core can end it; see Walk::finish.
int64_t ltc_finish(void* session, int64_t kernels, int64_t frame_bytes, int64_t threads) {
  auto& one = *static_cast<ltc::Session*>(session);
  const auto walk = one.walk;
  const auto outcome = walk && one.is_walking ? walk->finish({kernels, frame_bytes, threads}) : ltc::NOT_LAUNCHED;
  if (outcome != ltc::LAUNCHED) return outcome;
  one.is_walking = false;
  one.walk.reset();
  return outcome;
}

int64_t ltc_frame() { return ltc::frame_of_thread(); }

// How many calls were followed.
int64_t ltc_walked(void* session) {
  const auto& walk = static_cast<ltc::Session*>(session)->walk;
  return walk ? walk->position() : 0;
}

// How many numbers were read since the last time, or else copies made for the CPU, and their bytes.
int64_t ltc_take_reads(bool of_numbers, int64_t* bytes) {
  auto& read = ltc::reads_here[of_numbers];
  *bytes = read.bytes.exchange(0);
  return read.count.exchange(0);
}

// A backward begins, run by that code of Python's; the code of the one around it, if there is one.
const void* ltc_begin_backward(void* session, const void* engine, const void* function) {
  static_cast<ltc::Session*>(session)->function = function;
  return std::exchange(static_cast<ltc::Session*>(session)->engine, engine);
}

void ltc_end_backward(void* session, const void* outer) {
  static_cast<ltc::Session*>(session)->engine = outer;
  auto& made = static_cast<ltc::Session*>(session)->made_in_backward;
  for (auto& one : made)
    if (auto storage = one.lock(); storage)
      if (auto* held = ltc::held_by(storage.get()); held && held->base && !(held->is_walked && held->pending < 0)) ltc::leave_family(*held);
  made.clear();
}

int64_t ltc_take_uploads(int64_t* found, int64_t room) { return ltc::take_uploads(found, room); }

int64_t ltc_bytes() { return ltc::bytes_held; }

int64_t ltc_count(int64_t reason) {
  if (reason == -2) return ltc::followed_here;
  return reason < 0 ? ltc::calls_here.load() : reason < ltc::REASONS ? ltc::left_to_python[reason].load() : -1;
}

// The strides of a view that the core has, as the CPU's would be. Returns how many: none where it is no view, or
// contiguous; -1 where Python has to look, -2 of one that is followed.
int64_t ltc_view_strides(void* storage, int64_t* strides, int64_t room) {
  const auto* held = ltc::held_by(static_cast<c10::StorageImpl*>(storage));
  if (!held) return -1;
  if (held->is_walked) return held->base ? -2 : 0;
  if (!held->host.defined()) return -1;
  if (!held->base) return 0;
  const auto* base = ltc::held_by(held->base.get());
  if (held->is_copy || !base || !base->host.defined() || !base->host.is_contiguous()) return -1;
  if (held->host.is_contiguous()) return 0;
  const auto found = held->host.strides();
  if (int64_t(found.size()) > room) return -1;
  std::copy(found.begin(), found.end(), strides);
  return int64_t(found.size());
}
}
#pragma GCC visibility pop
