// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/style.hpp"

namespace transformer::report {

// Curves' colours follow Okabe and Ito (2008), which eyes of every kind tell apart; brighter on dark ground.
std::string_view chart_style() {
  return R"css(
:root, svg {
  --ground: #fcfcfb; --raised: #ffffff; --ink: #16191d; --soft: #5c6570; --line: #e4e6e9; --axis: #b4bac2;
  --c0: #0068b0; --c1: #c8500a; --c2: #00875f; --c3: #b0528a; --c4: #9a6f00; --c5: #2f93c7;
  --forward: #7fb2e0; --backward: #3b7dbd; --update: #1f4e79; --moved: #b9c0c8; --local: #dfe3e7; --exposed: #e0691a;
  --gap: #fbe3d2; --on: #0b1b2b; --over: #ffffff;
  --m0: #1f5f99; --m1: #4a8ac4; --m2: #86b4de; --m3: #00795a; --m4: #4fae8f; --m5: #c9a227; --m6: #e0c878;
  --m7: #8a93a0; --m8: #b9a3c9; --pale: #10202e; --deep: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root, svg {
    --ground: #101317; --raised: #171b21; --ink: #e8ebee; --soft: #9aa4af; --line: #272d35; --axis: #55606c;
    --c0: #56aee8; --c1: #ff9054; --c2: #3cc79c; --c3: #e294c2; --c4: #e6b83c; --c5: #8bd0f5;
    --forward: #3f78ad; --backward: #5c9fdb; --update: #a9d2f7; --moved: #59636f; --local: #2c343d; --exposed: #f5803a;
    --gap: #43291a; --on: #f1f4f7; --over: #08121b;
    --m0: #2f74b5; --m1: #4f93d1; --m2: #8cbdea; --m3: #1d8a69; --m4: #56b899; --m5: #d0aa35; --m6: #e6cf83;
    --m7: #737d8a; --m8: #a48db6; --pale: #0c151d; --deep: #ffffff;
  }
}
svg { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .tick { fill: var(--soft); font-size: 11.5px; }
svg .lane { fill: var(--soft); font-size: 11.5px; }
svg .strong { fill: var(--ink); font-weight: 600; }
svg .value { font-size: 11.5px; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--axis); stroke-width: 1; }
.cursor { visibility: hidden; stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.curve { fill: none; stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }
.curve.raw { stroke-width: 1; opacity: .3; }
.curve.thin { stroke-width: 1.25; opacity: .65; }
.curve.dashed { stroke-dasharray: 5 4; }
.curve.c0 { stroke: var(--c0); } .curve.c1 { stroke: var(--c1); } .curve.c2 { stroke: var(--c2); }
.curve.c3 { stroke: var(--c3); } .curve.c4 { stroke: var(--c4); } .curve.c5 { stroke: var(--c5); }
circle.c0 { fill: var(--c0); } circle.c1 { fill: var(--c1); } circle.c2 { fill: var(--c2); }
circle.c3 { fill: var(--c3); } circle.c4 { fill: var(--c4); } circle.c5 { fill: var(--c5); }
circle.jump { fill: var(--ground); stroke-width: 2; }
circle.jump.c0 { stroke: var(--c0); } circle.jump.c1 { stroke: var(--c1); } circle.jump.c2 { stroke: var(--c2); }
circle.jump.c3 { stroke: var(--c3); } circle.jump.c4 { stroke: var(--c4); } circle.jump.c5 { stroke: var(--c5); }
svg .label { font-size: 12px; font-weight: 600; }
svg .label.c0 { fill: var(--c0); } svg .label.c1 { fill: var(--c1); } svg .label.c2 { fill: var(--c2); }
svg .label.c3 { fill: var(--c3); } svg .label.c4 { fill: var(--c4); } svg .label.c5 { fill: var(--c5); }
.compute { fill: var(--update); } .compute.forward { fill: var(--forward); } .compute.backward { fill: var(--backward); }
.moved { fill: var(--moved); } .local { fill: var(--local); } .exposed { fill: var(--exposed); } .gap { fill: var(--gap); }
svg .inside { font-size: 11px; fill: var(--pale); } svg .inside.on { fill: var(--on); }
svg .inside.over { fill: var(--over); }
svg .inside.n0, svg .inside.n1, svg .inside.n3 { fill: var(--deep); }
.m0 { fill: var(--m0); } .m1 { fill: var(--m1); } .m2 { fill: var(--m2); } .m3 { fill: var(--m3); } .m4 { fill: var(--m4); }
.m5 { fill: var(--m5); } .m6 { fill: var(--m6); } .m7 { fill: var(--m7); } .m8 { fill: var(--m8); }
.plan { opacity: .55; }
svg text.plan { opacity: 1; fill: var(--ink); }
)css";
}

