// Series over steps: one small chart each, with marks, two runs at a time, and a cursor that all charts share.
import {add, ask, plain, say, short} from './text.js';

const SVG = 'http://www.w3.org/2000/svg', HEIGHT = 150, LEFT = 48, RIGHT = 6, TOP = 8, BOTTOM = 20;
const home = document.getElementById('charts'), readout = document.getElementById('readout');
const charts = new Map();
let names = [], cursor = null, added = new Set(), removed = new Set(), labels = ['', ''], axis = [0, 1], marks = null;

class Chart {
  constructor({key, label, says}) {
    this.key = key; this.runs = [null, null];
    this.box = add(home, 'div', undefined, 'chart');
    const head = add(this.box, 'h3');
    add(head, 'span', label, 'name').title = plain(label);
    this.value = add(head, 'span', '', 'value');
    const close = add(head, 'button', '×');
    close.setAttribute('aria-label', `hide ${plain(label)}`);
    close.onclick = () => { added.delete(key); removed.add(key); this.box.remove(); charts.delete(key); };
    add(this.box, 'p', says || '\u00a0', 'says muted');
    this.svg = document.createElementNS(SVG, 'svg');
    this.svg.setAttribute('tabindex', '0');
    this.svg.setAttribute('role', 'img');
    this.box.append(this.svg);
    this.label = plain(label);
    this.svg.addEventListener('pointermove', e => this.point(e));
    this.svg.addEventListener('pointerdown', e => this.point(e));
    this.svg.addEventListener('pointerleave', () => move(null));
    this.svg.addEventListener('keydown', e => this.step(e));
    this.svg.addEventListener('blur', () => move(null));
  }
  place(step) { return LEFT + (this.width - LEFT - RIGHT) * (step - this.from) / (this.to - this.from || 1); }
  point(e) {
    const box = this.svg.getBoundingClientRect();
    const share = (e.clientX - box.left - LEFT) / Math.max(1, this.width - LEFT - RIGHT);
    move(this.near(this.from + share * (this.to - this.from)), this);
  }
  near(step) {
    let best = null;
    for (const run of this.runs) for (const each of run?.steps ?? [])
      if (best === null || Math.abs(each - step) < Math.abs(best - step)) best = each;
    return best;
  }
  step(e) {
    const steps = [...new Set(this.runs.flatMap(run => run?.steps ?? []))].sort((a, b) => a - b);
    if (!steps.length || !['ArrowLeft', 'ArrowRight', 'Home', 'End', 'Escape'].includes(e.key)) return;
    e.preventDefault();
    if (e.key === 'Escape') { move(null); return; }
    const at = cursor === null ? steps.length - 1 : Math.max(0, steps.findIndex(each => each >= cursor));
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1}[e.key];
    move(steps[Math.min(steps.length - 1, Math.max(0, to))], this);
  }
  at(run, step) {
    const {steps, values} = this.runs[run] ?? {steps: [], values: []};
    if (!steps.length) return null;
    let low = 0, high = steps.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (steps[middle] <= step) low = middle; else high = middle - 1; }
    return steps[low] <= step ? [steps[low], values[low]] : null;
  }
  say() {
    const told = [0, 1].filter(run => this.runs[run]?.steps.length).map(run => {
      const {steps, values} = this.runs[run];
      const at = cursor === null ? [steps.at(-1), values.at(-1)] : this.at(run, cursor);
      return at ? short(at[1]) : '–';
    });
    say(this.value, told.join(' | ') || '–');
  }
  draw() {
    this.width = Math.max(120, this.svg.clientWidth || this.box.clientWidth - 20);
    const known = this.runs.filter(run => run?.steps.length);
    const shape = (tag, attributes, text) => {
      const made = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      if (text !== undefined) made.textContent = text;
      return this.svg.appendChild(made);
    };
    this.svg.replaceChildren();
    [this.from, this.to] = axis;
    if (!known.length) { this.say(); return; }
    const values = known.flatMap(run => run.values);
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    this.svg.setAttribute('aria-label', `${this.label}: last ${short(known[0].values.at(-1))} at step ${short(known[0].steps.at(-1))}, ` +
      `least ${short(low)}, greatest ${short(high)}, of ${known[0].of} steps; arrow keys read values`);
    if (low > 0 && low < high * 0.4) low = 0;
    const ticks = round(low, high);
    low = ticks[0]; high = ticks.at(-1);
    const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low));
    for (const value of ticks) {
      shape('path', {class: 'grid', d: `M${LEFT} ${y(value).toFixed(1)}H${this.width - RIGHT}`});
      shape('text', {class: 'axis', x: LEFT - 6, y: y(value) + 3.5, 'text-anchor': 'end'}, short(+value.toPrecision(3)));
    }
    const markAt = (kind, step, bottom, text) => {
      if (step === null || step < this.from || step > this.to) return;
      const x = this.place(step).toFixed(1);
      const line = shape('path', {class: `m-${kind}`, d: `M${x} ${bottom}V${HEIGHT - BOTTOM}`, 'stroke-width': 1.5});
      if (text) line.appendChild(document.createElementNS(SVG, 'title')).textContent = plain(text);
    };
    for (const {kind, step, text} of told()) markAt(kind, step, kind === 'round' ? HEIGHT - BOTTOM - 5 : TOP, text);
    const path = (steps, values) => steps.map((step, at) => `${at ? 'L' : 'M'}${this.place(step).toFixed(1)} ${y(values[at]).toFixed(1)}`).join('');
    [1, 0].forEach(run => {
      const found = this.runs[run], name = run ? 'b' : 'a';
      if (!found?.steps.length) return;
      shape('path', {class: `line ${name}${found.mean ? ' raw' : ''}`, d: path(found.steps, found.values)});
      if (found.mean) shape('path', {class: `line ${name}`, d: path(...found.mean)});
      if (found.steps.length <= 24) found.steps.forEach((step, at) =>
        shape('circle', {class: `dot ${name}`, cx: this.place(step).toFixed(1), cy: y(found.values[at]).toFixed(1), r: 2.6}));
    });
    const label = (x, at, anchor, text) => shape('text', {class: 'axis', x, y: at, 'text-anchor': anchor}, text);
    label(LEFT, HEIGHT - 5, 'start', `step ${short(this.from)}`);
    label(this.width - RIGHT, HEIGHT - 5, 'end', short(this.to));
    this.line = shape('path', {class: 'cursor', d: ''});
    this.cursor();
  }
  cursor() {
    const inside = cursor !== null && cursor >= this.from && cursor <= this.to;
    this.line?.setAttribute('d', inside ? `M${this.place(cursor).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}` : '');
    this.say();
  }
}

