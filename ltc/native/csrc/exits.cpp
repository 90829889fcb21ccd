#include "exits.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "modes.h"
#include "overload.h"
#include "python_side.h"
#include "tracks.h"

namespace ltc {

Exit::Exit(const int64_t* words)
    : run(words[0]), kernels(words[1]), constants(words[2]), frame_bytes(words[3]), block_bytes(words[4]) {
  const int64_t* next = words + 9;
  for (int64_t i = 0; i < words[5]; i++, next += 2) inputs.push_back({next[0], next[1] != 0});
  for (int64_t i = 0; i < words[6]; i++) made.push_back(*next++);
  for (int64_t i = 0; i < words[7]; i++, next += 3) cells.push_back({next[0], next[1], char(next[2])});
  values.assign(next, next + words[8]);
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

double as_double(const c10::IValue& value) {
  return value.isDouble() ? value.toDouble() : value.isBool() ? double(value.toBool()) : double(value.toInt());
}

}  // namespace

bool Exit::Cell::holds(const c10::IValue& value, int64_t* frame) const {
  if (!value.isDouble() && !value.isInt() && !value.isBool()) return false;
  int64_t* at = frame + word;
  switch (format) {
    case 'd': return put(as_double(value), at);
    case 'f': {
      const double number = as_double(value);
      const bool fits = !std::isfinite(number) || std::abs(number) <= double(std::numeric_limits<float>::max());
      return fits && put(float(number), at);
    }
    case 'q': return put_whole<int64_t>(value, at);
    case 'i': return put_whole<int32_t>(value, at);
    case 'h': return put_whole<int16_t>(value, at);
    case 'b': return put_whole<int8_t>(value, at);
    case 'B': return put_whole<uint8_t>(value, at);
    case '?': return put(as_double(value) != 0, at);
    default: return false;
  }
}

namespace {

// What the programs of this thread work in, one at a time.
int64_t* memory(Tensor& kept, int64_t bytes) {
  if (!kept.defined() || kept.numel() < bytes) kept = at::detail::empty_cpu({bytes}, at::kByte);
  return static_cast<int64_t*>(kept.data_ptr());
}

thread_local Tensor frame_here, block_here;

bool has_relatives(HeldValue& held) { return held.base || relatives(held).size() > 1; }

// The memory of a program's input; none where the program cannot have it as it is.
Tensor input_of(HeldValue& held, const Type& type, bool is_written) {
  if (held.host.sizes() != type.sizes || held.host.dtype() != type.dtype) return Tensor();
  if (!is_written) return held.host.contiguous();
  if (!may_be_written(held)) return Tensor();
  if (!held.host.is_contiguous()) held.hold(held.host.contiguous());
  return held.host;
}

}  // namespace

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
      if (held->pending >= 0 && has_relatives(*held)) return {};
    }
    all.push_back(std::move(storage));
  }
  return all;
}

bool Walk::is_at_exit() const { return track_->exit && !is_over_ && !is_compared_ && position_ == track_->steps.size(); }

bool Walk::finish(int64_t threads) {
  const auto exit = track_->exit;
  if (!is_at_exit() || exit->values.size() != members_.size()) return false;
  c10::impl::ExcludeDispatchKeyGuard below(above_cpu());
  const auto all = living(*exit);
  if (all.size() != members_.size()) return false;
  int64_t* frame = memory(frame_here, exit->frame_bytes);
  int64_t* address = frame;
  std::vector<Tensor> hosts, made;
  for (const auto& input : exit->inputs) {
    auto* held = held_by(all[input.name].get());
    const auto& type = track_->types[input.name];
    if (!held->host.defined() && !lend_to_walk(over(all[input.name].get(), type.sizes, type.dtype), *held)) return false;
    hosts.push_back(input_of(*held, type, input.is_written));
    if (!hosts.back().defined()) return false;
    *address++ = reinterpret_cast<int64_t>(hosts.back().data_ptr());
  }
  if (is_over_) return false;  // Python has asked for a value meanwhile
  for (auto name : exit->made) {
    const auto& type = track_->types[name];
    made.push_back(at::detail::empty_cpu(type.sizes, c10::typeMetaToScalarType(type.dtype)));
    *address++ = reinterpret_cast<int64_t>(made.back().data_ptr());
  }
  *address++ = reinterpret_cast<int64_t>(frame);
  *address++ = exit->constants;
  *address++ = 0;
  *address++ = reinterpret_cast<int64_t>(memory(block_here, exit->block_bytes));
  for (const auto& cell : exit->cells)
    if (!cell.holds(numbers_[cell.number], frame)) return false;
  const auto run = reinterpret_cast<int64_t (*)(int64_t, int64_t*, int64_t)>(exit->run);
  if (run(exit->kernels, frame, threads) >= 0) return false;  // nothing was written over: Python finds out what is wrong
  for (size_t i = 0; i < made.size(); i++) held_by(all[exit->made[i]].get())->hold(std::move(made[i]));
  is_over_ = true;
  for (const auto& storage : all)
    if (storage) leave(*held_by(storage.get()));
  inputs_.clear();
  return true;
}

void Walk::leave(HeldValue& held) {
  held.walk = 0;
  held.pending = -1;
  held.is_walked = false;
}

}  // namespace ltc
