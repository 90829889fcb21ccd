#include "tracks.h"

#include <ATen/Dispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/util/ScopeExit.h>

#include "python_side.h"
#include "session.h"

namespace ltc {
namespace {

bool equal(const IValue& one, const IValue& other) {
  if (one.isInt()) return other.isInt() && one.toInt() == other.toInt();
  if (one.isBool()) return other.isBool() && one.toBool() == other.toBool();
  if (one.isDouble()) return other.isDouble() && one.toDouble() == other.toDouble();
  if (one.isNone()) return other.isNone();
  if (one.isString()) return other.isString() && one.toStringRef() == other.toStringRef();
  if (one.isDevice()) return other.isDevice() && one.toDevice() == other.toDevice();
  if (!one.isList() || !other.isList()) return false;  // what is compared here comes from a schema
  const auto ours = one.toListRef(), theirs = other.toListRef();
  return std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), equal);
}

bool are_same(const Link* one, const Link* other) {
  for (; one && other; one = one->before.get(), other = other->before.get()) {
    const auto &ours = one->arguments, &theirs = other->arguments;
    if (one->overload != other->overload || one->index != other->index) return false;
    if (!std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), equal)) return false;
  }
  return one == other;
}

// The base of a view, of which the core has the value.
Tensor base_of(const HeldValue& view) {
  const auto& host = held_by(view.base.get())->host;
  return over(view.base.get(), host.sizes(), host.dtype());
}

// True if it was made before the walk.
bool is_old_view(const HeldValue& held) { return held.base && !held.is_walked; }

bool is_number(const IValue& value) { return value.isInt() || value.isDouble() || value.isBool(); }

bool is_same_class(const IValue& one, const IValue& other) {
  return one.isDouble() ? other.isDouble() : one.isBool() ? other.isBool() : other.isInt();
}

// The number that Python's kernels are given in place of such a tensor; none if it is complex.
IValue number_in(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (type == at::kDouble) return IValue(*tensor.const_data_ptr<double>());
  if (type == at::kLong) return IValue(*tensor.const_data_ptr<int64_t>());
  if (type == at::kBool) return IValue(*tensor.const_data_ptr<bool>());
  return IValue();
}

bool is_no_tensor(const IValue& given) { return given.isNone() || (given.isTensor() && !given.toTensor().defined()); }

bool is_among(const IValue& value, const std::vector<double>& statics) {
  if (!is_number(value)) return false;
  return std::find(statics.begin(), statics.end(), value.toScalar().toDouble()) != statics.end();
}

Caller caller_of(const Overload& overload) { return overload.is_view ? caller_in_backward() : Caller::NONE; }

// A number that is part of a formula where it has a value of some few has none of these.
bool keeps_class(const Overload::Words& words, const Step& step, const torch::jit::Stack& stack, size_t first) {
  for (size_t i = 0; i < step.words.size(); i++)
    if (step.words[i].is == Word::Is::NUMBER && is_among(stack[first + i], words.statics[i])) return false;
  return true;
}

template <class Use>
void for_each_written(const Overload& overload, const torch::jit::Stack& stack, size_t first, Use use) {
  for (size_t i = 0; overload.has_writes && i < overload.writes.size(); i++)
    if (overload.writes[i]) for_each_tensor(stack[first + i], use);
}

}  // namespace

bool fits(const IValue& number, at::ScalarType type) {
  if (!is_number(number) || type == at::kBool || (type == at::kLong && !number.isDouble())) return true;
  const bool is_limited = at::isIntegralType(type, false) || at::isReducedFloatingType(type) || type == at::kFloat;
  if (!is_limited) return true;
  const double value = number.toScalar().toDouble();
  return AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, type, "fits", [&] {
    return std::abs(value) <= double(std::numeric_limits<scalar_t>::max());
  }) || (at::isFloatingType(type) && !std::isfinite(value));
}

// --- learning ---------------------------------------------------------------------------------------

