// SPDX-License-Identifier: Apache-2.0
// std::min, std::max, std::copy, std::equal and std::lower_bound. Of libstdc++, <vector> has them. Its <algorithm> has
// ranges and parallel algorithms too, which take compilers a twentieth of the time of all of fsdp.hpp.
#pragma once

#include <vector>

#include "fsdp/version.hpp"

#if !defined(__GLIBCXX__)
#include <algorithm>
#endif