std::string_view page_style() {
  return R"css(
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; background: var(--ground); color-scheme: light dark; }
body { margin: 0 auto; padding: 40px 24px 64px; max-width: 1088px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 26px; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 0 0 2px; font-size: 15px; font-weight: 600; }
.line { margin: 6px 0 0; color: var(--soft); }
section, figure { margin: 36px 0 0; }
.row { display: grid; gap: 0 31px; }
.row.of2 { grid-template-columns: 1fr 1fr; gap: 0 40px; }
.row.of3 { grid-template-columns: 1fr 1fr 1fr; }
.row > * { min-width: 0; }
.row figure { margin-top: 26px; }
.charts { position: relative; }
.charts > input { position: absolute; opacity: 0; pointer-events: none; }
.controls { display: flex; flex-wrap: wrap; gap: 8px 10px; align-items: center; font-size: 13px; color: var(--soft); }
.set { display: inline-flex; gap: 10px; align-items: center; margin-right: 14px; }
.choice { display: inline-flex; border: 1px solid var(--line); border-radius: 7px; overflow: hidden; }
.choice label { padding: 3px 12px; cursor: pointer; }
.choice label + label { border-left: 1px solid var(--line); }
#by-iterations:checked ~ .controls [for=by-iterations], #by-tokens:checked ~ .controls [for=by-tokens],
#by-time:checked ~ .controls [for=by-time], #y-linear:checked ~ .controls [for=y-linear],
#y-log:checked ~ .controls [for=y-log] { background: var(--raised); color: var(--ink); font-weight: 600; box-shadow: inset 0 -2px var(--c0); }
#by-iterations:focus-visible ~ .controls [for=by-iterations], #by-tokens:focus-visible ~ .controls [for=by-tokens],
#by-time:focus-visible ~ .controls [for=by-time], #y-linear:focus-visible ~ .controls [for=y-linear],
#y-log:focus-visible ~ .controls [for=y-log] { outline: 2px solid var(--c0); outline-offset: -2px; }
.v { display: none; }
#by-iterations:checked ~ #y-linear:checked ~ * .v.iterations.lin, #by-iterations:checked ~ #y-log:checked ~ * .v.iterations.log,
#by-tokens:checked ~ #y-linear:checked ~ * .v.tokens.lin, #by-tokens:checked ~ #y-log:checked ~ * .v.tokens.log,
#by-time:checked ~ #y-linear:checked ~ * .v.time.lin, #by-time:checked ~ #y-log:checked ~ * .v.time.log
{ display: block; }
.charts > figure { margin-top: 18px; }
.notes { margin: 18px 0 0; }
.warn { color: var(--exposed); font-weight: 600; }
pre.sample { white-space: pre-wrap; max-height: 320px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 40px; }
.pair.program { grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); margin-top: 26px; }
.pair > * { min-width: 0; }
figcaption, .say, .rest { color: var(--soft); font-size: 13px; margin: 0 0 10px; }
.read { font-variant-numeric: tabular-nums; color: var(--ink); min-height: 20px; }
.read:empty { display: none; }
.read:not(:empty) ~ .v .rest { display: none; }
.rest { min-height: 20px; }
svg { display: block; max-width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.small { display: none; }
dl.tiles { display: flex; flex-wrap: wrap; gap: 20px 44px; margin: 26px 0 0; }
dl.tiles div { min-width: 104px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 23px; line-height: 1.25; font-weight: 600; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: 12.5px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--soft); font-size: 12.5px; }
th.number, td.number { text-align: right; white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
tbody th { color: var(--soft); }
table.kinds { max-width: 620px; margin-top: 8px; }
table.times th, table.kinds th { overflow-wrap: normal; }
table.pairs th { width: 230px; }
table.pairs td { white-space: pre-wrap; }
.sum td, .sum th { color: var(--ink); font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 12px; padding: 0; list-style: none; font-size: 13px; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 7px; border-radius: 2px; vertical-align: -1px; }
.stroke { display: inline-block; width: 18px; height: 3px; margin-right: 6px; border-radius: 2px; vertical-align: 3px; }
pre { margin: 0; padding: 12px 14px; max-height: 420px; overflow: auto; background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; font: 11.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: normal; }
details { margin: 14px 0 0; }
summary { cursor: pointer; color: var(--soft); font-size: 13.5px; }
footer { margin: 48px 0 0; color: var(--soft); font-size: 12.5px; }
@media (max-width: 720px) {
  body { padding: 24px 16px 48px; }
  .row.of2, .row.of3 { grid-template-columns: minmax(0, 1fr); }
  .pair, .pair.program { grid-template-columns: minmax(0, 1fr); row-gap: 26px; }
  .pair:not(.program) { row-gap: 0; }
  .wide { display: none; }
  .small { display: block; }
  dl.tiles { display: grid; grid-template-columns: 1fr 1fr; gap: 16px 20px; }
  dd { font-size: 20px; }
  th, td { padding-right: 10px; }
  table.pairs th { width: 42%; }
  .runs thead { display: none; }
  .runs tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  .runs td, .runs th { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 2px 0; text-align: right; }
  .runs td::before { content: attr(data-name); color: var(--soft); text-align: left; }
}
@media print { body { max-width: none; } pre { max-height: none; } }
)css";
}

