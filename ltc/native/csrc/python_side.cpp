#include "python_side.h"

namespace ltc {
namespace {

const DispatchKeySet kPython(DispatchKey::PrivateUse2);
const DispatchKeySet kAnswers(DispatchKey::CPU);  // where Python's answers are registered

template <size_t SIZE>
struct Name {
  constexpr Name(const char (&name)[SIZE]) { std::copy_n(name, SIZE, text); }
  char text[SIZE];
};

// Python's answer to a question by name; none to one that only tells.
template <Name NAME, class... Given>
IValue ask(Given&&... given) {
  static const auto question = c10::Dispatcher::singleton().findSchemaOrThrow(NAME.text, "");
  torch::jit::Stack stack{IValue(std::forward<Given>(given))...};
  question.redispatchBoxed(kAnswers, &stack);
  return stack.empty() ? IValue() : std::move(stack[0]);
}

// True if Python has lent a value.
bool takes(HeldValue& held, IValue lent) {
  if (!lent.isTensor() || !lent.toTensor().defined()) return false;
  held.hold(std::move(lent).toTensor());
  return true;
}

}  // namespace

int64_t ask_for_rule(const std::string& overload) { return ask<"ltc_core::rule">(overload).toInt(); }

bool borrow(const Tensor& tensor) {
  auto* held = attached(tensor);
  if (!held) return false;
  auto lent = ask<"ltc_core::lend">(tensor, number_of(*held));
  return held->host.defined() || takes(*held, std::move(lent));  // a view has joined its base
}

bool lend_to_walk(const Tensor& tensor, HeldValue& held) {
  return takes(held, ask<"ltc_core::lend_to_walk">(tensor, number_of(held)));
}

bool lend_view(const Tensor& tensor, HeldValue& held) {
  return ask<"ltc_core::lend_view">(tensor, number_of(held)).toBool();
}

bool end_at_read(bool is_number) { return ask<"ltc_core::end_at_read">(is_number).toBool(); }

bool may_look() { return ask<"ltc_core::may_look">().toBool(); }

void note_uploads() { ask<"ltc_core::note_uploads">(); }

bool may_read(const Tensor& value, bool is_number) { return ask<"ltc_core::may_read">(value, is_number).toBool(); }

void begin() { ask<"ltc_core::begin">(); }

void look() { ask<"ltc_core::look">(); }

std::string ask_for_words(const std::string& overload) { return ask<"ltc_core::words">(overload).toStringRef(); }

bool may_learn() { return ask<"ltc_core::may_learn">().toBool(); }

std::vector<int64_t> learned_values(const std::vector<Tensor>& tensors, const std::vector<IValue>& numbers,
                                    size_t operands, size_t made, int64_t inputs, bool is_view) {
  c10::List<IValue> given(c10::AnyType::get());
  for (const auto& one : numbers) given.push_back(one);
  return ask<"ltc_core::learned_values">(tensors, std::move(given), int64_t(operands), int64_t(made), inputs, is_view)
      .toIntVector();
}

bool is_plain(const Tensor& tensor, HeldValue& held) {
  if (held.host.defined()) return !held.base;
  if (!held.is_plain || held.base) held.is_plain = ask<"ltc_core::is_plain">(tensor).toBool();
  return held.is_plain;
}

bool open(const std::vector<Tensor>& tensors, const std::vector<int64_t>& numbers) {
  return ask<"ltc_core::open">(tensors, numbers).toBool();
}

bool copies_in_python(const Tensor& tensor, at::IntArrayRef sizes) {
  return ask<"ltc_core::copies">(tensor, sizes).toBool();
}

int64_t draw() { return ask<"ltc_core::draw">().toInt(); }

void undraw() { ask<"ltc_core::undraw">(); }

std::vector<int64_t> program_drawn() { return ask<"ltc_core::program_drawn">().toIntVector(); }

void catch_up() { ask<"ltc_core::catch_up">(); }

void run_in_python(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  handle.redispatchBoxed(kPython, stack);
}

}  // namespace ltc