Learner::Learner() : walk_(new_walk()) {}

void Learner::before(Overload& overload, const torch::jit::Stack& stack) {
  is_refused_ |= is_under_way_;  // a call has failed
  seen_.clear();
  if (is_refused_) return;
  numbers_.clear();
  new_inputs_ = 0;
  Step step{&overload, {}, {}, {}};
  step.caller = caller_of(overload);
  is_refused_ = in_some_mode() || step.caller == Caller::UNKNOWN || !may_learn();
  if (is_refused_) return;
  const auto& words = overload.words();
  if (words.draws) numbers_.emplace_back();
  const size_t first = stack.size() - words.kinds.size();
  for (size_t i = 0; i < words.kinds.size(); i++)
    step.words.push_back(word_of(stack[first + i], words.kinds[i], words.statics[i]));
  for (size_t i = 0; overload.is_factory && i < words.kinds.size(); i++)  // Python knows which device is meant
    is_refused_ |= words.kinds[i] == 'd' && stack[first + i].isNone();
  track_->steps.push_back(std::move(step));
  is_under_way_ = true;
}

Word Learner::word_of(const IValue& given, char kind, const std::vector<double>& statics) {
  Word word{Word::Is::EQUAL};
  word.value = given;
  if (kind == 'i') {
    word.is = Word::Is::ANYTHING;
  } else if (kind == 'g') {
    is_refused_ |= !given.isNone();
  } else if (kind == 't') {
    if (given.isTensor()) return word_of(given.toTensor());
    word.is = Word::Is::NO_TENSOR;
    is_refused_ |= !given.isNone();
  } else if ((kind == 'T' || kind == 'N') && given.isList()) {
    word.is = Word::Is::LIST;
    word.value = IValue();
    for (const IValue& part : given.toListRef()) word.parts.push_back(word_of(part, kind == 'T' ? 't' : 'n', {}));
  } else if ((kind == 'n' || kind == 'f') && is_number(given) && !is_among(given, statics)) {
    word.is = Word::Is::NUMBER;
    numbers_.push_back(given);
  } else {
    is_refused_ |= !equal(given, given);  // it cannot be compared
  }
  return word;
}

Word Learner::word_of(const Tensor& tensor) {
  Word word{Word::Is::KNOWN};
  if (!tensor.defined()) return {Word::Is::NO_TENSOR};
  if (is_wrapped_number(tensor)) {
    word.is = Word::Is::NUMBER;
    word.value = number_in(tensor);
    is_refused_ |= word.value.isNone();
    numbers_.push_back(word.value);
    return word;
  }
  auto* held = tensor.device() == device_zero() ? attached(tensor) : nullptr;
  if (!held) {
    is_refused_ = true;
    return word;
  }
  seen_.push_back(tensor);
  if (held->walk != walk_) {
    if (!held->host.defined()) lend_view(tensor, *held);
    note_old_views(*held);
    for (const auto& [view, how] : old_views_)
      if (view._unsafe_get_target() == held->storage) return word_of_view(tensor, Word(how));
    word.is = Word::Is::INPUT;
    is_refused_ |= !is_plain(tensor, *held);
    new_inputs_++;
    name(tensor);
  }
  word.name = held->name;
  return word;
}

Word Learner::word_of_view(const Tensor& tensor, Word word) {
  word.parts.push_back(word_of(std::exchange(word.value, IValue()).toTensor()));
  word.name = name(tensor);
  bases_.back() = word.parts[0].name;
  return word;
}

void Learner::note_old_views(HeldValue& held) {
  if (!held.base || !held.host.defined()) return;
  for (const auto& one : relatives(held))
    if (const auto* view = held_by(one.get()); view->base)
      old_views_.emplace_back(one, Word{Word::Is::VIEW, -1, base_of(*view), {}, view->link});
}

