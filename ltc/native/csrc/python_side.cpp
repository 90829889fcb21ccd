#include "python_side.h"

namespace ltc {
namespace {

const DispatchKeySet kPython(DispatchKey::PrivateUse2);
const DispatchKeySet kAnswers(DispatchKey::CPU);  // where Python's answers are registered

// Python's answer to a question by name.
torch::jit::Stack answer(const c10::OperatorHandle& question, torch::jit::Stack stack) {
  question.redispatchBoxed(kAnswers, &stack);
  return stack;
}

c10::OperatorHandle question(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// True if Python has lent a value.
bool takes(HeldValue& held, IValue lent) {
  if (!lent.isTensor() || !lent.toTensor().defined()) return false;
  held.hold(std::move(lent).toTensor());
  return true;
}

}  // namespace

int64_t ask_for_rule(const std::string& overload) {
  static const auto asked = question("ltc_core::rule");
  return answer(asked, {IValue(overload)})[0].toInt();
}

bool borrow(const Tensor& tensor) {
  static const auto asked = question("ltc_core::lend");
  auto* held = attached(tensor);
  if (!held) return false;
  const auto lent = answer(asked, {IValue(tensor), IValue(number_of(*held))})[0];
  return held->host.defined() || takes(*held, lent);  // a view has joined its base
}

bool lend_to_walk(const Tensor& tensor, HeldValue& held) {
  static const auto asked = question("ltc_core::lend_to_walk");
  return takes(held, answer(asked, {IValue(tensor), IValue(number_of(held))})[0]);
}

bool end_at_read(bool is_number) {
  static const auto asked = question("ltc_core::end_at_read");
  return answer(asked, {IValue(is_number)})[0].toBool();
}

bool may_look() {
  static const auto asked = question("ltc_core::may_look");
  return answer(asked, {})[0].toBool();
}

void note_uploads() {
  static const auto asked = question("ltc_core::note_uploads");
  answer(asked, {});
}

bool may_read(const Tensor& value, bool is_number) {
  static const auto asked = question("ltc_core::may_read");
  return answer(asked, {IValue(value), IValue(is_number)})[0].toBool();
}

void begin() {
  static const auto asked = question("ltc_core::begin");
  answer(asked, {});
}

void look() {
  static const auto asked = question("ltc_core::look");
  answer(asked, {});
}

std::string ask_for_words(const std::string& overload) {
  static const auto asked = question("ltc_core::words");
  return answer(asked, {IValue(overload)})[0].toStringRef();
}

bool may_learn() {
  static const auto asked = question("ltc_core::may_learn");
  return answer(asked, {})[0].toBool();
}

std::vector<int64_t> learned_values(const std::vector<Tensor>& tensors, const std::vector<IValue>& numbers,
                                    size_t operands, size_t made, int64_t inputs, bool is_view) {
  static const auto asked = question("ltc_core::learned_values");
  c10::List<IValue> given(c10::AnyType::get());
  for (const auto& one : numbers) given.push_back(one);
  return answer(asked, {IValue(tensors), IValue(std::move(given)), IValue(int64_t(operands)), IValue(int64_t(made)),
                        IValue(inputs), IValue(is_view)})[0].toIntVector();
}

bool is_plain(const Tensor& tensor, HeldValue& held) {
  static const auto asked = question("ltc_core::is_plain");
  if (held.host.defined()) return !held.base;
  if (!held.is_plain || held.base) held.is_plain = answer(asked, {IValue(tensor)})[0].toBool();
  return held.is_plain;
}

bool open(const std::vector<Tensor>& tensors, const std::vector<int64_t>& numbers) {
  static const auto asked = question("ltc_core::open");
  return answer(asked, {IValue(tensors), IValue(numbers)})[0].toBool();
}

bool copies_in_python(const Tensor& tensor, at::IntArrayRef sizes) {
  static const auto asked = question("ltc_core::copies");
  return answer(asked, {IValue(tensor), IValue(sizes)})[0].toBool();
}

int64_t draw() {
  static const auto asked = question("ltc_core::draw");
  return answer(asked, {})[0].toInt();
}

void undraw() {
  static const auto asked = question("ltc_core::undraw");
  answer(asked, {});
}

void catch_up() {
  static const auto asked = question("ltc_core::catch_up");
  answer(asked, {});
}

void run_in_python(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  handle.redispatchBoxed(kPython, stack);
}

}  // namespace ltc
