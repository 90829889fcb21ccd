#include "calls.h"

#include <c10/util/ScopeExit.h>

#include <chrono>

#include "own_kernels.h"
#include "python_side.h"

namespace ltc {

std::atomic<int64_t> calls_here, followed_here;

Session& this_thread() {
  thread_local auto* session = new Session;  // Python may ask for it behind the thread's end
  return *session;
}

// Each stride reaches over all that smaller ones do.
bool may_overlap(const Tensor& host) {
  if (host.is_non_overlapping_and_dense() || host.numel() < 2) return false;
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims;  // stride, extent
  for (int64_t k = 0; k < host.dim(); k++) if (host.size(k) > 1) dims.emplace_back(host.stride(k), host.size(k));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;
  for (const auto& [stride, extent] : dims) {
    if (stride < reach) return true;
    reach += stride * (extent - 1);
  }
  return false;
}

Tensor in_own_memory(Tensor host) {
  if (host._is_zerotensor()) return at::zeros(host.sizes(), host.options());  // it has no memory
  if (host.storage().use_count() > 1) host = host.clone();  // it lies in an operand's
  return host.contiguous();  // as it appears: views of it have the strides that they have in Python
}

namespace {

const int64_t MOST_UPLOADS = 256;  // that Python has not noted yet
const size_t LARGEST_UPLOAD = 8 << 20;  // bytes, beside whose copy Python takes no time

// A call as a copy between the CPU and the device, which is part of no path: see `_to_copy` in native_functions.yaml.
struct Copy {
  Copy(Overload& overload, const torch::jit::Stack& stack) {
    if (overload.rule < 0) overload.prepare();
    if (!(overload.rule & COPIES)) return;
    const auto* given = &stack[stack.size() - overload.kinds.size()];
    self = &given[0].toTensor();
    is_upload = self->is_cpu();
    is_read = !is_upload && given[3].isDevice() && given[3].toDevice().is_cpu();
    const auto size = given[1].isNone() ? self->element_size() : c10::elementSize(given[1].toScalarType());
    is_large_upload = is_upload && size_t(self->numel()) * size > LARGEST_UPLOAD;
  }
  bool is_one() const { return is_upload || is_read; }
  const Tensor* self = nullptr;
  bool is_upload = false, is_read = false, is_large_upload = false;  // Python finds out if there is the memory
};

// One call, from its operands to its results. Nothing is changed before the kernel runs.
class Call {
 public:
  // A gradient that a formula repeats is no view of another, though it may lie in its memory.
  Call(Overload& overload, torch::jit::Stack* stack, Caller caller)
      : copy(overload, *stack), overload_(overload), stack_(stack), first_(stack->size() - overload.kinds.size()),
        is_formulas_(caller == Caller::FORMULA || caller == Caller::FUNCTION),
        is_value_(caller == Caller::FORMULA && (overload.rule & IS_EXPAND) && !replays_a_write()) {}

  // The operands as the CPU's kernel takes them; false where Python has to run the call.
  bool prepare() {
    host_.reserve(overload_.kinds.size() + overload_.returned.size());
    if ((overload_.rule & COPIES) && !may_copy()) return false;
    for (size_t i = 0; i < overload_.kinds.size(); i++) {
      const IValue& given = (*stack_)[first_ + i];
      if (overload_.kinds[i] == Kind::OTHER) host_.push_back(given);
      else if (!add(given, i)) return false;
    }
    if (overload_.rule & FROM_START) count_from(host_[0].toTensor(), host_.back());
    if (!written_.empty()) read_before_writing();
    if (overload_.rule & COPIES) host_.back() = at::MemoryFormat::Contiguous;
    return !copy.is_read || may_read_here(host_[0].toTensor(), false);
  }

  // False where it turns out that Python has to.
  bool run() {
    if (overload_.rule & DRAWS) return run_random(overload_, host_);
    if ((overload_.rule & ATTENTION) && run_fused_attention(host_)) return true;
    if ((overload_.rule & ADAM) && run_adam(host_)) host_.clear();
    else if (copy.is_upload) run_upload();
    else overload_.handle.redispatchBoxed(kCpu, &host_);
    return has_made_ours();
  }

  bool reads() const { return (overload_.rule & MAY_READ) && (reads_ || !overload_.takes_lists); }

  const Copy copy;

  // What was written to may have been before a failure: then nobody tries it again.
  bool may_be_tried_again() const { return !overload_.has_writes; }

