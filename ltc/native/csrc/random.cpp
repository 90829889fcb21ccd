// Random numbers, the same as a program's: Philox4x32-10, as backends/reference/philox.py has it, in the formulas of
// aten/rules/rng.py. Those that round more than once are a program's, which rounds them in its own way.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include "own_kernels.h"
#include "python_side.h"

namespace ltc {
namespace {

using torch::jit::Stack;

const int64_t PIECE = 1024, PIECES_EACH = 16;  // elements of a piece; pieces that a thread is worth for

// The words of stream 0 from the block on, four of each.
void words_of(uint64_t seed, uint64_t block, int64_t blocks, uint32_t* words) {
  for (int64_t i = 0; i < blocks; i++) {
    uint32_t c0 = uint32_t(block + i), c1 = uint32_t((block + i) >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
      const uint64_t low = uint64_t(c0) * 0xD2511F53u, high = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(high >> 32) ^ c1 ^ k0, c1 = uint32_t(high);
      c2 = uint32_t(low >> 32) ^ c3 ^ k1, c3 = uint32_t(low);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[4 * i] = c0, words[4 * i + 1] = c1, words[4 * i + 2] = c2, words[4 * i + 3] = c3;
  }
}

uint64_t two_words(const uint32_t* words) { return uint64_t(words[1]) << 32 | words[0]; }

double in_64_bits(const uint32_t* words) { return double(int64_t(two_words(words) >> 11)) * 0x1p-53; }

// Write `number(element, its words)` of each element to a contiguous tensor, piece by piece; each has so many words.
template <class Element, class Number>
void fill(const Tensor& made, int64_t seed, int64_t each, Number number) {
  auto* elements = made.mutable_data_ptr<Element>();
  const int64_t count = made.numel();
  at::parallel_for(0, (count + PIECE - 1) / PIECE, PIECES_EACH, [&](int64_t begin, int64_t end) {
    uint32_t words[2 * PIECE];
    for (int64_t first = begin * PIECE; first < std::min(end * PIECE, count); first += PIECE) {
      const auto last = std::min(first + PIECE, count);
      words_of(uint64_t(seed), uint64_t(first * each / 4), (each * (last - first) + 3) / 4, words);
      for (int64_t i = first; i < last; i++) elements[i] = Element(number(i, words + each * (i - first)));
    }
  });
}

// What is written to gets new values.
void assign(Stack& host, Tensor made) {
  Tensor self = host[0].toTensor();
  self.copy_(made);
  host = {IValue(std::move(self))};
}

// --- each overload: false where Python has to run the call ----------------------------------------

bool dropout(Stack& host) {
  Tensor x = host[0].toTensor();
  const double p = host[1].toDouble();
  const bool trains = !host[2].isBool() || host[2].toBool();
  if (!at::isFloatingType(x.scalar_type()) || !x.numel() || !(p >= 0 && p < 1) || !trains) return false;
  x = x.contiguous();
  Tensor made = at::empty_like(x), kept = at::empty(x.sizes(), at::kBool);
  auto* keeps = kept.mutable_data_ptr<bool>();
  const float limit = float(p);
  const int64_t seed = draw();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "dropout", [&] {
    using wide = at::opmath_type<scalar_t>;
    const auto* from = x.const_data_ptr<scalar_t>();
    const wide scale = wide(1 / (1 - p));
    fill<scalar_t>(made, seed, 1, [&](int64_t i, const uint32_t* word) {
      keeps[i] = float(int32_t(*word >> 8)) * 0x1p-24f >= limit;
      return wide(keeps[i]) * wide(from[i]) * scale;
    });
  });
  host = {IValue(std::move(made)), IValue(std::move(kept))};
  return true;
}

// Ones where a number lies below the probability, which is one, or that of each element.
Tensor ones(at::IntArrayRef sizes, const Tensor& probability, int64_t seed) {
  Tensor made = at::empty(sizes, at::kBool);
  const Tensor all = probability.to(at::kDouble).expand(sizes).contiguous();
  const auto* limits = all.const_data_ptr<double>();
  fill<bool>(made, seed, 2, [&](int64_t i, const uint32_t* words) { return in_64_bits(words) < limits[i]; });
  return made;
}

bool bernoulli_with(Stack& host) {
  const double p = host[1].toDouble();
  if (!(p >= 0 && p <= 1)) return false;
  assign(host, ones(host[0].toTensor().sizes(), at::scalar_tensor(p, at::kDouble), draw()));
  return true;
}

bool bernoulli(Stack& host) {
  const Tensor p = host[0].toTensor();
  if (!at::isFloatingType(p.scalar_type()) || !p.ge(0).logical_and_(p.le(1)).all().item<bool>()) return false;
  host = {IValue(ones(p.sizes(), p, draw()).to(p.scalar_type()))};
  return true;
}

bool uniform(Stack& host) {
  const Tensor self = host[0].toTensor();
  const auto most = host[2].toDouble();
  if (!at::isFloatingType(self.scalar_type()) || host[1].toDouble() != 0 || !(most >= 0) || !self.numel()) return false;
  if (!std::isfinite(most) || !fits(host[2], self.scalar_type())) return false;
  Tensor made = at::empty(self.sizes(), self.options(), at::MemoryFormat::Contiguous);
  const int64_t seed = draw();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "uniform", [&] {
    using wide = at::opmath_type<scalar_t>;
    constexpr int bits = std::numeric_limits<scalar_t>::digits;
    constexpr bool is_double = std::is_same_v<scalar_t, double>;
    const wide unit = wide(std::ldexp(1.0, -bits));
    fill<scalar_t>(made, seed, is_double ? 2 : 1, [&](int64_t, const uint32_t* words) {
      if constexpr (is_double) return in_64_bits(words) * most;
      else return wide(int32_t(*words >> (32 - bits))) * unit * wide(most);
    });
  });
  assign(host, std::move(made));
  return true;
}

// low, low + 1, ..., high - 1
Tensor integers(at::IntArrayRef sizes, int64_t low, int64_t high, int64_t seed) {
  Tensor made = at::empty(sizes, at::kLong);
  const uint64_t count = uint64_t(high) - uint64_t(low);
  fill<int64_t>(made, seed, 2, [&](int64_t, const uint32_t* words) {
    return low + int64_t((two_words(words) >> 1) % count);
  });
  return made;
}

// True if the type has all of low, low + 1, ..., high - 1. Python raises where it has not.
bool has_all(at::ScalarType type, int64_t low, int64_t high) {
  if (low >= high || high - uint64_t(low) > INT64_MAX || type == at::kBool || at::isComplexType(type)) return false;
  return AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, type, "has_all", [&] {
    const int bits = std::min(std::numeric_limits<scalar_t>::digits, 62);
    const int64_t most = int64_t(1) << bits;
    const bool is_signed = std::numeric_limits<scalar_t>::is_signed;
    return bits == 62 || (low >= (is_signed ? -most : 0) && high <= most);
  });
}

