// SPDX-License-Identifier: Apache-2.0
// Fields take the arguments in order.
// expect: format_fields_are_not_numbered_or_named
#include "fsdp/detail/base/format.hpp"

#ifdef CONTROL
std::string text() { return fsdp::formatted("{} {{}}", 1); }
#else
std::string text() { return fsdp::formatted("{0}", 1); }
#endif
