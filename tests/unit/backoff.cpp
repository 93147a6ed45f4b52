// SPDX-License-Identifier: Apache-2.0
// Waits yield on an idle core and sleep on a busy one.
// skip-asan
#include "fsdp/detail/host/backoff.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/catch.hpp"
#include "tests/support/in_child.hpp"

namespace {

/// Keeps the calling thread on one core of those it may use. @return false if the system does not let it
bool stay_on_one_core() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    return ::pthread_setaffinity_np(::pthread_self(), sizeof one, &one) == 0;
  }
  return false;
}

}  // namespace

TEST_CASE("a wait stops yielding in the end", "[backoff]") {
  fsdp::host::YieldPhase phase;
  long yields = 0;
  while (yields < 100'000'000 && phase.yield()) ++yields;
  CHECK(yields < 100'000'000);
  CHECK_FALSE(phase.yield());
}

TEST_CASE("a wait on a core where another thread computes sleeps at once, and yields again later", "[backoff]") {
  bool pinned = true, slept_at_once = false, yielded_again = false;
  std::thread waiting([&] {
    pinned = stay_on_one_core();
    if (!pinned) return;
    std::atomic<bool> stop{false}, computing{false};
    std::thread neighbour([&] {  // inherits the core
      computing.store(true, std::memory_order_relaxed);
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
    while (!computing.load(std::memory_order_relaxed)) std::this_thread::yield();
    for (int wait = 0; wait < 1000 && !slept_at_once; ++wait) {
      fsdp::host::YieldPhase phase;
      slept_at_once = !phase.yield();
    }
    stop.store(true, std::memory_order_relaxed);
    neighbour.join();
    for (int wait = 0; wait < 1000 && !yielded_again; ++wait) {
      fsdp::host::YieldPhase phase;
      yielded_again = phase.yield();
    }
  });
  waiting.join();
  REQUIRE(pinned);
  CHECK(slept_at_once);
  CHECK(yielded_again);
}

TEST_CASE("a wait that is asked to end names what asked it to", "[backoff]") {
  auto const outcome = fsdp::testing::in_child([] {
    fsdp::host::request_termination("another SIGUSR1");
    for (fsdp::host::Backoff backoff;;) backoff.pause([] { return std::string("a peer"); });
  });
  INFO(outcome.text);
  CHECK(outcome.code == fsdp::host::wait_terminated_exit_code);
  CHECK(outcome.text.find("fsdp: another SIGUSR1 during a wait: a peer; waiting for") != std::string::npos);
}

TEST_CASE("a wait that is asked to end says so, unless another has said more", "[backoff]") {
  for (bool const reported : {false, true}) {
    auto const outcome = fsdp::testing::in_child([&] {
      fsdp::host::detail::reported.store(reported);
      fsdp::host::request_termination();
      // As whoever has reported ends the process; a second is for what must not come before.
      std::signal(SIGALRM, [](int) { std::_Exit(fsdp::host::wait_expired_exit_code); });
      if (reported) ::alarm(1);
      for (fsdp::host::Backoff backoff;;) backoff.pause([] { return std::string("a peer"); });
    });
    INFO(outcome.text);
    CHECK(outcome.code == (reported ? fsdp::host::wait_expired_exit_code : fsdp::host::wait_terminated_exit_code));
    bool const said = outcome.text.find("fsdp: SIGTERM during a wait: a peer; waiting for") != std::string::npos;
    CHECK(said == !reported);
  }
}

TEST_CASE("a wait outlasts a stop of the process, and the clock of deadlines stands still meanwhile", "[backoff]") {
  using fsdp::AwakeClock;
  auto const child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    fsdp::host::set_wait_deadline(std::chrono::seconds{4});
    std::atomic<bool> over{false}, went_back{false};
    std::atomic<int> looks{0};
    std::thread waiting([&] {
      for (fsdp::host::Backoff backoff; !over.load(std::memory_order_relaxed); looks.fetch_add(1))
        backoff.pause([] { return std::string("the end of the test"); });
    });
    std::thread looking([&] {
      for (auto last = AwakeClock::now(); !over.load(std::memory_order_relaxed);) {
        auto const now = AwakeClock::now();
        if (now < last) went_back.store(true, std::memory_order_relaxed);
        last = now;
      }
    });
    while (looks.load() < 100) std::this_thread::yield();  // from the 65th on it sleeps, and minds its deadline
    auto const awake = AwakeClock::now();
    auto const steady = std::chrono::steady_clock::now();
    std::raise(SIGSTOP);
    auto const slept = (std::chrono::steady_clock::now() - steady) - (AwakeClock::now() - awake);
    for (int const before = looks.load(); looks.load() < before + 3;) std::this_thread::yield();
    over.store(true, std::memory_order_relaxed);
    waiting.join();
    looking.join();
    std::_Exit(went_back.load() ? 2 : slept >= std::chrono::seconds{3} ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
  REQUIRE(WIFSTOPPED(status));
  std::this_thread::sleep_for(std::chrono::milliseconds{5500});
  ::kill(child, SIGCONT);
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("the clock of deadlines counts a long call in full, though nobody looks meanwhile", "[backoff]") {
  using fsdp::AwakeClock;
  auto const begin = AwakeClock::now();
  {
    AwakeClock::LongCall const call;
    std::this_thread::sleep_for(std::chrono::milliseconds{2500});
  }
  CHECK(AwakeClock::now() - begin >= std::chrono::milliseconds{2500});
}
