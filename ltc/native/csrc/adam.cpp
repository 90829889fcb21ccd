// A step of Adam on lists is one call of ltc::adam_, whose formula ltc/device/ops/adam_overload.py has.
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>

#include "own_kernels.h"

namespace ltc {
namespace {

const int64_t GRAIN = 32768;  // elements, as torch's own loops have

struct Adam {
  std::optional<double> decay;
  double weight, beta2, rest, step_size, root, eps;
  bool amsgrad, maximize, decoupled;
};

// The widest vectors that the processor has: torch's own headers know them in torch's own build alone.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

template <class T, bool HAS_MOST>
inline __attribute__((always_inline)) void step(const Adam& by, T* __restrict x, const T* __restrict gradient,
                                                T* __restrict first, T* __restrict second, T* __restrict most,
                                                int64_t size) {
  const T scale = T(by.decoupled ? by.decay.value_or(1) : 1), share = T(by.decoupled ? 0 : by.decay.value_or(0));
  const T sign = by.maximize ? T(-1) : T(1), weight = T(by.weight), beta2 = T(by.beta2), rest = T(by.rest);
  const T step_size = T(by.step_size), root = T(by.root), eps = T(by.eps);
  for (int64_t i = 0; i < size; i++) {
    const T g = sign * gradient[i] + (share != 0 ? share * x[i] : T(0));  // x may be infinite
    const T m = first[i] + weight * (g - first[i]);
    const T v = second[i] * beta2 + rest * g * g;
    T bound = v;
    if (HAS_MOST) bound = most[i] = most[i] > v || most[i] != most[i] ? most[i] : v;  // NaN stays
    first[i] = m, second[i] = v;
    x[i] = x[i] * scale + step_size * (m / (std::sqrt(bound) / root + eps));
  }
}

WIDEST void update(const Adam& by, float* x, const float* g, float* first, float* second, float* most, int64_t size) {
  most ? step<float, true>(by, x, g, first, second, most, size)
       : step<float, false>(by, x, g, first, second, most, size);
}

WIDEST void update(const Adam& by, double* x, const double* g, double* first, double* second, double* most,
                   int64_t size) {
  most ? step<double, true>(by, x, g, first, second, most, size)
       : step<double, false>(by, x, g, first, second, most, size);
}

template <class T>
void run(const Adam& by, const Tensor& x, const Tensor& gradient, const Tensor& first, const Tensor& second,
         const Tensor& most) {
  T *to = x.mutable_data_ptr<T>(), *m = first.mutable_data_ptr<T>(), *v = second.mutable_data_ptr<T>();
  const T* from = gradient.const_data_ptr<T>();
  T* bound = by.amsgrad ? most.mutable_data_ptr<T>() : nullptr;
  at::parallel_for(0, x.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    update(by, to + begin, from + begin, m + begin, v + begin, bound ? bound + begin : nullptr, end - begin);
  });
}

// A loop of vectors reads before it writes: right where no tensor of one update shares memory with another.
bool is_disjoint(const std::vector<Tensor>& update) {
  for (size_t i = 0; i < update.size(); i++)
    for (size_t k = 0; k < i; k++)
      if (at::get_overlap_status(update[i], update[k]) != at::MemOverlapStatus::No) return false;
  return true;
}

// Where two parameters lie in one memory, each operation takes all of them in turn.
bool have_own_memory(const c10::List<Tensor>& params) {
  std::vector<const void*> memory;
  for (const Tensor& one : params) memory.push_back(storage_of(one));
  std::sort(memory.begin(), memory.end());
  return std::adjacent_find(memory.begin(), memory.end()) == memory.end();
}

}  // namespace

bool run_adam(const torch::jit::Stack& host) {
  const Adam by{host[5].toOptional<double>(), host[6].toDouble(),  host[7].toDouble(),  host[8].toDouble(),
                host[9].toDouble(),           host[10].toDouble(), host[11].toDouble(), host[12].toBool(),
                host[13].toBool(),            host[14].toBool()};
  const size_t lists = by.amsgrad ? 5 : 4;
  std::vector<c10::List<Tensor>> all;
  for (size_t k = 0; k < lists; k++) all.push_back(host[k].toTensorList());
  const size_t count = all[0].size();
  for (const auto& list : all) if (list.size() != count) return false;
  for (size_t i = 0; i < count; i++) {
    std::vector<Tensor> update;
    for (const auto& list : all) update.push_back(list.get(i));
    const Tensor& x = update[0];
    if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kDouble) return false;
    for (const Tensor& one : update)
      if (one.sizes() != x.sizes() || one.scalar_type() != x.scalar_type() || !one.is_contiguous()) return false;
    if (!is_disjoint(update)) return false;
  }
  if (!have_own_memory(all[0]) || !(by.weight < 0.5)) return false;  // torch's lerp adds in the other direction from .5
  for (size_t i = 0; i < count; i++) {
    const Tensor x = all[0].get(i), most = by.amsgrad ? all[4].get(i) : Tensor();
    const auto make = x.scalar_type() == at::kFloat ? &run<float> : &run<double>;
    make(by, x, all[1].get(i), all[2].get(i), all[3].get(i), most);
  }
  return true;
}

}  // namespace ltc
