// SPDX-License-Identifier: Apache-2.0
// The width of a field may be an argument, its precision may not.
// expect: format_field_does_not_suit_its_argument
#include "fsdp/detail/base/format.hpp"

#ifdef CONTROL
std::string text() { return fsdp::formatted("{:{}.2f}", 1.0, 8); }
#else
std::string text() { return fsdp::formatted("{:{}.{}f}", 1.0, 8, 2); }
#endif