std::string_view page_script() {
  return R"js(
"use strict";
const count = x => x.toLocaleString("en");
const time = x => x >= 3600 ? Math.floor(x / 3600) + " h " + Math.floor(x / 60) % 60 + " min"
  : x >= 60 ? Math.floor(x / 60) + " min " + Math.floor(x % 60) + " s" : x.toFixed(1) + " s";
const headings = [x => "iteration " + count(x), x => x.toLocaleString("en", {notation: "compact", maximumFractionDigits: 2}) + " tokens", time];
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const curves = JSON.parse(figure.dataset.curves), read = figure.querySelector(".read");
  for (const svg of figure.querySelectorAll("svg")) {
    const at = name => Number(svg.dataset[name]), cursor = svg.querySelector(".cursor");
    const axis = at("axis"), index = [0, 2, 3][axis], heading = headings[axis];
    const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[index] - x) > Math.abs(a[index] - x) ? a : b);
    const here = curves.map(curve => ({name: curve.name, points: curve.points.filter(point => point[index] !== null)}))
      .filter(curve => curve.points.length > 0);
    const leave = () => { read.textContent = ""; cursor.style.visibility = "hidden"; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = ((event.clientX - box.left) * scale - at("left")) / (at("right") - at("left"));
      if (0 > share || share > 1.02 || here.length === 0) return leave();
      const wanted = at("low") + share * (at("high") - at("low"));
      const x = here.map(curve => nearest(curve.points, wanted)[index]).reduce((a, b) => Math.abs(b - wanted) > Math.abs(a - wanted) ? a : b);
      const texts = here.map(curve => [curve.name, nearest(curve.points, x)]);
      read.textContent = [heading(x), ...texts.map(([name, point]) =>
        name + " " + point[1] + (point[index] === x ? "" : " (at " + (axis === 0 ? count(point[0]) : heading(point[index])) + ")"))].join(" \u00b7 ");
      const position = at("left") + (x - at("low")) / (at("high") - at("low")) * (at("right") - at("left"));
      cursor.style.visibility = "visible";
      cursor.setAttribute("x1", position);
      cursor.setAttribute("x2", position);
    });
  }
}
// A page that is loaded again while its run is watched keeps what was chosen.
for (const input of document.querySelectorAll(".charts > input")) {
  const kept = () => { try { return sessionStorage; } catch { return {}; } };
  if (kept()[input.name] === input.id) input.checked = true;
  input.addEventListener("change", () => { kept()[input.name] = input.id; });
}
)js";
}

}  // namespace transformer::report
