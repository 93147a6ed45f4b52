# SPDX-License-Identifier: Apache-2.0
# The program that a seed prints compiles without the tests, and repeats what the seed did.
# labels: full
# programs: differential_random
# timeout: 600
# usage: printed.sh <build directory>
set -eu
program=$(find "$1" -name differential_random -type f -perm -u+x | head -1)
[ -n "$program" ] || { echo "skipped: differential_random is not built"; exit 77; }
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$program" --print=2 > "$work/printed.cpp"
"${CXX:-c++}" -std=c++20 -O0 -pthread -DFMT_HEADER_ONLY -I "$source/include" "$work/printed.cpp" -o "$work/printed"
"$work/printed" | tee "$work/log"
grep -qx "no difference" "$work/log"

# This seed clips gradients. A reference that is off by one part in ten thousand differs, in the printed program as in the test.
sed 's/double const norm = factor_ \*/double const norm = 1.0001 * factor_ */; s/p -= rate \* m;/p -= 1.0001 * rate * m;/; s/rate \* (m/1.0001 * rate * (m/' \
  "$work/printed.cpp" > "$work/changed.cpp"
"${CXX:-c++}" -std=c++20 -O0 -pthread -DFMT_HEADER_ONLY -I "$source/include" "$work/changed.cpp" -o "$work/changed"
if "$work/changed"; then
  echo "a wrong reference is not noticed"
  exit 1
fi
