"""Style sheet and script of the pages; both are written into them."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbf9; --card: #ffffff; --text: #1d2327; --soft: #5b656d; --line: #dde1e4;
  --blue: #2f6db3; --blue-soft: #9dbfe2; --orange: #b4500f; --green: #1c7a45; --red: #b3282d;
  --kept: #e1f2e6; --left: #f3f1ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15191c; --card: #1d2327; --text: #e4e8ea; --soft: #9aa6ae; --line: #37424a;
    --blue: #6ea8e6; --blue-soft: #3c5f85; --orange: #f0934e; --green: #6fcf97; --red: #f07f83;
    --kept: #1d3b2a; --left: #2b2f30;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 70rem; padding: 1rem 1.25rem 4rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.7rem; margin: .5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); }
.tiles {
  display: grid; gap: .75rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
}
.tile, .call, .panel {
  background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .75rem 1rem;
}
.tile b { display: block; font-size: 1.5rem; line-height: 1.25; }
.tile span { color: var(--soft); font-size: .875rem; }
.panel { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); }
td + td, th + th { padding-left: .25rem; }
td.number, th.number {
  text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap;
}
.meter { min-width: 6rem; width: 30%; }
.meter div { height: .7rem; margin-top: .4rem; border-radius: .2rem; background: var(--blue-soft); }
tr.last .meter div { background: var(--green); }
tr.last td:not(.soft) { font-weight: 600; }
.funnel td:first-child { width: 11rem; }
.histogram { width: 100%; min-width: 34rem; height: auto; display: block; }
.bar { fill: var(--blue-soft); }
.bar.over { fill: var(--green); }
.null { fill: none; stroke: var(--orange); stroke-width: 2; }
line.tau { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; }
text.tau { fill: var(--text); font-size: 13px; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { fill: var(--soft); font-size: 12px; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .875rem; }
.legend i {
  display: inline-block; width: .9rem; height: .7rem; margin-right: .4rem; border-radius: .15rem;
}
.legend .real { background: var(--blue-soft); }
.legend .pass { background: var(--green); }
.legend .chance { background: var(--orange); height: .2rem; vertical-align: middle; }
.controls { display: flex; flex-wrap: wrap; gap: .75rem; align-items: end; margin-bottom: 1rem; }
.controls label { display: grid; font-size: .8125rem; color: var(--soft); }
select, input {
  font: inherit; color: var(--text); background: var(--card); padding: .3rem .5rem;
  border: 1px solid var(--line); border-radius: .35rem; max-width: 100%;
}
.scores .soft, .ends td { font-size: .8125rem; }
.scores b { font-weight: 600; }
.ends .meter { min-width: 7rem; width: 7rem; }
.split { display: flex; height: .7rem; margin-top: .3rem; border-radius: .2rem; overflow: hidden; }
.split .real { background: var(--blue-soft); }
.split .pass { background: var(--green); }
.legend .stop, .split .stop { background: var(--orange); }
.name { width: 7rem; white-space: nowrap; }
.diagnosis { margin: .5rem 0 1rem; padding-left: 1.25rem; }
.run {
  background: var(--card); border: 1px solid var(--line); border-left: .3rem solid var(--line);
  border-radius: .5rem; padding: .6rem 1rem; margin-bottom: .6rem; overflow-wrap: anywhere;
}
.run.right { border-left-color: var(--green); }
.run.wrong, .run.stopped { border-left-color: var(--orange); }
.run .question { font-weight: 600; white-space: pre-line; }
.run .facts { margin-top: .15rem; }
.right .verdict { font-weight: 600; color: var(--green); }
.wrong .verdict { font-weight: 600; color: var(--orange); }
.turns { margin-top: .75rem; }
.turn { display: grid; grid-template-columns: 1.75rem 1fr; padding: .2rem 0; }
.turn .step { color: var(--soft); font-size: .875rem; text-align: center; }
.turn .soft { font-size: .75rem; padding-left: .8rem; }
.part { white-space: pre-wrap; padding: .15rem .6rem; border-left: .2rem solid transparent; }
.part .label {
  display: block; font: 600 .75rem/1.4 system-ui, "Segoe UI", Roboto, sans-serif;
  color: var(--soft);
}
.part .label:empty { display: none; }
.part.thought { font-style: italic; border-left-color: var(--line); }
.part.thought .label, .part.thought mark { font-style: normal; }
.part.action { border-left-color: var(--blue); }
.part.observation { border-left-color: var(--green); background: var(--left); }
.part.action, .part.observation {
  font-family: ui-monospace, SFMono-Regular, Consolas, monospace; font-size: .875rem;
}
.part.failed { border-left-color: var(--red); }
.part.failed .label { color: var(--red); }
.part.nudge { border-left-color: var(--orange); }
.part.answer { border-left-color: var(--green); font-weight: 600; }
.run mark {
  color: inherit; background: var(--kept); border-radius: .25rem; padding: .05rem .25rem;
  font-family: ui-monospace, SFMono-Regular, Consolas, monospace; font-size: .9em;
}
.outcome { border-top: 1px solid var(--line); padding-top: .4rem; white-space: pre-line; }
.call { margin-bottom: .75rem; overflow-wrap: anywhere; }
.call[hidden] { display: none; }
.call mark {
  color: inherit; background: var(--left); border-radius: .25rem; padding: .05rem .25rem;
  font-family: ui-monospace, SFMono-Regular, Consolas, monospace; font-size: .9em;
}
.call.kept mark { background: var(--kept); }
.call .context { white-space: pre-line; }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1rem; color: var(--soft); font-size: .875rem; }
.facts b { color: var(--text); font-weight: 600; font-variant-numeric: tabular-nums; }
.reason { font-weight: 600; color: var(--soft); }
.kept .reason { color: var(--green); }
.failed .reason { color: var(--red); }
code, pre { font-family: ui-monospace, SFMono-Regular, Consolas, monospace; font-size: .875rem; }
pre { overflow-x: auto; margin: .5rem 0; }
summary { cursor: pointer; }
@media (max-width: 40rem) { .meter { display: none; } }
:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
"""

SCRIPT = """
// A list of items is filtered by the controls above it: a field compares with the item's value of
// the same name, the search field with its text.
const lists = [...document.querySelectorAll(".controls")].map((controls) => ({
  fields: [...controls.querySelectorAll("select, input")],
  items: [...document.querySelectorAll(controls.dataset.items)],
  noun: controls.dataset.noun,
  shown: controls.querySelector("[role=status]"),
}));
function fits(item, field) {
  const wanted = field.value.trim();
  if (field.type !== "search") return !wanted || item.dataset[field.id] === field.value;
  return !wanted || item.textContent.toLowerCase().includes(wanted.toLowerCase());
}
function filter({fields, items, noun, shown}) {
  let count = 0;
  for (const item of items) {
    item.hidden = !fields.every((field) => fits(item, field));
    count += !item.hidden;
  }
  shown.textContent = count + " of " + items.length + " " + noun + " on this page";
}
// A view can be linked to: report.html#tool=Calculator&reason=kept
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const list of lists) {
    for (const field of list.fields) {
      if (asked.has(field.id)) field.value = asked.get(field.id);
    }
    filter(list);
  }
}
for (const list of lists) {
  for (const field of list.fields) field.addEventListener("input", () => filter(list));
}
addEventListener("hashchange", follow);
follow();
"""
