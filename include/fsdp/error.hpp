// SPDX-License-Identifier: Apache-2.0
// Exceptions whose messages name the rank, the unit, and the expected and found values.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fsdp/format.hpp"

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
