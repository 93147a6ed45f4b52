// SPDX-License-Identifier: Apache-2.0
// Bytes that rank 0 of a group over TCP sends when engines are sealed, groups are split and ranks vote: linear in the
// number of ranks, which are threads here.
// links: OpenSSL::Crypto
// skip-sanitizers
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/tcp_place.hpp"
#include "tests/support/toy_model.hpp"

namespace control_bytes {

/// Bytes that the calling thread has sent over sockets.
thread_local std::int64_t sent = 0;

}  // namespace control_bytes

/// The C library's, and counts.
extern "C" ssize_t send(int descriptor, void const* data, std::size_t bytes, int flags) {
  auto const result = ::syscall(SYS_sendto, descriptor, data, bytes, flags, nullptr, 0);
  if (result > 0) control_bytes::sent += result;
  return result;
}

namespace {

using fsdp::bootstrap::Secret;
using fsdp::bootstrap::TcpGroup;
using fsdp::testing::free_port;
using fsdp::testing::place;

/// Bytes that rank 0 sends while all ranks make a call.
struct Sent {
  std::int64_t seal = 0, split = 0, vote = 0;
};

template <class Call>
std::int64_t sent_by(Call const& call) {
  auto const before = control_bytes::sent;
  call();
  return control_bytes::sent - before;
}

Sent sent_among(int size) {
  int const port = free_port();
  std::string const layouts(12'000, 'x');
  Sent result;
  std::vector<std::string> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        TcpGroup group(place(rank, size, port), std::chrono::minutes(2), Secret("a secret of sixteen bytes"));
        Sent mine;
        mine.seal = sent_by([&] { fsdp::detail::expect_equal_texts(group, layouts, "layouts"); });
        mine.vote = sent_by([&] {
          if (fsdp::detail::mean_over_ranks(group, {1.0, double(rank)}, "5 steps")[0] != 1.0)
            throw fsdp::Error("another mean");
        });
        mine.split = sent_by([&] {
          auto const part = group.split(rank / 8, rank, "eights");
          if (part.rank() != rank % 8) throw fsdp::Error("another rank");
        });
        if (rank == 0) result = mine;
      } catch (std::exception const& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  for (auto const& text : thrown) CHECK(text == "");
  return result;
}

/// Ranks of one process whose control plane is a TcpGroup's.
class Controlled : public fsdp::testing::Forwarding<Controlled, fsdp::local::Communicator<fsdp::host::Device>> {
 public:
  using Inner = fsdp::local::Communicator<fsdp::host::Device>;
  Controlled(Inner inner, std::shared_ptr<TcpGroup> control)
      : Forwarding(std::move(inner)), control_(std::move(control)) {}
  Controlled split(int color, int key, std::string_view name) {
    auto group = std::make_shared<TcpGroup>(control_->split(color, key, name));
    return {inner().split(color, key, name), std::move(group)};
  }
  template <class S>
  void before(S& /*stream*/, fsdp::Label /*label*/) {}
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    return control_->exchange(mine, what);
  }
  template <class Answer>
  std::string ask_first_rank(std::string const& mine, std::string_view what, Answer const& answer) {
    return control_->ask_first_rank(mine, what, answer);
  }

 private:
  std::shared_ptr<TcpGroup> control_;
};

}  // namespace

TEST_CASE("rank 0 sends bytes linear in the number of ranks for a seal, a split and a vote", "[tcp]") {
  auto const open_files = static_cast<int>(fsdp::bootstrap::detail::open_files_limit());
  for (int const size : {2, 8, 64, 256, 1024}) {
    if (3 * size + 128 > open_files) {
      WARN("skipped from " << size << " ranks on: only " << open_files << " files may be open");
      break;
    }
    auto const sent = sent_among(size);
    INFO(size << " ranks: a seal " << sent.seal << ", a split " << sent.split << ", a vote " << sent.vote << " bytes");
    auto const others = size - 1;
    CHECK(sent.seal == 80 * others);         // a header each: no rank differs
    CHECK(sent.vote == (80 + 17) * others);  // and the means of two doubles
    CHECK(sent.split <= 512 * others);
  }
}

TEST_CASE("an engine is sealed with bytes linear in the number of ranks", "[tcp]") {
  for (int const size : {2, 4, 8}) {
    int const port = free_port();
    std::int64_t sent = 0;
    fsdp::local::run(size, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> world) {
      int const rank = world.rank();
      auto control = std::make_shared<TcpGroup>(place(rank, size, port), std::chrono::minutes(2),
                                                Secret("a secret of sixteen bytes"));
      fsdp::Mesh mesh{Controlled(std::move(world), std::move(control))};
      fsdp::Engine engine{mesh, fsdp::FullShard{}};
      toy::Shape shape;
      shape.global_rows = 24;
      toy::Network network(engine, shape);
      auto const bytes = sent_by([&] { engine.seal(); });
      if (rank == 0) sent = bytes;
    });
    INFO(size << " ranks: " << sent << " bytes");
    CHECK(sent > 0);
    CHECK(sent <= 1280 * (size - 1));  // of them one split
  }
}
