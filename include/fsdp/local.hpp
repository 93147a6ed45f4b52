// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process: runs them, each with its communicator.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/host/team.hpp"
#include "fsdp/detail/local/communicator.hpp"
#include "fsdp/detail/local/group.hpp"
#include "fsdp/detail/local/run.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail {

inline bool is_peer_error(std::exception_ptr const& error) {
  try {
    std::rethrow_exception(error);
  } catch (PeerError const&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// A rank's thread, the function that it calls, and the exception that ended it.
struct RankThread {
  int rank = 0;
  void const* live = nullptr;  ///< called with the rank; its type is its caller's to know
  std::thread thread{};
  std::exception_ptr error{};
};

/// Throws the error of the rank that failed first. A rank that was told of a peer's failure may end before that peer
/// does: the cause is thrown, if there is one.
[[gnu::cold]] inline void rethrow_first(fsdp::detail::FixedArray<RankThread> const& threads, std::size_t first) {
  auto chosen = threads[first].error;
  for (auto const& thread : threads) {
    auto const& error = thread.error;
    if (error != nullptr && (chosen == nullptr || (is_peer_error(chosen) && !is_peer_error(error)))) chosen = error;
  }
  if (chosen != nullptr) std::rethrow_exception(chosen);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local {

namespace detail {

/// A caller's devices and body behind pointers, so that the threads of ranks are compiled once for a device and not for
/// each body. Both functions are called in the threads of ranks, with `context`.
template <class D>
struct RankCalls {
  void* context;
  D (*device_of)(void* context, int rank);
  void (*live)(void* context, Communicator<D>& communicator);
};

/// Runs `calls` in one thread per rank, and returns when all have ended.
template <class D>
void run_ranks(int ranks, RankCalls<D> const& calls) {
  if (ranks < 1 || ranks > pairwise::max_ranks) {
    fail<ConfigError>("fsdp::local::run: expected 1 to {} ranks, got {}", pairwise::max_ranks, ranks);
  }
  std::shared_ptr<Run<D>> const shared(new Run<D>(ranks));  // see [Note: Shared by new]
  std::vector<int> world;
  while (world.size() < static_cast<std::size_t>(ranks)) world.push_back(static_cast<int>(world.size()));
  auto group = make_group(shared, std::move(world), "world");
  fsdp::detail::FixedArray<RankThread> threads(static_cast<std::size_t>(ranks));
  auto const live = [&](int rank) {
    auto const failed = [&] {
      threads[static_cast<std::size_t>(rank)].error = std::current_exception();
      shared->set_failed(rank, current_failure());
    };
    try {
      Communicator<D> communicator(group, rank, calls.device_of(calls.context, rank));
      try {
        calls.live(calls.context, communicator);
        shared->raise_left(rank);
      } catch (...) {
        failed();
      }
    } catch (std::exception const&) {
      failed();
    }
    shared->end(rank);
  };
  auto const main = [](void* context) {
    auto const& of = *static_cast<RankThread const*>(context);
    (*static_cast<decltype(live)*>(of.live))(of.rank);
  };
  for (int rank = 0; rank < ranks; ++rank) {
    auto& own = threads[static_cast<std::size_t>(rank)];
    own.rank = rank;
    own.live = &live;
    try {
      own.thread = host::start_thread(main, &own);
    } catch (std::exception const& error) {
      own.error = std::make_exception_ptr(
          ResourceError(formatted("cannot start the thread of rank {}: {}", rank, error.what())));
      shared->set_failed(rank, {ErrorKind::resource, "its thread could not be started"});
      for (int missing = rank; missing < ranks; ++missing) shared->end(missing);
      break;
    }
  }
  for (auto& own : threads)
    if (own.thread.joinable()) own.thread.join();
  if (shared->poisoned()) return rethrow_first(threads, static_cast<std::size_t>(shared->failed_rank()));
  shared->expect_equal_ends();
}

}  // namespace detail

/// Runs `body(communicator)` in `ranks` threads of this process, one per rank, and returns when all have ended.
/// @param ranks 1 to 256: see pairwise::max_ranks
/// @param device the device of every rank, or a callable that returns the device of the rank it is given
/// @param body called concurrently, with an rvalue (or an lvalue) Communicator
/// @throws the error of the first rank that failed; what an engine has left (defer_failure); OrderError if engines
/// ended differently (ReportsHistory)
template <class DeviceOrFactory, class Body>
void run(int ranks, DeviceOrFactory const& device, Body&& body) {
  using B = std::remove_reference_t<Body>;
  struct Context {
    DeviceOrFactory const& device;
    B& body;
    auto device_of(int rank) const {
      if constexpr (fsdp::Device<DeviceOrFactory>) {
        return device;
      } else {
        return device(rank);
      }
    }
  } context{device, body};
  using D = decltype(context.device_of(0));
  detail::run_ranks<D>(ranks, {&context, [](void* of, int rank) { return static_cast<Context*>(of)->device_of(rank); },
                               [](void* of, Communicator<D>& communicator) {
                                 B& live = static_cast<Context*>(of)->body;
                                 if constexpr (std::is_invocable_v<B&, Communicator<D>>) {
                                   live(std::move(communicator));
                                 } else {
                                   live(communicator);
                                 }
                               }});
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local

#if FSDP_COMPILED
#include "fsdp/detail/base/compiled.hpp"
#include "fsdp/detail/compiled/instances.hpp"
#include "fsdp/host.hpp"

#define FSDP_LOCAL_INSTANCES(how)                                                        \
  how void local::detail::run_ranks(int, local::detail::RankCalls<host::Device> const&); \
  FSDP_COMMUNICATOR_INSTANCES(how, local::Communicator<host::Device>)                    \
  FSDP_DEVICE_INSTANCES(how, host::Device, Fp32)                                         \
  FSDP_ENGINE_INSTANCES(how, local::Communicator<host::Device>, Fp32)

namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_LOCAL_INSTANCES(extern template)
}

#endif
