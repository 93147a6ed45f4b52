// SPDX-License-Identifier: Apache-2.0
// A host stream that has failed: who waits for it fails with the same cause, and nobody else.
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "fsdp/detail/host/stream.hpp"
#include "fsdp/error.hpp"
#include "tests/catch.hpp"

namespace {

using fsdp::ErrorKind;
using fsdp::Failure;
using fsdp::host::Event;
using fsdp::host::Stream;

/// Stops a stream's worker until the end of its scope.
class Stop {
 public:
  explicit Stop(Stream& stream) : goes_on_(std::make_shared<std::atomic<bool>>(false)) {
    stream.enqueue([goes_on = goes_on_] {
      while (!goes_on->load()) std::this_thread::yield();
    });
  }
  Stop(Stop const&) = delete;
  ~Stop() { goes_on_->store(true); }

 private:
  std::shared_ptr<std::atomic<bool>> goes_on_;
};

template <class E>
void fail_with(Stream& stream, std::string const& text) {
  stream.enqueue([text] { throw E(text); });
}
/// The exception of `act`: its type, and its text; "nothing" if it returns.
template <class Act>
std::string thrown(Act const& act) {
  try {
    act();
  } catch (...) {
    auto const failure = fsdp::current_failure();
    return std::to_string(static_cast<int>(failure.kind)) + " " + failure.text;
  }
  return "nothing";
}
std::string expected(ErrorKind kind, std::string const& text) {
  return std::to_string(static_cast<int>(kind)) + " " + text;
}

/// A stream fails, then records an event, which another stream awaits, and the host, and, by way of a second event, a
/// third stream. @return what the host, the second and the third stream throw
template <class E>
std::array<std::string, 3> waiters_of(std::string const& text) {
  Event first, second;
  Stream last{"last"}, between{"between"};
  {
    Stream failed{"failed"};
    {
      Stop const stop(failed);  // nobody knows of the failure while events are recorded
      fail_with<E>(failed, text);
      failed.record(first);
      between.wait(first);
      between.record(second);
      last.wait(second);
    }
  }  // the failure outlives its stream
  return {thrown([&] { Stream::await(first); }), thrown([&] { between.synchronize(); }),
          thrown([&] { last.synchronize(); })};
}

}  // namespace

TEST_CASE("failed streams: who waits fails with an exception of the same type and text, by way of others too") {
  auto const check = [](auto const& waiters, std::string const& text) {
    for (auto const& waiter : waiters) CHECK(waiter == text);
  };
  check(waiters_of<fsdp::UsageError>("u"), expected(ErrorKind::usage, "u"));
  check(waiters_of<fsdp::ConfigError>("c"), expected(ErrorKind::config, "c"));
  check(waiters_of<fsdp::OrderError>("o"), expected(ErrorKind::order, "o"));
  check(waiters_of<fsdp::ResourceError>("r"), expected(ErrorKind::resource, "r"));
  check(waiters_of<fsdp::VendorError>("v"), expected(ErrorKind::vendor, "v"));
  check(waiters_of<fsdp::PeerError>(""), expected(ErrorKind::peer, ""));
  check(waiters_of<std::domain_error>("boom"), expected(ErrorKind::other, "boom"));
  for (std::size_t const size : {7u, 8u, 9u, 999u, 1000u})
    check(waiters_of<fsdp::Error>(std::string(size, 'x')), expected(ErrorKind::other, std::string(size, 'x')));
  check(waiters_of<fsdp::Error>(std::string(1001, 'x')), expected(ErrorKind::other, std::string(1000, 'x')));
}

TEST_CASE("failed streams: the stream itself throws what its task threw, again and again") {
  Stream stream{"failed"};
  fail_with<std::domain_error>(stream, "boom");
  for (int i = 0; i < 2; ++i) CHECK_THROWS_AS(stream.synchronize(), std::domain_error);
  CHECK_THROWS_AS(stream.enqueue([] {}), std::domain_error);
  REQUIRE(stream.failure() != nullptr);
  CHECK(stream.failure()->kind == ErrorKind::other);
  CHECK(stream.failure()->text == "boom");
  CHECK(fsdp::failure_of(stream) == stream.failure());
  Stream const other{"other"};
  CHECK(other.failure() == nullptr);
}

