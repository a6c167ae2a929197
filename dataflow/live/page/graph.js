// The drawing of the graph with what its nodes and edges do now, and the same as tables.
import {NOT, add, bytes, fill, percent, plain, say, seconds, short} from './text.js';

const SVG = 'http://www.w3.org/2000/svg';
const TAGS = new Set(['svg', 'title', 'desc', 'g', 'rect', 'path', 'line', 'text', 'tspan']);
const KINDS = ['busy', 'blocked', 'waiting', 'starved'];
const FEW = 40;
const stage = document.getElementById('stage'), card = document.getElementById('node');
let graph = null, drawing = null, scale = 0, picked = null, chosen = null, now = null, all = false;
const parts = new Map(), lines = new Map(), shown = new Map();

function make(shape) {
  const [tag, attributes, inside] = shape;
  if (!TAGS.has(tag)) return document.createTextNode('');
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  for (const each of inside) made.append(Array.isArray(each) ? make(each) : document.createTextNode(plain(each)));
  return made;
}

function shape(tag, attributes, parent) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return parent.appendChild(made);
}

export function drawGraph(found) {
  graph = found; drawing = null; picked = chosen = null; card.hidden = true;
  parts.clear(); lines.clear(); shown.clear();
  stage.replaceChildren();
  if (!found.picture) {
    add(stage, 'p', 'This folder has no drawing that can be shown (graph.svg); the tables say what is known.');
    return;
  }
  drawing = make(found.picture);
  drawing.setAttribute('role', 'group');
  drawing.setAttribute('aria-label', `Graph ${plain(found.name)}`);
  stage.append(drawing);
  for (const element of drawing.querySelectorAll('.node')) {
    const node = graph.nodes[+element.dataset.node], box = element.querySelector('.box');
    if (!node || !box) continue;
    const [x, y, width, height] = ['x', 'y', 'width', 'height'].map(name => +box.getAttribute(name));
    const left = x + 8, room = width - 16, top = y + height - 5.5;
    shape('rect', {class: 'bar-whole', x: left, y: top, width: room, height: 3.5, rx: 1}, element);
    const bars = {};
    for (const kind of KINDS) bars[kind] = shape('rect', {class: `bar-${kind}`, x: left, y: top, width: 0, height: 3.5}, element);
    const text = shape('text', {class: 'now', x: x + 4, y: y + height + 8.5}, element);
    parts.set(node.name, {element, bars, text, left, room, title: element.querySelector('title')});
    parts.get(node.name).middle = [x + width / 2, y + height / 2];
    element.setAttribute('tabindex', parts.size === 1 ? '0' : '-1');
    element.setAttribute('role', 'button');
    element.setAttribute('aria-label', plain(node.name));
    element.setAttribute('aria-pressed', 'false');
    element.addEventListener('click', () => { reach(node.name); pick(node.name); });
    element.addEventListener('keydown', e => steer(e, node.name));
  }
  const names = document.getElementById('all-nodes');
  names.replaceChildren();
  for (const name of [...parts.keys()].slice(0, 2000)) add(names, 'option').value = plain(name);
  for (const element of drawing.querySelectorAll('[data-edge]')) {
    const edge = graph.edges[+element.dataset.edge];
    if (!edge) continue;
    lines.set(key(edge), [...(lines.get(key(edge)) || []), element]);
    const line = element.querySelector('.line');
    if (line) shape('path', {class: 'reach', d: line.getAttribute('d') ?? ''}, element);
    element.addEventListener('click', () => choose(key(edge)));
  }
  zoom(Math.max(READABLE, whole()));
  const [first] = parts.values();
  if (first) center(first.middle);
}

const center = ([x, y]) => stage.scrollTo({left: x * scale - stage.clientWidth / 2, top: y * scale - stage.clientHeight / 2});