  void finish() {
    for (const auto& one : written_) {
      auto* impl = one.unsafeGetTensorImpl();
      if (overload_.rule & COUNTS_WRITES) impl->bump_version();
      const auto& host = held_by(one)->host;
      if (host.sizes() != impl->sizes()) impl->set_sizes_contiguous(host.sizes());  // it was resized
    }
    torch::jit::Stack results;
    results.reserve(overload_.returned.size());
    for (size_t k = 0; k < overload_.returned.size(); k++) {
      const int place = overload_.returned[k];
      results.push_back(place >= 0 ? (*stack_)[first_ + place] : made(std::move(host_[k])));
    }
    stack_->resize(first_);
    for (auto& one : results) stack_->push_back(std::move(one));
  }

 private:
  void run_upload() {
    const auto began = std::chrono::steady_clock::now();
    overload_.handle.redispatchBoxed(kCpu, &host_);
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began;
    note_upload(took.count(), int64_t(host_.back().toTensor().nbytes()));
  }

  // False where Python makes other results of this call: sparse ones, and products that it adds up wider.
  bool has_made_ours() const {
    for (size_t k = 0; k < overload_.returned.size(); k++) {
      if (overload_.returned[k] >= 0 || !host_[k].isTensor()) continue;
      const auto& host = host_[k].toTensor();
      if (!host.defined()) continue;
      if (host.layout() != c10::kStrided || ((overload_.rule & NOT_16_BITS) && is_16_bits(host))) return false;
    }
    return true;
  }

  // (self, dtype, layout, device, pinned, ...) -> a tensor of this device, or of the CPU's. Python knows which
  // device is meant by no index.
  bool may_copy() const {
    const auto& self = (*stack_)[first_].toTensor();
    const IValue &layout = (*stack_)[first_ + 2], &device = (*stack_)[first_ + 3], &pinned = (*stack_)[first_ + 4];
    if (!layout.isNone() && layout.toLayout() != c10::kStrided) return false;
    if (copy.is_read) return pinned.isNone() || !pinned.toBool();
    if (!copy.is_upload) return true;
    return self.layout() == c10::kStrided && !self.is_complex() && device.isDevice() &&
           device.toDevice() == device_zero() && !self.unsafeGetTensorImpl()->is_python_dispatch();
  }

  // What lies in the memory that is written to, and is not all of it, is copied first.
  void read_before_writing() {
    for (const auto& one : written_) {
      const auto& target = held_by(one)->host;
      for (size_t i = 0; i < overload_.kinds.size(); i++) {
        if (overload_.kinds[i] != Kind::TENSOR || overload_.writes[i] || !host_[i].isTensor()) continue;
        const auto& read = host_[i].toTensor();
        if (read.defined() && read.is_alias_of(target) && !read.is_set_to(target)) host_[i] = read.clone();
      }
    }
  }

  bool add(const IValue& given, size_t i) {
    switch (overload_.kinds[i]) {
      case Kind::TENSOR:
        if (!given.isTensor()) break;
        if (Tensor host; host_of(given.toTensor(), overload_.writes[i], host)) return keep(std::move(host));
        return false;
      case Kind::TENSORS: return !given.isTensorList() ? keep(given) : add_list(given, i);
      case Kind::OPTIONAL_TENSORS: return !given.isList() ? keep(given) : add_optional(given);
      case Kind::DEVICE:
        if (given.isNone() && overload_.is_factory) return false;  // Python knows which device is meant
        if (given.isNone()) break;
        if (!copy.is_read && given.toDevice() != device_zero() && given.toDevice() != at::Device(at::kPrivateUse1))
          return false;
        return keep(c10::Device(c10::kCPU));
      case Kind::OTHER: break;
    }
    return keep(given);
  }

  bool keep(IValue given) {
    host_.push_back(std::move(given));
    return true;
  }

  bool add_list(const IValue& given, size_t i) {
    c10::List<Tensor> hosts;
    const auto parts = given.toListRef();
    hosts.reserve(parts.size());
    for (const auto& part : parts) {
      Tensor host;
      if (!host_of(part.toTensor(), overload_.writes[i], host)) return false;
      hosts.push_back(std::move(host));
    }
    return keep(std::move(hosts));
  }

  bool add_optional(const IValue& given) {
    c10::List<std::optional<Tensor>> hosts;
    for (const auto& part : given.toListRef()) {
      if (part.isNone() || !part.toTensor().defined()) {
        hosts.push_back(std::nullopt);
        continue;
      }
      const auto& index = part.toTensor();
      if (!index.device().is_privateuseone()) return false;  // an index on the CPU
      const auto type = index.scalar_type();
      reads_ |= type == at::kBool || type == at::kByte;
      Tensor host;
      if (!host_of(index, false, host)) return false;
      hosts.push_back(std::move(host));
    }
    return keep(std::move(hosts));
  }

