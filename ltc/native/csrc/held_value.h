// What the core knows of a tensor's storage: its value on the host, while no Python object has it.
//
// A HeldValue is the context of the storage's DataPtr, so that it lives exactly as long as the
// storage. A value is in one place: here, or in the State that hangs on the storage's Python object.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ltc {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Storage = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline const c10::Device device_zero() { return {c10::DeviceType::PrivateUse1, 0}; }

struct Overload;

// How a view is derived from what it shows.
struct Link {
  std::shared_ptr<const Link> before;  // of a view of a view
  const Overload* overload = nullptr;  // it lives as long as the process
  std::vector<IValue> arguments;  // but for the first
  int64_t index;                  // which of its results, -1 where it has one
  int64_t step = -1;              // of a view that is followed: the call that makes it, in place of the above
};

// The links of a view, the first one first.
std::vector<const Link*> all_links(const Link* last);

// A base and its views. All lie in one memory, but for those that had to be copied.
struct Family {
  std::vector<WeakStorage> members;  // the base is the first while it lives
  int64_t copies = 0;
};

struct HeldValue {
  ~HeldValue() { release(); }
  void hold(Tensor value);
  Tensor release();

  Tensor host;                      // undefined while Python has the value; see `hold`
  int64_t bytes = 0;                // of a memory of its own
  c10::StorageImpl* storage;        // whose context this is
  int64_t number = 0;               // by which a State of Python's asks for the value; 0: there is none
  Storage base;                     // of a view
  std::shared_ptr<const Link> link;
  std::shared_ptr<Family> family;
  int64_t walk = 0, name = 0;       // in a Sketch, a Learner or a Walk
  int64_t pending = -1;             // in a Walk: the number of the value that it will have
  bool is_walked = false;           // in a Walk, which alone knows the value
  bool is_plain = false;            // Python has said so: it is no view, and has a buffer between recordings
  bool is_watched = false;          // a view that the backward under way makes independent when it ends
  bool is_copy = false;             // a view that lies in a memory of its own
};

// What all values that the core has take: not those of views, which lie in their base's.
extern std::atomic<int64_t> bytes_held;

// Families and numbers change on whichever thread drops a tensor.
extern std::mutex changes;

// A number that no other Sketch, Learner or Walk has.
int64_t new_walk();

void dropped(void* held);

// A number of Python's that stands beside a tensor in a call.
inline bool is_wrapped_number(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline HeldValue* held_by(c10::StorageImpl* storage) {
  if (!storage) return nullptr;
  const auto& pointer = storage->_mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &dropped ? static_cast<HeldValue*>(pointer.get_context()) : nullptr;
}

inline c10::StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

inline HeldValue* held_by(const Tensor& tensor) { return held_by(storage_of(tensor)); }

inline Storage kept(const Tensor& tensor) { return Storage::reclaim_copy(storage_of(tensor)); }

// A tensor of no elements over a storage.
Tensor empty_over(const Storage& storage);

// The same; attached to the storage first where Python has made it. Null where it cannot be.
HeldValue* attached(const Tensor& tensor);

// True if a view's value has the strides that it has on the CPU.
bool has_true_strides(const HeldValue& view);

// A new tensor of the device that holds a value.
Tensor holding(Tensor host);

// A new tensor of the device that holds none.
Tensor pending(c10::IntArrayRef sizes, caffe2::TypeMeta dtype);

// Another tensor over a storage.
Tensor over(c10::StorageImpl* storage, c10::IntArrayRef sizes, caffe2::TypeMeta dtype);

// A new tensor that is a view, derived by `link` from the tensor of `shown`.
Tensor view_of(const Tensor& shown, Tensor host, std::shared_ptr<const Link> link, bool is_copy);

// A tensor becomes a view, derived by `link` from the tensor of `shown`.
void join_family(const Tensor& view, const Tensor& shown, std::shared_ptr<const Link> link, bool is_copy);

// True if what is written to the memory of the value is seen by its base and all views of that, and
// by nobody else. A value that shares its memory by chance gets a memory of its own first.
bool may_be_written(HeldValue& held);

// The value is the only one in its memory from now on.
void have_own_memory(HeldValue& held);

// A view is a tensor of its own from now on.
void leave_family(HeldValue& held);

// The base and the views of a storage that has them; else the storage alone.
std::vector<Storage> relatives(HeldValue& held);

// The number by which a State of Python's asks for the value; null where its tensor is gone.
int64_t number_of(HeldValue& held);
Storage numbered(int64_t number);

}  // namespace ltc
