#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Which header and library FindOpenBLAS takes, on machines made of empty files: always OpenBLAS's own, and both of one
# installation, whatever other cblas.h is there, and whatever an earlier configuration found.
# timeout: 120
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$source_folder/tests/support/script.sh"
work=$(mktemp -d)
at_exit 'rm -rf "$work"'
cd "$work" || exit 1
cat > CMakeLists.txt << EOF2
cmake_minimum_required(VERSION 3.25)
project(finds LANGUAGES NONE)
list(PREPEND CMAKE_MODULE_PATH "$source_folder/cmake")
set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
set(CMAKE_FIND_LIBRARY_PREFIXES lib)
set(CMAKE_FIND_LIBRARY_SUFFIXES .so)
set(CMAKE_LIBRARY_ARCHITECTURE x-linux-gnu)
find_package(OpenBLAS QUIET)
message(STATUS "found '\${OpenBLAS_FOUND}' lacks '\${OpenBLAS_LACKS}'")
if(OpenBLAS_FOUND)
  message(STATUS "pair '\${OpenBLAS_INCLUDE_DIR}' '\${OpenBLAS_LIBRARY}'")
endif()
EOF2

openblas_header() { mkdir -p "$1"; echo 'void openblas_set_num_threads(int);' > "$1/cblas.h"; }
reference_header() { mkdir -p "$1"; echo 'void cblas_sgemm(void);' > "$1/cblas.h"; }
library() { mkdir -p "$1"; : > "$1/libopenblas.so"; }
# configure PREFIXES [arguments...]: on a machine that has these prefixes and nothing else
configure() {
  checks=$((checks + 1))
  "${CMAKE:-cmake}" -B build -DCMAKE_PREFIX_PATH="$1" "${@:2}" . > output 2>&1 || fail "CMake ended with $?"
}
takes() { check "does not take $1 and $2" grep -qF "pair '$work/$1' '$work/$2'" output; }
lacks() { check "does not lack $1" grep -qF "found 'FALSE' lacks '$1'" output; }

debian=$work/debian headers=debian/include/x-linux-gnu libraries=debian/lib/x-linux-gnu
mkdir -p "$headers"
configure "$debian"
lacks "its header cblas.h"
reference_header $headers
configure "$debian"
lacks "its header: $work/$headers/cblas.h is another library's"
# As Debian installs OpenBLAS beside the reference BLAS, with the reference's header preferred.
openblas_header $headers/openblas-pthread
configure "$debian"
lacks "the library libopenblas for the header in $work/$headers/openblas-pthread"
library $libraries
configure "$debian"
takes $headers/openblas-pthread $libraries/libopenblas.so
# The package is removed, and comes again.
rm -r $headers/openblas-pthread $libraries
configure "$debian"
lacks "its header: $work/$headers/cblas.h is another library's"
openblas_header $headers/openblas-pthread
library $libraries/openblas-pthread
configure "$debian"
takes $headers/openblas-pthread $libraries/openblas-pthread/libopenblas.so
# An earlier version took the folder of the preferred header.
configure "$debian" -DOpenBLAS_INCLUDE_DIR="$work/$headers" -DOpenBLAS_LIBRARY="$work/$libraries/libopenblas.so"
takes $headers/openblas-pthread $libraries/openblas-pthread/libopenblas.so

# Another library's header is first on the path; so is a libopenblas of another installation.
rm -rf build
reference_header other/include
library other/lib
configure "$work/other;$debian"
takes $headers/openblas-pthread $libraries/openblas-pthread/libopenblas.so
rm -rf build
openblas_header plain/include
library plain/lib
configure "$work/other;$work/plain;$debian"
takes plain/include plain/lib/libopenblas.so

echo "$checks checks, $failures failures"
exit $((failures != 0))
