// What the core asks of Python. Each is an operator that a Python function is registered for, so that
// the core needs no symbol of Python's, and one file serves every interpreter.
#pragma once

#include "held_value.h"

namespace ltc {

// The Rule of an overload.
int64_t ask_for_rule(const std::string& overload);

// Take the value of a tensor that Python has; false where Python keeps it.
bool borrow(const Tensor& tensor);

// A call looks at values; false where none may be read. Whether the calls go on here is seen in the session.
bool may_look();

// The calls of this thread begin to run when they are made.
void begin();

// There are many uploads that Python has not heard of.
void note_uploads();

// A read, as a number or else as a copy, of a value that is there; false where Python's kernel has to make it.
bool may_read(const Tensor& value, bool is_number);

// There were so many calls that Python wants to look.
void look();

// How Python's recorder sees the arguments of an overload: a letter for each, with the values that are part
// of a formula, as in "n1.0,2.0"; the first word is "draws" where a call draws a seed.
std::string ask_for_words(const std::string& overload);

// True if nothing but calls that were learned has been recorded.
bool may_learn();

// What Python recorded of a call, whose tensors are its operands, what it made, and others: 1, 2 if it made views, 3 if
// the backward under way makes these independent, 0 if nothing, -1 if it cannot be followed here; then the number of
// each tensor's value, -1 if it has none that is pending.
// `inputs`: how many of the operands are inputs that no call before has had.
std::vector<int64_t> learned_values(const std::vector<Tensor>& tensors, const std::vector<IValue>& numbers,
                                    size_t operands, size_t made, int64_t inputs, bool is_view);

// True if a tensor's value may be the input of a program as it is.
bool is_plain(const Tensor& tensor, HeldValue& held);

// Python lets go of the values of tensors, and asks for them by number; false where it does not.
bool open(const std::vector<Tensor>& tensors, const std::vector<int64_t>& numbers);

// Take the value of an input, which Python has, at the end of a walk; false where Python keeps it.
bool lend_to_walk(const Tensor& tensor, HeldValue& held);

// Take the values of a view and its base, of which Python has recorded nothing; false where Python keeps them.
bool lend_view(const Tensor& tensor, HeldValue& held);

// A value is read at the end of a walk; true if the recording ends here, so that the value is there.
bool end_at_read(bool is_number);

// True if the CPU would reshape the tensor by a copy.
bool copies_in_python(const Tensor& tensor, at::IntArrayRef sizes);

// The next seed; it is the next one again.
int64_t draw();
void undraw();

// How the program is launched by which Python has just drawn random numbers: bytes of its frame, and kernels, before
// the words of an Exit; none where it was no program.
std::vector<int64_t> program_drawn();

// Python ends the walk of this thread.
void catch_up();

// Run a call by Python's kernel.
void run_in_python(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

}  // namespace ltc
