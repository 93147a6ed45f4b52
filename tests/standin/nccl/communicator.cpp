// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/nccl/communicator.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "tests/standin/nccl/occupancy.hpp"
#include "tests/standin/nccl/rules.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/standin/runtime/unseen.hpp"

namespace standin::nccl {
namespace {

struct LastError {
  std::mutex mutex;
  std::string text;
};
LastError& last() {
  static auto* const instance = new LastError;
  return *instance;
}

/// NCCL over shared memory waits for a lost peer forever; with =error it notices, as it can over a network.
bool notices_lost_peers() {
  char const* const text = std::getenv("FSDP_STANDIN_NCCL_LOST_PEER");
  return text != nullptr && std::string_view(text) == "error";
}

std::uint64_t hash(std::string_view text) {  // FNV-1a: equal in all programs, as std::hash need not be
  std::uint64_t value = 0xcbf29ce484222325u;
  for (char const letter : text) value = (value ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  return value;
}

/// All ranks share memory; so what tells their machines apart is what NCCL was told.
std::uint64_t host_hash() {
  char const* const id = std::getenv("NCCL_HOSTID");
  return hash(id == nullptr ? "" : id);
}

std::uint64_t gpu_hash(int device) {
  cudaDeviceProp properties{};
  static_cast<void>(cudaGetDeviceProperties(&properties, device));  // it exists
  return hash({properties.uuid.bytes, sizeof(properties.uuid.bytes)});
}

std::shared_ptr<Tags> tags_of(std::uint64_t nonce) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<std::uint64_t, std::weak_ptr<Tags>>;
  std::scoped_lock const lock(*mutex);
  auto& entry = (*all)[nonce];
  auto tags = entry.lock();
  if (tags == nullptr) entry = tags = std::make_shared<Tags>();
  return tags;
}

Mail mail_of(std::string_view call, std::int64_t first = 0, std::int64_t second = 0) {
  Mail mail;
  std::copy(call.begin(), call.end(), mail.call.begin());
  mail.numbers = {first, second};
  return mail;
}

}  // namespace

ncclResult_t failed(ncclResult_t result, std::string text) {
  std::scoped_lock const lock(last().mutex);
  last().text = std::move(text);
  return result;
}
char const* last_error() {
  thread_local std::string copy;
  std::scoped_lock const lock(last().mutex);
  copy = last().text;
  return copy.c_str();
}

Communicator::~Communicator() {
  if (background_.joinable()) background_.join();
  for (int const process : processes_) {
    if (process >= 0) ::close(process);
  }
}

ncclResult_t Communicator::take_seat(ncclUniqueId const& id) {
  if (auto const error = shared.open(id); !error.empty())
    return failed(ncclSystemError, fmt::format("rank {} of {}: {}", rank, size, error));
  auto& header = shared.header();
  int ranks = 0;
  if (!header.ranks.compare_exchange_strong(ranks, size) && ranks != size)
    return failed(ncclInvalidArgument,
                  fmt::format("rank {} was told of {} ranks, another rank of {}", rank, size, ranks));
  auto& seat = shared.seat(rank);
  auto empty = SeatState::empty;
  if (!seat.state.compare_exchange_strong(empty, SeatState::joined)) {
    auto const text = fmt::format("rank {} of {} exists already in the communicator of this identifier", rank, size);
    report(rule("identifier_reuse"), text);
    return failed(ncclInvalidUsage, text);
  }
  seat.process = ::getpid();
  seat.device = device;
  seat.gpu = gpu_hash(device);
  seat.host = host_hash();
  tags = tags_of(header.nonce);
  return ncclSuccess;
}

ncclResult_t Communicator::expect_own_gpus() {
  for (int first = 0; first < size; ++first) {
    for (int second = first + 1; second < size; ++second) {
      auto const& a = shared.seat(first);
      auto const& b = shared.seat(second);
      if (a.host == b.host && a.gpu == b.gpu)
        return failed(ncclInvalidUsage,
                      fmt::format("rank {} and rank {} are both on CUDA device {} of one machine: NCCL "
                                  "wants a GPU for each rank",
                                  first, second, a.device));
    }
  }
  return ncclSuccess;
}

ncclResult_t Communicator::join(ncclUniqueId const& id) {
  static_cast<void>(Occupancy::of(device));  // reads the environment
  if (auto const status = take_seat(id); status != ncclSuccess) return status;
  std::vector<Mail> all;
  if (auto const status = exchange(mail_of("ncclCommInitRank"), all); status != ncclSuccess) return status;
  Shared::close_identifier(id);
  processes_.assign(static_cast<std::size_t>(size), -1);
  for (int peer = 0; peer < size; ++peer) {
    auto const process = shared.seat(peer).process;
    if (process != ::getpid())
      processes_[static_cast<std::size_t>(peer)] = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
  }
  return expect_own_gpus();
}

ncclResult_t Communicator::exchange(Mail mail, std::vector<Mail>& all) {
  auto& own = shared.seat(rank);
  auto const slot = mails_++ % 2;
  own.mail[slot] = mail;
  own.mails.store(mails_);
  shared.ring();
  all.clear();
  for (int peer = 0; peer < size; ++peer) {
    auto const& seat = shared.seat(peer);
    auto const status =
        wait_until(fmt::format("{} for rank {}", mail.call.data(), peer), [&] { return seat.mails.load() >= mails_; });
    if (status != ncclSuccess) return status;
    all.push_back(seat.mail[slot]);
    if (all.back().call != mail.call) {
      report(rule("collective_mismatch"), fmt::format("rank {} of {} calls {}, rank {} calls {}", rank, size,
                                                      mail.call.data(), peer, all.back().call.data()));
      return failed(ncclInvalidUsage, "ranks make different calls");
    }
  }
  return ncclSuccess;
}

ncclResult_t Communicator::divide(int color, int key, Part& part) {
  std::vector<Mail> all;
  if (auto const status = exchange(mail_of("ncclCommSplit", color, key), all); status != ncclSuccess) return status;
  std::vector<int> members;
  for (int peer = 0; peer < size; ++peer) {
    if (color != NCCL_SPLIT_NOCOLOR && all[static_cast<std::size_t>(peer)].numbers[0] == color) members.push_back(peer);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)].numbers[1] < all[static_cast<std::size_t>(b)].numbers[1];
  });
  part.size = static_cast<int>(members.size());
  part.rank = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
  auto mail = mail_of("ncclCommSplit, identifiers");
  if (part.size > 0 && part.rank == 0 && !Shared::make_identifier(mail.id))
    return failed(ncclSystemError, fmt::format("memfd_create: {}", std::strerror(errno)));
  if (auto const status = exchange(mail, all); status != ncclSuccess) return status;
  if (part.size > 0) part.id = all[static_cast<std::size_t>(members.front())].id;
  return ncclSuccess;
}

