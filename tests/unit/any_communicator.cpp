// SPDX-License-Identifier: Apache-2.0
// AnyCommunicator hands every call on to the communicator that it holds, as it came, and gives back what that one gave.
// skip-tsan
#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/detail/engine/executor.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host.hpp"
#include "fsdp/tensor.hpp"
#include "tests/catch.hpp"

namespace {

using fsdp::Label;
using fsdp::Ticket;
using World = fsdp::AnyCommunicator<fsdp::host::Device>;

template <class T>
constexpr std::string_view type_name = fsdp::name(fsdp::dtype_of<T>);

/// Notes what it is asked. Its answers differ from call to call.
class Noted {
 public:
  using Device = fsdp::host::Device;
  using Stream = Device::Stream;

  Noted(std::vector<std::string>& notes, std::string name) : notes_(&notes), name_(std::move(name)) {}

  int rank() const { return 5; }
  int size() const { return 7; }
  Device const& device() const { return device_; }
  Noted split(int color, int key, std::string_view what) {
    note("split {} {} {}", color, key, what);
    return {*notes_, std::string(what)};
  }
  void* allocate(std::size_t bytes) {
    note("allocate {}", bytes);
    return &memory_;
  }
  void deallocate(void* memory, std::size_t bytes) noexcept { note("deallocate {} {}", memory == &memory_, bytes); }
  void register_memory(void* memory, std::size_t bytes) { note("register {} {}", memory == &memory_, bytes); }
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    return collective<T>("all_gather", stream, send, receive, count, label);
  }
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    return collective<T>("reduce_scatter", stream, send, receive, count, label);
  }
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    return collective<T>("all_reduce", stream, send, receive, count, label);
  }
  Ticket all_reduce_mean(Stream& stream, float const* send, float* receive, std::size_t count, Label label) {
    return collective<float>("all_reduce_mean", stream, send, receive, count, label);
  }
  template <class T>
  Ticket broadcast(Stream& stream, T* data, std::size_t count, int root, Label label) {
    return collective<T>(fmt::format("broadcast from {}", root), stream, data, data, count, label);
  }
  void wait_for_peers(Stream& stream, Ticket ticket, fsdp::WaitSite site) {
    note("wait {} {} {}", stream.name(), ticket.sequence, fsdp::name(site));
  }
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    note("exchange {} {}", text, what);
    return {"mine", text};
  }
  template <class Answer>
  std::string ask_first_rank(std::string const& text, std::string_view what, Answer const& answer) {
    note("ask_first_rank {} {}", text, what);
    return answer(std::vector<std::string>{"first", text});
  }
  void note_failure(fsdp::Failure const& why) noexcept { note("failure {}", why.text.c_str()); }
  void defer_failure(fsdp::Failure const& why) noexcept { note("left {}", why.text.c_str()); }
  void report_history(int engine, std::string_view history) noexcept { note("end {} {}", engine, history); }

 private:
  template <class... Args>
  void note(fmt::format_string<Args...> form, Args&&... args) {
    notes_->push_back(name_ + ": " + fmt::format(form, std::forward<Args>(args)...));
  }
  template <class T>
  Ticket collective(std::string_view what, Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    note("{} of {} {} on {}, {} to {}, {} {} {}", what, count, type_name<T>, stream.name(), fmt::ptr(send),
         fmt::ptr(receive), label.unit, label.pass, label.history);
    return {notes_->size()};
  }

  std::vector<std::string>* notes_;
  std::string name_;
  Device device_;
  int memory_ = 0;
};

static_assert(fsdp::Communicator<World> && fsdp::RegistersMemory<World> && fsdp::TakesMeans<World> &&
              fsdp::ReportsHistory<World>);

/// The least communicator: fp32 alone, and none of the optional members.
class Least {
 public:
  using Device = fsdp::host::Device;
  using Stream = Device::Stream;
  static constexpr bool completes_in_order = false;

  int rank() const { return 0; }
  int size() const { return 1; }
  Device const& device() const { return device_; }
  Least split(int, int, std::string_view) { return {}; }
  void* allocate(std::size_t) { return nullptr; }
  void deallocate(void*, std::size_t) noexcept {}
  Ticket all_gather(Stream&, float const*, float*, std::size_t, Label) { return {1}; }
  Ticket reduce_scatter(Stream&, float const*, float*, std::size_t, Label) { return {2}; }
  Ticket all_reduce(Stream&, float const*, float*, std::size_t, Label) { return {3}; }
  Ticket all_reduce(Stream&, double const*, double*, std::size_t, Label) { return {4}; }
  Ticket broadcast(Stream&, float*, std::size_t, int, Label) { return {5}; }
  void wait_for_peers(Stream&, Ticket, fsdp::WaitSite) {}
  std::vector<std::string> exchange(std::string const& text, std::string_view) { return {text}; }

 private:
  Device device_;
};
static_assert(fsdp::Communicator<Least>);

/// Has the former names of three optional members.
class Former : public Least {
 public:
  Former split(int, int, std::string_view) { return {}; }
  template <class Answer>
  std::string consult(std::string const&, std::string_view, Answer const&) {
    return "asked";
  }
  void keep_end(int engine, std::string_view) noexcept { last_end = engine; }
  void leave_failure(fsdp::Failure const&) noexcept { ++failures; }