// Round numbers that enclose two values, three to six of them.
function round(low, high) {
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  const rough = (high - low) / 3, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(each => each * size).find(each => each >= rough * 0.999) ?? 10 * size;
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: Math.max(2, Math.min(8, last - first + 1))}, (_, at) => (first + at) * step);
}

// What happened at which step, in words; the same for all charts.
const told = () => marks === null ? [] : [
  ...marks.rounds.map(step => ({kind: 'round', step, text: 'evaluation'})),
  ...marks.restarts.map(step => ({kind: 'restart', step, text: `steps from ${step} on were made again`})),
  ...marks.swaps.map(each => ({kind: 'swap', step: each.step, text: each.text})),
  ...marks.faults.map(each => ({kind: 'fault', step: each.step, text: each.text})),
];

function move(step, chart) {
  cursor = step;
  for (const each of charts.values()) each.cursor();
  if (step === null || !chart) return;
  const values = [0, 1].map(run => [run, chart.at(run, step)]).filter(([, at]) => at)
    .map(([run, at]) => `${labels[1] ? labels[run] + ': ' : ''}${short(at[1])}`);
  const near = told().filter(each => each.step === step).map(each => each.text).slice(0, 4);
  say(readout, [`${chart.label} at step ${short(step)}: ${values.join(', ') || 'nothing'}`, ...near].join(' · '));
}

export const wanted = () => [...charts.keys()];
export const restart = (first, second) => {
  for (const chart of charts.values()) chart.box.remove();
  charts.clear(); cursor = null; names = []; removed = new Set(); marks = null; axis = [0, 1];
  labels = [plain(first), plain(second ?? '')];
  document.getElementById('keys').hidden = !labels[1];
  for (const [at, name] of ['a', 'b'].entries()) say(document.getElementById(`key-${name}`), labels[at]);
};

// The names of a run's series: charts for those that come first, and all of them to choose from.
export function offer(found) {
  names = found.series;
  const fresh = names.filter(each => (each.first || added.has(each.key)) && !charts.has(each.key) && !removed.has(each.key));
  for (const each of fresh) charts.set(each.key, new Chart(each));
  if (fresh.length) for (const each of names) if (charts.has(each.key)) home.append(charts.get(each.key).box);
  const list = document.getElementById('all-series');
  const told = names.map(each => each.label).join('\u0000');
  if (list.dataset.told !== told) {
    list.dataset.told = told;
    list.replaceChildren();
    for (const each of names) add(list, 'option').value = plain(each.label);
  }
  const over = found.left_out ? `, and more that are left out` : '';
  say(document.getElementById('count'), `${names.length} series${over}`);
}

const find = document.getElementById('find');
export function onChosen(then) {
  find.addEventListener('change', () => {
    const text = find.value.trim().toLowerCase();
    if (!text) return;
    const exact = names.filter(each => plain(each.label).toLowerCase() === text);
    const hits = (exact.length ? exact : names.filter(each => plain(each.label).toLowerCase().includes(text))).slice(0, 12);
    for (const each of hits) {
      added.add(each.key); removed.delete(each.key);
      if (!charts.has(each.key)) charts.set(each.key, new Chart(each));
    }
    find.value = '';
    if (hits.length) { then(); charts.get(hits[0].key).box.scrollIntoView({block: 'nearest'}); }
    else say(document.getElementById('count'), `no series is called like that; ${names.length} there are`);
  });
}

// Fetch the series of a run: 0, the one that is shown, or 1, the one beside it.
export async function load(run, number, found) {
  if (run === 0) marks = found;
  const keys = wanted();
  for (let begin = 0; begin < keys.length; begin += 20) {
    const found = await ask('series', {run: number, key: keys.slice(begin, begin + 20), points: 600});
    for (const [key, series] of Object.entries(found.series)) {
      const chart = charts.get(key);
      if (!chart) continue;
      chart.runs[run] = series;
    }
  }
}

// Draw all charts over the same steps.
export function redraw() {
  const ends = [...charts.values()].flatMap(chart => chart.runs).filter(run => run?.steps.length);
  if (ends.length) axis = [Math.min(...ends.map(run => run.steps[0])), Math.max(...ends.map(run => run.steps.at(-1)))];
  for (const chart of charts.values()) chart.draw();
}
let width = 0;
new ResizeObserver(() => {
  if (home.clientWidth === width) return;
  width = home.clientWidth;
  for (const chart of charts.values()) chart.draw();
}).observe(home);
