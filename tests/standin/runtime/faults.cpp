// SPDX-License-Identifier: Apache-2.0
// Reports of accesses that end the process. Sanitizers say more themselves.
#include <csignal>

#include "tests/standin/runtime/state.hpp"
#include "tests/support/fiber.hpp"  // EMULATED_ASAN

namespace standin {

namespace {

constinit thread_local Operation const* running = nullptr;  ///< on the calling thread

/// Called where the access was made, by a thread that cannot go on.
[[maybe_unused]] void on_fault(int signal, siginfo_t* info, void*) {
  std::signal(signal, SIG_DFL);
  auto& runtime = Runtime::instance();
  std::string where = hex(info->si_addr);
  if (runtime.mutex.try_lock()) {
    auto const place = place_of(runtime, info->si_addr);
    runtime.mutex.unlock();
    if (place.kind == Place::Kind::freed) where += ", which was freed";
    if (place.kind == Place::Kind::edge) where += ", behind " + text_of(place.allocation->region);
    if (place.kind == Place::Kind::allocated) where += ", in " + text_of(place.allocation->region);
  }
  constexpr int wrong_key = 4;  // SEGV_PKUERR
  if (running != nullptr) {
    report(rule("bad_access"), running->what + " touched " + where);
  } else if (info->si_code == wrong_key) {
    report(rule("host_access"), "the host touched " + where);
  }
  std::raise(signal);  // when the handler returns: ends as it would have
}

}  // namespace

RunningOperation::RunningOperation(Operation const& operation) {
  watch_faults();
  running = &operation;
}
RunningOperation::~RunningOperation() { running = nullptr; }

void watch_faults() {
#if !STANDIN_TSAN && !defined(EMULATED_ASAN)
  struct sigaction now {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction == on_fault) return;
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, nullptr);
#endif
}

}  // namespace standin