// (..., size, dtype, layout, device, pinned): a plain tensor is asked for.
bool makes_plain(const Stack& host, size_t sizes) {
  const IValue &layout = host[sizes + 2], &pinned = host[sizes + 4];
  return (layout.isNone() || layout.toLayout() == at::kStrided) && (pinned.isNone() || !pinned.toBool());
}

bool rand(Stack& host) {
  const auto type = host[1].isNone() ? at::typeMetaToScalarType(c10::get_default_dtype()) : host[1].toScalarType();
  if (!at::isFloatingType(type) || !makes_plain(host, 0)) return false;
  host = {IValue(at::empty(host[0].toIntVector(), type)), IValue(0.0), IValue(1.0)};
  return uniform(host);
}

// The places of the arguments; -1 is 0, or what is written to.
template <int LOW, int HIGH, int SIZES = -1>
bool randint(Stack& host) {
  constexpr bool makes = SIZES >= 0;
  if (host[HIGH].isNone() || (makes && !makes_plain(host, SIZES))) return false;
  const int64_t low = LOW < 0 ? 0 : host[LOW].toInt(), high = host[HIGH].toInt();
  const auto sizes = makes ? host[SIZES].toIntVector() : host[0].toTensor().sizes().vec();
  const auto named = makes ? host[SIZES + 1].toOptional<at::ScalarType>() : host[0].toTensor().scalar_type();
  if (!has_all(named.value_or(at::kLong), low, high) || !c10::multiply_integers(sizes)) return false;
  Tensor made = integers(sizes, low, high, draw());
  if (makes) host = {IValue(made.to(named.value_or(at::kLong)))};
  else assign(host, std::move(made));
  return true;
}

