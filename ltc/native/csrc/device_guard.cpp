// What torch asks of the device around calls: nothing happens there, and no Python is needed for it.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "own_kernels.h"

namespace ltc {
namespace {

using c10::Device;
using c10::Stream;

// Answers as torch's guard for devices in Python does: there is one stream, on which nothing waits.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  Device exchangeDevice(Device) const override { return device_zero(); }
  Device getDevice() const override { return device_zero(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device_zero()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, device_zero()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, device_zero()); }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

}  // namespace

void register_guard() {
  static const auto* guard = new Guard;  // torch holds a plain pointer to it
  c10::impl::device_guard_impl_registry[size_t(c10::DeviceType::PrivateUse1)].store(guard);
}

}  // namespace ltc
