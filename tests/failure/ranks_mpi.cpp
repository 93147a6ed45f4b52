// SPDX-License-Identifier: Apache-2.0
// A program whose ranks fail in the way that its argument names; tests/failure/*.sh run it under mpirun.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fsdp/mpi.hpp"
#include "tests/support/failing_step.hpp"

namespace {

/// Errors that the functions below return in place of the C library's, which they hide.
bool reserving_kills = false;   ///< SIGKILL: shared memory is made, and not mapped
bool files_need_names = false;  ///< EOPNOTSUPP for files without a name

}  // namespace

extern "C" int posix_fallocate(int file, off_t begin, off_t bytes) {
  if (reserving_kills) ::raise(SIGKILL);
  return ::syscall(SYS_fallocate, file, 0, begin, bytes) == 0 ? 0 : errno;
}
extern "C" int open(char const* path, int flags, ...) {
  if (files_need_names && (flags & O_TMPFILE) == O_TMPFILE) {
    errno = EOPNOTSUPP;
    return -1;
  }
  std::va_list rest;
  va_start(rest, flags);
  auto const mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

namespace {

constexpr std::size_t count = 4096;

/// The last rank misbehaves before the third collective; all others wait for it.
void misbehave(std::string_view how) {
  if (how == "killed") ::raise(SIGKILL);
  if (how == "absent") ::sleep(60);
  if (how == "throws") fsdp::fail<fsdp::UsageError>("this rank has had enough");
}

int body(fsdp::mpi::Environment const& environment, std::string_view how);

/// All ranks catch what happens to them, and end as if nothing had.
int survive(fsdp::mpi::Environment const& environment, std::string_view how) {
  try {
    return body(environment, how);
  } catch (fsdp::Error const& error) {
    std::printf("caught: %s\n", error.what());
    return 0;
  }
}

/// A task of rank 1 throws, after the last call that could say so.
void fail_unnoticed(fsdp::mpi::Environment const& environment) {
  using Comm = fsdp::mpi::BasicCommunicator<failing::Device>;
  fsdp::Mesh<Comm> mesh{Comm(environment)};
  fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
  auto layer = engine.shard(failing::Layer{engine.device(), 100}, "layer");
  double weight = 0;
  layer.forward(&weight);
  engine.synchronize();
  if (engine.rank() == 1) engine.compute().enqueue([] { throw std::domain_error("boom"); });
}

int body(fsdp::mpi::Environment const& environment, std::string_view how) {
  files_need_names = how == "named";
  fsdp::mpi::Communicator world(environment);
  reserving_kills = how == "reserving";
  auto const last = world.rank() == world.size() - 1;
  auto const ranks = static_cast<std::size_t>(world.size());
  if (how == "shm") {
    world.allocate(std::size_t{4} << 20);
    std::puts("allocated");
    return 0;
  }
  auto* const memory = static_cast<float*>(world.allocate(ranks * count * sizeof(float)));
  auto stream = world.device().make_stream("gather");
  auto* const own = memory + static_cast<std::size_t>(world.rank()) * count;
  for (int k = 0; k < 2; ++k) world.all_gather(stream, own, memory, count, {"first", "forward"});
  stream.synchronize();
  if (last) misbehave(how);
  if (last && how == "returns") return 0;
  if (how == "sigterm" && last) ::sleep(60);
  if (how == "control") {
    if (last) ::sleep(60);
    world.exchange("here", "test");
  }
  if (how == "order" && last) {
    world.reduce_scatter(stream, memory, own, count, {"block.0", "backward"});
  } else if (how == "count" && last) {
    world.all_gather(stream, own, memory, count - 64, {"block.1", "forward"});
  } else {
    world.all_gather(stream, own, memory, count, {"block.1", "forward"});
  }
  if (how == "sigterm") {  // the stream's worker waits for the last rank
    while (fsdp::mpi::detail::process().waiting.load() == 0) std::this_thread::yield();
    std::printf("waits: process %d\n", static_cast<int>(::getpid()));
    std::fflush(stdout);
  }
  stream.synchronize();
  std::puts("completed");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string const how = argc > 1 ? argv[1] : "";
  if (how == "unnoticed-alone") {
    fsdp::mpi::Environment const environment(argc, argv);
    fail_unnoticed(environment);
    return 0;
  }
  return fsdp::mpi::run(argc, argv, [&](fsdp::mpi::Environment& environment) {
    std::string_view const kind = how;
    if (kind == "unnoticed") {
      fail_unnoticed(environment);
      return 0;
    }
    if (kind.starts_with("caught-")) return survive(environment, kind.substr(7));
    return body(environment, kind);
  });
}
