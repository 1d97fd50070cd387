"""The report's style sheet: for light and dark, paper and narrow windows. Colours of sides and phases are those of
Okabe and Ito, which differ for the colour-blind too."""

from __future__ import annotations

_LIGHT = {
    "back": "#ffffff",
    "panel": "#f4f6f8",
    "text": "#1c2329",
    "faint": "#5c6773",
    "grid": "#dfe4e8",
    "edge": "#c3cad1",
    "bad": "#b3261e",
    "link": "#005f94",
    "heat": "0, 114, 178",
}
_DARK = {
    "back": "#14181c",
    "panel": "#1e242a",
    "text": "#e4e9ee",
    "faint": "#9da8b3",
    "grid": "#2b333b",
    "edge": "#46515c",
    "bad": "#ff8a7a",
    "link": "#6cc0f5",
    "heat": "86, 180, 233",
}
# By number: two greys of references around fastgen's blues and the other sides' colours.
_SIDES_LIGHT = ("#7a828a", "#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#c9b800", "#b4bac0")
_SIDES_DARK = ("#929ba4", "#2b93d1", "#8fd0f5", "#e69f00", "#d68db6", "#1fb88c", "#f0e442", "#5d666f")
# In the order of PHASES; numbers are written on them.
_PHASES = ("#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#f0e442", "#9aa2aa")
_WHITE_ON = (1, 3)

_RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 1.5rem 1.25rem 4rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Helvetica, Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--edge); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .25rem; }
p { margin: .5rem 0; max-width: 46rem; }
a { color: var(--link); }
ul { margin: .5rem 0; padding-left: 1.25rem; }
li { margin: .15rem 0; }
code { font-size: .9em; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0 1.1rem; }
.under, .note, .faint { color: var(--faint); }
.note { font-size: .875rem; margin: .25rem 0; }
.summary { background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; padding: .6rem 1.1rem;
  margin: 1.25rem 0; }
.summary ul { margin: .25rem 0; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1.1rem 0 1.4rem; break-inside: avoid; }
figcaption { margin-bottom: .3rem; font-size: .9rem; line-height: 1.4; color: var(--faint); }
figcaption b { color: var(--text); }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 700px; font-family: inherit; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 0 1.5rem; }
.charts svg { min-width: 300px; }
.charts figure { max-width: 520px; }
svg.swatch { display: inline-block; vertical-align: -2px; min-width: 0; width: auto; height: 14px; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .875rem; }
table { border-collapse: collapse; font-size: .84rem; line-height: 1.35; margin: .25rem 0 1rem;
  font-variant-numeric: tabular-nums; }
table { min-width: min(100%, 34rem); }
caption { text-align: left; color: var(--faint); padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--grid);
  min-width: 3.25rem; max-width: 20rem;
  font-weight: 400; overflow-wrap: break-word; }
thead th { color: var(--faint); border-bottom: 1px solid var(--edge); vertical-align: bottom; }
tbody th { min-width: 11rem; max-width: 24rem; overflow-wrap: anywhere; }
th.n, td.n { text-align: right; padding: .25rem 0 .25rem .7rem; }
td.n { white-space: nowrap; }
td.n .bad { white-space: normal; }
td b { font-weight: 600; }
.below { display: block; color: var(--faint); font-size: .92em; }
.reason { white-space: normal; min-width: 9rem; }
.busy { color: var(--bad); }
.heat { display: block; padding: 0 .4rem; border-radius: 3px; }
.slower { outline: 1px dashed var(--bad); }
details > summary { cursor: pointer; color: var(--faint); font-size: .875rem; margin: .4rem 0; }
text { fill: var(--text); }
text.number, text.faint, text.bad { stroke: var(--back); stroke-width: 4px; paint-order: stroke; }
text.faint { fill: var(--faint); }
text.bad { fill: var(--bad); }
text.number { font-variant-numeric: tabular-nums; }
path { fill: none; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--edge); }
.one { stroke: var(--text); stroke-dasharray: 3 2; }
.ink { stroke: var(--text); stroke-width: 1.3; }
.halo { stroke: var(--back); stroke-width: 3.5; }
.hatch { stroke: var(--back); stroke-width: 1.6; }
.curve { stroke-width: 2; }
.band { opacity: .2; }
.point { stroke: var(--back); stroke-width: 1; }
@media print {
  html { font-size: 11px; }
  body { max-width: none; padding: 0; font-size: 1rem; }
  .charts { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; }
  svg { min-width: 0; }
  svg.swatch { height: 11px; }
  table { font-size: .78rem; }
  tr { break-inside: avoid; }
  th, td { min-width: 0 !important; }
  h2, h3, figcaption, caption { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def _variables(colours: dict[str, str], sides: tuple[str, ...]) -> str:
    values = [*colours.items(), *((f"side{number}", colour) for number, colour in enumerate(sides))]
    return ":root { " + " ".join(f"--{name}: {value};" for name, value in values) + " }"


def sheet() -> str:
    lines = [":root { color-scheme: light dark; }", _variables(_LIGHT, _SIDES_LIGHT)]
    # On paper the light colours, whatever the system prefers.
    lines += ["@media screen and (prefers-color-scheme: dark) {", _variables(_DARK, _SIDES_DARK), "}", _RULES.strip()]
    for number in range(len(_SIDES_LIGHT)):
        lines.append(f".fill{number} {{ fill: var(--side{number}); }} .line{number} {{ stroke: var(--side{number}); }}")
    for number, colour in enumerate(_PHASES):
        on = "#ffffff" if number in _WHITE_ON else "#111111"
        lines.append(f".phase{number} {{ fill: {colour}; }} text.on{number} {{ fill: {on}; }}")
    lines += [f".heat{number} {{ background: rgba(var(--heat), {number * 0.055:.3f}); }}" for number in range(10)]
    return "\n".join(lines)
