// A path summed up in two numbers, as its calls go by: what comes back is told from what is new.
#pragma once

#include "overload.h"

namespace ltc {

struct Sketch {
  void begin();
  // What a call is, and which earlier results it is given.
  void add(const Overload& overload, const torch::jit::Stack& stack);
  // The same of one without lists of tensors.
  template <class... Arguments>
  void add_call(const Overload& overload, const Arguments&... given) {
    begin_call(overload);
    (add_argument(given), ...);
  }
  // What it has made and written to gets names by which later calls tell it.
  void name_results(const torch::jit::Stack& stack, size_t first);
  void name_result(const Tensor& tensor);

  static uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
    return sum ^ (sum >> 29);
  }

  uint64_t exact = 0;  // of the calls with all extents and whole numbers
  uint64_t shape = 0;  // of the calls alone
  int64_t calls = 0;  // one of lists is one for each of their tensors, a recurrence one for each of its steps
  int64_t entries = 0;  // as they were made
  int64_t bytes = 0;  // of what they have made
  int64_t inputs = 0;  // tensors of before that they were given

 private:
  void mix(uint64_t word) { exact = mixed(exact, word); }
  void mix_both(uint64_t word) { mix(word), shape = mixed(shape, word); }
  void add(const IValue& value);
  void add(const Tensor& tensor);
  void add_type(const Tensor& tensor);
  void name(const Tensor& tensor);
  void begin_call(const Overload& overload);

  // As `add` takes it from a stack.
  template <class Argument>
  void add_argument(const Argument& given) {
    if constexpr (std::is_same_v<Argument, Tensor>) add(given);
    else if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) given ? add(*given) : add(IValue());
    else add(IValue(given));
  }

  int64_t walk_ = 0, names_ = 0, longest_ = 1;
};

}  // namespace ltc
