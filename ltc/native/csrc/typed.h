// Kernels of the commonest overloads, which take their arguments as they are: to put them on a stack costs more
// than such a call. What is not an ordinary call goes to the general kernel.
#pragma once

#include <torch/library.h>

#include "calls.h"

namespace ltc {

// One call: its operands, and what it makes. Nothing is changed where it is not `is_ready`.
class PlainCall {
 public:
  // True if the calls of an overload run here by now, and need no more than this class does.
  static bool may_begin(const Session& session, const Overload& overload) {
    const int64_t others = ZEROED | MAY_READ | COPIES | ATTENTION | ADAM;
    return (overload.rule & (RUNS_HERE | others)) == RUNS_HERE && session.gate.runs() &&
           !session.gate.follows() && !session.is_armed.load(std::memory_order_relaxed) &&
           !in_some_mode() && !(overload.is_view && in_backward());
  }

  PlainCall(const Overload& overload, Session& session)
      : overload_(overload), session_(session), is_sketched_(session.sums()) {}

  // An argument as the CPU's kernel takes it.
  template <class Argument>
  auto host(Argument given) {
    using Kind = std::remove_cvref_t<Argument>;
    if constexpr (std::is_same_v<Argument, Tensor&>) return written(given);
    else if constexpr (std::is_same_v<Kind, Tensor>) return read(given);
    else if constexpr (std::is_same_v<Kind, std::optional<Tensor>>)
      return given ? std::optional<Tensor>(read(*given)) : std::nullopt;
    else return given;
  }

  bool is_ready() const { return !is_refused_ && session_.gate.runs(); }

  template <class... Arguments>
  void sketch(const Arguments&... given) { if (is_sketched_) session_.sketch.add_call(overload_, given...); }

  // What has been made, as the device's; `given`: the arguments.
  template <class... Others>
  Tensor finished(Tensor&& host, const Tensor& shown, const Others&... given) {
    if (!overload_.is_view) return made(std::move(host));
    std::vector<IValue> arguments;
    arguments.reserve(sizeof...(given));
    (arguments.emplace_back(given), ...);
    auto link = std::make_shared<const Link>(held_by(shown)->link, &overload_, std::move(arguments), -1);
    return named(view_of(shown, std::move(host), std::move(link), false));
  }

  template <class... Parts, class... Arguments>
  std::tuple<Parts...> finished(std::tuple<Parts...>&& hosts, const Arguments&...) {
    return std::apply([this](auto&... host) { return std::tuple<Parts...>{made(std::move(host))...}; }, hosts);
  }

  void finish_write(Tensor& written);
  // The call is over: Python may want to look.
  void end();

 private:
  Tensor read(const Tensor& given);
  Tensor written(Tensor& given);
  Tensor made(Tensor host);
  Tensor named(Tensor tensor) {
    if (is_sketched_) session_.sketch.name_result(tensor);
    return tensor;
  }

  const Overload& overload_;
  Session& session_;
  const bool is_sketched_;
  bool is_refused_ = false;
  Tensor target_;  // the host of what is written to
};

template <class Operator, class Signature = typename Operator::schema>
struct Typed;

template <class Operator, class Result, class... Arguments>
struct Typed<Operator, Result(Arguments...)> {
  static inline CallKernel* kernel;  // the general one

  static Result call(DispatchKeySet keys, Arguments... given) {
    Session& session = this_thread();
    bool has_failed = false;
    if (PlainCall::may_begin(session, kernel->overload)) {
      Gate::Inside inside(session.gate);
      PlainCall plain(kernel->overload, session);
      std::tuple hosts{plain.template host<Arguments>(given)...};
      if (plain.is_ready()) {
        plain.sketch(given...);
        c10::impl::ExcludeDispatchKeyGuard below(above_cpu());
        const auto run = [](auto&... host) -> Result {
          return Operator::redispatch(DispatchKeySet(DispatchKey::CPU), host...);
        };
        if constexpr (std::is_reference_v<Result>) {
          std::apply(run, hosts);
          auto& written = std::get<0>(std::tie(given...));
          plain.finish_write(written);
          plain.end();
          return written;
        } else {
          std::optional<Result> host;
          try {
            host.emplace(std::apply(run, hosts));
          } catch (const std::exception&) {
            has_failed = true;
          }
          if (host) {
            Result made = plain.finished(std::move(*host), given...);
            plain.end();
            return made;
          }
        }
      }
    }
    auto stack = c10::impl::boxArgs<Arguments...>(given...);
    if (has_failed) kernel->left(session, &stack);
    else (*kernel)(kernel->overload.handle, keys, &stack);
    if constexpr (std::is_reference_v<Result>) return std::get<0>(std::tie(given...));
    else return c10::impl::PopResult<Result>::call(stack);
  }
};

// Adds the kernel of an overload; false where it has none of these.
bool add_typed(torch::Library& to, const std::string& name, CallKernel* general);

}  // namespace ltc