int64_t Learner::name(const Tensor& tensor) {
  auto* held = attached(tensor);
  held->walk = walk_;
  held->name = int64_t(track_->types.size());
  track_->types.emplace_back(tensor);
  storages_.emplace_back(kept(tensor));
  values_.push_back(-1);
  bases_.push_back(held->name);
  return held->name;
}

void Learner::after(const torch::jit::Stack& stack, size_t first) {
  is_under_way_ = false;
  const auto forget = c10::make_scope_exit([this] { seen_.clear(); });  // else they would be alive at the end
  // Python may have put another memory under a tensor
  is_refused_ |= std::any_of(seen_.begin(), seen_.end(), [this](const Tensor& operand) {
    const auto* held = held_by(operand);
    return !held || held->walk != walk_;
  });
  if (is_refused_) return;
  auto& step = track_->steps.back();
  const size_t operands = seen_.size();
  for (size_t i = first; i < stack.size(); i++)
    for_each_tensor(stack[i], [this](const Tensor& one) { if (one.defined()) seen_.push_back(one); });
  const size_t made = seen_.size() - operands;
  if (step.overload->has_writes) for (size_t i = 0; i < operands; i++) add_family(held_by(seen_[i])->name);
  const auto ids = learned_values(seen_, numbers_, operands, made, new_inputs_, step.overload->is_view);
  is_refused_ = ids.empty() || ids[0] < 0;
  if (is_refused_) return;
  const std::vector<int64_t> numbers(ids.begin() + 1, ids.end());
  if (ids[0] == 0) note_values(step, numbers);  // a copy of what is known: its target has another value
  is_refused_ = ids[0] == 0 && new_inputs_;
  step.is_passed = ids[0] == 0 && step.values.empty();
  if (step.is_passed) step.words.clear();
  if (step.is_passed || is_refused_) return;
  step.makes_views = ids[0] >= 2;
  step.is_watched = ids[0] == 3;
  note_results(step, stack, first);
  if (!is_refused_) note_values(step, numbers);
}

// The tensors of its memory that are there: a write changes them.
void Learner::add_family(int64_t name) {
  if (std::count(bases_.begin(), bases_.end(), bases_[name]) < 2) return;
  for (size_t other = 0; other < bases_.size(); other++) {
    auto storage = int64_t(other) != name && bases_[other] == bases_[name] ? storages_[other].lock() : Storage();
    if (storage) seen_.push_back(empty_over(storage));
  }
}

void Learner::note_results(Step& step, const torch::jit::Stack& stack, size_t first) {
  const auto& places = step.overload->returned;
  is_refused_ |= places.size() != stack.size() - first;
  for (size_t k = 0; k < places.size() && !is_refused_; k++) {
    Result result;
    result.written = places[k];
    result.is_list = stack[first + k].isTensorList();
    std::vector<Tensor> tensors;
    if (result.is_list) tensors = stack[first + k].toTensorVector();
    else if (stack[first + k].isTensor()) tensors.push_back(stack[first + k].toTensor());
    else is_refused_ = true;
    for (const auto& one : tensors) {
      if (result.written >= 0) continue;
      auto* held = one.defined() ? attached(one) : nullptr;
      is_refused_ |= one.defined() && (!held || held->walk == walk_);
      if (is_refused_) return;
      result.names.push_back(held ? name(one) : -1);
      if (step.makes_views) bases_.back() = bases_[held_by(seen_[0])->name];
    }
    step.results.push_back(std::move(result));
  }
}

void Learner::note_values(Step& step, const std::vector<int64_t>& ids) {
  for (size_t i = 0; i < seen_.size(); i++) {
    const auto* held = held_by(seen_[i]);
    if (!held || held->walk != walk_ || values_[held->name] == ids[i]) continue;
    values_[held->name] = ids[i];
    step.values.emplace_back(held->name, ids[i]);
  }
}

// --- following --------------------------------------------------------------------------------------

Walk::Walk(std::shared_ptr<const Track> track, bool has_host_values)
    : track_(std::move(track)), has_host_values_(has_host_values), number_(new_walk()) {
  members_.reserve(track_->types.size());
}

