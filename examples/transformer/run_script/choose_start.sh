# shellcheck shell=bash disable=SC2034  # variables that run.sh uses
# SPDX-License-Identifier: Apache-2.0
# Continues a run that is in the folder of run.sh already, or keeps it under another name. Sourced.

# choose_start FOLDER KEY NAMED [SETTING...]: sets start (the trainer's settings).
# A run that was started with KEY is continued. Another run in a folder of run.sh's own is kept under another name; in a folder
# that the caller has NAMED (1), the trainer refuses to replace it. A caller who sets init_from or overwrite decides.
choose_start() {
  local folder=$1 key=$2 named=$3 number=1 setting
  start=(--init_from=auto)
  for setting in "${@:4}"; do
    case $setting in --init_from* | --overwrite*) start=() ;; esac
  done
  if ((${#start[@]})) && [[ -e $folder/latest || -e $folder/model.safetensors || -e $folder/adapter_model.safetensors ]] &&
    [[ ! -e $folder/.started || $(< "$folder/.started") != "$key" ]]; then
    if ((named)); then
      start=()
      return
    fi
    while [[ -e $folder.$number ]]; do number=$((number + 1)); done
    mv "$folder" "$folder.$number"
    say "the run with other settings is kept in $folder.$number"
  fi
  # A run of this command has written its model, but no whole checkpoint: the disk was full. It begins again.
  if ((${#start[@]})) && [[ ! -e $folder/latest ]] && ! compgen -G "$folder/step-*" > /dev/null && [[ -e $folder/model.safetensors || -e $folder/adapter_model.safetensors ]]; then
    start=(--overwrite)
  fi
  mkdir -p "$folder"
  rm -f "$folder/.trained"
  printf '%s\n' "$key" > "$folder/.started"
}
