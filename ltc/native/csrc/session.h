// Which of a thread's calls run in the core.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "sketch.h"
#include "tracks.h"

namespace ltc {

// One thread's. Python enters it where the calls of a thread run when they are made, and are not
// noted; any thread of Python's may leave it.
struct Session {
  std::atomic<bool> is_entered{false};
  std::atomic<bool> is_armed{false};   // Python is asked to enter it before the next call
  std::atomic<bool> is_walking{false};
  std::atomic<bool> is_inside{false};  // a call is under way
  int64_t calls = 0;                   // since Python last asked
  int64_t reads_until = 0;             // calls, before which nobody has to hear of a read
  int64_t read_at = -1;                // calls before the last read; -1: none since Python last asked
  int64_t looks_after = INT64_MAX;     // Python looks behind so many calls
  const void* engine = nullptr;        // the code of Python's function that runs the backward under way
  int64_t depth = 0;                   // of Python's kernels, which make calls of their own
  Sketch sketch;
  // Python may end both during a call, which therefore holds them.
  std::shared_ptr<Learner> learner;    // while Python follows a path
  std::shared_ptr<Walk> walk;          // while the core does
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_in_backward;  // views
};

Session& this_thread();

// True if a value that is there may be read; Python hears of it where it has to.
bool may_read_here(const Tensor& value, bool is_number);

// What was read and Python has not heard of: copies to the CPU, and numbers.
struct Reads {
  std::atomic<int64_t> count{0}, bytes{0};
};
extern Reads reads_here[2];

// What the core left to Python, by reason; how many calls it ran, and how many it followed.
enum Reason { NOT_ENTERED, RULE, MODE, OPERAND, MEMORY, FAILED, IN_BACKWARD, REASONS };
extern std::atomic<int64_t> left_to_python[REASONS], calls_here, followed_here;

}  // namespace ltc
