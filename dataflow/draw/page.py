"""The frame of the HTML page: its style, its script, and where the picture and the facts go."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="stage">{svg}</main>
<div id="tools"><button id="out" title="zoom out">−</button><button id="fit" title="fit (0)">fit</button>\
<button id="in" title="zoom in">+</button></div>
<aside id="panel" hidden><button id="close" aria-label="close">×</button><div id="facts"></div></aside>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--muted:#656d76;--hair:#d4dae0;--pick:#4f46e5}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--muted:#9198a1;--hair:#343b44;--pick:#8b8cf8}}
html,body{margin:0;height:100%;overflow:hidden;background:var(--paper);color:var(--ink);
font:13px/1.5 Inter,'Helvetica Neue',Helvetica,Arial,sans-serif}
#stage{position:fixed;inset:0;cursor:grab;touch-action:none}
.open #stage{right:min(380px,92vw)}
#stage.drag{cursor:grabbing}
#stage svg.dataflow-graph{width:100%;height:100%;max-width:none;display:block}
#stage .node{cursor:pointer;outline:none}
#stage .node:hover .box,#stage .node:focus-visible .box{stroke:var(--muted)}
#stage .node.picked .box{stroke:var(--pick);stroke-width:2}
#tools{position:fixed;z-index:1;left:16px;bottom:16px;display:flex;gap:4px}
button{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--hair);border-radius:6px;
min-width:32px;height:28px;cursor:pointer}
#panel{position:fixed;top:0;right:0;bottom:0;width:min(380px,92vw);box-sizing:border-box;padding:20px 22px;
overflow:auto;background:var(--paper);border-left:1px solid var(--hair)}
#panel[hidden]{display:none}
#close{position:absolute;top:14px;right:14px;border:0;font-size:18px}
#panel h1{font-size:18px;margin:0 30px 0 0;overflow-wrap:anywhere}
#panel h2{font-size:11px;text-transform:uppercase;letter-spacing:.06em;color:var(--muted);margin:20px 0 4px}
#panel p{margin:6px 0;white-space:pre-wrap;overflow-wrap:anywhere}
#panel .muted{color:var(--muted)}
table{border-collapse:collapse;width:100%;font:11.5px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
td{padding:1px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{padding-right:14px;white-space:nowrap}
td:last-child{color:var(--muted);text-align:right}
tr.added td:first-child{color:var(--pick);font-weight:600}
"""

SCRIPT = """
'use strict';
const facts = JSON.parse(document.getElementById('data').textContent);
const stage = document.getElementById('stage'), svg = stage.querySelector('svg');
const panel = document.getElementById('panel'), body = document.getElementById('facts');
const whole = svg.viewBox.baseVal, home = [whole.x, whole.y, whole.width, whole.height];
let view = home.slice();
svg.querySelector('.paper').style.display = 'none';
const show = () => svg.setAttribute('viewBox', view.join(' '));
const scale = () => Math.max(view[2] / stage.clientWidth, view[3] / stage.clientHeight);
function at(x, y) {
  const s = scale(), box = svg.getBoundingClientRect();
  return [view[0] + view[2] / 2 + (x - box.left - box.width / 2) * s,
          view[1] + view[3] / 2 + (y - box.top - box.height / 2) * s];
}
function zoom(factor, x, y) {
  factor = Math.min(Math.max(factor, home[2] / 60 / view[2]), home[2] * 4 / view[2]);
  const p = at(x, y);
  view = [p[0] + (view[0] - p[0]) * factor, p[1] + (view[1] - p[1]) * factor, view[2] * factor, view[3] * factor];
  show();
}
const centred = factor => zoom(factor, stage.clientWidth / 2, stage.clientHeight / 2);
function fit() { view = home.slice(); show(); }
function add(parent, tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return parent.appendChild(made);
}
function table(title, rows, added) {
  const names = Object.keys(rows);
  if (!names.length) return;
  add(body, 'h2', title);
  const made = add(body, 'table');
  for (const name of names) {
    const row = add(made, 'tr', undefined, added && added.includes(name) ? 'added' : '');
    add(row, 'td', name); add(row, 'td', rows[name]);
  }
}
function pick(node) {
  for (const other of svg.querySelectorAll('.picked')) other.classList.remove('picked');
  panel.hidden = !node;
  document.body.classList.toggle('open', Boolean(node));
  if (!node) return;
  node.classList.add('picked');
  const f = facts[+node.dataset.node];
  body.replaceChildren();
  add(body, 'h1', f.name);
  add(body, 'p', f.kind, 'muted');
  if (f.devices.length) add(body, 'p', 'on ' + f.devices.join(', '), 'muted');
  if (f.doc) add(body, 'p', f.doc);
  if (f.model) { add(body, 'h2', 'model'); add(body, 'p', f.model); }
  table('knobs', f.knobs);
  for (const [title, columns] of f.arriving) table(title, columns);
  for (const [title, columns] of f.leaving) table(title, columns, f.added);
  if (f.weights.length) { add(body, 'h2', 'weights'); f.weights.forEach(w => add(body, 'p', w)); }
  panel.scrollTop = 0;
}
let start = null, moved = false;
stage.addEventListener('pointerdown', e => { start = [e.clientX, e.clientY, view[0], view[1]]; moved = false; });
window.addEventListener('pointermove', e => {
  if (!start) return;
  const dx = e.clientX - start[0], dy = e.clientY - start[1];
  if (Math.abs(dx) + Math.abs(dy) > 4) { moved = true; stage.classList.add('drag'); }
  if (moved) { const s = scale(); view[0] = start[2] - dx * s; view[1] = start[3] - dy * s; show(); }
});
window.addEventListener('pointerup', () => { start = null; stage.classList.remove('drag'); });
stage.addEventListener('click', e => { if (!moved) pick(e.target.closest('.node')); });
stage.addEventListener('wheel', e => { e.preventDefault(); zoom(Math.exp(e.deltaY * 0.0015), e.clientX, e.clientY); },
  { passive: false });
for (const node of svg.querySelectorAll('.node')) { node.tabIndex = 0; node.setAttribute('role', 'button'); }
document.addEventListener('keydown', e => {
  const node = e.target.closest && e.target.closest('.node');
  if (node && (e.key === 'Enter' || e.key === ' ')) { e.preventDefault(); pick(node); }
  else if (e.key === 'Escape') pick(null);
  else if (e.key === '+' || e.key === '=') centred(0.8);
  else if (e.key === '-') centred(1.25);
  else if (e.key === '0') fit();
});
document.getElementById('in').onclick = () => centred(0.8);
document.getElementById('out').onclick = () => centred(1.25);
document.getElementById('fit').onclick = fit;
document.getElementById('close').onclick = () => pick(null);
"""
