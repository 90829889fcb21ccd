#include "held_value.h"

#include <c10/core/AutogradState.h>

namespace ltc {
namespace {

auto& numbers = *new std::unordered_map<int64_t, WeakStorage>;  // outlives every tensor

Tensor tensor_over(c10::Storage storage, c10::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  const DispatchKeySet keys(DispatchKey::PrivateUse1);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
  auto* impl = made.unsafeGetTensorImpl();
  if (sizes.size() != 1 || sizes[0] != 0) impl->set_sizes_contiguous(sizes);  // they begin as [0]
  return made;
}

void forget(Family& family, const HeldValue& held) {
  std::erase_if(family.members, [&](const auto& one) { return one._unsafe_get_target() == held.storage; });
  family.copies -= held.is_copy;
}

// A storage's Python object holds it, once Python has looked at it; in older versions of torch it does not count.
template <class Slot> auto python_holders(const Slot& slot, int) -> decltype(slot.load_pyobj(), size_t()) {
  return slot.load_pyobj() != nullptr;
}
template <class Slot> size_t python_holders(const Slot&, long) { return 0; }

size_t holders_of(const Tensor& host) {
  const auto* storage = host.storage().unsafeGetStorageImpl();
  return host.storage().use_count() - python_holders(*storage->pyobj_slot(), 0);
}

}  // namespace

std::atomic<int64_t> bytes_held;

void HeldValue::hold(Tensor value) {
  release();
  host = std::move(value);
  bytes = base ? 0 : int64_t(host.nbytes());
  bytes_held.fetch_add(bytes, std::memory_order_relaxed);
}

Tensor HeldValue::release() {
  if (bytes) bytes_held.fetch_sub(std::exchange(bytes, 0), std::memory_order_relaxed);
  return std::exchange(host, Tensor());
}

std::mutex changes;

int64_t new_walk() {
  static std::atomic<int64_t> walks{0};
  return ++walks;
}

void dropped(void* context) {
  std::unique_ptr<HeldValue> held(static_cast<HeldValue*>(context));
  if (!held->number && !held->family) return;
  std::lock_guard<std::mutex> lock(changes);
  if (held->number) numbers.erase(held->number);
  if (held->family) forget(*held->family, *held);
}

HeldValue* attached(const Tensor& tensor) {
  if (auto* held = held_by(tensor)) return held;
  auto* storage = storage_of(tensor);
  if (!storage || tensor.device() != device_zero()) return nullptr;
  const auto& pointer = storage->_mutable_data_ptr_no_checks();
  if (pointer.get() || pointer.get_context()) return nullptr;  // somebody else's memory
  auto* held = new HeldValue;
  held->storage = storage;
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, held, &dropped, tensor.device()));
  return held;
}

bool has_true_strides(const HeldValue& view) {
  const auto* base = held_by(view.base.get());
  return !view.is_copy && base && base->host.defined() && base->host.is_contiguous();
}

Tensor pending(c10::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  auto held = std::make_unique<HeldValue>();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(0),
      c10::DataPtr(nullptr, held.get(), &dropped, device_zero()), nullptr, false);
  held.release()->storage = storage.get();
  return tensor_over(c10::Storage(std::move(storage)), sizes, dtype);
}

Tensor holding(Tensor host) {
  Tensor made = pending(host.sizes(), host.dtype());
  held_by(made)->hold(std::move(host));
  return made;
}

Tensor over(c10::StorageImpl* storage, c10::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  return tensor_over(c10::Storage(Storage::reclaim_copy(storage)), sizes, dtype);
}

Tensor empty_over(const Storage& storage) { return over(storage.get(), {0}, caffe2::TypeMeta::Make<float>()); }

Tensor view_of(const Tensor& shown, Tensor host, std::shared_ptr<const Link> link, bool is_copy) {
  Tensor made = holding(std::move(host));
  bytes_held.fetch_sub(std::exchange(held_by(made)->bytes, 0), std::memory_order_relaxed);
  join_family(made, shown, std::move(link), is_copy);
  return made;
}

void join_family(const Tensor& view, const Tensor& shown, std::shared_ptr<const Link> link, bool is_copy) {
  // Without view replay autograd would use as_strided with an offset, which no tensor here has. The engine undoes a
  // flag that is set inside a backward, so each view sets it.
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  auto *of = held_by(shown), *held = held_by(view);
  held->base = of->base ? of->base : kept(shown);
  held->link = std::move(link);
  held->is_copy = is_copy || of->is_copy;
  std::lock_guard<std::mutex> lock(changes);
  if (!of->family) {
    of->family = std::make_shared<Family>();
    of->family->members.emplace_back(kept(shown));
  }
  held->family = of->family;
  held->family->members.emplace_back(kept(view));
  held->family->copies += held->is_copy;
}

bool may_be_written(HeldValue& held) {
  const auto holders = holders_of(held.host);
  {
    std::lock_guard<std::mutex> lock(changes);
    const size_t members = held.family ? held.family->members.size() : 1;
    const bool has_copies = held.family && held.family->copies;
    if (members > 1) return !has_copies && holders == members;
  }
  have_own_memory(held);
  return true;
}

void have_own_memory(HeldValue& held) {
  if (holders_of(held.host) != 1 || !held.host.is_non_overlapping_and_dense()) held.hold(held.host.clone());
}

void leave_family(HeldValue& held) {
  Storage base;  // outlives the lock: the last holder of a storage comes to `dropped`
  std::lock_guard<std::mutex> lock(changes);
  if (held.family) forget(*held.family, held);
  held.family.reset();
  held.link.reset();
  held.is_copy = false;
  base = std::move(held.base);
}

std::vector<Storage> relatives(HeldValue& held) {
  std::vector<Storage> all;
  std::lock_guard<std::mutex> lock(changes);
  if (!held.family) all.push_back(Storage::reclaim_copy(held.storage));
  else
    for (const auto& one : held.family->members) if (auto storage = one.lock()) all.push_back(std::move(storage));
  return all;
}

std::vector<const Link*> all_links(const Link* last) {
  std::vector<const Link*> all;
  for (; last; last = last->before.get()) all.push_back(last);
  std::reverse(all.begin(), all.end());
  return all;
}

int64_t number_of(HeldValue& held) {
  static int64_t last = 0;
  std::lock_guard<std::mutex> lock(changes);
  if (!held.number) numbers.emplace(held.number = ++last, Storage::reclaim_copy(held.storage));
  return held.number;
}

Storage numbered(int64_t number) {
  std::lock_guard<std::mutex> lock(changes);
  const auto found = numbers.find(number);
  return found == numbers.end() ? Storage() : found->second.lock();
}

}  // namespace ltc
