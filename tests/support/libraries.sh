# SPDX-License-Identifier: Apache-2.0
# Sourced by tests that call a compiler: libraries that spare them most of its time.

# find_fmt_library COMPILER: sets fmt_define and fmt_link, the flags that compile and link with fmt's library. They are empty if
# the compiler does not find it. A file then compiles fmt's headers, which takes longer.
find_fmt_library() {
  fmt_define='' fmt_link=''
  if echo 'int main() {}' | "$1" -x c++ - -lfmt -o /dev/null 2>/dev/null; then fmt_define=-DFSDP_FMT_LIBRARY=1 fmt_link=-lfmt; fi
}

# find_compiled_libraries COMPILER: finds fmt's library, and adds the suite's fsdp::compiled to the flags that link (fmt_link), and
# its macros to compiled_define. FSDP_COMPILED_LIBRARIES names its files with colons between them. At -O0 a file that makes an
# engine compiles in half the time with it.
find_compiled_libraries() {
  find_fmt_library "$1"
  compiled_define=''
  if [[ -z $fmt_define || -z ${FSDP_COMPILED_LIBRARIES:-} || $FSDP_COMPILED_LIBRARIES == *" "* ]]; then return; fi
  local file
  for file in ${FSDP_COMPILED_LIBRARIES//:/ }; do [[ -e $file ]] || return 0; done
  fmt_link="${FSDP_COMPILED_LIBRARIES//:/ } $fmt_link"
  compiled_define="-DFSDP_COMPILED=1 -DFSDP_COMPILED_MPI=1"
}
