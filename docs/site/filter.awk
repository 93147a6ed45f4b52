# SPDX-License-Identifier: Apache-2.0
# Doxygen's input filter. Headings of a page get names that are unique among all pages, and links lead to these names. Links to
# sources become plain text: the site has no sources. In headers the inline namespace of the version goes.
BEGIN {
  file = ARGV[1]
  markdown = file ~ /\.md$/
  page = name_of(file)
  sub(/\/[^\/]*$/, "", file)
}
# The name of a page: docs/adr/0001-x.md is doc-adr-0001-x. Doxygen has pages of its own, such as `concepts`.
function name_of(path) {
  sub(/\.md$/, "", path)
  if (path ~ /\/docs\/adr\//) sub(/.*\/docs\/adr\//, "adr-", path)
  else if (path ~ /\/docs\/history\//) sub(/.*\/docs\/history\//, "history-", path)
  else if (path ~ /\/docs\//) sub(/.*\/docs\//, "", path)
  else if (path ~ /\/examples\//) sub(/.*\/examples\//, "examples-", path)
  else sub(/.*\//, "top-", path)
  gsub(/\//, "-", path)
  return "doc-" tolower(path)
}
# The name that a browser gives to a heading.
function anchor_of(text) {
  text = tolower(text)
  while (match(text, /\]\([^)]*\)/)) text = substr(text, 1, RSTART - 1) substr(text, RSTART + RLENGTH)
  gsub(/[^a-z0-9_ -]/, "", text)
  gsub(/ /, "-", text)
  return text
}
# The path of a link's target, without `..`.
function resolved(target,    parts, n, i, out, m) {
  n = split(file "/" target, parts, "/")
  m = 0
  for (i = 1; i <= n; ++i) {
    if (parts[i] == "." || (parts[i] == "" && i > 1)) continue
    if (parts[i] == "..") --m
    else out[++m] = parts[i]
  }
  target = out[1]
  for (i = 2; i <= m; ++i) target = target "/" out[i]
  return target
}
function links(line,    head, text, target, path, anchor, result) {
  result = ""
  while (match(line, /!?\[[^][]*\]\([^) ]+\)/)) {
    head = substr(line, 1, RSTART - 1)
    text = target = substr(line, RSTART, RLENGTH)
    line = substr(line, RSTART + RLENGTH)
    sub(/\]\(.*/, "", text)
    sub(/.*\]\(/, "", target)
    sub(/\)$/, "", target)
    anchor = target
    if (target ~ /:\/\// || text ~ /^!/) { result = result head text "](" target ")"; continue }
    sub(/^!?\[/, "", text)
    path = target
    sub(/#.*/, "", path)
    if (!sub(/^[^#]*#/, "", anchor)) anchor = ""
    path = path == "" ? ARGV[1] : resolved(path)
    if (path ~ /\/examples\/usage\/[a-z_]*(\.cpp)?$/) {
      sub(/.*\/usage/, "usage", path)
      sub(/\/$/, "", path)
      sub(/\//, "-", path)
      sub(/\.cpp$/, "", path)
      result = result head "[" text "](#" path ")"
    } else if (path !~ /\.md$/ || (path ~ /\/examples\// && path !~ /\/(nanogpt|transformer)\/README\.md$/)) result = result head text
    else result = result head "[" text "](#" name_of(path) (anchor == "" ? "" : "-" anchor) ")"
  }
  # A link whose text began on the line before.
  if (match(line, /^[^][]*\]\([^) ]+\)/)) {
    text = target = substr(line, 1, RLENGTH)
    sub(/\]\(.*/, "", text)
    sub(/.*\]\(/, "", target)
    sub(/\)$/, "", target)
    anchor = path = target
    sub(/#.*/, "", path)
    if (!sub(/^[^#]*#/, "", anchor)) anchor = ""
    path = path == "" ? ARGV[1] : resolved(path)
    if (path ~ /\.md$/) line = text "](#" name_of(path) (anchor == "" ? "" : "-" anchor) ")" substr(line, RLENGTH + 1)
  }
  return result line
}
# Deduction guides are no functions.
!markdown && /^template <.*>$/ { held = $0; next }
!markdown && held != "" {
  text = held
  held = ""
  if ($0 ~ /^[A-Za-z]+\(.*\) -> .*;/) next
  print text
}
!markdown { gsub(/fsdp::inline FSDP_VERSION_NAMESPACE/, "fsdp"); print; next }
/^ *(```|~~~)/ { fence = !fence; print; next }
fence || /^    / { print; next }
/^<!--.*-->$/ { next }
/^#+ / {
  text = $0
  sub(/^#+ /, "", text)
  print links($0) " {#" page (seen++ ? "-" anchor_of(text) : "") "}"
  next
}
{ print links($0) }
