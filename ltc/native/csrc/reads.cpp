// Values that are there are read without Python's kernels; Python is told, now or at its next look.
#include <ATen/core/grad_mode.h>

#include "own_kernels.h"
#include "python_side.h"

namespace ltc {

Reads reads_here[2];

namespace {

// A copy is a call, which is inside already; a number is not.
bool passes_cut(Session& session, bool is_number) {
  if (!session.reads_pass) return false;
  if (!is_number) return session.passes_cut(true);
  Gate::Inside inside(session.gate);
  return session.passes_cut(true);
}

bool note_read(const Tensor& value, bool is_number) {
  reads_here[is_number].count.fetch_add(1, std::memory_order_relaxed);
  reads_here[is_number].bytes.fetch_add(int64_t(value.nbytes()), std::memory_order_relaxed);
  return true;
}

at::Scalar number(const Tensor& tensor) {
  auto* held = held_by(tensor);
  const bool has_ended = held && held->is_walked && !in_some_mode() && ends_at_read(true);
  if ((has_ended || this_thread().gate.runs()) && held && held->host.defined() && !in_some_mode()) {
    const Tensor host = held->host;  // Python may take the value
    const at::Scalar found = at::_ops::_local_scalar_dense::redispatch(DispatchKeySet(DispatchKey::CPU), host);
    // Python's kernel reads NaN: it has a hint for the user.
    const bool is_nan = found.isFloatingPoint() && std::isnan(found.toDouble());
    if (!is_nan && (has_ended ? note_read(host, true) : may_read_here(host, true))) return found;
  }
  return at::_ops::_local_scalar_dense::redispatch(DispatchKeySet(DispatchKey::PrivateUse2), tensor);
}

}  // namespace

bool may_read_here(const Tensor& value, bool is_number) {
  Session& session = this_thread();
  if (session.gate.follows()) return note_read(value, is_number);  // it is no value of the walk: nothing ends
  if (session.calls < session.reads_until) session.read_at = session.calls;
  else if (!passes_cut(session, is_number)) return may_read(value, is_number);
  return note_read(value, is_number);
}

bool ends_at_read(bool is_number) {
  const auto& session = this_thread();
  return !session.depth && session.walk && session.walk->is_at_exit() && end_at_read(is_number);
}

void register_reads(torch::Library& library) { library.impl("_local_scalar_dense", TORCH_FN(number)); }

}  // namespace ltc