  bool host_of(const Tensor& tensor, bool is_written, Tensor& host) {
    if (!tensor.defined()) return true;
    if (tensor.layout() != c10::kStrided || tensor.is_complex()) return false;
    if (!tensor.device().is_privateuseone()) {
      if (overload_.rule & COPIES) {
        host = tensor;
        return true;
      }
      if (!tensor.is_cpu() || tensor.dim() != 0 || is_written || (overload_.rule & OF_DEVICE)) return false;
      host = tensor.detach();
      return true;
    }
    if ((overload_.rule & NOT_16_BITS) && is_16_bits(tensor)) return false;
    auto* held = held_by(tensor);
    if (!held || !held->host.defined()) {
      if (!borrow(tensor)) return false;
      held = held_by(tensor);
    }
    if (is_written) {
      const bool is_in_order = !(overload_.rule & AS_IT_LIES) || held->host.is_contiguous();
      if (!is_in_order || !may_be_written(*held) || may_overlap(held->host)) return false;
      written_.push_back(tensor);
      host = held->host;
      return true;
    }
    const bool is_taken = (overload_.rule & ANY_STRIDES) || held->host.is_contiguous();
    host = is_taken ? held->host : held->host.contiguous();
    is_copied_ |= !is_taken;
    return true;
  }

  IValue made(IValue result) {
    if (copy.is_read) return result;
    if (result.isTensor()) {
      Tensor host = std::move(result).toTensor();
      return host.defined() ? IValue(tensor_of(std::move(host), -1)) : IValue(Tensor());
    }
    if (!result.isTensorList()) return result;
    c10::List<Tensor> tensors;
    int64_t index = 0;
    for (const auto& one : result.toListRef()) tensors.push_back(tensor_of(one.toTensor(), index++));
    return IValue(std::move(tensors));
  }

  Tensor tensor_of(Tensor host, int64_t index) {
    if (is_value_) return holding(std::move(host));
    if (overload_.is_view) return view(std::move(host), index);
    host = in_own_memory(std::move(host));
    // Zero in every dtype, also in those for which PyTorch has no kernel that fills.
    if ((overload_.rule & ZEROED) && host.nbytes()) std::memset(host.mutable_data_ptr(), 0, host.nbytes());
    return holding(std::move(host));
  }

  Tensor view(Tensor host, int64_t index) {
    const Tensor& shown = (*stack_)[first_].toTensor();
    std::vector<IValue> arguments(stack_->begin() + first_ + 1, stack_->begin() + first_ + overload_.kinds.size());
    auto link = std::make_shared<const Link>(held_by(shown)->link, &overload_, std::move(arguments), index);
    Tensor made = view_of(shown, std::move(host), std::move(link), is_copied_);
    if (is_formulas_) watch(made);
    return made;
  }