bool Walk::matches(const Word& word, const Tensor& tensor) {
  switch (word.is) {
    case Word::Is::NO_TENSOR:
      return !tensor.defined();
    case Word::Is::NUMBER:
      return tensor.defined() && is_wrapped_number(tensor) && matches(word, number_in(tensor));
    case Word::Is::KNOWN: {
      const auto* held = tensor.defined() ? held_by(tensor) : nullptr;
      return held && held->walk == number_ && held->name == word.name;
    }
    case Word::Is::INPUT:
    case Word::Is::VIEW: {
      const auto& type = track_->types[word.name];
      const bool is_alike = tensor.defined() && tensor.device() == device_zero() && type.is_of(tensor);
      auto* held = is_alike ? attached(tensor) : nullptr;
      return held && held->walk != number_ && bind(word, tensor, *held);
    }
    default:
      return false;
  }
}

// A tensor from before the recording, if it is what the path has here, bears that one's name.
bool Walk::bind(const Word& word, const Tensor& tensor, HeldValue& held) {
  const bool is_view = word.is == Word::Is::VIEW;
  if (!(is_view ? held.host.defined() || lend_view(tensor, held) : is_plain(tensor, held))) return false;
  if (is_view && !(held.base && are_same(held.link.get(), word.link.get()))) return false;
  if (is_view && !matches(word.parts[0], base_of(held))) return false;
  held.walk = number_;
  held.name = word.name;
  inputs_.push_back(kept(tensor));
  input_names_.push_back(word.name);
  return true;
}

bool Walk::matches(const Word& word, const IValue& given) {
  if (word.is == Word::Is::ANYTHING) return true;
  if (word.is == Word::Is::EQUAL) return equal(word.value, given);
  if (word.is == Word::Is::NO_TENSOR) return is_no_tensor(given);
  if (given.isTensor()) return matches(word, given.toTensor());
  if (word.is == Word::Is::NUMBER) {
    if (!is_number(given) || !is_same_class(word.value, given)) return false;
    numbers_.push_back(given);
    return true;
  }
  if (word.is != Word::Is::LIST || !given.isList()) return false;
  const auto parts = given.toListRef();
  if (parts.size() != word.parts.size()) return false;
  for (size_t i = 0; i < parts.size(); i++) if (!matches(word.parts[i], parts[i])) return false;
  return true;
}

// True if the result's type holds the numbers that a kernel converts to it: Python raises, of others.
bool Walk::holds_numbers(const Step& step, const Overload::Words& words, const torch::jit::Stack& stack,
                         size_t first) const {
  for (size_t i = 0; i < step.words.size(); i++) {
    if (words.kinds[i] != 'f') continue;
    const auto& result = step.results[0];
    const auto type = result.written >= 0 ? stack[first + result.written].toTensor().scalar_type()
                                          : c10::typeMetaToScalarType(track_->types[result.names[0]].dtype);
    if (!fits(stack[first + i], type)) return false;
  }
  return true;
}

// True if what is written to changes no tensor but those that it changed when the path was learned.
bool Walk::may_write(const Step& step, const torch::jit::Stack& stack, size_t first) {
  const auto changes_known = [&](const Tensor& tensor) {
    auto* held = tensor.defined() ? held_by(tensor) : nullptr;
    if (!held || !held->family) return true;
    for (const auto& one : relatives(*held)) {
      const auto* other = held_by(one.get());
      if (!other || other->walk != number_ || is_old_view(*other)) return false;
      if (other == held) continue;
      const auto is_changed = [&](const auto& value) { return value.first == other->name; };
      if (other->pending >= 0 && std::none_of(step.values.begin(), step.values.end(), is_changed)) return false;
    }
    return true;
  };
  bool may = true;
  for_each_written(*step.overload, stack, first, [&](const Tensor& one) { may = may && changes_known(one); });
  return may;
}

