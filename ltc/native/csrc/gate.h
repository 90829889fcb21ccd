// Whether the calls of a thread run in the core, are followed there, or summed up. Any thread may close the gate, and
// wait for a call under way; the model of it, under every interleaving, is tests/models/gate.py.
#pragma once

#include <atomic>
#include <thread>

namespace ltc {

class Gate {
 public:
  // A call of the gate's thread: what it asks the gate while it is inside is true until it is over.
  struct Inside {
    explicit Inside(Gate& gate) : gate(gate), is_within(gate.is_inside_.exchange(true, std::memory_order_seq_cst)) {}
    ~Inside() { gate.is_inside_.store(is_within, std::memory_order_release); }
    Gate& gate;
    const bool is_within;  // another call of the same thread
  };

  bool runs() const { return runs_.load(std::memory_order_seq_cst); }
  bool follows() const { return follows_.load(std::memory_order_seq_cst); }
  bool sums() const { return sums_.load(std::memory_order_seq_cst); }
  void run() { runs_ = true; }
  void follow() { follows_ = true; }
  void sum() { sums_ = true; }
  void stop_following() { follows_ = false; }
  void stop_summing() { sums_.store(false, std::memory_order_seq_cst); }
  void close() { runs_.store(false, std::memory_order_seq_cst), follows_.store(false, std::memory_order_seq_cst); }
  void wait() const { while (is_inside_.load(std::memory_order_seq_cst)) std::this_thread::yield(); }

 private:
  std::atomic<bool> runs_{false}, follows_{false}, sums_{false}, is_inside_{false};
};

}  // namespace ltc
