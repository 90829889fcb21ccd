
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include "python_side.h"
#include "tracks.h"

namespace ltc {

Exit::Exit(const int64_t* words) : run(words[0]), constants(words[1]), block_bytes(words[2]), guard(words[3]) {
  const int64_t* next = words + 8;
  for (int64_t i = 0; i < words[4]; i++, next += 2) inputs.push_back({next[0], next[1] != 0});
  for (int64_t i = 0; i < words[5]; i++) made.push_back(*next++);
  for (int64_t i = 0; i < words[6]; i++, next += 3) cells.push_back({next[0], next[1], char(next[2])});
  values.assign(next, next + words[7]);
}

namespace {

template <class Number>
bool put(Number number, int64_t* word) {
  *word = 0;
  std::memcpy(word, &number, sizeof(number));
  return true;
}

template <class Number>
bool put_whole(const c10::IValue& value, int64_t* word) {
  if (value.isDouble()) return false;
  const int64_t number = value.isBool() ? value.toBool() : value.toInt();
  const bool fits = number >= int64_t(std::numeric_limits<Number>::min()) &&
                    number <= int64_t(std::numeric_limits<Number>::max());
  return fits && put(Number(number), word);
}

// What the programs of this thread work in, one at a time.
int64_t* memory(Tensor& kept, int64_t bytes) {
  if (!kept.defined() || kept.numel() < bytes) kept = at::detail::empty_cpu({bytes}, at::kByte);
  return static_cast<int64_t*>(kept.data_ptr());
}

thread_local Tensor frame_here, block_here;

}  // namespace

Tensor output_of(const Type& type, int64_t guard) {
  const auto dtype = c10::typeMetaToScalarType(type.dtype);
  if (!guard) return at::detail::empty_cpu(type.sizes, dtype);
  const int64_t bytes = c10::multiply_integers(type.sizes) * int64_t(type.dtype.itemsize());
  Tensor around = at::detail::empty_cpu({(bytes + guard - 1) / guard * guard + 2 * guard}, at::kByte);
  void* own = static_cast<char*>(around.data_ptr()) + guard;
  return at::from_blob(own, type.sizes, [around](void*) {}, at::TensorOptions().dtype(dtype));
}

namespace {

// The memory of a program's input; none where the program cannot have it as it is.
Tensor input_of(HeldValue& held, const Type& type, bool is_written) {
  if (held.host.sizes() != type.sizes || held.host.dtype() != type.dtype) return Tensor();
  if (!is_written) return held.host.contiguous();
  have_own_memory(held);
  if (!held.host.is_contiguous()) held.hold(held.host.contiguous());
  return held.host;
}

}  // namespace

bool Exit::Cell::holds(const c10::IValue& value, int64_t* frame) const {
  if (!value.isDouble() && !value.isInt() && !value.isBool()) return false;
  const double number = value.toScalar().toDouble();
  int64_t* at = frame + word;
  switch (format) {
    case 'd': return put(number, at);
    case 'f': return (!std::isfinite(number) || std::abs(number) <= double(std::numeric_limits<float>::max())) &&
                     put(float(number), at);
    case 'q': return put_whole<int64_t>(value, at);
    case 'i': return put_whole<int32_t>(value, at);
    case 'h': return put_whole<int16_t>(value, at);
    case 'b': return put_whole<int8_t>(value, at);
    case 'B': return put_whole<uint8_t>(value, at);
    case '?': return put(number != 0, at);
    default: return false;
  }
}

// True if all that changes with a value was made in this walk, or comes to it.
bool Walk::is_known_family(HeldValue& held) const {
  if ((held.base ? held_by(held.base.get()) : &held)->pending < 0) return true;
  for (const auto& one : relatives(held))
    if (const auto* other = held_by(one.get()); !other || other->walk != number_) return false;
  return true;
}

// A view of what is there by now: derived from it by the calls that have made it.
void Walk::derive(HeldValue& view) const {
  const Tensor base = held_by(view.base.get())->host;
  Derivation derived{base, nullptr};
  for (const auto* one : all_links(view.link.get())) {
    std::vector<IValue> arguments = one->arguments;
    const Step* step = one->overload ? nullptr : &track_->steps[one->step];
    for (size_t i = 1; step && i < step->words.size(); i++) arguments.push_back(step->words[i].value);
    derived.add(step ? *step->overload : *one->overload, std::move(arguments), one->index);
  }
  const bool is_copy = !derived.host.is_alias_of(base);
  view.hold(std::move(derived.host));
  view.link = std::move(derived.link);
  std::lock_guard<std::mutex> lock(changes);
  view.family->copies += is_copy - view.is_copy;
  view.is_copy = is_copy;
}

// The tensors that are alive, by name; none of them where others are than the exit says.
std::vector<Storage> Walk::living(const Exit& exit) const {
  std::vector<Storage> all;
  all.reserve(members_.size());
  for (size_t name = 0; name < members_.size(); name++) {
    auto storage = members_[name].lock();
    if (bool(storage) == (exit.values[name] == Exit::GONE)) return {};
    if (storage) {
      auto* held = held_by(storage.get());
      if (!held || held->walk != number_ || held->pending != exit.values[name]) return {};
      if (!is_known_family(*held)) return {};
    }
    all.push_back(std::move(storage));
  }
  return all;
}

// True if the core has the value of an input, by now.
bool Walk::has_value(c10::StorageImpl* input) const {
  auto* held = held_by(input);
  const auto& type = track_->types[held->name];
  return held->host.defined() || lend_to_walk(over(input, type.sizes, type.dtype), *held);
}

bool Walk::is_at_exit() const {
  return track_->exit && !is_over_ && !is_compared_ && position_ == track_->steps.size();
}

int64_t Launch::run(const Exit& exit, const std::vector<Tensor>& hosts, const std::vector<IValue>& numbers) const {
  int64_t* frame = memory(frame_here, frame_bytes);
  int64_t* address = frame;
  for (const auto& one : hosts) *address++ = reinterpret_cast<int64_t>(one.data_ptr());
  *address++ = reinterpret_cast<int64_t>(frame);
  *address++ = exit.constants;
  *address++ = 0;
  *address++ = reinterpret_cast<int64_t>(memory(block_here, exit.block_bytes));
  for (const auto& cell : exit.cells) if (!cell.holds(numbers[cell.number], frame)) return NOT_LAUNCHED;
  return reinterpret_cast<int64_t (*)(int64_t, int64_t*, int64_t)>(exit.run)(kernels, frame, threads);
}

int64_t frame_of_thread() { return reinterpret_cast<int64_t>(frame_here.data_ptr()); }

int64_t Walk::finish(const Launch& launch) {
  const auto exit = track_->exit;
  if (!is_at_exit() || exit->values.size() != members_.size()) return NOT_LAUNCHED;
  try {
    return launched(*exit, launch);
  } catch (const c10::Error&) {  // there is no memory
    if (is_over_) throw;
    return NOT_LAUNCHED;
  }
}

int64_t Walk::launched(const Exit& exit, const Launch& launch) {
  c10::impl::ExcludeDispatchKeyGuard below(above_cpu());
  const auto all = living(exit);
  if (all.size() != members_.size()) return NOT_LAUNCHED;
  std::vector<Tensor> hosts;
  for (const auto& input : exit.inputs) {
    auto* held = held_by(all[input.name].get());
    const auto& type = track_->types[input.name];
    if (!has_value(all[input.name].get())) return NOT_LAUNCHED;
    hosts.push_back(input_of(*held, type, input.is_written));
    if (!hosts.back().defined()) return NOT_LAUNCHED;
  }
  for (const auto& storage : all) {
    const auto* view = held_by(storage.get());
    const bool is_of_input = view && view->base && held_by(view->base.get())->pending < 0;
    if (is_of_input && !has_value(view->base.get())) return NOT_LAUNCHED;
  }
  if (is_over_) return NOT_LAUNCHED;  // Python has asked for a value meanwhile
  for (auto name : exit.made) hosts.push_back(output_of(track_->types[name], exit.guard));
  const auto outcome = launch.run(exit, hosts, numbers_);
  if (outcome != LAUNCHED) return outcome;  // nothing was written over: Python finds out
  const auto* made = &hosts[exit.inputs.size()];
  for (size_t i = 0; i < exit.made.size(); i++) held_by(all[exit.made[i]].get())->hold(made[i]);
  is_over_ = true;
  for (const auto& storage : all)
    if (auto* held = held_by(storage.get()); held && held->base && held->is_walked) derive(*held);
  for (const auto& storage : all) if (storage) leave(*held_by(storage.get()));
  inputs_.clear();
  return LAUNCHED;
}

void Walk::leave(HeldValue& held) {
  held.walk = 0, held.pending = -1, held.is_walked = false;
}

}  // namespace ltc
