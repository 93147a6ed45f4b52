// SPDX-License-Identifier: Apache-2.0
// Under ThreadSanitizer, dropping one event wait must be reported as a race, whoever is late; keeping all must be
// clean.
//
//   dropped_wait                                  runs itself for every case below and checks how each ends
//   dropped_wait <scenario> <late> <keep|drop>    runs one case; the sanitizer makes it exit with 66 if it saw a race
//
// Scenarios: `streams` (two streams of one host thread), `teams` (the same, each of three threads), `all_gather`,
// `all_reduce`, `reuse` (two ranks of a local communicator). Late: `worker`, `host` or `nobody`. Without the sanitizer
// only the cases that keep all waits are run.
// skip-asan
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/sanitized.hpp"

namespace {

using Device = fsdp::testing::DropDevice<fsdp::host::Device>;
using Comm = fsdp::local::Communicator<Device>;
using fsdp::WaitSite;

constexpr std::size_t count = 4096;
constexpr fsdp::Label label{"unit", "test"};

struct Late {
  bool worker, host;
  void on_worker(fsdp::host::Stream& stream) const {
    if (worker) stream.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds{20}); });
  }
  void on_host() const {
    if (host) std::this_thread::sleep_for(std::chrono::milliseconds{20});
  }
};

void write(fsdp::host::Stream& stream, float* data, std::size_t n, float value) {
  stream.enqueue([=] {
    for (std::size_t i = 0; i < n; ++i) data[i] = value;
  });
}
void read(fsdp::host::Stream& stream, float const* data, std::size_t n, double* total) {
  stream.enqueue([=] {
    for (std::size_t i = 0; i < n; ++i) *total += static_cast<double>(data[i]);
  });
}

void streams(Device const& device, Late late) {
  auto writer = device.make_stream("writer", fsdp::StreamPriority::normal);
  auto reader = device.make_stream("reader", fsdp::StreamPriority::normal);
  auto written = device.make_event();
  std::vector<float> data(count);
  double total = 0;
  late.on_worker(writer);
  write(writer, data.data(), count, 1.0f);
  device.record(written, writer);
  late.on_host();
  device.wait(reader, written, WaitSite::compute_unsharded);
  read(reader, data.data(), count, &total);
  device.synchronize(reader);
  device.synchronize(writer);
}

/// The parts take so long that helpers have some.
void teams(Device const& device, Late late) {
  auto writer = device.make_stream("writer", fsdp::StreamPriority::normal);
  auto reader = device.make_stream("reader", fsdp::StreamPriority::normal);
  auto written = device.make_event();
  constexpr std::size_t parts = 6, length = count / parts;
  std::vector<float> data(count);
  std::vector<double> totals(parts);
  auto const linger = [] { std::this_thread::sleep_for(std::chrono::milliseconds{2}); };
  for (int warm = 0; warm < 2; ++warm) {  // a team that knows nothing has nothing to tell
    writer.enqueue_parts(parts, [linger](std::int64_t) { linger(); });
    reader.enqueue_parts(parts, [linger](std::int64_t) { linger(); });
  }
  late.on_worker(writer);
  writer.enqueue_parts(parts, [linger, to = data.data()](std::int64_t part) {
    linger();
    for (std::size_t i = 0; i < length; ++i) to[static_cast<std::size_t>(part) * length + i] = 1.0f;
  });
  device.record(written, writer);
  late.on_host();
  device.wait(reader, written, WaitSite::compute_unsharded);
  reader.enqueue_parts(parts, [from = data.data(), to = totals.data()](std::int64_t part) {
    auto const own = static_cast<std::size_t>(part);
    for (std::size_t i = 0; i < length; ++i) to[own] += static_cast<double>(from[own * length + i]);
  });
  device.synchronize(reader);
  device.synchronize(writer);
}

