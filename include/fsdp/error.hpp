// SPDX-License-Identifier: Apache-2.0
// Exceptions whose messages name the rank, the unit, and the expected and found values; and failures of streams and
// ranks as values that pass to other threads and processes.
#pragma once

#include <concepts>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fsdp/detail/base/format.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Base of all exceptions of the library.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A call that its documented precondition forbids.
struct UsageError : Error {
  using Error::Error;
};

/// A setting that cannot be honoured, or that differs between ranks.
struct ConfigError : Error {
  using Error::Error;
};

/// Ranks disagree about what runs next, or a unit is used out of its declared order.
struct OrderError : Error {
  using Error::Error;
};

/// Memory, shared memory or an operating-system resource could not be had.
struct ResourceError : Error {
  using Error::Error;
};

/// A vendor library (CUDA, NCCL, cuBLAS, MPI) reported an error.
struct VendorError : Error {
  using Error::Error;
};

/// A peer failed, or a collective missed its deadline.
struct PeerError : Error {
  using Error::Error;
};

namespace detail {
/// The part of fail() that does not depend on the arguments' types.
template <class E>
[[noreturn, gnu::noinline, gnu::cold]] void throw_formatted(std::string_view text, FormatArgument const* arguments) {
  throw E(format_arguments(text, arguments));
}

/// The text, with the rank unless it begins with that.
[[gnu::cold]] inline std::string with_rank(int rank, std::string_view what) {
  auto const who = formatted("rank {}", rank);
  bool const said = what.starts_with(who + ": ") || what.starts_with(who + " of ");
  return said ? std::string(what) : formatted("{}: {}", who, what);
}

/// Text of an uncaught exception, with the rank, for a terminate handler, which runs before any stack is unwound.
[[gnu::cold]] inline std::string uncaught_text(int rank) {
  std::string what = "terminated without an exception";
  try {
    if (auto const error = std::current_exception()) std::rethrow_exception(error);
  } catch (std::exception const& error) {
    what = error.what();
  } catch (...) {
    what = "an exception that is no std::exception";
  }
  return with_rank(rank, what);
}
}  // namespace detail

/// Throws `E` with a formatted message.
template <class E, class... Args>
[[noreturn, gnu::noinline, gnu::cold]] void fail(detail::FormatTextOf<Args...> text, Args const&... args) {
  FormatArgument const arguments[]{args..., 0};
  detail::throw_formatted<E>(text.view(), arguments);
}

/// "2, 3, 4", for messages.
template <class Values>
std::string listed(Values const& values) {
  std::string text;
  bool first = true;
  for (auto const& value : values) {
    if (!first) text += ", ";
    first = false;
    text += formatted("{}", value);
  }
  return text;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

/// Throws fsdp::UsageError with the formatted message unless `condition` holds. Stays on in every build.
#define FSDP_EXPECTS(condition, ...)                                 \
  do {                                                               \
    if (!(condition)) ::fsdp::fail<::fsdp::UsageError>(__VA_ARGS__); \
  } while (false)

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The type of an exception.
enum class ErrorKind : unsigned char { other, usage, config, order, resource, vendor, peer };

/// An exception's type and its text.
struct Failure {
  ErrorKind kind = ErrorKind::other;  ///< type of the exception
  std::string text;                   ///< message of the exception

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
concept ReportsFailure = requires(Stream& stream, Stream const& view) {
  { view.failure() } -> std::same_as<Failure const*>;  // nullptr: whole, as far as is known
  view.rethrow();                                      // throws it, if there is one
  { view.was_reported() } -> std::same_as<bool>;       // some call has thrown it
  stream.finish();                                     // waits until all work is done or skipped; throws nothing
};

/// The former name of ReportsFailure, for one version.
template <class Stream>
concept TellsFailure = ReportsFailure<Stream>;

/// The reason why the stream has failed; nullptr if it has not, or if streams of its device do not fail.
template <class Stream>
Failure const* failure_of([[maybe_unused]] Stream const& stream) {
  if constexpr (ReportsFailure<Stream>) {
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
  if constexpr (ReportsFailure<Stream>)
    if (auto const* const why = failure_of(stream); why != nullptr && why->kind != ErrorKind::peer) stream.rethrow();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
