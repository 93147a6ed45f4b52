// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/nccl/occupancy.hpp"

#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

#include "tests/standin/nccl/shared.hpp"
#include "tests/standin/runtime/unseen.hpp"

namespace standin::nccl {
namespace {

struct Devices {
  std::mutex mutex;
  std::map<int, Occupancy*> occupancies;  // never destroyed: streams may run until the process ends
};
Devices& devices() {
  static auto* const instance = new Devices;
  return *instance;
}

[[noreturn]] void refuse(char const* name, std::string_view value, char const* expected) {
  fmt::print(stderr, "standin: {}={}: expected {}\n", name, value, expected);
  std::abort();
}

std::uint64_t number(char const* name, std::uint64_t otherwise) {
  char const* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  auto const value = std::strtoull(text, &end, 10);
  if (*end != '\0') refuse(name, text, "a number");
  return value;
}

/// A permutation of 64-bit numbers whose results look drawn (the finalizer of splitmix64).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

int version() {
  static auto const value = static_cast<int>(number("FSDP_STANDIN_NCCL_VERSION", NCCL_VERSION_CODE));
  return value;
}

Occupancy& Occupancy::of(int device) {
  std::scoped_lock const lock(devices().mutex);
  auto& entry = devices().occupancies[device];
  if (entry == nullptr) entry = new Occupancy(device);
  return *entry;
}

Occupancy::Occupancy(int device) {
  char const* const text = std::getenv("FSDP_STANDIN_NCCL");
  std::string_view const mode = text == nullptr || *text == '\0' ? "serial" : text;
  if (mode != "serial" && mode != "seeded") refuse("FSDP_STANDIN_NCCL", mode, "serial or seeded");
  seeded_ = mode == "seeded";
  if (!seeded_) {
    capacity_ = 1;
    return;
  }
  host_order_ = version() >= 22600 && number("NCCL_LAUNCH_ORDER_IMPLICIT", 0) != 0;
  seed_ = mix(number("FSDP_STANDIN_SEED", 0) + static_cast<std::uint64_t>(device));
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<int>::max());
  capacity_ = static_cast<int>(std::min(number("FSDP_STANDIN_NCCL_CAPACITY", most), most));
  if (capacity_ < 1) refuse("FSDP_STANDIN_NCCL_CAPACITY", "0", "at least 1");
  static int const at_exit = std::atexit([] {
    Unseen const unseen;
    std::scoped_lock const lock(devices().mutex);
    for (auto const& [ordinal, occupancy] : devices().occupancies)
      fmt::print(stderr, "standin: at most {} collectives of NCCL were under way at once on device {}\n",
                 occupancy->needed(), ordinal);
  });
  static_cast<void>(at_exit);
}

int Occupancy::needed() {
  std::scoped_lock const lock(mutex_);
  return needed_;
}

Occupancy::Place::Place(Occupancy& device, void const* communicator, int rank)
    : device_(device), communicator_(communicator), draw_(0), declines_(0) {
  std::scoped_lock const lock(device.mutex_);
  if (device.seeded_) {
    draw_ = mix(device.seed_ ^ mix(++device.enqueued_ * most_ranks + static_cast<std::uint64_t>(rank)));
    declines_ = static_cast<int>(draw_ % 5);
  }
  entry_ = device.places_.insert(device.places_.end(), this);
}

bool Occupancy::Place::enter() {
  std::scoped_lock const lock(device_.mutex_);
  if (running_ || !here_) return true;
  ready_ = true;
  if (declines_ > 0) {
    --declines_;
    return false;
  }
  if (!device_.starts(*this)) return false;
  running_ = true;
  device_.needed_ = std::max(device_.needed_, ++device_.running_);
  return true;
}

bool Occupancy::starts(Place const& place) const {
  if (running_ >= capacity_) return false;
  if (!seeded_) return places_.front() == &place;
  for (auto const* other : places_) {
    if (host_order_) {
      if (other == &place) break;
      if (!other->running_) return false;
    } else if (other->ready_ && !other->running_ && other->declines_ == 0 && other->draw_ < place.draw_)
      return false;
  }
  return true;
}

void Occupancy::Place::leave() {
  Unseen const unseen;
  std::scoped_lock const lock(device_.mutex_);
  device_.leave(*this);
}

void Occupancy::leave(Place& place) {
  if (!place.here_) return;
  place.here_ = false;
  places_.erase(place.entry_);
  if (place.running_) --running_;
}

void Occupancy::remove(void const* communicator) {
  std::scoped_lock const lock(mutex_);
  for (auto entry = places_.begin(); entry != places_.end();) {
    auto& place = **entry++;
    if (place.communicator_ == communicator) leave(place);
  }
}

}  // namespace standin::nccl