void collective(Device const& device, Late late, bool reduce) {
  fsdp::local::run(2, device, [&](Comm comm) {
    auto stream = device.make_stream("collectives", fsdp::StreamPriority::high);
    std::vector<float> data(2 * count);
    float* const own = data.data() + static_cast<std::size_t>(comm.rank()) * count;
    if (comm.rank() == 0) late.on_worker(stream);
    write(stream, reduce ? data.data() : own, reduce ? 2 * count : count, 1.0f);
    if (comm.rank() == 1) late.on_host();
    if (reduce) {
      auto const ticket =
          comm.all_reduce(stream, static_cast<float const*>(data.data()), data.data(), 2 * count, label);
      comm.wait_for_peers(stream, ticket, WaitSite::none);
    } else {
      auto const ticket = comm.all_gather(stream, static_cast<float const*>(own), data.data(), count, label);
      comm.wait_for_peers(stream, ticket, WaitSite::none);
    }
    device.synchronize(stream);
    comm.exchange({}, "done");
  });
}

void reuse(Device const& device, Late late) {
  fsdp::local::run(2, device, [&](Comm comm) {
    auto stream = device.make_stream("collectives", fsdp::StreamPriority::high);
    std::vector<float> data(2 * count);
    float* const own = data.data() + static_cast<std::size_t>(comm.rank()) * count;
    write(stream, own, count, 1.0f);
    if (comm.rank() == 0) late.on_worker(stream);
    auto const ticket = comm.all_gather(stream, static_cast<float const*>(own), data.data(), count, label);
    if (comm.rank() == 1) late.on_host();
    comm.wait_for_peers(stream, ticket, WaitSite::gather_peers_read);
    write(stream, own, count, 2.0f);
    device.synchronize(stream);
    comm.exchange({}, "done");
  });
}

void run_case(std::string_view scenario, std::string_view late, bool drop) {
  Late const lag{late == "worker", late == "host"};
  auto const site = scenario == "streams" || scenario == "teams" ? WaitSite::compute_unsharded
                    : scenario == "all_gather"                   ? WaitSite::collective_peer_ready
                    : scenario == "all_reduce"                   ? WaitSite::collective_peer_partial
                                                                 : WaitSite::gather_peers_read;
  Device const device{fsdp::host::Device{scenario == "teams" ? 3 : 1}, drop ? site : WaitSite::count_};
  if (scenario == "streams") {
    streams(device, lag);
  } else if (scenario == "teams") {
    teams(device, lag);
  } else if (scenario == "reuse") {
    reuse(device, lag);
  } else {
    collective(device, lag, scenario == "all_reduce");
  }
}

using fsdp::testing::has_thread_sanitizer;

/// Runs one case in a process of its own and returns its exit code.
int spawn_case(char const* program, std::string scenario, std::string late, std::string action) {
  std::string name = program;
  char* arguments[] = {name.data(), scenario.data(), late.data(), action.data(), nullptr};
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);  // the sanitizer's report
  pid_t child = 0;
  int const failed = ::posix_spawn(&child, "/proc/self/exe", &files, nullptr, arguments, environ);
  ::posix_spawn_file_actions_destroy(&files);
  if (failed != 0) return -1;
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int run_all(char const* program) {
  if (has_thread_sanitizer) ::setenv("TSAN_OPTIONS", "exitcode=66", 1);
  int wrong = 0;
  for (std::string const scenario : {"streams", "teams", "all_gather", "all_reduce", "reuse"}) {
    for (std::string const late : {"worker", "host", "nobody"}) {
      for (std::string const action : {"keep", "drop"}) {
        bool const drop = action == "drop";
        if (drop && !has_thread_sanitizer) continue;
        int const expected = drop ? 66 : 0;
        for (int repetition = 0; repetition < 3; ++repetition) {
          int const got = spawn_case(program, scenario, late, action);
          if (got == expected) continue;
          std::printf("%s %s %s: exit code %d, expected %d\n", scenario.c_str(), late.c_str(), action.c_str(), got,
                      expected);
          ++wrong;
        }
      }
    }
  }
  std::printf("%d cases ended otherwise than expected%s\n", wrong,
              has_thread_sanitizer ? "" : " (without ThreadSanitizer: kept waits only)");
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) return run_all(argv[0]);
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s [streams|teams|all_gather|all_reduce|reuse worker|host|nobody keep|drop]\n",
                 argv[0]);
    return 2;
  }
  run_case(argv[1], argv[2], std::string_view{argv[3]} == "drop");
  return 0;
}