  Overload& overload_;
  torch::jit::Stack* stack_;
  const size_t first_;
  torch::jit::Stack host_;
  c10::SmallVector<Tensor, 4> written_;
  bool is_copied_ = false, reads_ = false;
  const bool is_formulas_, is_value_;
};

// True if a view would be one through an `expand`, which shows elements several times.
bool shows_twice(const Overload& overload, const torch::jit::Stack& stack) {
  if (overload.rule & IS_EXPAND) return true;
  const auto* held = held_by(stack[stack.size() - overload.kinds.size()].toTensor());
  const auto* link = held ? held->link.get() : nullptr;
  while (link && !(link->overload && (link->overload->rule & IS_EXPAND))) link = link->before.get();
  return link;
}

// True if the call has run.
bool run_here(Overload& overload, Session& session, torch::jit::Stack* stack) {
  if (overload.rule < 0) overload.prepare();
  if (!(overload.rule & RUNS_HERE) || in_some_mode()) return false;
  const auto caller = overload.is_view ? caller_in_backward() : Caller::NONE;
  if (caller == Caller::UNKNOWN) return false;
  if ((caller == Caller::FUNCTION || caller == Caller::OTHER) && shows_twice(overload, *stack)) return false;
  c10::impl::ExcludeDispatchKeyGuard below(above_cpu());
  Call call(overload, stack, caller);
  const bool is_beside_walk = call.copy.is_upload || (call.copy.is_read && session.gate.follows());
  if (!call.prepare() || !(is_beside_walk || session.gate.runs())) return false;
  if (call.reads() && !may_look()) return false;
  bool has_run = false;
  try {
    has_run = call.run();
  } catch (const std::exception&) {
    if (!call.may_be_tried_again()) throw;
  }
  if (!has_run) return false;
  call.finish();
  if (call.copy.is_upload && noted_uploads() > MOST_UPLOADS) note_uploads();
  if (!call.copy.is_one()) session.calls++;
  calls_here.fetch_add(1, std::memory_order_relaxed);
  if (session.calls >= session.looks_after) look();
  return true;
}

// Bring numbers on the CPU that index a tensor of this device to it, as Python does. A mask stays on the CPU, where
// Python finds the elements that it chooses.
void bring_indices(IValue* given, int place) {
  if (given[0].toTensor().device() != device_zero()) return;
  auto indices = given[place].toOptionalTensorList();
  for (size_t i = 0; i < indices.size(); i++) {
    const auto x = indices.get(i);
    if (!x || !x->defined() || !x->is_cpu() || x->scalar_type() != at::kLong) continue;
    indices = indices.copy();  // the caller may have this list
    indices.set(i, x->to(device_zero()));
    given[place] = indices;
  }
}

// True if the call was one that the walk expects, and nothing is left to do.
bool followed(Overload& overload, Session& session, torch::jit::Stack* stack) {
  auto next = Walk::Next::PASSED;
  {
    Gate::Inside inside(session.gate);
    if (!session.gate.follows()) return false;  // another thread has stopped it
    const auto walk = session.walk;
    next = walk->call(overload, stack);
  }
  if (next == Walk::Next::LEFT) catch_up();
  if (next == Walk::Next::FOLLOWED) followed_here.fetch_add(1, std::memory_order_relaxed);
  return next == Walk::Next::FOLLOWED;
}

}  // namespace

void CallKernel::operator()(const c10::OperatorHandle&, DispatchKeySet, torch::jit::Stack* stack) {
  Session& session = this_thread();
  if (overload.indices >= 0) bring_indices(&(*stack)[stack->size() - overload.kinds.size()], overload.indices);
  if (session.gate.follows() && !session.depth) {
    const Copy copy(overload, *stack);
    const auto* read = copy.is_read ? held_by(*copy.self) : nullptr;
    if (read && read->is_walked && !ends_at_read(false)) catch_up();
    if (copy.is_one()) return run_beside_walk(session, stack);
    if (followed(overload, session, stack)) return;
  }
  const size_t first = stack->size() - overload.kinds.size();
  if (!run(session, stack)) return;
  Gate::Inside inside(session.gate);
  if (session.gate.sums()) session.sketch.name_results(*stack, first);
}

bool CallKernel::run(Session& session, torch::jit::Stack* stack) {
  if (session.is_armed.load(std::memory_order_relaxed)) {
    const Copy copy(overload, *stack);
    // where nothing runs, a read is Python's, and so is an upload that may be refused
    if ((overload.rule & RUNS_HERE) && !copy.is_read && !copy.is_large_upload) {
      session.is_armed = false;
      begin();
    }
  }
  bool is_summed_up = false, has_run = false;
  if (session.sums() || session.gate.runs()) {  // only now: a first call begins the sketch
    Gate::Inside inside(session.gate);
    if ((is_summed_up = session.sums())) session.sketch.add(overload, *stack);
    has_run = session.gate.runs() && run_here(overload, session, stack);
  }
  if (!has_run) left(session, stack);
  return is_summed_up;
}

// A copy from or to the CPU, of which the walk knows nothing.
void CallKernel::run_beside_walk(Session& session, torch::jit::Stack* stack) {
  {
    Gate::Inside inside(session.gate);
    const bool may_run = session.gate.follows() && session.walk->has_host_values();
    if (may_run && !Copy(overload, *stack).is_large_upload && run_here(overload, session, stack)) return;
  }
  left(session, stack);
}

void CallKernel::left(Session& session, torch::jit::Stack* stack) {
  overload.left_to_python.fetch_add(1, std::memory_order_relaxed);
  const auto drawn = std::exchange(session.drawn, 0);
  if (session.learner && !session.depth && !Copy(overload, *stack).is_one()) learn(session, stack);
  else leave(session, stack);
  if (drawn) keep_program(drawn, stack->back().toTensor());
}

void CallKernel::leave(Session& session, torch::jit::Stack* stack) {
  session.depth++;
  const auto back = c10::make_scope_exit([&session] { session.depth--; });
  run_in_python(overload.handle, stack);
}

void CallKernel::learn(Session& session, torch::jit::Stack* stack) {
  if (overload.rule < 0) overload.prepare();
  const auto learner = session.learner;
  const size_t first = stack->size() - overload.kinds.size();
  learner->before(overload, *stack);
  leave(session, stack);
  if (session.learner == learner) learner->after(*stack, first);
}

}  // namespace ltc
