#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A manual page and a completion for bash, from what a program prints with --help: FOLDER/NAME.1 and FOLDER/NAME.bash.
#   manual.sh PROGRAM FOLDER
set -euo pipefail
program=$1 folder=$2 name=$(basename "$1")
mkdir -p "$folder"
general=$("$program" --help)
mapfile -t commands < <(sed -nE '/^Usage:/,/^A first run/s/^  ([a-z]+) .*/\1/p' <<<"$general")
((${#commands[@]} > 3)) || { echo "manual.sh: $name --help lists no commands" >&2; exit 1; }
# Text as troff sees it: no line begins a request, no hyphen is broken.
escaped() { sed -E 's/\\/\\e/g; s/-/\\-/g; s/^([.'"'"'])/\\\&\1/'; }
help_of() { "$program" "$1" --help; }

{
  printf '.TH %s 1 "" "fsdp" "User Commands"\n.SH NAME\n%s \\- %s\n.SH SYNOPSIS\n.B %s\n.I COMMAND\n\\&...\n' \
    "${name^^}" "$name" "$(head -n 1 <<<"$general" | sed "s/^$name //; s/\\. .*//; s/\\.$//" | escaped)" "$name"
  printf '.SH COMMANDS\n.nf\n'
  sed -nE '/^  [a-z]+ /p; /^A first run/q' <<<"$general" | escaped
  printf '.fi\n.SH EXAMPLE\n.nf\n'
  sed -n '/^A first run/,/^$/p' <<<"$general" | sed '1d;/^$/d' | escaped
  printf '.fi\n'
  for command in "${commands[@]}"; do
    printf '.SH %s\n' "$(tr a-z A-Z <<<"$name $command" | escaped)"
    help_of "$command" | sed '1d' | escaped | awk '
      /^$/ { next }
      /^Usage:/ { sub(/^Usage: /, ""); print ".PP\n" $0; next }
      /^  [^ ]/ {  # a setting, and its text behind two blanks or more
        sub(/^  /, "")
        text = ""
        if (match($0, /  +/)) { text = substr($0, RSTART + RLENGTH); $0 = substr($0, 1, RSTART - 1) }
        print ".TP\n.B " $0
        if (text != "") print text
        next
      }
      /^ / { sub(/^ +/, ""); print; next }
      /:$/ { sub(/:$/, ""); print ".SS " $0; next }
      { print ".PP\n" $0 }'
  done
} >"$folder/$name.1"

{
  printf '# Completion of %s in bash: source this file, or copy it to /etc/bash_completion.d.\n' "$name"
  printf '_%s() {\n  local word=${COMP_WORDS[COMP_CWORD]} settings=""\n' "$name"
  printf '  if ((COMP_CWORD == 1)); then\n    COMPREPLY=($(compgen -W "%s" -- "$word"))\n    return\n  fi\n' "${commands[*]} --help --version"
  printf '  case ${COMP_WORDS[1]} in\n'
  for command in "${commands[@]}"; do
    printf '    %s) settings="%s" ;;\n' "$command" "$(help_of "$command" | sed -nE 's/^  (--[a-z_0-9]+)(=?).*/\1\2/p' | paste -sd ' ')"
  done
  printf '  esac\n  if [[ $word == -* ]]; then\n    COMPREPLY=($(compgen -W "$settings --help" -- "$word"))\n'
  printf '  else\n    COMPREPLY=($(compgen -f -- "$word"))\n  fi\n}\ncomplete -o nospace -F _%s %s\n' "$name" "$name"
} >"$folder/$name.bash"
