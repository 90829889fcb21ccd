// Copies of the CPU's tensors to the device, as metrics have them.
#pragma once

#include <cstdint>

namespace ltc {

// One copy, which took so many nanoseconds.
void note_upload(int64_t nanoseconds, int64_t bytes);

// How many were noted since they were last taken.
int64_t noted_uploads();

// Fill in up to `room` of them, and forget these: nanoseconds since 1970, nanoseconds, bytes of each.
int64_t take_uploads(int64_t* found, int64_t room);

}  // namespace ltc