// Of all nodes one is reached by the tab key, the others from there by the arrow keys.
function reach(name) {
  for (const [other, part] of parts) part.element.setAttribute('tabindex', other === name ? '0' : '-1');
  parts.get(name).element.focus();
}

function steer(event, name) {
  if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); pick(name); return; }
  const way = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]}[event.key];
  if (!way) return;
  event.preventDefault();
  const [x, y] = parts.get(name).middle;
  let best = null, least = Infinity;
  for (const [other, part] of parts) {
    const [across, down] = [part.middle[0] - x, part.middle[1] - y];
    const ahead = across * way[0] + down * way[1], aside = Math.abs(across * way[1]) + Math.abs(down * way[0]);
    if (ahead > 1 && ahead + 2 * aside < least) { best = other; least = ahead + 2 * aside; }
  }
  if (best !== null) reach(best);
}

// A node by a part of its name: picked, and brought into view at a size that can be read.
const finder = document.getElementById('find-node');
finder.addEventListener('change', () => {
  const text = finder.value.trim().toLowerCase(), all = [...parts.keys()];
  if (!text) return;
  const found = all.find(name => name.toLowerCase() === text) ?? all.find(name => name.toLowerCase().includes(text));
  finder.setCustomValidity(found ? '' : `no node of this graph is called '${plain(finder.value)}'`);
  if (!found) { finder.reportValidity(); return; }
  finder.value = '';
  zoom(Math.max(scale, 1));
  if (picked !== found) pick(found);
  reach(found);
  parts.get(found).element.scrollIntoView({block: 'nearest', inline: 'center'});
  center(parts.get(found).middle);
});
finder.addEventListener('input', () => finder.setCustomValidity(''));

const key = edge => `${edge.from}\u0000${edge.to}\u0000${edge.source || ''}`;
const width = () => drawing ? drawing.viewBox.baseVal.width : 0;
function zoom(to) {
  scale = Math.min(4, Math.max(0.02, to));
  if (drawing) { drawing.setAttribute('width', width() * scale); drawing.removeAttribute('height'); }
}
const READABLE = 0.62;
const whole = () => Math.min(1.25, (stage.clientWidth - 4) / Math.max(1, width()));
const fit = () => zoom(whole());
stage.addEventListener('wheel', e => { if (e.ctrlKey) { e.preventDefault(); zoom(scale * (e.deltaY < 0 ? 1.15 : 1 / 1.15)); } }, {passive: false});
document.getElementById('in').onclick = () => zoom(scale * 1.25);
document.getElementById('out').onclick = () => zoom(scale / 1.25);
document.getElementById('fit').onclick = fit;

let told = () => {};
export const onPicked = callback => { told = callback; };

const takesWeights = name => graph.edges.some(edge => edge.plane === 'weights' && [edge.from, edge.to].includes(name));

function pick(name) {
  picked = picked === name ? null : name;
  mark(null);
  const declared = graph.nodes.find(node => node.name === picked);
  told(picked && {name: picked, knobs: graph.settable?.[picked], swaps: declared.kind === 'operator' && !takesWeights(picked), replicas: now?.nodes.find(each => each.name === picked)?.replicas});
  for (const [other, part] of parts) {
    part.element.classList.toggle('picked', other === picked);
    part.element.setAttribute('aria-pressed', String(other === picked));
  }
  showPicked();
}

// An edge whose numbers stand in the card; a second time: none.
function choose(edge) {
  if (picked !== null) pick(picked);
  mark(chosen === edge ? null : edge);
  showPicked();
}

function mark(edge) {
  for (const element of lines.get(chosen) || []) element.classList.remove('picked');
  chosen = edge;
  for (const element of lines.get(chosen) || []) element.classList.add('picked');
}

const counts = ([batches, rows, size]) => `${short(rows)} rows, ${bytes(size)}, in ${short(batches)} batches`;