ncclResult_t Communicator::finalize() {
  auto status = wait_until("the flush of collectives", [&] { return finished.load() == sequence.load(); });
  auto joined = SeatState::joined;
  shared.seat(rank).state.compare_exchange_strong(joined, SeatState::left);
  shared.ring();
  for (int peer = 0; peer < size && status == ncclSuccess; ++peer) {
    auto const& seat = shared.seat(peer);
    if (seat.host != shared.seat(rank).host) continue;
    status = wait_until(fmt::format("the end of a communicator for rank {}", peer),
                        [&] { return seat.state.load() != SeatState::joined; });
  }
  return status;
}

void Communicator::abort() {
  aborted = true;
  Occupancy::of(device).remove(this);
  if (shared.is_open()) {
    shared.seat(rank).state = SeatState::aborted;
    shared.ring();
  }
  if (background_.joinable()) background_.join();
  std::scoped_lock const lock(stepping);  // what moves data now sees `aborted` before it moves more
}

void Communicator::begin(std::function<ncclResult_t()> action) {
  if (background_.joinable()) background_.join();  // it was seen to be done
  state = ncclInProgress;
  background_ = std::thread([this, action = std::move(action)] {
    Unseen const unseen;
    static_cast<void>(cudaSetDevice(device));
    state = action();
  });
}

ncclResult_t Communicator::poll() {
  if (say_in_progress_.exchange(false)) return ncclInProgress;
  if (state.load() == ncclSuccess) {
    if (int const peer = lost_peer(); peer >= 0) return fail_for(peer), ncclRemoteError;
  }
  return state.load();
}

ncclResult_t Communicator::enqueued() {
  if (blocking) return ncclSuccess;
  say_in_progress_ = true;
  return ncclInProgress;
}

Window* Communicator::window_of(void const* address) {
  for (auto& [handle, window] : windows) {
    if (address >= window.begin && address < window.begin + window.bytes) return &window;
  }
  return nullptr;
}

ncclResult_t Communicator::wait_until(std::string_view what, std::function<bool()> const& done) {
  using namespace std::chrono_literals;
  auto notice = std::chrono::steady_clock::now() + 20s;
  while (true) {
    auto const bell = shared.header().bell.load();
    if (done()) return ncclSuccess;
    if (aborted.load()) return failed(ncclInternalError, fmt::format("rank {}: aborted in {}", rank, what));
    if (int const peer = lost_peer(); peer >= 0) return fail_for(peer);
    if (std::chrono::steady_clock::now() > notice) {
      fmt::print(stderr, "standin: rank {} of {} has waited 20 s in {}\n", rank, size, what);
      notice += 60s;
    }
    shared.wait(bell, 50ms);  // not longer: a peer that is lost does not ring
  }
}

int Communicator::lost_peer() {
  static bool const notices = notices_lost_peers();
  if (!notices) return -1;
  for (std::size_t peer = 0; peer < processes_.size(); ++peer) {
    auto const seat = shared.seat(static_cast<int>(peer)).state.load();
    if (seat == SeatState::aborted && static_cast<int>(peer) != rank) return static_cast<int>(peer);
    if (seat != SeatState::joined || processes_[peer] < 0) continue;
    pollfd ended{processes_[peer], POLLIN, 0};
    if (::poll(&ended, 1, 0) > 0 && shared.seat(static_cast<int>(peer)).state.load() == SeatState::joined)
      return static_cast<int>(peer);
  }
  return -1;
}

ncclResult_t Communicator::fail_for(int peer) {
  auto const process = shared.seat(peer).process;
  state = ncclRemoteError;
  return failed(ncclRemoteError, fmt::format("rank {} of {}: rank {} (process {}) is gone", rank, size, peer, process));
}

}  // namespace standin::nccl
