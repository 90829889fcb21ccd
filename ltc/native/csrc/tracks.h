// Following: a path that came back is known call by call. Each call is compared with the one that is
// expected, and makes tensors without values; Python catches up where it has to know of them.
#pragma once

#include "exits.h"
#include "modes.h"
#include "overload.h"

namespace ltc {

struct Type {
  explicit Type(const Tensor& tensor) : sizes(tensor.sizes()), dtype(tensor.dtype()) {}
  bool is_of(const Tensor& tensor) const { return tensor.dtype() == dtype && tensor.sizes() == sizes; }
  c10::SmallVector<int64_t, 5> sizes;
  caffe2::TypeMeta dtype;
};

// True if PyTorch certainly converts the number to the type; see `fits` in numbers_that_fit.py.
bool fits(const IValue& number, at::ScalarType type);

// What an argument of an expected call is.
struct Word {
  enum class Is : uint8_t { ANYTHING, EQUAL, NUMBER, NO_TENSOR, KNOWN, INPUT, VIEW, LIST };
  Is is;
  int64_t name = -1;         // of a tensor: KNOWN from an earlier call, or an INPUT or a VIEW that comes here first
  IValue value;              // EQUAL to this; a NUMBER of this one's class
  std::vector<Word> parts;   // of a LIST; the base of a VIEW, which was made before the recording
  std::shared_ptr<const Link> link;  // of a VIEW
};

struct Result {
  int written = -1;  // it is this argument
  bool is_list = false;
  std::vector<int64_t> names;  // of new tensors; -1: undefined
};

struct Step {
  const Overload* overload;
  std::vector<Word> words;
  std::vector<Result> results;
  // The tensors whose values change, by name, each with the number of its value; -1: it is a view that is
  // derived again where it is next used.
  std::vector<std::pair<int64_t, int64_t>> values;
  bool is_passed = false;      // Python runs it, and records nothing
  bool makes_views = false;
  bool is_watched = false;     // the backward under way makes them independent when it ends
  Caller caller = Caller::NONE;  // who asks for them
};

struct Track {
  std::vector<Step> steps;
  std::vector<Type> types;  // of the tensors, by name
  mutable std::shared_ptr<const Exit> exit;  // of the thread that walks along it; null where Python ends each recording
};

// A track is learned while Python follows the path.
class Learner {
 public:
  Learner();
  // Around each call of Python's.
  void before(Overload& overload, const torch::jit::Stack& stack);
  void after(const torch::jit::Stack& stack, size_t first);
  // Null where the path cannot be followed here.
  std::shared_ptr<const Track> learned() const { return is_refused_ || is_under_way_ ? nullptr : track_; }

 private:
  Word word_of(const IValue& given, char kind, const std::vector<double>& statics);
  Word word_of(const Tensor& tensor);
  Word word_of_view(const Tensor& tensor, Word word);
  void note_old_views(HeldValue& held);
  int64_t name(const Tensor& tensor);
  void note_results(Step& step, const torch::jit::Stack& stack, size_t first);
  void note_values(Step& step, const std::vector<int64_t>& ids);
  void add_family(int64_t name);

  const int64_t walk_;
  std::shared_ptr<Track> track_ = std::make_shared<Track>();
  std::vector<WeakStorage> storages_;    // by name
  std::vector<int64_t> values_, bases_;  // by name
  // Views from before the recording, each with its base as the value: Python has all once it has one.
  std::vector<std::pair<WeakStorage, Word>> old_views_;
  std::vector<Tensor> seen_;             // of the call under way
  std::vector<IValue> numbers_;
  int64_t new_inputs_ = 0;  // of the call under way
  bool is_refused_ = false, is_under_way_ = false;
};

// One run along a track.
class Walk {
 public:
  Walk(std::shared_ptr<const Track> track, bool has_host_values);
  // Python makes the calls that are not expected, and those that are passed.
  enum class Next { FOLLOWED, PASSED, LEFT };
  Next call(Overload& overload, torch::jit::Stack* stack);
  bool has_host_values() const { return has_host_values_; }
  int64_t position() const { return int64_t(position_); }
  // Of a view made in the walk: its base's sizes and dtype (as an empty tensor), and its links.
  IValue view(const HeldValue& held) const;
  // What Python has to know, once.
  IValue caught_up();
  // True if the walk has come to an end that may be made here.
  bool is_at_exit() const;
  // The recording ends: its program has run, and each tensor has its value. Where it has not LAUNCHED, nothing has
  // changed, and Python has to end it.
  int64_t finish(const Launch& launch);

 private:
  bool matches(const Word& word, const IValue& given);
  bool matches(const Word& word, const Tensor& tensor);
  bool bind(const Word& word, const Tensor& tensor, HeldValue& held);
  bool holds_numbers(const Step& step, const Overload::Words& words, const torch::jit::Stack& stack,
                     size_t first) const;
  bool may_write(const Step& step, const torch::jit::Stack& stack, size_t first);
  bool open_what_is_written(const Step& step);
  void forget_call();
  void count_writes(const Step& step, const torch::jit::Stack& stack, size_t first) const;
  bool is_free(const Tensor& tensor) const;
  IValue renamed(const Tensor& tensor, int64_t name);
  IValue results(const Result& result, const Step& step, const torch::jit::Stack& stack, size_t first);
  std::vector<Storage> living(const Exit& exit) const;
  bool is_known_family(HeldValue& held) const;
  void derive(HeldValue& view) const;
  bool has_value(c10::StorageImpl* input) const;
  int64_t launched(const Exit& exit, const Launch& launch);
  static void leave(HeldValue& held);
  Tensor made(int64_t name, const Step& step, const torch::jit::Stack& stack, size_t first, int64_t index);

  const std::shared_ptr<const Track> track_;
  const bool has_host_values_;
  const int64_t number_;
  size_t position_ = 0, known_numbers_ = 0, known_inputs_ = 0, known_members_ = 0;
  std::vector<WeakStorage> members_;  // by name
  std::vector<Storage> inputs_;
  std::vector<int64_t> input_names_;
  std::vector<IValue> numbers_;  // of a seed: none before it is drawn
  int64_t made_ = 0;
  bool is_compared_ = false;  // a call is under way, of which nothing counts yet
  bool is_over_ = false;
};

}  // namespace ltc
