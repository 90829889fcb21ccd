#include "overload.h"

#include <sstream>

#include "modes.h"
#include "python_side.h"

namespace ltc {
namespace {

Kind kind_of(const c10::Argument& argument) {
  const auto type = argument.type()->str();
  if (type == "Tensor" || type == "Tensor?") return Kind::TENSOR;
  if (type == "Tensor[]") return Kind::TENSORS;
  if (type == "Tensor?[]") return Kind::OPTIONAL_TENSORS;
  if (type == "Device" || type == "Device?") return Kind::DEVICE;
  return Kind::OTHER;
}

int place_of_written(const c10::FunctionSchema& schema, const c10::AliasInfo& returned) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && alias->beforeSet() == returned.beforeSet()) return int(i);
  }
  return -1;
}

Tensor shown_as_it_lies(const Tensor& host, const Link& link) {
  const bool counts = link.overload->rule & FROM_START;
  torch::jit::Stack stack{IValue(counts ? host.contiguous() : host)};
  stack.insert(stack.end(), link.arguments.begin(), link.arguments.end());
  if (counts) count_from(stack[0].toTensor(), stack.back());
  link.overload->handle.redispatchBoxed(kCpu, &stack);
  return link.index < 0 ? stack[0].toTensor() : stack[0].toTensorVector()[link.index];
}

}  // namespace

Overload::Overload(const c10::OperatorHandle& handle) : handle(handle) {
  const auto& schema = handle.schema();
  name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  for (const auto& argument : schema.arguments()) {
    kinds.push_back(kind_of(argument));
    writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    has_writes |= writes.back();
    if (kinds.back() == Kind::OPTIONAL_TENSORS) indices = int(kinds.size()) - 1;
    takes_lists |= kinds.back() == Kind::TENSORS || kinds.back() == Kind::OPTIONAL_TENSORS;
    is_factory &= kinds.back() == Kind::OTHER || kinds.back() == Kind::DEVICE;
  }
  for (const auto& one : schema.returns()) {
    const int place = one.alias_info() ? place_of_written(schema, *one.alias_info()) : -1;
    is_view |= one.alias_info() && place < 0;
    returned.push_back(place);
  }
}

void Overload::prepare() { rule = ask_for_rule(name); }

void count_from(const Tensor& host, IValue& offset) {
  offset = host.storage_offset() + (offset.isNone() ? 0 : offset.toInt());
}

Tensor shown(const Tensor& host, const Link& link) {
  try {
    return shown_as_it_lies(host, link);
  } catch (const c10::Error&) {  // a `view` of what is not contiguous
    if (host.is_contiguous()) throw;
    return shown_as_it_lies(host.contiguous(), link);
  }
}

void Derivation::add(const Overload& overload, std::vector<IValue> arguments, int64_t index) {
  link = std::make_shared<const Link>(std::move(link), &overload, std::move(arguments), index);
  host = shown(host, *link);
}

IValue links_of(const HeldValue& view) {
  c10::List<IValue> links(c10::AnyType::get());
  for (const auto* one : all_links(view.link.get())) {
    c10::List<IValue> arguments(c10::AnyType::get());
    for (const auto& argument : one->arguments) arguments.push_back(argument);
    const auto maker = one->overload ? IValue(one->overload->name) : IValue(one->step);
    links.push_back(c10::ivalue::Tuple::create({maker, IValue(std::move(arguments)), IValue(one->index)}));
  }
  return IValue(std::move(links));
}

const Overload& as_on_path(const Overload& overload) {
  return overload.out_of_place && caller_in_backward() == Caller::FORMULA ? *overload.out_of_place : overload;
}

const Overload::Words& Overload::words() {
  if (const auto* known = words_.load()) return *known;
  std::istringstream told(ask_for_words(name));
  auto words = std::make_unique<Words>();
  std::string word, number;
  told >> word;
  words->draws = word == "draws";
  while (told >> word) {
    words->kinds += word[0];
    auto& values = words->statics.emplace_back();
    std::istringstream numbers(word.substr(1));
    while (std::getline(numbers, number, ',')) values.push_back(std::stod(number));
  }
  const Words* other = nullptr;
  return words_.compare_exchange_strong(other, words.get()) ? *words.release() : *other;
}

}  // namespace ltc
