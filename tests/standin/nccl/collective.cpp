// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/nccl/collective.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "tests/standin/nccl/rules.hpp"
#include "tests/standin/nccl/sum.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/standin/runtime/unseen.hpp"

#if STANDIN_TSAN
extern "C" {
void __tsan_read_range(void* begin, unsigned long bytes);
void __tsan_write_range(void* begin, unsigned long bytes);
}
#endif

namespace standin::nccl {
namespace {

char const* name_of(Operation operation) {
  switch (operation) {
    case Operation::all_gather: return "ncclAllGather";
    case Operation::reduce_scatter: return "ncclReduceScatter";
    case Operation::all_reduce: return "ncclAllReduce";
    case Operation::broadcast: return "ncclBroadcast";
  }
  return "";
}

/// In a reduce-scatter a piece has a part for each rank.
std::size_t elements_of_round(Request const& request, int size, std::size_t element) {
  auto const all = piece_bytes / element;
  return request.operation == Operation::reduce_scatter ? all / static_cast<std::size_t>(size) : all;
}

std::int64_t offset_in(Communicator& communicator, void const* address) {
  auto const* const window = communicator.window_of(address);
  return window == nullptr || !window->symmetric ? -1 : static_cast<std::byte const*>(address) - window->begin;
}

Signature signature_of(Communicator& communicator, Request const& request) {
  std::scoped_lock const lock(communicator.windows_mutex);
  return {.operation = request.operation,
          .type = request.type,
          .count = request.count,
          .root = request.root,
          .send_offset = offset_in(communicator, request.send),
          .receive_offset = offset_in(communicator, request.receive)};
}

bool same_call(Signature const& a, Signature const& b) {
  return a.operation == b.operation && a.type == b.type && a.count == b.count && a.root == b.root;
}

}  // namespace

std::size_t Request::send_bytes(int rank, int size) const {
  if (operation == Operation::broadcast && rank != root) return 0;
  return count * size_of(type) * (operation == Operation::reduce_scatter ? static_cast<std::size_t>(size) : 1);
}
std::size_t Request::receive_bytes(int size) const {
  return count * size_of(type) * (operation == Operation::all_gather ? static_cast<std::size_t>(size) : 1);
}

bool Request::in_place(int rank) const {
  auto const own = static_cast<std::size_t>(rank) * count * size_of(type);
  if (operation == Operation::all_gather) return send == receive + own;
  if (operation == Operation::reduce_scatter) return receive == send + own;
  return send == receive;
}

std::string describe(Signature const& signature) {
  auto text = fmt::format("{} of {} {}", name_of(signature.operation), signature.count, name_of(signature.type));
  if (signature.root >= 0) text += fmt::format(" from rank {}", signature.root);
  return text;
}

Collective::Collective(std::shared_ptr<Communicator> communicator, Request const& request, std::uint64_t number)
    : communicator_(std::move(communicator)),
      request_(request),
      number_(number),
      element_(size_of(request.type)),
      round_elements_(elements_of_round(request, communicator_->size, element_)),
      rounds_((request.count + round_elements_ - 1) / round_elements_),
      signature_(signature_of(*communicator_, request)),
      what_(describe(signature_)),
      place_(Occupancy::of(communicator_->device), communicator_.get(), communicator_->rank) {
  use_windows(1);
}

Collective::~Collective() {
  Unseen const unseen;
  if (uses_windows_) use_windows(-1);
}

void Collective::use_windows(int change) {
  std::scoped_lock const lock(communicator_->windows_mutex);
  for (void const* const buffer :
       {static_cast<void const*>(request_.send), static_cast<void const*>(request_.receive)}) {
    if (auto* const window = communicator_->window_of(buffer)) window->uses += change;
  }
}

/// [Note: Edges of a collective]
/// A rank's output comes after the inputs of the ranks that it is made of: after all of them, but for a broadcast's.
/// Nothing else is ordered: a rank's own output may be written before its peers have begun, and what a peer does after
/// the collective does not come after this rank's output.
bool Collective::step() {
  if (!entered_) {
    {
      Unseen const unseen;
      if (communicator_->aborted.load()) return true;
      if (!enter()) return false;
      auto const device = communicator_->device;
      if (auto const bytes = request_.send_bytes(communicator_->rank, communicator_->size); bytes > 0)
        expect_device_operand(device, request_.send, bytes, "the input of " + what_);
      expect_device_operand(device, request_.receive, request_.receive_bytes(communicator_->size),
                            "the output of " + what_);
    }
    tell_input();
    if (contributes(communicator_->rank)) release(communicator_->tags->of(number_));
    tell_output();
    entered_ = true;
  }
  {
    Unseen const unseen;
    std::scoped_lock const lock(communicator_->stepping);
    if (communicator_->aborted.load()) return true;
    if (stuck_ || !agree() || !move_data()) return false;
    place_.leave();
    use_windows(-1);
    uses_windows_ = false;
    communicator_->finished.store(number_);
    communicator_->shared.ring();
  }
  acquire(communicator_->tags->of(number_));
  return true;
}

void Collective::tell_input() const {
#if STANDIN_TSAN
  auto const& communicator = *communicator_;
  if (auto const bytes = request_.send_bytes(communicator.rank, communicator.size); bytes > 0)
    __tsan_read_range(const_cast<std::byte*>(request_.send), bytes);
#endif
}

/// Data that are in place already are not written.
void Collective::tell_output() const {
#if STANDIN_TSAN
  auto const& communicator = *communicator_;
  bool const in_place = request_.in_place(communicator.rank);
  auto const part = request_.count * element_;
  if (in_place && request_.operation == Operation::broadcast && request_.root == communicator.rank) return;
  if (!in_place || request_.operation != Operation::all_gather) {
    __tsan_write_range(request_.receive, request_.receive_bytes(communicator.size));
    return;
  }
  for (int peer = 0; peer < communicator.size; ++peer) {
    if (peer != communicator.rank) __tsan_write_range(request_.receive + static_cast<std::size_t>(peer) * part, part);
  }
#endif
}

/// In the order of the communicator, and when there is room on the device.
bool Collective::enter() { return communicator_->finished.load() + 1 == number_ && place_.enter(); }

/// Waits until all ranks run this collective, and compares what they run.
bool Collective::agree() {
  auto& communicator = *communicator_;
  if (!announced_) {
    auto& own = communicator.shared.seat(communicator.rank);
    own.signatures[number_ % 2] = signature_;
    own.announced.store(number_);
    communicator.shared.ring();
    first_piece_ = communicator.pieces;
    announced_ = true;
  }
  for (; agreed_ < communicator.size; ++agreed_) {
    auto const& seat = communicator.shared.seat(agreed_);
    if (seat.announced.load() < number_) return false;
    auto const& theirs = seat.signatures[number_ % 2];
    auto const& mine = signature_;
    if (!same_call(mine, theirs)) {
      stuck_ = true;
      report(rule("collective_mismatch"),
             fmt::format("collective {} of a communicator is {} on rank {}, and {} on rank {}", number_, what_,
                         communicator.rank, describe(theirs), agreed_));
      return false;
    }
    // In place, all-gather's input and reduce-scatter's output move with the rank.
    auto const part = static_cast<std::int64_t>(mine.count * element_) * (agreed_ - communicator.rank);
    auto const follows = [&](std::int64_t own, std::int64_t other, bool moves) {
      return own == other || (moves && own >= 0 && other == own + part);
    };
    if (!follows(mine.send_offset, theirs.send_offset, mine.operation == Operation::all_gather) ||
        !follows(mine.receive_offset, theirs.receive_offset, mine.operation == Operation::reduce_scatter)) {
      stuck_ = true;
      report(
          rule("window_offset"),
          fmt::format("collective {}, {}: buffers begin at {} and {} of symmetric windows (-1: in none) on rank {}, at "
                      "{} and {} on rank {}",
                      number_, what_, mine.send_offset, mine.receive_offset, communicator.rank, theirs.send_offset,
                      theirs.receive_offset, agreed_));
      return false;
    }
  }
  return true;
}

/// See [Note: Rounds].
bool Collective::move_data() {
  auto& communicator = *communicator_;
  auto& own = communicator.shared.seat(communicator.rank);
  auto const every_peer = [&](auto const& holds) {
    for (int peer = 0; peer < communicator.size; ++peer) {
      if (!holds(communicator.shared.seat(peer))) return false;
    }
    return true;
  };
  while (taken_ < rounds_) {
    bool moved = false;
    auto const piece = first_piece_ + offered_;
    if (offered_ < rounds_ &&
        every_peer([&](Seat const& seat) { return piece < 2 || seat.taken.load() >= piece - 1; })) {
      if (contributes(communicator.rank)) offer(offered_);
      own.offered.store(piece + 1);
      ++offered_;
      moved = true;
    }
    auto const wanted = first_piece_ + taken_;
    if (taken_ < offered_ && every_peer([&](Seat const& seat) { return seat.offered.load() > wanted; })) {
      take(taken_);
      own.taken.store(wanted + 1);
      ++taken_;
      moved = true;
    }
    if (!moved) return false;
  }
  communicator.pieces = first_piece_ + rounds_;
  return true;
}

std::size_t Collective::elements_of(std::uint64_t round) const {
  return std::min(round_elements_, request_.count - static_cast<std::size_t>(round) * round_elements_);
}

void Collective::offer(std::uint64_t round) {
  auto* const piece = communicator_->shared.offer(communicator_->rank, first_piece_ + round);
  auto const begin = static_cast<std::size_t>(round) * round_elements_ * element_;
  auto const bytes = elements_of(round) * element_;
  if (request_.operation != Operation::reduce_scatter) {
    std::memcpy(piece, request_.send + begin, bytes);
    return;
  }
  for (std::size_t peer = 0; peer < static_cast<std::size_t>(communicator_->size); ++peer)
    std::memcpy(piece + peer * round_elements_ * element_, request_.send + peer * request_.count * element_ + begin,
                bytes);
}

void Collective::take(std::uint64_t round) {
  auto const& communicator = *communicator_;
  auto const size = static_cast<std::size_t>(communicator.size);
  auto const piece = first_piece_ + round;
  auto const begin = static_cast<std::size_t>(round) * round_elements_ * element_;
  auto const elements = elements_of(round);
  bool const in_place = request_.in_place(communicator.rank);
  switch (request_.operation) {
    case Operation::all_gather:
      for (std::size_t peer = 0; peer < size; ++peer) {
        if (in_place && peer == static_cast<std::size_t>(communicator.rank)) continue;
        std::memcpy(request_.receive + peer * request_.count * element_ + begin,
                    communicator.shared.offer(static_cast<int>(peer), piece), elements * element_);
      }
      return;
    case Operation::broadcast:
      if (in_place && communicator.rank == request_.root) return;
      std::memcpy(request_.receive + begin, communicator.shared.offer(request_.root, piece), elements * element_);
      return;
    case Operation::reduce_scatter:
      sum(request_.receive + begin, static_cast<std::size_t>(communicator.rank) * round_elements_, elements,
          communicator.rank + 1, piece);
      return;
    case Operation::all_reduce:
      auto const part = (elements + size - 1) / size;
      for (std::size_t p = 0; p * part < elements; ++p)
        sum(request_.receive + begin + p * part * element_, p * part, std::min(part, elements - p * part),
            static_cast<int>(p) + 1, piece);
      return;
  }
}

/// Sums `count` elements from element `at` of the ranks' pieces, beginning with rank `first`.
void Collective::sum(std::byte* into, std::size_t at, std::size_t count, int first, std::uint64_t piece) const {
  for (int hop = 0; hop < communicator_->size; ++hop) {
    auto const* const theirs = communicator_->shared.offer((first + hop) % communicator_->size, piece) + at * element_;
    if (hop == 0) {
      std::memcpy(into, theirs, count * element_);
    } else {
      static_cast<void>(add(request_.type, into, theirs, count));
    }
  }
}

}  // namespace standin::nccl
