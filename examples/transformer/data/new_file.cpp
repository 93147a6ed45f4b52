// SPDX-License-Identifier: Apache-2.0
// A file that appears under its name only when it is complete.
#include "transformer/data/new_file.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"

namespace transformer {
namespace {

[[noreturn]] void cannot_write(std::filesystem::path const& path) {
  fsdp::fail<fsdp::ConfigError>("'{}' cannot be written: {}", path.string(), std::generic_category().message(errno));
}

/// Paths for the handler, which may not allocate.
struct Slot {
  std::atomic<bool> taken{false}, names{false};
  std::array<char, PATH_MAX> path{};
};
std::array<Slot, 16> slots;

std::atomic<bool> signals_wait{false};
std::atomic<int> waiting_signal{0};

void remove_and_end(int signal) {
  for (int round = 0; round < 2; ++round)  // files, then the folders that they have left empty
    for (auto& slot : slots)
      if (slot.names.load(std::memory_order_acquire)) static_cast<void>(std::remove(slot.path.data()) == 0);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

extern "C" void transformer_remove_on_signal(int signal) {
  if (signals_wait.load()) {
    waiting_signal.store(signal);
    return;
  }
  remove_and_end(signal);
}

RemovedOnSignal::RemovedOnSignal(std::filesystem::path const& path) {
  auto const& text = path.native();
  for (std::size_t i = 0; i < slots.size() && text.size() < PATH_MAX; ++i) {
    if (slots[i].taken.exchange(true)) continue;
    slot_ = i;
    std::memcpy(slots[i].path.data(), text.c_str(), text.size() + 1);
    slots[i].names.store(true, std::memory_order_release);
    return;
  }
}

void RemovedOnSignal::keep() {
  if (slot_ == none) return;
  slots[slot_].names.store(false);
  slots[slot_].taken.store(false);
  slot_ = none;
}

void remove_on_signals() {
  struct sigaction action {};
  sigemptyset(&action.sa_mask);
  action.sa_handler = transformer_remove_on_signal;
  for (int const signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);  // nohup and shells in the background
  }
}

SignalsWait::SignalsWait() { signals_wait.store(true); }

SignalsWait::~SignalsWait() {
  signals_wait.store(false);
  if (int const signal = waiting_signal.exchange(0); signal != 0) remove_and_end(signal);
}

NewFile::NewFile(std::filesystem::path const& path)
    : path_(path), temporary_(std::filesystem::path(path) += ".tmp"), removed_(temporary_) {
  auto made = fsdp::checkpoint::detail::new_file(temporary_, 0666);
  file_ = made < 0 ? nullptr : ::fdopen(made, "wb");
  if (file_ == nullptr) cannot_write(temporary_);
  made.release();
}

NewFile::~NewFile() {
  if (file_ != nullptr) std::fclose(file_);
  if (temporary_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void NewFile::write(std::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) cannot_write(temporary_);
}

void NewFile::finish() {
  if (file_ == nullptr) return;
  if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0) cannot_write(temporary_);
  if (std::fclose(std::exchange(file_, nullptr)) != 0) cannot_write(temporary_);
}

void NewFile::commit() {
  finish();
  std::error_code error;
  std::filesystem::rename(temporary_, path_, error);
  if (error)
    fsdp::fail<fsdp::ConfigError>("'{}' cannot be renamed to '{}': {}", temporary_.string(), path_.string(),
                                  error.message());
  temporary_.clear();
  removed_.keep();
}

void NewFile::commit_all(std::deque<NewFile>& files, std::vector<std::filesystem::path> const& others,
                         std::filesystem::path const& marker) {
  for (auto& file : files) file.finish();  // what may find the disk full
  SignalsWait const wait;
  auto const folder = fsdp::checkpoint::folder_of(marker);
  if (fsdp::checkpoint::detail::new_file(marker, 0666) < 0) cannot_write(marker);
  fsdp::checkpoint::sync_folder(folder);
  for (auto& file : files) file.commit();
  std::error_code ignored;
  for (auto const& other : others) std::filesystem::remove(other, ignored);
  fsdp::checkpoint::sync_folder(folder);
  std::filesystem::remove(marker, ignored);
}

}  // namespace transformer