function showChosen() {
  const data = now?.edges.find(each => key(each) === chosen), weights = now?.weights.find(each => key(each) === chosen);
  const edge = data ?? weights;
  card.replaceChildren();
  if (!edge) { add(card, 'p', NOT, 'muted'); return; }
  add(card, 'h3', data ? `${edge.from} → ${edge.to} · rows of ${edge.source}` : `${edge.from} → ${edge.to} · weights`);
  const list = add(card, 'dl');
  const tell = (name, value) => { add(list, 'dt', name); add(list, 'dd', value); };
  if (data) {
    tell('in flight', edge.depth === null ? NOT : `${short(edge.depth)} rows of ${short(edge.capacity)} that there is credit for`);
    tell('crosses it', edge.rows_s === null ? NOT : `${short(edge.rows_s)} rows/s, ${bytes(Math.round(edge.bytes_s))}/s`);
    for (const [end, ends] of [['sent', 'counted where it begins'], ['received', 'counted where it ends'], ['acknowledged', 'done with']])
      tell(`${end} so far`, edge.crossed ? `${counts(edge.crossed[end])}, ${ends}` : NOT);
    return;
  }
  const last = now.newest[edge.from] || {}, exchange = last.exchanges?.[edge.to];
  tell('version', `${short(edge.made)} made, ${short(edge.has)} at the reader`);
  tell('last exchange', exchange ? `version ${short(exchange.version)}, to ${short(exchange.readers)} ${exchange.readers === 1 ? 'reader' : 'readers'}` : NOT);
  tell('as the trainer sees it', took(exchange?.committed_seconds, 'from its start until every reader computed with it'));
  tell('as the reader sees it', took(exchange?.taken_seconds, 'from its arrival until it was taken at a safe point'));
  tell('bytes', moved(exchange));
  for (const [part, says] of [['staleness', 'staleness'], ['staleness_generating', 'crossed while generated'], ['staleness_waiting', 'crossed while waiting']])
    tell(says, stale(last, part));
}

const took = (value, says) => value === undefined ? NOT : `${short(value)} s, ${says}`;
const stale = (line, part) => line[`${part}_mean`] === undefined || line[`${part}_mean`] === null
  ? NOT : `${short(line[`${part}_mean`])} versions on the mean, ${short(line[`${part}_max`])} at most`;

function moved(exchange) {
  if (exchange?.nbytes === undefined) return NOT;
  const full = exchange.full_bytes, less = full > exchange.nbytes ? `, ${percent(1 - exchange.nbytes / full)} less` : '';
  return `${bytes(exchange.nbytes)} of ${bytes(full)} in full${less}`;
}

function showPicked() {
  card.hidden = !picked && !chosen;
  if (chosen) { showChosen(); return; }
  if (!picked) return;
  const declared = graph.nodes.find(node => node.name === picked);
  const node = now?.nodes.find(each => each.name === picked);
  card.replaceChildren();
  add(card, 'h3', `${picked} · ${declared.operator ?? ''}`);
  const list = add(card, 'dl');
  const tell = (name, value) => { add(list, 'dt', name); add(list, 'dd', value); };
  const placed = ['replicas', 'ranks', 'threads', 'gpus'].filter(name => declared.placed[name]).map(name => `${declared.placed[name]} ${declared.placed[name] === 1 ? name.slice(0, -1) : name}`).join(', ');
  tell('placed', [placed, declared.hosts.join(', ')].filter(Boolean).join(' on ') || 'not recorded');
  if (node) {
    if (node.ill.length) tell('trouble', node.ill.join('; '));
    if (node.state !== 'over') tell('holds', node.pending === null ? NOT : `${short(node.pending)} rows that it owes an answer for`);
    if (node.held_back) tell('weights', `${short(node.held_back)} prompts or groups may start only with newer weights`);
    tell('rows', `${short(node.rows_in)} in, ${short(node.rows_out)} out`);
    if (node.version !== null && node.version !== undefined) tell('version', short(node.version));
    for (const worker of node.workers.slice(0, 32)) {
      const where = worker.host || 'this machine';
      const below = worker.processes_below ? `, ${worker.processes_below} processes below it` : '';
      const memory = worker.rss_bytes === null ? `memory ${NOT} from here` : `${bytes(worker.rss_bytes)} resident`;
      tell(worker.name, `${worker.state} on ${where}, pid ${worker.pid ?? '–'}, ${memory}${below}, ${worker.restarts} restarts`);
    }
  }
  for (const [name, value] of Object.entries(declared.knobs)) tell(name, value);
}

