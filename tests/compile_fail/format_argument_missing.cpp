// SPDX-License-Identifier: Apache-2.0
// A message has as many arguments as fields.
// expect: format_text_and_arguments_differ_in_number
#include "fsdp/detail/base/format.hpp"

#ifdef CONTROL
std::string text() { return fsdp::formatted("{} of {}", 1, 2); }
#else
std::string text() { return fsdp::formatted("{} of {}", 1); }
#endif