using Kernel = bool (*)(Stack&);
const std::unordered_map<std::string, Kernel> KERNELS = {
    {"aten::native_dropout", dropout},    {"aten::bernoulli_.float", bernoulli_with},
    {"aten::bernoulli", bernoulli},       {"aten::uniform_", uniform},
    {"aten::randint", randint<-1, 0, 1>}, {"aten::randint.low", randint<0, 1, 2>}, {"aten::rand", rand},
    {"aten::random_.to", randint<-1, 1>}, {"aten::random_.from", randint<1, 2>},
};

// PyTorch's kernel, with a generator of its own.
bool run_seeded(const Overload& overload, Stack& host) {
  const auto place = overload.handle.schema().argumentIndexWithName("generator");
  if (!place) return false;
  host[0] = host[0].toTensor().contiguous();  // it draws as the numbers lie
  host[*place] = at::make_generator<at::CPUGeneratorImpl>(uint64_t(draw()));
  try {
    overload.handle.redispatchBoxed(kCpu, &host);
  } catch (const std::exception&) {
    undraw();  // Python tries again
    throw;
  }
  return true;
}

// --- by a program -----------------------------------------------------------------------------------

struct Program {
  Exit exit;
  int64_t kernels, frame_bytes;
  Type type;  // of what it makes
};
const size_t MOST_PROGRAMS = 256;  // each is kept for good
std::mutex programs_change;
std::unordered_map<uint64_t, Program> programs;

bool run_program(const Overload& overload, Stack& host) {
  Sketch call;  // all but the numbers that it is given, which come behind the seed
  call.add(overload, host);
  const auto key = Sketch::mixed(call.exact, uint64_t(c10::typeMetaToScalarType(c10::get_default_dtype())));
  std::vector<IValue> numbers{IValue()};
  std::copy_if(host.begin(), host.end(), std::back_inserter(numbers), [](const auto& one) { return one.isDouble(); });
  if (numbers.size() > 1 && !(numbers.back().toDouble() > 0)) return false;  // a deviation, or a rate
  std::unique_lock<std::mutex> lock(programs_change);
  const auto found = programs.find(key);
  this_thread().drawn = found == programs.end() ? key : 0;
  if (found == programs.end()) return false;
  lock.unlock();  // it stays where it is
  const auto& [exit, kernels, frame_bytes, type] = found->second;
  Tensor made = output_of(type, exit.guard);
  numbers[0] = draw();
  if (Launch{kernels, frame_bytes, at::get_num_threads()}.run(exit, {made}, numbers) != LAUNCHED) {
    undraw();  // Python tries again
    return false;
  }
  if (overload.has_writes) assign(host, std::move(made));
  else host = {IValue(std::move(made))};
  return true;
}

}  // namespace

void keep_program(uint64_t key, const Tensor& drawn) {
  const auto words = programs.size() < MOST_PROGRAMS ? program_drawn() : std::vector<int64_t>();
  std::lock_guard<std::mutex> lock(programs_change);
  if (!words.empty()) programs.insert({key, {Exit(&words[2]), words[1], words[0], Type(drawn)}});
}

bool run_random(const Overload& overload, Stack& host) {
  for (const auto& one : host) if (one.isGenerator()) return false;
  if (overload.rule & BY_PROGRAM) return run_program(overload, host);
  const auto found = KERNELS.find(overload.name);
  return found == KERNELS.end() ? run_seeded(overload, host) : found->second(host);
}

}  // namespace ltc
