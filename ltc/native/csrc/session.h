// Which of a thread's calls run in the core.
#pragma once

#include <unordered_set>

#include "gate.h"
#include "sketch.h"
#include "tracks.h"

namespace ltc {

// The ends of recordings of which the policy hears no more: where a path so short came behind the same two again, in
// these sizes or in ever others, nothing changes. Python hears of how many there were at the next other end.
struct SettledCuts {
  // The end of what is summed up is passed if it is settled; false where Python has to hear of it. `is_of_reads`: a
  // read ends it, and no optimizer has made a step.
  bool pass(Sketch& sketch, bool is_of_reads, int64_t calls);
  // Python hears of an end, and says what is settled from now on: it is; neither it is nor the one behind which its
  // recording began; none is; all are that differ from it in sizes alone.
  void hear(const Sketch& sketch);
  enum class Settles : int64_t { THIS, NOT_HERE, NONE, ALIKE };
  void settle(Settles settles);
  // Other recordings begin, behind none.
  void begin();
  int64_t most = 0;  // that are passed in a row

  struct Sums {
    uint64_t exact = 0, shape = 0;
  };
  Sums behind, before;  // of the recording before this one, and of the one before that
  int64_t reads = 0, marks = 0;  // that were passed since Python last heard
  int64_t passed = 0, passed_at = 0;  // how many since Python counted calls, and at which of these the last

 private:
  static const size_t MOST_KNOWN = 4096;
  Sums sums_of(const Sketch& sketch) const;
  void end(const Sketch& sketch);
  Sums last_, began_;  // the last end, and the one behind which its recording began
  std::unordered_set<uint64_t> known_;
};

// One thread's. Python enters it where the calls of a thread run when they are made, and are not
// noted; any thread of Python's may leave it.
struct Session {
  // True if a call is summed up; another thread may take the sum between two calls, not within one.
  bool sums() const { return gate.sums() && !depth; }
  void begin_sum() { sketch.begin(), gate.sum(); }
  // True if the recording may end here, and the next one begin, without Python.
  bool passes_cut(bool is_read) {
    return gate.runs() && sums() && cuts.pass(sketch, is_read && !std::exchange(has_trained, false), calls);
  }

  Gate gate;
  std::atomic<bool> is_armed{false};   // Python is asked to enter it before the next call
  int64_t calls = 0;                   // since Python last asked
  int64_t reads_until = 0;             // calls, before which nobody has to hear of a read
  bool reads_pass = false;             // nor of one at a settled cut
  bool has_trained = false;            // an optimizer has made a step in this recording
  int64_t read_at = -1;                // calls before the last read; -1: none since Python last asked
  int64_t looks_after = INT64_MAX;     // Python looks behind so many calls
  const void* engine = nullptr;        // the code of Python's function that runs the backward under way
  const void* function = nullptr;      // and of the one that calls the backward of a Function
  int64_t depth = 0;                   // of Python's kernels, which make calls of their own
  Sketch sketch;
  SettledCuts cuts;
  // Python may end both during a call, which therefore holds them.
  std::shared_ptr<Learner> learner;    // while Python follows a path
  std::shared_ptr<Walk> walk;          // while the core does
  std::vector<WeakStorage> watched;    // views
  uint64_t drawn = 0;                  // the sum of the call that Python is to draw for; else 0
};

Session& this_thread();

// The view becomes independent when the backward of this thread ends.
inline void watch(const Tensor& one) { held_by(one)->is_watched = true, this_thread().watched.emplace_back(kept(one)); }

// True if a value that is there may be read; Python hears of it where it has to.
bool may_read_here(const Tensor& value, bool is_number);

// A value of the walk is read; true if the recording has ended here, so that the value is there.
bool ends_at_read(bool is_number);

// What was read and Python has not heard of: copies to the CPU, and numbers.
struct Reads {
  std::atomic<int64_t> count{0}, bytes{0};
};
extern Reads reads_here[2];

// Copies of the CPU's tensors to the device, as metrics have them. One took so many nanoseconds.
void note_upload(int64_t nanoseconds, int64_t bytes);

// How many were noted since they were last taken.
int64_t noted_uploads();

// Fill in up to `room` of them, and forget these: nanoseconds since 1970, nanoseconds, bytes of each.
int64_t take_uploads(int64_t* found, int64_t room);

// How many calls ran here, and how many were followed.
extern std::atomic<int64_t> calls_here, followed_here;

}  // namespace ltc