  static inline int last_end = 0, failures = 0;
};
static_assert(fsdp::Communicator<Former>);

/// A wrapper of the user's, which is made from an AnyCommunicator and answers as that one does.
class Wrapper {
 public:
  using Device = fsdp::host::Device;
  using Stream = Device::Stream;

  explicit Wrapper(World world) : world_(std::move(world)) {}
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  Device const& device() const { return world_.device(); }
  Wrapper split(int color, int key, std::string_view name) { return Wrapper(world_.split(color, key, name)); }
  void* allocate(std::size_t bytes) { return world_.allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) noexcept { world_.deallocate(memory, bytes); }
  void register_memory(void* memory, std::size_t bytes) { world_.register_memory(memory, bytes); }
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return world_.all_gather(stream, send, recv, count, label);
  }
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return world_.reduce_scatter(stream, send, recv, count, label);
  }
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return world_.all_reduce(stream, send, recv, count, label);
  }
  Ticket all_reduce_mean(Stream& stream, float const* send, float* recv, std::size_t count, Label label) {
    return world_.all_reduce_mean(stream, send, recv, count, label);
  }
  template <class T>
  Ticket broadcast(Stream& stream, T* data, std::size_t count, int root, Label label) {
    return world_.broadcast(stream, data, count, root, label);
  }
  void wait_for_peers(Stream& stream, Ticket ticket, fsdp::WaitSite site) {
    world_.wait_for_peers(stream, ticket, site);
  }
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    return world_.exchange(text, what);
  }
  bool registers_memory() const { return world_.registers_memory(); }
  bool takes_means() const { return world_.takes_means(); }
  bool completes_in_order() const { return world_.completes_in_order(); }
  bool sums(fsdp::DType type) const { return world_.sums(type); }

 private:
  World world_;
};
static_assert(fsdp::Communicator<Wrapper>);

}  // namespace

TEST_CASE("any communicator hands every call on, and gives back what it got") {
  std::vector<std::string> notes;
  World world = Noted(notes, "whole");
  CHECK((world.registers_memory() && world.takes_means() && world.completes_in_order()));
  CHECK((world.sums(fsdp::DType::f32) && world.sums(fsdp::DType::bf16) && world.sums(fsdp::DType::f16)));
  CHECK((world.sums(fsdp::DType::f64) && world.sums(fsdp::DType::i64)));
  auto stream = world.device().make_stream("s", fsdp::StreamPriority::normal);
  Label const label{"unit", "pass", "history"};
  CHECK(world.rank() == 5);
  CHECK(world.size() == 7);

  float const send{};
  float receive{};
  fsdp::bf16 const narrow_send{};
  fsdp::bf16 narrow_receive{};
  double const wide_send{};
  double wide_receive{};
  std::vector<std::string> expected;
  auto const expect = [&](std::string_view what, std::size_t count, std::string_view type, void const* from, void* to,
                          Ticket ticket) {
    expected.push_back(fmt::format("whole: {} of {} {} on s, {} to {}, unit pass history", what, count, type,
                                   fmt::ptr(from), fmt::ptr(to)));
    CHECK(ticket.sequence == expected.size());
  };
  auto ticket = world.all_gather(stream, &send, &receive, 1, label);
  expect("all_gather", 1, type_name<float>, &send, &receive, ticket);
  ticket = world.all_gather(stream, &narrow_send, &narrow_receive, 2, label);
  expect("all_gather", 2, type_name<fsdp::bf16>, &narrow_send, &narrow_receive, ticket);
  ticket = world.reduce_scatter(stream, &send, &receive, 3, label);
  expect("reduce_scatter", 3, type_name<float>, &send, &receive, ticket);
  ticket = world.reduce_scatter(stream, &narrow_send, &narrow_receive, 7, label);
  expect("reduce_scatter", 7, type_name<fsdp::bf16>, &narrow_send, &narrow_receive, ticket);
  ticket = world.all_reduce(stream, &narrow_send, &narrow_receive, 8, label);
  expect("all_reduce", 8, type_name<fsdp::bf16>, &narrow_send, &narrow_receive, ticket);
  ticket = world.all_reduce(stream, &send, &receive, 4, label);
  expect("all_reduce", 4, type_name<float>, &send, &receive, ticket);
  ticket = world.all_reduce(stream, &wide_send, &wide_receive, 5, label);
  expect("all_reduce", 5, type_name<double>, &wide_send, &wide_receive, ticket);
  ticket = world.all_reduce_mean(stream, &send, &receive, 9, label);
  expect("all_reduce_mean", 9, type_name<float>, &send, &receive, ticket);
  ticket = world.broadcast(stream, &receive, 6, 3, label);
  expect("broadcast from 3", 6, type_name<float>, &receive, &receive, ticket);

  world.wait_for_peers(stream, {9}, fsdp::WaitSite::collective_peer_ready);
  expected.push_back(fmt::format("whole: wait s 9 {}", fsdp::name(fsdp::WaitSite::collective_peer_ready)));
  CHECK(world.exchange("text", "what") == std::vector<std::string>{"mine", "text"});
  expected.push_back("whole: exchange text what");
  CHECK(world.ask_first_rank("text", "what",
                             [](std::vector<std::string> const& texts) { return texts[0] + texts[1]; }) == "firsttext");
  CHECK(fsdp::comm::ask_first_rank(world, "text", "what", fsdp::comm::text_of_first) == "first");
  expected.insert(expected.end(), 2, "whole: ask_first_rank text what");
  fsdp::Failure why;
  why.text = "why";
  world.note_failure(why), world.defer_failure(why), world.report_history(3, "history");
  expected.insert(expected.end(), {"whole: failure why", "whole: left why", "whole: end 3 history"});
  void* const memory = world.allocate(11);
  expected.push_back("whole: allocate 11");
  world.register_memory(memory, 10);
  expected.push_back("whole: register true 10");
  world.deallocate(memory, 12);
  expected.push_back("whole: deallocate true 12");

  auto part = world.split(1, 2, "part");
  expected.push_back("whole: split 1 2 part");
  part.exchange("t", "w");
  expected.push_back("part: exchange t w");
  auto moved = std::move(part);
  moved.exchange("t", "v");
  expected.push_back("part: exchange t v");
  CHECK(notes == expected);
}