function word(node) {
  const rate = node.rows_out_s || node.rows_in_s;
  const per = node.tokens_s ? `${short(node.tokens_s)} tokens/s` : rate ? `${short(rate)} rows/s` : '';
  return [node.ill.length ? 'trouble' : node.state === 'over' ? '' : node.state, per].filter(Boolean).join(' · ');
}

function meter(cell, shares) {
  let bar = cell.firstChild;
  if (!bar || !bar.classList) {
    cell.replaceChildren();
    bar = add(cell, 'div', undefined, 'meter');
    bar.setAttribute('role', 'img');
    for (const kind of KINDS) add(bar, 'span', undefined, kind);
  }
  const told = shares ? KINDS.map(kind => `${kind} ${percent(shares[kind])}`) : [NOT];
  const rest = shares ? 1 - KINDS.reduce((sum, kind) => sum + shares[kind], 0) : 1;
  if (shares && rest > 0.005) told.push(`${NOT} ${percent(rest)}`);
  bar.title = told.join(', ');
  bar.setAttribute('aria-label', bar.title);
  KINDS.forEach((kind, at) => { bar.children[at].style.width = shares ? `${shares[kind] * 100}%` : '0'; });
}

// The name of an edge, which opens its numbers.
function opener(cell, edge) {
  let button = cell.firstChild;
  if (!button || !button.classList) { cell.replaceChildren(); button = add(cell, 'button', undefined, 'bare'); }
  say(button, `${edge.from} → ${edge.to}`);
  button.onclick = () => choose(key(edge));
  button.setAttribute('aria-pressed', String(chosen === key(edge)));
}

function credit(cell, edge) {
  if (edge.depth === null) { say(cell, NOT); return; }
  const share = edge.capacity ? edge.depth / edge.capacity : 0;
  say(cell, `${short(edge.depth)} of ${short(edge.capacity)}${share >= 1 ? ', full' : ''}`);
  cell.className = share >= 1 ? 'bad' : share >= 0.5 ? 'warn' : '';
}

const NODE_HEADS = [
  {text: 'node'}, {text: 'state'}, {text: 'time', draw: meter}, {text: 'busy', number: true}, {text: 'blocked', number: true},
  {text: 'waiting', number: true}, {text: 'starved', number: true}, {text: 'rows/s out', number: true}, {text: 'replicas', number: true}, {text: 'memory', number: true},
];
const EDGE_HEADS = [
  {text: 'edge', draw: opener}, {text: 'rows of'}, {text: 'rows/s', number: true}, {text: 'bytes/s', number: true}, {text: 'in flight, of credit', draw: credit},
];
const WEIGHT_HEADS = [
  {text: 'edge', draw: opener}, {text: 'version made', number: true}, {text: 'reader has', number: true}, {text: 'behind', number: true},
  {text: 'staleness of the last step: mean, most'}, {text: 'while generated'}, {text: 'while waiting'}, {text: 'bound', number: true},
  {text: 'last exchange: trainer, reader'}, {text: 'bytes of it'},
];

