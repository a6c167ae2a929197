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
  view = [p[0] + (view[0] - p[0]) * factor, p[1] + (view[1] - p[1]) * factor,
          view[2] * factor, view[3] * factor];
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
stage.addEventListener('pointerdown', e => {
  start = [e.clientX, e.clientY, view[0], view[1]];
  moved = false;
});
window.addEventListener('pointermove', e => {
  if (!start) return;
  const dx = e.clientX - start[0], dy = e.clientY - start[1];
  if (Math.abs(dx) + Math.abs(dy) > 4) { moved = true; stage.classList.add('drag'); }
  if (moved) { const s = scale(); view[0] = start[2] - dx * s; view[1] = start[3] - dy * s; show(); }
});
window.addEventListener('pointerup', () => { start = null; stage.classList.remove('drag'); });
stage.addEventListener('click', e => { if (!moved) pick(e.target.closest('.node')); });
stage.addEventListener('wheel', e => {
  e.preventDefault();
  zoom(Math.exp(e.deltaY * 0.0015), e.clientX, e.clientY);
}, { passive: false });
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
