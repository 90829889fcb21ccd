// What the core has to know of an overload to run its calls.
#pragma once

#include "held_value.h"

namespace ltc {

// What Python says of an overload, at its first call.
enum Rule : int64_t {
  RUNS_HERE = 1,      // PyTorch's CPU kernel may be called
  ANY_STRIDES = 2,    // it takes operands of any strides
  ZEROED = 4,         // what it makes has no values: zeros in ltc
  COUNTS_WRITES = 8,  // nobody else counts what it writes to
  NOT_16_BITS = 16,   // it adds float16 and bfloat16 without widening
  MAY_READ = 32,      // the shape of its result may depend on values
  IS_EXPAND = 64,
  COPIES = 128,       // it is `_to_copy`, which takes tensors of the CPU's as well
  ATTENTION = 256,    // it is `ltc::attention` or its gradient
  ADAM = 512,         // it is `ltc::adam_`
  AS_IT_LIES = 1024,  // it goes through the memory of what it writes to, whatever the strides
  OF_DEVICE = 2048,   // it takes no number of the CPU's: Python uploads one
  DRAWS = 4096,       // `run_random` draws its numbers
  FROM_START = 8192,  // its last argument is an offset: see `count_from`
  BY_PROGRAM = 16384,  // its numbers are those of a program
};

enum class Kind : uint8_t { OTHER, TENSOR, TENSORS, OPTIONAL_TENSORS, DEVICE };

struct Overload {
  explicit Overload(const c10::OperatorHandle& handle);
  // Asks Python for the rule.
  void prepare();

  // How Python's recorder sees the arguments: see `ask_for_words`.
  struct Words {
    std::string kinds;
    std::vector<std::vector<double>> statics;
    bool draws = false;
  };
  const Words& words();

  c10::OperatorHandle handle;
  std::string name;
  std::atomic<int64_t> rule{-1};  // until prepared
  std::vector<Kind> kinds;
  std::vector<bool> writes;
  std::vector<int> returned;  // of each return: which written argument it is, or -1
  bool is_view = false, has_writes = false, takes_lists = false;
  int indices = -1;  // the argument that has a tensor's indices
  bool is_factory = true;  // it takes no tensors
  // Where autograd adds up gradients: it adds in place if nothing but it holds the sum, which depends on
  // who has made that. Null of other overloads.
  const Overload* out_of_place = nullptr;
  std::atomic<int64_t> left_to_python{0};

 private:
  std::atomic<const Words*> words_{nullptr};  // of the first thread that has asked; they stay
};

// The offset of `as_strided`, which counts in the tensor: the CPU's kernel counts from where the memory begins.
void count_from(const Tensor& host, IValue& offset);

// What a view shows of a value on the host; a copy where it would have to lie in order for a view.
Tensor shown(const Tensor& host, const Link& link);

// A view that is derived anew from the value of its base, link by link.
struct Derivation {
  void add(const Overload& overload, std::vector<IValue> arguments, int64_t index);
  Tensor host;
  std::shared_ptr<const Link> link;
};

// The links of a view, the first one first, as Python is told of them: the name of an overload, or else the step of a
// walk, then its arguments, and which of its results it was.
IValue links_of(const HeldValue& view);

// Use the tensor that a value is, or each of a list of them.
template <class Use> void for_each_tensor(const IValue& given, Use use) {
  if (given.isTensor()) return use(given.toTensor());
  if (given.isTensorList()) for (const IValue& one : given.toListRef()) use(one.toTensor());
}

// The overload as paths have it: a sum of gradients in place is one that makes a tensor.
const Overload& as_on_path(const Overload& overload);

}  // namespace ltc
