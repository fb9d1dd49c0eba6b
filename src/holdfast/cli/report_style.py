"""How the page of a report looks. The colours of phases (after Okabe and Ito) can be told apart by the colour-blind."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --quiet: #667; --line: #dde1e6; --panel: #f5f7f9;
  --hot: #e8590c; --bad: #c92a2a; --warn: #b35c00 }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e4e7ea; --quiet: #98a2ad; --line: #333a41;
  --panel: #1d2126; --hot: #d9480f; --bad: #ff6b6b; --warn: #ffa94d } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem }
p { margin: .3rem 0 }
.quiet { color: var(--quiet) }
.bad { color: var(--bad) }
.warn { color: var(--warn) }
.remarks { list-style: none; padding: .7rem 1rem; background: var(--panel); border-radius: 8px; overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0 }
.tiles div { background: var(--panel); border-radius: 8px; padding: .5rem .8rem }
dt { color: var(--quiet); font-size: .8rem }
dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto; display: block; margin: .5rem 0 }
svg text { font: 11px system-ui, sans-serif; fill: var(--quiet) }
.grid { stroke: var(--line) }
.turn { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3 }
.hit { fill: transparent }
g:hover > .hit { fill: var(--panel) }
.legend span { display: inline-block; margin-right: 1.1rem; white-space: nowrap }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
.c0 { fill: #56b4e9; background: #56b4e9 } .c1 { fill: #0072b2; background: #0072b2 } .c2 { fill: #e69f00; background: #e69f00 }
.c3 { fill: #009e73; background: #009e73 } .c4 { fill: #cc79a7; background: #cc79a7 } .c5 { fill: #d55e00; background: #d55e00 }
.c6 { fill: #d4c400; background: #d4c400 } .c7 { fill: #8c6bb1; background: #8c6bb1 } .c8 { fill: #7f6d5f; background: #7f6d5f }
.c9 { fill: #4d908e; background: #4d908e } .gap { fill: #999; background: #999 }
.new { fill: #0072b2; background: #0072b2 } .saved { fill: #bcd3e6; background: #bcd3e6 }
.failed { fill: var(--bad) } .skipped { fill: var(--warn) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top }
thead th { color: var(--quiet); font-weight: 500; font-size: .85rem }
td { overflow-wrap: anywhere; min-width: 4.5rem }
.heat td { text-align: right; white-space: nowrap;
  background: color-mix(in srgb, var(--hot) calc(var(--heat, 0%) * .65), transparent) }
.heat tbody th { font-weight: 400; white-space: nowrap }
.heat .slowest th { font-weight: 700 }
.tag { font-size: .75rem; padding: 0 .35em; margin-left: .6em;
  border: 1px solid var(--bad); color: var(--bad); border-radius: 4px }
summary { cursor: pointer }
@media print { body { max-width: none } }
"""