export function showNow(found) {
  now = found;
  const over = found.over_s ? `over the last ${seconds(found.over_s)}` : '';
  say(document.getElementById('over'), found.state === 'under way' ? over : found.over_s ? `over all ${seconds(found.over_s)}` : '');
  for (const node of found.nodes) showNode(node);
  for (const edge of found.edges) showEdge(edge);
  const sorted = [...found.nodes];
  if (sorted.length > FEW) sorted.sort((a, b) => (b.shares?.busy ?? -1) - (a.shares?.busy ?? -1));
  const rows = all ? sorted : sorted.slice(0, FEW);
  fill(document.getElementById('nodes'), NODE_HEADS, rows.map(node => [
    node.name, node.ill.length ? `trouble: ${node.ill[0]}` : node.for_s ? `${node.state} ${seconds(node.for_s)}` : node.state,
    node.shares, percent(node.shares?.busy), percent(node.shares?.blocked), percent(node.shares?.waiting),
    percent(node.shares?.starved),
    node.rows_out_s === null ? NOT : short(node.rows_out_s), short(node.replicas), memory(node),
  ]));
  const more = document.getElementById('more-nodes');
  more.hidden = all || sorted.length <= FEW;
  say(more, `the ${FEW} busiest are shown; show all ${sorted.length}`);
  fill(document.getElementById('edges'), EDGE_HEADS, found.edges.slice(0, all ? 4000 : FEW).map(edge => [
    edge, edge.source, edge.rows_s === null ? NOT : short(edge.rows_s), edge.bytes_s === null ? NOT : bytes(Math.round(edge.bytes_s)), edge,
  ]));
  fill(document.getElementById('weights'), WEIGHT_HEADS, found.weights.map(weightRow));
  if (picked || chosen) showPicked();
}
document.getElementById('more-nodes').onclick = () => { all = true; if (now) showNow(now); };

function memory(node) {
  const known = node.workers.map(worker => worker.rss_bytes).filter(value => value !== null);
  return known.length ? bytes(known.reduce((a, b) => a + b, 0)) : NOT;
}

function weightRow(edge) {
  const last = now.newest[edge.from] || {};
  const bound = graph.edges.find(each => each.plane === 'weights' && each.from === edge.from && each.to === edge.to);
  const pair = part => last[`${part}_mean`] === undefined || last[`${part}_mean`] === null
    ? NOT : `${short(last[`${part}_mean`])}, ${short(last[`${part}_max`])}`;
  const exchange = last.exchanges?.[edge.to];
  const seconds = exchange?.committed_seconds === undefined ? NOT : `${short(exchange.committed_seconds)} s, ${short(exchange.taken_seconds)} s`;
  return [edge, short(edge.made), short(edge.has), edge.behind === null ? NOT : short(edge.behind),
    pair('staleness'), pair('staleness_generating'), pair('staleness_waiting'), short(bound?.max_staleness), seconds, moved(exchange)];
}

function showNode(node) {
  const part = parts.get(node.name);
  if (!part) return;
  const told = JSON.stringify([node.shares, word(node), node.ill.length]);
  if (shown.get(node.name) === told) return;
  shown.set(node.name, told);
  let at = part.left;
  for (const kind of KINDS) {
    const wide = part.room * (node.shares?.[kind] ?? 0);
    part.bars[kind].setAttribute('x', at);
    part.bars[kind].setAttribute('width', Math.max(0, wide));
    at += wide;
  }
  say(part.text, word(node));
  part.element.classList.toggle('ill', node.ill.length > 0);
  part.element.setAttribute('aria-label', plain(`${node.name}: ${word(node)}`));
}

function showEdge(edge) {
  const share = edge.depth === null || !edge.capacity ? 0 : edge.depth / edge.capacity;
  const says = edge.rows_s === null ? '' : `; ${short(edge.rows_s)} rows/s, ${bytes(Math.round(edge.bytes_s))}/s`;
  for (const element of lines.get(key(edge)) || []) {
    const title = element.querySelector('title');
    if (title) say(title, (element.dataset.says ??= title.textContent) + says);
    element.classList.toggle('full', share >= 1);
    element.classList.toggle('half', share >= 0.5 && share < 1);
  }
}
