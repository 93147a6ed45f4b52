#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes a small Llama with random weights, as a folder of HuggingFace: four layers, 0.8 million parameters in bf16; tokens are
# bytes. For trying llama without a download.
#
#   write_small_model.sh FOLDER
set -euo pipefail

(($# == 1)) && [[ $1 != -* ]] || { echo "usage: write_small_model.sh FOLDER" >&2; exit 2; }
folder=$1
width=128 inner=344 layers=4 heads=4 tokens=257

tensors() { # a line each: name, rows, columns (1: a norm)
  local i
  echo "model.embed_tokens $tokens $width"
  for ((i = 0; i < layers; ++i)); do
    for name in q k v o; do echo "model.layers.$i.self_attn.${name}_proj $width $width"; done
    for name in gate up; do echo "model.layers.$i.mlp.${name}_proj $inner $width"; done
    echo "model.layers.$i.mlp.down_proj $width $inner"
    for name in input post_attention; do echo "model.layers.$i.${name}_layernorm $width 1"; done
  done
  echo "model.norm $width 1"
}
header() { # of safetensors
  local name rows columns shape begin=0 end separator='{'
  while read -r name rows columns; do
    shape=$rows end=$((begin + 2 * rows * columns))
    if ((columns > 1)); then shape+=,$columns; fi
    printf '%s"%s.weight":{"dtype":"BF16","shape":[%s],"data_offsets":[%d,%d]}' "$separator" "$name" "$shape" "$begin" "$end"
    begin=$end separator=,
  done < <(tensors)
  printf '}'
}
# Norms are 1. Other weights have a random sign, and magnitudes from 2^-7 to 2^-5: the high byte of such a bf16 is 3c or bc.
values() {
  tensors | LC_ALL=C awk 'BEGIN { srand(1) }
    { for (i = 0; i < $2 * $3; ++i)
        if ($3 == 1) printf "%c%c", 128, 63
        else printf "%c%c", int(rand() * 256), rand() < 0.5 ? 60 : 188 }'
}
vocabulary() { # the byte alphabet of GPT-2: printable bytes are themselves, others follow from U+0100 on
  local byte other=256 separator='{'
  for ((byte = 0; byte < 256; ++byte)); do
    if ((byte >= 33 && byte <= 126 || byte >= 161 && byte <= 172 || byte >= 174)); then
      printf '%s"\\u%04x":%d' "$separator" "$byte" "$byte"
    else
      printf '%s"\\u%04x":%d' "$separator" "$other" "$byte"
      other=$((other + 1))
    fi
    separator=,
  done
  printf ',"<|end_of_text|>":256}'
}

mkdir -p "$folder"
cat > "$folder/config.json" << JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": $width, "intermediate_size": $inner,
 "num_hidden_layers": $layers, "num_attention_heads": $heads, "num_key_value_heads": $heads, "vocab_size": $tokens, "max_position_embeddings": 1024,
 "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 256, "torch_dtype": "bfloat16"}
JSON
cat > "$folder/tokenizer.json" << JSON
{"version": "1.0", "truncation": null, "padding": null,
 "added_tokens": [{"id": 256, "content": "<|end_of_text|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
 "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
 "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
 "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
  "byte_fallback": false, "vocab": $(vocabulary), "merges": []}}
JSON
text=$(header)
{
  for ((shift = 0; shift < 64; shift += 8)); do printf '%b' "\\x$(printf '%02x' $((${#text} >> shift & 255)))"; done
  printf '%s' "$text"
  values
} > "$folder/.weights"
mv "$folder/.weights" "$folder/model.safetensors"
