// The end of a followed recording without Python: what is alive is computed by a program that is launched here.
#pragma once

#include <ATen/core/ivalue.h>

namespace ltc {

struct Type;

// How a walk along a track ends: the program, whose frame is filled as FrameLaunch of capabilities.py says, and what
// is alive. Python has it from an end of its own.
struct Exit {
  // [run, constants, block's bytes, guard's bytes, counts of: inputs, made, cells, values], then each of these.
  explicit Exit(const int64_t* words);

  struct Input {
    int64_t name;
    bool is_written;  // the program leaves a value in its memory
  };
  // A number of the walk's, in a word of the frame, as Python's `struct` writes that format.
  struct Cell {
    int64_t number, word;
    char format;
    bool holds(const c10::IValue& value, int64_t* frame) const;  // false where the format holds no such number
  };
  static const int64_t NO_VALUE = -1, GONE = -2;

  int64_t run, constants, block_bytes, guard;
  std::vector<Input> inputs;
  std::vector<int64_t> made;    // names of the tensors that get new memory
  std::vector<Cell> cells;
  std::vector<int64_t> values;  // by name: the number of its value; NO_VALUE: it keeps the one it had; GONE
};

// One launch: its kernels, the bytes of its frame, and its threads.
struct Launch {
  int64_t kernels, frame_bytes, threads;
  // Run the program over its inputs and what it makes, in that order; the numbers are those that cells name.
  int64_t run(const Exit& exit, const std::vector<at::Tensor>& hosts, const std::vector<c10::IValue>& numbers) const;
};

// An output in new memory, with so many bytes before it and behind its last cache line: checks look at these.
at::Tensor output_of(const Type& type, int64_t guard);

// What has come of it, or else the number of the kernel that has failed.
const int64_t LAUNCHED = -1, NOT_LAUNCHED = -2;

// Where the frame of this thread's last launch is.
int64_t frame_of_thread();

}  // namespace ltc
