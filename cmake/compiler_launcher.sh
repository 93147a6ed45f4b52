#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts the compilers of run.sh and tests/run.sh: by ccache as soon as there is one, without anything being built anew when it
# comes or goes. Sources in another folder take the same objects, and so do builds with and without -Werror. A ccache that fails
# (its folder cannot be written, say) ends no build: the compiler is then called without it, and reports its own errors.
if command -v ccache > /dev/null; then
  CCACHE_BASEDIR=${CCACHE_BASEDIR-$(cd "$(dirname "$0")/.." && pwd)} CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
  CCACHE_IGNOREOPTIONS=-Werror CCACHE_DEPEND=1 # a source that is not in the cache is not preprocessed a second time
  export CCACHE_BASEDIR CCACHE_NOHASHDIR CCACHE_SLOPPINESS CCACHE_IGNOREOPTIONS CCACHE_DEPEND
  if words=$(ccache "$@" 2>&1); then
    [ -n "$words" ] || exit 0
    case " $* " in
      *" -Werror "*) # an object that was cached without it comes with its warnings: the compiler makes errors of them
        option=
        for word; do
          [ "$option" != -o ] || rm -f -- "$word"
          option=$word
        done
        ;;
      *)
        printf '%s\n' "$words" >&2
        exit 0
        ;;
    esac
  fi
fi
exec "$@"
