// SPDX-License-Identifier: Apache-2.0
// The style of pages and pictures, and the script of a page.
#pragma once

#include <string_view>

namespace transformer::report {

/// Colours, light and dark, and the classes that charts use: for a page and for a picture that stands alone.
std::string_view chart_style();

/// Layout of a page.
std::string_view page_style();

/// Read-outs under a pointer or a finger. Without it a page says the same, less exactly. It has neither & nor <, so
/// that the page is well-formed XML too.
std::string_view page_script();

}  // namespace transformer::report
