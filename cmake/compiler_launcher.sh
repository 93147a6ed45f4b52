#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What run.sh and tests/run.sh have compilers started by: ccache as soon as there is one, without anything being built anew
# when it comes or goes. The same object for another folder of the same sources.
if command -v ccache > /dev/null; then
  CCACHE_BASEDIR=${CCACHE_BASEDIR-$(cd "$(dirname "$0")/.." && pwd)} CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
  export CCACHE_BASEDIR CCACHE_NOHASHDIR CCACHE_SLOPPINESS
  exec ccache "$@"
fi
exec "$@"