TEST_CASE("failed streams: a record from before the failure has none, however late it is awaited") {
  Event before, again;
  Stream failed{"failed"}, late{"late"}, later{"later"};
  {
    Stop const stop(failed);
    failed.record(before);
    failed.record(again);
    late.wait(again);  // of the second ticket of three
    fail_with<fsdp::Error>(failed, "boom");
    failed.record(again);
    later.wait(again);
  }
  CHECK(thrown([&] { failed.synchronize(); }) == expected(ErrorKind::other, "boom"));
  CHECK(thrown([&] { Stream::await(before); }) == "nothing");
  late.wait(before);
  CHECK(thrown([&] { late.synchronize(); }) == "nothing");
  CHECK(thrown([&] { later.synchronize(); }) == expected(ErrorKind::other, "boom"));

  Stream stopped{"stopped"}, runs{"runs"};  // the wait runs when the later ticket is long complete
  Event twice;
  {
    Stop const hold(stopped);
    runs.record(twice);
    stopped.wait(twice);
    fail_with<fsdp::Error>(runs, "boom");
    try {
      runs.record(twice);
    } catch (fsdp::Error const&) {  // the worker was quick
    }
    CHECK_THROWS_AS(runs.synchronize(), fsdp::Error);
  }
  CHECK(thrown([&] { stopped.synchronize(); }) == "nothing");
}

TEST_CASE("failed streams: an event that another stream records is whole again") {
  Event event;
  for (int round = 0; round < 20; ++round) {
    Stream failed{"failed"}, whole{"whole"}, first{"first"}, second{"second"};
    {
      Stop const stop(failed);
      fail_with<fsdp::Error>(failed, "boom");
      failed.record(event);
      first.wait(event);
    }
    if (round % 2 == 0) CHECK_THROWS_AS(first.synchronize(), fsdp::Error);  // nothing refers to the event any more
    whole.record(event);
    second.wait(event);
    CHECK(thrown([&] { second.synchronize(); }) == "nothing");
    CHECK(thrown([&] { Stream::await(event); }) == "nothing");
    CHECK(thrown([&] { first.synchronize(); }) == expected(ErrorKind::other, "boom"));
    if (round % 5 == 4) event = Event{};  // another flag, from the pool
  }
}

TEST_CASE("failed streams: peers are told whose stream has failed first") {
  Event of_rank_1, of_rank_0;
  of_rank_1.set_rank(1);
  of_rank_0.set_rank(0);
  Stream failed{"rank 1"}, next{"rank 0"}, last{"rank 2"};
  {
    Stop const stop(failed);
    fail_with<fsdp::ConfigError>(failed, "boom");
    failed.record(of_rank_1);
    next.wait(of_rank_1);
    next.record(of_rank_0);
    last.wait(of_rank_0);
  }
  auto const told = expected(ErrorKind::peer, "rank 1 failed: boom");
  CHECK(thrown([&] { next.synchronize(); }) == told);
  CHECK(thrown([&] { last.synchronize(); }) == told);
  CHECK(thrown([&] { Stream::await(of_rank_1); }) == told);
}

TEST_CASE("failed streams: an inline stream that waits throws") {
  Event event;
  Stream failed{"failed"};
  {
    Stop const stop(failed);
    fail_with<fsdp::OrderError>(failed, "boom");
    failed.record(event);
  }
  auto here = Stream::inline_stream("inline");
  CHECK(thrown([&] { here.wait(event); }) == expected(ErrorKind::order, "boom"));
  CHECK(here.failure() == nullptr);
}

namespace {

struct Hears {
  static constexpr bool moves_as_bytes = true;

  void operator()() const { *heard += "ran "; }
  void skip(Failure const& why) const noexcept { *heard += why.text; }
  std::string* heard;
};
struct HearsOwned : Hears {
  explicit HearsOwned(std::string* to) : Hears{to} {}
  std::unique_ptr<int> owned;
  static constexpr bool moves_as_bytes = false;
};

}  // namespace

TEST_CASE("failed streams: a callable that asks for it is told why it is skipped") {
  std::string heard;
  Stream stream{"failed"};
  {
    Stop const stop(stream);
    stream.enqueue(Hears{&heard});
    fail_with<fsdp::Error>(stream, "boom ");
    stream.enqueue(Hears{&heard});
    stream.enqueue(HearsOwned{&heard});
  }
  CHECK_THROWS_AS(stream.synchronize(), fsdp::Error);
  CHECK(heard == "ran boom boom ");
}
