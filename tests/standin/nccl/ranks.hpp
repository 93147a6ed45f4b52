// SPDX-License-Identifier: Apache-2.0
// For tests of the stand-in for NCCL: ranks that are threads or processes, and what was reported.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/standin/runtime/runtime.hpp"

namespace standin::test {

/// Throws unless a call succeeded: Catch2's macros are for the thread that runs the tests.
inline void expect(bool holds, std::string const& what) {
  if (!holds) throw std::runtime_error(what);
}
inline void check(ncclResult_t status, char const* call) {
  expect(status == ncclSuccess,
         std::string(call) + ": " + ncclGetErrorString(status) + "; " + ncclGetLastError(nullptr));
}
inline void check(cudaError_t status, char const* call) {
  expect(status == cudaSuccess, std::string(call) + ": " + cudaGetErrorString(status));
}
#define STANDIN_CHECK(call) ::standin::test::check((call), #call)

/// Collects reports of the stand-ins while it lives; they do not end the process then.
class Reports {
 public:
  Reports() : before_(set_handler(&take)) {
    std::scoped_lock const lock(mutex());
    all().clear();
  }
  Reports(Reports const&) = delete;
  Reports& operator=(Reports const&) = delete;
  ~Reports() { set_handler(before_); }
  /// The texts under a rule.
  static std::vector<std::string> of(std::string_view rule) {
    std::scoped_lock const lock(mutex());
    std::vector<std::string> texts;
    for (auto const& [broken, text] : all()) {
      if (broken == rule) texts.push_back(text);
    }
    return texts;
  }
  static std::string text() {
    std::scoped_lock const lock(mutex());
    std::string text;
    for (auto const& [broken, words] : all()) text += broken + ": " + words + "\n";
    return text;
  }
  static std::size_t size() {
    std::scoped_lock const lock(mutex());
    return all().size();
  }

 private:
  static void take(std::string_view rule, std::string const& text) {
    std::scoped_lock const lock(mutex());
    all().emplace_back(rule, text);
  }
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::vector<std::pair<std::string, std::string>>& all() {
    static std::vector<std::pair<std::string, std::string>> instance;
    return instance;
  }
  Handler before_;
};

inline ncclUniqueId new_identifier() {
  ncclUniqueId id{};
  STANDIN_CHECK(ncclGetUniqueId(&id));
  return id;
}

/// Waits until `done` says so. A test that fails does not wait forever.
inline void wait_until(std::function<bool()> const& done, std::string const& what) {
  auto const end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!done()) {
    expect(std::chrono::steady_clock::now() < end, "waited in vain until " + what);
    std::this_thread::yield();
  }
}

/// Device memory with `count` elements.
template <class T>
class Memory {
 public:
  explicit Memory(std::size_t count) : count_(count) { STANDIN_CHECK(cudaMalloc(&data_, count * sizeof(T))); }
  Memory(Memory const&) = delete;
  Memory& operator=(Memory const&) = delete;
  ~Memory() { static_cast<void>(cudaFree(data_)); }
  T* data() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

/// A stream, and a communicator of one rank. Ends both; while an exception passes, without waiting for peers.
class Rank {
 public:
  Rank(ncclUniqueId const& id, int place, int ranks, int device, int blocking = 1) : rank(place), size(ranks) {
    STANDIN_CHECK(cudaSetDevice(device));
    STANDIN_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    auto const status = ncclCommInitRankConfig(&comm, ranks, id, place, &config);
    if (blocking == 1) STANDIN_CHECK(status);
  }
  Rank(Rank const&) = delete;
  Rank& operator=(Rank const&) = delete;
  ~Rank() {
    if (comm != nullptr)
      static_cast<void>(std::uncaught_exceptions() > 0 ? ncclCommAbort(comm) : ncclCommDestroy(comm));
    static_cast<void>(cudaStreamDestroy(stream));
  }
  void abort() { STANDIN_CHECK(ncclCommAbort(std::exchange(comm, nullptr))); }
  void synchronize() const { STANDIN_CHECK(cudaStreamSynchronize(stream)); }
  template <class T>
  void upload(T* to, std::vector<T> const& from) const {
    STANDIN_CHECK(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyDefault, stream));
    synchronize();
  }
  template <class T>
  std::vector<T> download(T const* from, std::size_t count) const {
    std::vector<T> to(count);
    STANDIN_CHECK(cudaMemcpyAsync(to.data(), from, count * sizeof(T), cudaMemcpyDefault, stream));
    synchronize();
    return to;
  }

  int const rank, size;
  cudaStream_t stream = nullptr;
  ncclComm_t comm = nullptr;
};

/// Calls body(rank) on a thread for each rank. @return what the first that failed threw, or ""
inline std::string on_threads(int ranks, std::function<void(int)> const& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (std::exception const& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  for (auto const& error : errors) {
    if (!error.empty()) return error;
  }
  return {};
}

/// How a process ended: its exit code (128 more than a signal), and what it wrote to stderr.
struct Ended {
  int code = 0;
  std::string text;
};

/// Calls body(rank) in a process for each rank, which ends with code 0 if it returns, and with 1 if it throws.
/// @pre this process has called nothing of CUDA
inline std::vector<Ended> in_processes(int ranks, std::function<void(int)> const& body) {
  struct Child {
    pid_t process;
    int from;
  };
  std::vector<Child> children;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    expect(::pipe(ends) == 0, "pipe");
    auto const process = ::fork();
    expect(process >= 0, "fork");
    if (process == 0) {
      ::alarm(60);  // of a test that fails a rank may wait for another forever
      for (auto const& sibling : children) ::close(sibling.from);
      ::close(ends[0]);
      ::dup2(ends[1], STDERR_FILENO);
      try {
        body(rank);
      } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        std::_Exit(1);
      }
      std::_Exit(0);
    }
    ::close(ends[1]);
    children.push_back({process, ends[0]});
  }
  std::vector<Ended> result;
  for (auto const& child : children) {
    Ended ended;
    char part[512];
    for (ssize_t got = 0; (got = ::read(child.from, part, sizeof part)) > 0;)
      ended.text.append(part, static_cast<std::size_t>(got));
    ::close(child.from);
    int status = 0;
    ::waitpid(child.process, &status, 0);
    ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.push_back(std::move(ended));
  }
  return result;
}
/// Output and exit of processes that had to succeed; "" if all did.
inline std::string failures(std::vector<Ended> const& all) {
  std::string text;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].code != 0)
      text += "rank " + std::to_string(rank) + ": " + std::to_string(all[rank].code) + ": " + all[rank].text + "\n";
  }
  return text;
}

}  // namespace standin::test
