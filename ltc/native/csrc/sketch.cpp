#include "sketch.h"

#include "session.h"

namespace ltc {

void Sketch::begin() {
  *this = Sketch();
  walk_ = new_walk();
}

void Sketch::add(const Overload& overload, const torch::jit::Stack& stack) {
  begin_call(overload);
  for (size_t i = stack.size() - overload.kinds.size(); i < stack.size(); i++) add(stack[i]);
  calls += longest_ - 1;
}

void Sketch::begin_call(const Overload& overload) {
  calls++, entries++, longest_ = 1;
  mix_both(reinterpret_cast<uint64_t>(&as_on_path(overload)));
}

void Sketch::add(const IValue& value) {
  if (value.isTensor()) return add(value.toTensor());
  if (value.isInt()) return mix(uint64_t(value.toInt()));
  if (value.isBool()) return mix_both(value.toBool());
  if (value.isNone()) return mix_both(uint64_t(INT64_MIN));  // a number that no call is given: a type is one as well
  if (value.isList()) {
    const auto parts = value.toList();
    mix_both(parts.size());
    if (value.isTensorList()) longest_ = std::max(longest_, int64_t(parts.size()));
    for (const IValue& part : parts) add(part);
  }  // a number of the user's may change from step to step
}

void Sketch::add(const Tensor& tensor) {
  auto* held = tensor.defined() ? attached(tensor) : nullptr;
  if (!held) return tensor.defined() ? add_type(tensor) : mix_both(false);
  if (held->walk == walk_) return mix_both(uint64_t(held->name));
  inputs++;
  add_type(tensor);
  name(tensor);
}

void Sketch::add_type(const Tensor& tensor) {
  mix_both(uint64_t(tensor.scalar_type()) << 8 | uint64_t(tensor.dim()));
  for (auto extent : tensor.sizes()) mix(uint64_t(extent));
}

void Sketch::name(const Tensor& tensor) {
  if (auto* held = tensor.defined() ? attached(tensor) : nullptr) held->walk = walk_, held->name = ++names_;
}

void Sketch::name_result(const Tensor& tensor) {
  name(tensor);
  if (const auto* held = tensor.defined() ? held_by(tensor) : nullptr; held && !held->base)
    bytes += tensor.numel() * int64_t(tensor.itemsize());
}

void Sketch::name_results(const torch::jit::Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); i++)
    for_each_tensor(stack[i], [this](const Tensor& one) { name_result(one); });
}

// --- ends of recordings

bool SettledCuts::pass(Sketch& sketch, bool is_of_reads, int64_t calls) {
  const auto [exact, shape] = sums_of(sketch);
  // Without a call nothing ends.
  if (!sketch.calls || reads + marks >= most || !(known_.count(exact) + known_.count(shape))) return !sketch.calls;
  (is_of_reads ? reads : marks)++;
  passed++, passed_at = calls;
  end(sketch), sketch.begin();
  return true;
}

void SettledCuts::end(const Sketch& sketch) {
  began_ = std::exchange(last_, sums_of(sketch));
  before = behind, behind = {sketch.exact, sketch.shape};
}

void SettledCuts::hear(const Sketch& sketch) {
  end(sketch), reads = marks = 0;
}

void SettledCuts::settle(Settles settles) {
  if (settles == Settles::NONE || known_.size() >= MOST_KNOWN) known_.clear();
  if (settles == Settles::THIS) known_.insert(last_.exact);
  else if (settles == Settles::ALIKE) known_.insert(last_.shape);
  else for (auto sum : {last_.exact, last_.shape, began_.exact, began_.shape}) known_.erase(sum);
}

void SettledCuts::begin() {
  auto known = std::move(known_);
  *this = SettledCuts();
  known_ = std::move(known);
}

SettledCuts::Sums SettledCuts::sums_of(const Sketch& sketch) const {
  const auto sum = [](uint64_t kind, uint64_t before, uint64_t behind, uint64_t last) {
    return Sketch::mixed(Sketch::mixed(Sketch::mixed(kind, before), behind), last);
  };
  // From 1 on: else a path behind itself would be 0, and two in turns alike.
  return {sum(1, before.exact, behind.exact, sketch.exact), sum(2, before.shape, behind.shape, sketch.shape)};
}

}  // namespace ltc
