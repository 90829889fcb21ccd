#include "session.h"

#include <array>
#include <chrono>

namespace ltc {
namespace {

std::mutex taking;

auto& uploads = *new std::vector<std::array<int64_t, 3>>;  // outlives every thread

}  // namespace

void note_upload(int64_t nanoseconds, int64_t bytes) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::lock_guard<std::mutex> guard(taking);
  uploads.push_back({std::chrono::nanoseconds(now).count(), nanoseconds, bytes});
}

int64_t noted_uploads() {
  std::lock_guard<std::mutex> guard(taking);
  return int64_t(uploads.size());
}

int64_t take_uploads(int64_t* found, int64_t room) {
  std::lock_guard<std::mutex> guard(taking);
  const auto taken = std::min<int64_t>(room, int64_t(uploads.size()));
  for (int64_t i = 0; i < taken; i++) std::copy_n(uploads[i].begin(), 3, found + 3 * i);
  uploads.erase(uploads.begin(), uploads.begin() + taken);
  return taken;
}

}  // namespace ltc
