// SPDX-License-Identifier: Apache-2.0
// Start and end of MPI, the grouping of ranks into nodes, and the end of a rank that fails. Tasks of Slurm that srun
// started without an MPI plugin are refused.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/format.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/comm/pmi.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/detail/mpi/calls.hpp"
#include "fsdp/detail/mpi/header.hpp"
#include "fsdp/detail/mpi/node_mail.hpp"
#include "fsdp/detail/mpi/wait.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi {

namespace detail {

/// A positive number from the environment.
inline long setting(char const* name, long otherwise) {
  char const* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  long const value = std::strtol(text, &end, 10);
  if (*end != '\0' || value <= 0 || value > 1'000'000'000)
    fail<ConfigError>("{}='{}': expected a whole number from 1 to 1,000,000,000", name, text);
  return value;
}

inline std::chrono::milliseconds default_timeout() {
  long const seconds = setting("FSDP_TIMEOUT", -1);
  if (seconds > 0) return std::chrono::seconds(seconds);
  return std::chrono::duration_cast<std::chrono::milliseconds>(host::wait_deadline());
}

/// The rank of this process in the world, or -1 without MPI.
inline int world_rank() {
  int initialized = 0;
  int rank = -1;
  MPI_Initialized(&initialized);
  if (initialized != 0) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// Ends of this process's engines. Any thread.
struct Ends {
  std::mutex mutex;
  comm::EngineEnds ends;
};
inline Ends& ends() {
  static Ends kept;
  return kept;
}

/// Prints once what ended this rank, then ends the run. Installed as the terminate handler: an exception that nothing
/// catches gets here before any stack is unwound, so no destructor waits for peers that wait for this rank.
[[noreturn]] inline void end_by_exception() {
  host::yield_to_end();
  std::fflush(nullptr);
  write_error(fsdp::detail::uncaught_text(world_rank()) + "\n");
  end_run(EXIT_FAILURE);
}

}  // namespace detail

/// Checks for srun without an MPI plugin. Environment calls it before it initialises MPI.
/// @throws ConfigError if srun has started this process without an MPI plugin: Open MPI would end the process inside
/// MPI_Init. MPICH may have been built with Slurm's own library, which needs no plugin.
inline void expect_pmi() {
#ifdef OPEN_MPI
  if (auto const text = comm::missing_pmi(); !text.empty()) fail<ConfigError>("{}", text);
#endif
}

/// Settings of a communicator and of those split from it.
struct Options {
  /// Time that a rank waits for its peers before it reports them and ends the run: by default FSDP_TIMEOUT (seconds)
  /// where it is set, else host::wait_deadline(), ten minutes.
  std::chrono::milliseconds timeout = detail::default_timeout();
  /// Pretends that a machine is several nodes of this many ranks each, so that the path across nodes can be tried on
  /// one machine; 0: nodes are what they are. FSDP_RANKS_PER_NODE sets the default.
  int ranks_per_node = static_cast<int>(detail::setting("FSDP_RANKS_PER_NODE", 0));
};

/// MPI from its initialisation to its end. Exactly one per process; it must outlive every communicator.
///
/// [Note: Communicators are not freed] MPI_Comm_free is collective, and destructors of this library wait for nobody: a
/// rank that unwinds must not wait for the others. MPI communicators therefore live until MPI_Finalize, which
/// releases them. Each costs a few kilobytes, and a run makes a handful.
class Environment {
 public:
  /// Initialises MPI for several threads, groups ranks by node, and takes over SIGTERM (unless the program handles it)
  /// and std::terminate.
  /// @throws ConfigError if MPI cannot serve several threads, a setting is malformed, or as expect_pmi()
  /// @note Collective: yes, over MPI_COMM_WORLD.
  Environment(int& argc, char**& argv) : unwinding_(std::uncaught_exceptions()) {
    std::set_terminate(detail::end_by_exception);
    expect_pmi();
    int provided = 0;
    detail::check(MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    detail::process().initialized.store(true);
    if (provided < MPI_THREAD_MULTIPLE)
      fail<ConfigError>(
          "this MPI library does not provide MPI_THREAD_MULTIPLE, which fsdp needs; use one that was built with it");
    struct sigaction old {};
    sigaction(SIGTERM, nullptr, &old);
    if ((old.sa_flags & SA_SIGINFO) == 0 && old.sa_handler == SIG_DFL) {
      struct sigaction action {};
      action.sa_handler = detail::on_terminate;
      sigemptyset(&action.sa_mask);
      action.sa_flags = SA_RESTART;
      sigaction(SIGTERM, &action, nullptr);
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    group_by_node();
    mail_ = std::make_unique<detail::NodeMail>();
  }
  Environment(Environment const&) = delete;
  Environment& operator=(Environment const&) = delete;

  /// Waits for all ranks, compares the ends of their engines, and finalises MPI. Ends the run with an error if they
  /// differ; and while an exception passes, since peers could wait for this rank for ever. If an engine has left a
  /// failure that nobody was told of, prints it and ends the process with EXIT_FAILURE.
  ~Environment() {
    if (std::uncaught_exceptions() > unwinding_) detail::end_run(EXIT_FAILURE);
    bool const failed = report_deferred_failure();
    try {
      expect_equal_ends();
    } catch (std::exception const& error) {
      if (rank_ == 0) detail::write_error(formatted("rank 0: {}\n", error.what()));
      detail::end_run(EXIT_FAILURE);
    }
    detail::process().initialized.store(false);
    MPI_Finalize();
    if (!failed) return;
    std::fflush(nullptr);
    std::_Exit(EXIT_FAILURE);
  }
  /// Prints the failure that an engine has left, once: a stream failed, and no call had thrown that before the engine
  /// ended. mpi::run calls it.
  /// @return whether there was one
  [[gnu::cold]] bool report_deferred_failure() const {
    auto& note = detail::deferred_failure();
    if (!note.failed()) return false;
    detail::write_error(fsdp::detail::with_rank(rank_, note.text) + "\n");
    note.forget();
    return true;
  }

  /// Waits for all ranks, and compares the last steps of engines that have ended since the last call: a collective that
  /// follows the last step would find a difference, and after the end of an engine there is none.
  /// @throws OrderError on every rank if engines of several ranks have ended after different steps
  /// @note Collective: yes, over MPI_COMM_WORLD. run() and the destructor call it.
  void expect_equal_ends() const {
    wait_for_all();
    std::vector<comm::EngineEnd> own;
    {
      std::scoped_lock const lock(detail::ends().mutex);
      auto const list = detail::ends().ends.list();
      own.assign(list.begin(), list.end());
      detail::ends().ends.clear();
    }
    auto const ranks = static_cast<std::size_t>(size_);
    std::vector<int> counts(ranks), offsets(ranks);
    auto const bytes = static_cast<int>(own.size() * sizeof(comm::EngineEnd));
    detail::check(MPI_Allgather(&bytes, 1, MPI_INT, counts.data(), 1, MPI_INT, MPI_COMM_WORLD), "MPI_Allgather");
    for (std::size_t rank = 1; rank < ranks; ++rank) offsets[rank] = offsets[rank - 1] + counts[rank - 1];
    auto const total = static_cast<std::size_t>(offsets.back() + counts.back());
    std::vector<comm::EngineEnd> all(total / sizeof(comm::EngineEnd));
    detail::check(MPI_Allgatherv(own.data(), bytes, MPI_BYTE, all.data(), counts.data(), offsets.data(), MPI_BYTE,
                                 MPI_COMM_WORLD),
                  "MPI_Allgatherv");
    fsdp::detail::FixedArray<std::span<comm::EngineEnd const>> by_rank(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank)
      by_rank[rank] = std::span(all).subspan(static_cast<std::size_t>(offsets[rank]) / sizeof(comm::EngineEnd),
                                             static_cast<std::size_t>(counts[rank]) / sizeof(comm::EngineEnd));
    if (auto const text = comm::difference(by_rank); !text.empty()) fail<OrderError>("{}", text);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  detail::NodeMail& mail() const { return *mail_; }
  /// The lowest world rank on the node of each world rank.
  /// @param ranks_per_node divides nodes into parts of this many ranks; 0: does not
  std::vector<int> nodes(int ranks_per_node = 0) const {
    if (ranks_per_node == 0) return nodes_;
    std::vector<int> parts(nodes_.size());
    std::map<int, std::vector<int>> members;
    for (int rank = 0; rank < size_; ++rank) {
      auto& node = members[nodes_[static_cast<std::size_t>(rank)]];
      node.push_back(rank);
      auto const place = static_cast<int>(node.size()) - 1;
      parts[static_cast<std::size_t>(rank)] = node[static_cast<std::size_t>(place / ranks_per_node * ranks_per_node)];
    }
    return parts;
  }

 private:
  /// Returns when all ranks have come to their end. Peers of a rank that ends too early abort the run; Open MPI's
  /// launcher does not survive that in every case if a rank is in MPI_Finalize then.
  void wait_for_all() const {
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return;
    detail::PollPause pause;
    for (int done = 0; MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0;) pause();
  }
  void group_by_node() {
    MPI_Comm node = MPI_COMM_NULL;
    detail::check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node),
                  "MPI_Comm_split_type");
    int leader = rank_;
    MPI_Bcast(&leader, 1, MPI_INT, 0, node);
    MPI_Comm_free(&node);
    nodes_.resize(static_cast<std::size_t>(size_));
    MPI_Allgather(&leader, 1, MPI_INT, nodes_.data(), 1, MPI_INT, MPI_COMM_WORLD);
  }

  int unwinding_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> nodes_;
  std::unique_ptr<detail::NodeMail> mail_;
};

/// Runs `body(environment)` with MPI and returns its result, for main(). An exception that `body` does not catch is
/// printed once, with the rank, and ends all ranks with a non-zero code. A failure that an engine has left is printed,
/// and makes the result EXIT_FAILURE if it is 0.
/// @note Do not call it inside a try block: with a handler above, the stack is unwound first, and a stream's destructor
/// may then wait for work that waits for peers.
template <class Body>
int run(int argc, char** argv, Body&& body) {
  Environment environment(argc, argv);
  int const result = std::forward<Body>(body)(environment);
  bool const failed = environment.report_deferred_failure();
  environment.expect_equal_ends();
  return failed && result == 0 ? EXIT_FAILURE : result;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi
