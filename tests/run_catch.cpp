// SPDX-License-Identifier: Apache-2.0
// Where Catch2 itself is compiled, if it is version 2: for every main function together, because it takes long.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Listener = Catch::EventListenerBase;
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
using Listener = Catch::TestEventListenerBase;
#endif

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/run_catch.hpp"

namespace {

auto const main_thread = std::this_thread::get_id();
std::atomic<void const*> asserting{nullptr};

/// The assertions of Catch2 as one thread's own, until the thread ends.
struct Claim {
  bool take() {
    void const* nobody = nullptr;
    return asserting.compare_exchange_strong(nobody, this) || nobody == this;
  }
  ~Claim() {
    void const* self = this;
    asserting.compare_exchange_strong(self, nullptr);
  }
};

thread_local Claim claim;

/// Ends a program in which two threads use assertions at the same time: Catch2 does not allow it. The main thread
/// starts the others and waits for them, so it may use assertions too.
struct OneThread : Listener {
  using Listener::Listener;
  void assertionStarting(Catch::AssertionInfo const& info) override {
    if (std::this_thread::get_id() == main_thread || claim.take()) return;
    std::fprintf(stderr, "%s:%zu: two threads use assertions; use RANK_CHECK of tests/support/rank_checks.hpp\n",
                 info.lineInfo.file, info.lineInfo.line);
    std::abort();
  }
};

}  // namespace

CATCH_REGISTER_LISTENER(OneThread)

int run_catch(int argc, char const* const* argv) { return Catch::Session().run(argc, argv); }