TEST_CASE("any communicator that was moved from says so, and can be released") {
  std::vector<std::string> notes;
  World world = Noted(notes, "whole");
  World const other = std::move(world);
  CHECK(other.rank() == 5);
  CHECK_THROWS_AS(world.rank(), fsdp::UsageError);
  CHECK_THROWS_AS(world.split(0, 0, "part"), fsdp::UsageError);
  CHECK_THROWS_AS(world.sums(fsdp::DType::f32), fsdp::UsageError);
  world.deallocate(nullptr, 0);
  world.report_history(1, "end");
  CHECK_THROWS_AS(fsdp::Mesh(std::move(world)), fsdp::UsageError);
  CHECK(notes.empty());
}

TEST_CASE("any communicator says what its communicator lacks, and refuses it by name") {
  World world = Least{};
  CHECK_FALSE((world.registers_memory() || world.takes_means() || world.completes_in_order()));
  CHECK((world.sums(fsdp::DType::f32) && !world.sums(fsdp::DType::bf16) && !world.sums(fsdp::DType::f16)));
  CHECK_FALSE((fsdp::registers_memory(world) || fsdp::takes_means(world) || fsdp::order_among_peers(world)));
  world.register_memory(nullptr, 1), world.report_history(1, ""), world.note_failure({});
  CHECK(world.ask_first_rank("text", "what", fsdp::comm::first_text) == "text");

  auto const refusal = [](auto const& act) {
    try {
      act();
    } catch (fsdp::Error const& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  auto stream = world.device().make_stream("s", fsdp::StreamPriority::normal);
  fsdp::bf16 narrow{};
  CHECK(refusal([&] { world.all_gather(stream, &narrow, &narrow, 1, {}); }) ==
        "rank 0: the communicator that AnyCommunicator holds has no all_gather of bf16");
  double wide{};
  CHECK(refusal([&] {
          world.broadcast(stream, &wide, 1, 0, {"block", "forward"});
        }) ==
        "rank 0: the communicator that AnyCommunicator holds has no broadcast of fp64 for unit 'block' (forward)");
  CHECK(refusal([&] { fsdp::detail::GradientSums<World>::narrow(fsdp::DType::f16, world); }) ==
        "rank 0: reduce_dtype fp16: the communicator's reduce_scatter and all_reduce do not take fp16");
  std::vector<std::string> notes;
  World const whole = Noted(notes, "whole");
  CHECK(fsdp::detail::GradientSums<World>::narrow(fsdp::DType::f16, whole).round != nullptr);
}

TEST_CASE("communicators that have members of former names are called by them") {
  World world = Former{};
  CHECK(world.ask_first_rank("text", "what", fsdp::comm::no_text) == "asked");
  world.report_history(3, "history"), world.defer_failure({});
  CHECK(Former::last_end == 3);
  CHECK(Former::failures == 1);
}

TEST_CASE("any communicator hands on each call of the least communicator, and its wrappers' answers") {
  World world = Least{};
  auto stream = world.device().make_stream("s", fsdp::StreamPriority::normal);
  double sum{};
  CHECK(world.all_reduce(stream, &sum, &sum, 1, {}).sequence == 4);
  CHECK_FALSE(world.sums(fsdp::DType::f64));  // it has no reduce_scatter of these

  std::vector<std::string> notes;
  for (bool const least : {true, false}) {
    CAPTURE(least);
    World const wrapped = Wrapper(least ? World(Least{}) : World(Noted(notes, "whole")));
    CHECK(wrapped.registers_memory() != least);
    CHECK(wrapped.takes_means() != least);
    CHECK(wrapped.completes_in_order() != least);
    CHECK(wrapped.sums(fsdp::DType::bf16) != least);
    CHECK(wrapped.sums(fsdp::DType::f32));
  }
}