// Python lets go of the values of inputs that are written to: it comes here for them from now on.
bool Walk::open_what_is_written(const Step& step) {
  std::vector<Tensor> closed;
  std::vector<int64_t> numbers;
  for (const auto& [name, id] : step.values) {
    if (size_t(name) >= members_.size()) continue;  // made by this call
    auto storage = members_[name].lock();
    auto* held = storage ? held_by(storage.get()) : nullptr;
    if (!held || held->is_walked || held->base) continue;
    if (held->host.defined()) {
      held->is_walked = true;
      continue;
    }
    closed.push_back(empty_over(storage));
    numbers.push_back(number_of(*held));
  }
  if (closed.empty()) return true;
  if (!open(closed, numbers)) return false;
  for (const auto& one : closed) held_by(one)->is_walked = true;
  return true;
}

// What was found of a call that does not match is forgotten.
void Walk::forget_call() {
  while (inputs_.size() > known_inputs_) {
    held_by(inputs_.back().get())->walk = 0;
    inputs_.pop_back();
    input_names_.pop_back();
  }
  numbers_.resize(known_numbers_);
  members_.erase(members_.begin() + known_members_, members_.end());
}

Tensor Walk::made(int64_t name, const Step& step, const torch::jit::Stack& stack, size_t first, int64_t index) {
  if (name < 0) return Tensor();
  const auto& type = track_->types[name];
  Tensor tensor = pending(type.sizes, type.dtype);
  auto* held = held_by(tensor);
  held->walk = number_;
  held->name = name;
  held->is_walked = true;
  members_.emplace_back(kept(tensor));  // names are given in this order
  made_++;
  if (!step.makes_views) return tensor;
  const Tensor& shown = stack[first].toTensor();
  auto link = std::make_shared<Link>();
  link->before = held_by(shown)->link;
  link->step = int64_t(position_);
  link->index = index;
  join_family(tensor, shown, std::move(link), false);
  if (step.is_watched) watch(tensor);
  return tensor;
}

// True if it was made in this walk, and a sum may take its place: autograd alone holds it, and no view shows it. If it
// is a view itself, the path has a new tensor there, and what it shows stays as it is.
bool Walk::is_free(const Tensor& tensor) const {
  const auto* held = tensor.defined() ? held_by(tensor) : nullptr;
  if (!held || !held->is_walked || held->walk != number_) return false;
  return held->base ? tensor.is_contiguous() : !held->family;
}

// A sum in place of its first addend, which is gone.
IValue Walk::renamed(const Tensor& tensor, int64_t name) {
  auto* held = held_by(tensor);
  if (held->base) leave_family(*held);
  members_[held->name] = WeakStorage(Storage());
  members_.emplace_back(kept(tensor));
  held->name = name;
  made_++;
  return tensor;
}

IValue Walk::results(const Result& result, const Step& step, const torch::jit::Stack& stack, size_t first) {
  if (result.written >= 0) return stack[first + result.written];
  if (!result.is_list) return made(result.names[0], step, stack, first, -1);
  c10::List<Tensor> list;
  for (auto name : result.names) list.push_back(made(name, step, stack, first, int64_t(list.size())));
  return list;
}

void Walk::count_writes(const Step& step, const torch::jit::Stack& stack, size_t first) const {
  if (!(step.overload->rule & COUNTS_WRITES)) return;
  for_each_written(*step.overload, stack, first, [](const Tensor& one) { one.unsafeGetTensorImpl()->bump_version(); });
}

