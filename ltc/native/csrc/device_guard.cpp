// What torch asks of the device around calls: nothing happens there, and no Python is needed for it.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "own_kernels.h"

namespace ltc {
namespace {

// Answers as torch's guard for devices in Python does: there is one stream, on which nothing waits.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  at::Device exchangeDevice(at::Device) const override { return device_zero(); }
  at::Device getDevice() const override { return device_zero(); }
  at::Stream getStream(at::Device) const noexcept override { return at::Stream(at::Stream::DEFAULT, device_zero()); }
  at::Stream getNewStream(at::Device one, int) const override { return getStream(one); }
  at::Stream exchangeStream(at::Stream) const noexcept override { return getStream(device_zero()); }
  void record(void**, const at::Stream&, const at::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const at::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

}  // namespace

void register_guard() {
  static const auto* guard = new Guard;  // torch holds a plain pointer to it
  c10::impl::device_guard_impl_registry[size_t(c10::DeviceType::PrivateUse1)].store(guard);
}

}  // namespace ltc
