// SPDX-License-Identifier: Apache-2.0
// A brace that belongs to no field is doubled.
// expect: format_text_has_a_stray_brace
#include "fsdp/detail/base/format.hpp"

#ifdef CONTROL
std::string text() { return fsdp::formatted("}} {}", 1); }
#else
std::string text() { return fsdp::formatted("} {}", 1); }
#endif