Walk::Next Walk::call(Overload& overload, torch::jit::Stack* stack) {
  if (position_ == track_->steps.size()) return Next::LEFT;
  const Step& step = track_->steps[position_];
  const bool adds_in_place = step.overload != &overload;
  if ((adds_in_place && step.overload != &as_on_path(overload)) || in_some_mode()) return Next::LEFT;
  if (step.is_passed) {
    position_++;
    return Next::PASSED;
  }
  if (caller_of(overload) != step.caller) return Next::LEFT;
  const auto& words = overload.words();
  const size_t first = stack->size() - step.words.size();
  known_inputs_ = inputs_.size();
  known_numbers_ = numbers_.size();
  known_members_ = members_.size();
  is_compared_ = true;
  if (words.draws) numbers_.emplace_back();
  bool is_expected = keeps_class(words, step, *stack, first);
  for (size_t i = 0; is_expected && i < step.words.size(); i++)
    is_expected = matches(step.words[i], (*stack)[first + i]);
  if (adds_in_place) is_expected = is_expected && is_free((*stack)[first].toTensor());
  else if (is_expected) is_expected = holds_numbers(step, words, *stack, first) && may_write(step, *stack, first);
  if (is_expected && !is_over_) {
    for (size_t i = known_inputs_; i < inputs_.size(); i++) members_.emplace_back(inputs_[i]);
    is_expected = open_what_is_written(step);
  }
  is_compared_ = false;
  if (is_over_) return Next::LEFT;  // Python has asked for a value meanwhile
  if (!is_expected) {
    forget_call();
    return Next::LEFT;
  }
  if (words.draws) numbers_[known_numbers_] = IValue(draw());
  if (step.makes_views) c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  torch::jit::Stack made;
  if (adds_in_place) made.push_back(renamed((*stack)[first].toTensor(), step.results[0].names[0]));
  else for (const auto& result : step.results) made.push_back(results(result, step, *stack, first));
  for (const auto& [name, id] : step.values)
    if (auto storage = members_[name].lock()) held_by(storage.get())->pending = id;
  count_writes(step, *stack, first);
  stack->resize(first);
  for (auto& one : made) stack->push_back(std::move(one));
  position_++;
  return Next::FOLLOWED;
}

IValue Walk::view(const HeldValue& held) const {
  const auto* base = held_by(held.base.get());
  if (!base || base->walk != number_) return IValue();
  const auto& type = track_->types[base->name];
  const auto none = at::empty({0}, at::TensorOptions().dtype(type.dtype));
  return c10::ivalue::Tuple::create({IValue(at::IntArrayRef(type.sizes)), IValue(none), links_of(held)});
}

IValue Walk::caught_up() {
  is_over_ = true;
  if (is_compared_) forget_call();
  c10::List<Tensor> tensors;
  c10::List<int64_t> names, values, inputs, old_views;
  c10::List<IValue> numbers(c10::AnyType::get()), views(c10::AnyType::get());
  for (size_t i = 0; i < inputs_.size(); i++)
    (is_old_view(*held_by(inputs_[i].get())) ? old_views : inputs).push_back(input_names_[i]);
  for (auto& one : numbers_) numbers.push_back(one);
  std::vector<HeldValue*> living;
  for (size_t name = 0; name < members_.size(); name++) {
    auto storage = members_[name].lock();
    if (!storage) continue;
    auto* held = held_by(storage.get());
    const auto& type = track_->types[name];
    tensors.push_back(over(storage.get(), type.sizes, type.dtype));
    names.push_back(int64_t(name));
    values.push_back(held->pending);
    living.push_back(held);
  }
  for (auto* held : living) {
    if (!held->base || is_old_view(*held)) continue;
    views.push_back(c10::ivalue::Tuple::create(
        {IValue(held->name), IValue(held_by(held->base.get())->name), links_of(*held),
         IValue(held->is_watched)}));
  }
  for (auto* held : living) {
    if (held->is_walked && held->family) leave_family(*held);  // views of an input may be from before the walk
    leave(*held);
  }
  inputs_.clear();
  return c10::ivalue::Tuple::create(
      {IValue(int64_t(position_)), IValue(made_), IValue(std::move(numbers)), IValue(std::move(inputs)),
       IValue(std::move(old_views)), IValue(std::move(tensors)), IValue(std::move(names)), IValue(std::move(values)),
       IValue(std::move(views)), IValue(int64_t(members_.size()))});
}

}  // namespace ltc
