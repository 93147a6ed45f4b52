// SPDX-License-Identifier: Apache-2.0
// A field's specification suits its argument.
// expect: format_field_does_not_suit_its_argument
#include "fsdp/detail/base/format.hpp"

#ifdef CONTROL
std::string text() { return fsdp::formatted("{:.1f}", 1.0f); }
#else
std::string text() { return fsdp::formatted("{:.1f}", 1); }
#endif
