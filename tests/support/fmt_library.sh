# SPDX-License-Identifier: Apache-2.0
# Sourced: find_fmt_library COMPILER sets fmt_define and fmt_link, the flags that compile and link with fmt's library. They are
# empty if the compiler does not find it. A file then compiles fmt's headers, which takes longer.
find_fmt_library() {
  fmt_define='' fmt_link=''
  if echo 'int main() {}' | "$1" -x c++ - -lfmt -o /dev/null 2>/dev/null; then fmt_define=-DFSDP_FMT_LIBRARY=1 fmt_link=-lfmt; fi
}
