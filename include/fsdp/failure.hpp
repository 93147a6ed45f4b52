// SPDX-License-Identifier: Apache-2.0
// Failures of streams and ranks, as values that pass to other threads and processes.
#pragma once

#include <concepts>
#include <exception>
#include <string>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The type of an exception.
enum class ErrorKind : unsigned char { other, usage, config, order, resource, vendor, peer };

/// An exception's type and its text.
struct Failure {
  ErrorKind kind = ErrorKind::other;
  std::string text;

  /// Throws an exception of that type; of type fsdp::Error for `other`.
  [[noreturn, gnu::cold]] void raise() const {
    switch (kind) {
      case ErrorKind::usage: throw UsageError(text);
      case ErrorKind::config: throw ConfigError(text);
      case ErrorKind::order: throw OrderError(text);
      case ErrorKind::resource: throw ResourceError(text);
      case ErrorKind::vendor: throw VendorError(text);
      case ErrorKind::peer: throw PeerError(text);
      case ErrorKind::other: break;
    }
    throw Error(text);
  }
};

/// The failure that peers of `rank` get. If it failed because of another rank, they get that rank's failure unchanged.
[[gnu::cold]] inline Failure peer_failure(int rank, Failure const& why) {
  if (why.kind == ErrorKind::peer) return why;
  return {ErrorKind::peer, formatted("rank {} failed: {}", rank, why.text)};
}

/// The exception that is being handled. @pre called in a catch block
[[gnu::cold]] inline Failure current_failure() {
  try {
    throw;
  } catch (UsageError const& error) {
    return {ErrorKind::usage, error.what()};
  } catch (ConfigError const& error) {
    return {ErrorKind::config, error.what()};
  } catch (OrderError const& error) {
    return {ErrorKind::order, error.what()};
  } catch (ResourceError const& error) {
    return {ErrorKind::resource, error.what()};
  } catch (VendorError const& error) {
    return {ErrorKind::vendor, error.what()};
  } catch (PeerError const& error) {
    return {ErrorKind::peer, error.what()};
  } catch (std::exception const& error) {
    return {ErrorKind::other, error.what()};
  } catch (...) {
    return {ErrorKind::other, "an exception that is no std::exception"};
  }
}

/// A stream that may fail and report it, as host streams do. The concept Device does not require it.
template <class Stream>
concept TellsFailure = requires(Stream& stream, Stream const& view) {
  { view.failure() } -> std::same_as<Failure const*>;  // nullptr: whole, as far as is known
  view.rethrow();                                      // throws it, if there is one
  { view.was_told() } -> std::same_as<bool>;           // some call has thrown it
  stream.finish();                                     // waits until all work is done or skipped; throws nothing
};

/// The reason why the stream has failed; nullptr if it has not, or if streams of its device do not fail.
template <class Stream>
Failure const* failure_of([[maybe_unused]] Stream const& stream) {
  if constexpr (TellsFailure<Stream>) {
    return stream.failure();
  } else {
    return nullptr;
  }
}

/// Throws the cause of a PeerError that was caught, if it is a stream of this rank. Peers may have ended because a
/// stream of this rank has failed, and this rank hears of them first.
/// @throws the failure of `stream`, if it has failed by itself
template <class Stream>
[[gnu::cold]] void raise_own_failure([[maybe_unused]] Stream const& stream) {
  if constexpr (TellsFailure<Stream>)
    if (auto const* const why = failure_of(stream); why != nullptr && why->kind != ErrorKind::peer) stream.rethrow();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
