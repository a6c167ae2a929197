// The page: which runs it shows, when it asks, and what is in which place.
import {add, ask, fill, plain, say, seconds, short} from './text.js';
import {drawGraph, onPicked, showNow} from './graph.js';
import {load, offer, onChosen, redraw, restart} from './charts.js';
import {open, sawStep, shut, useRun} from './rollouts.js';
import {allowSteering, steerLive, steerNode, steerRun} from './steer.js';

const $ = id => document.getElementById(id);
const EVERY_MS = 1000, SERIES_MS = 2000, SLOW_MS = 5000;
let runs = [], run = 0, beside = null, changes = -1, drawn = 0, timer = null, marks = null, heard = 0, failed = 0;
const GOOD = new Set(['under way', 'finished']), BAD = new Set(['failed', 'not finished', 'silent']);

function place() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return {run: Math.min(Math.max(0, +found.run || 0), Math.max(0, runs.length - 1)), rollout: found.rollout};
}

async function choose(number) {
  run = number; changes = -1; marks = null; drawn = 0;
  $('run').value = run;
  say($('run-name'), runs[run].name);
  document.title = `${plain(runs[run].name)} · dataflow live`;
  $('trace').href = `trace?run=${run}`;
  $('minute').href = `trace?run=${run}&part=minute`;
  restart(runs[run].name, beside === null ? '' : runs[beside].name);
  drawGraph(await ask('graph', {run}));
  useRun(run);
  steerRun(run);
}

function header(now) {
  const pill = $('state');
  say(pill, now.phase && now.phase !== 'training' ? `${now.state}: ${now.phase}` : now.state);
  pill.className = `pill ${BAD.has(now.state) ? 'bad' : GOOD.has(now.state) ? 'good' : 'warn'}`;
  const last = Math.max(now.step ?? 0, ...Object.values(now.newest).map(line => line.step ?? 0));
  const time = now.seconds ? ` in ${seconds(now.seconds)}` : '';
  say($('progress'), `step ${short(last)}${now.steps ? ` of ${short(now.steps)}` : ''}${time}`);
  say($('sentence'), now.why ? `${now.sentence} (${now.why})` : now.sentence);
  const reading = $('reading');
  reading.hidden = now.read >= 1;
  say(reading, `reading the run's metrics: ${Math.round(now.read * 100)}%`);
  sawStep(last);
  steerLive(now.state === 'under way');
  $('minute').hidden = !now.has_minute;
  $('trace').hidden = !now.has_trace;
  $('no-trace').hidden = now.has_trace;
}

async function series(now) {
  if (now.changes === changes || Date.now() - drawn < SERIES_MS) return;
  drawn = Date.now();
  changes = now.changes;
  offer(await ask('names', {run}));
  marks = await ask('marks', {run});
  await load(0, run, marks);
  if (beside !== null) await load(1, beside, null);
  redraw();
  const at = line => line.at === null ? '–' : new Date(line.at * 1000).toLocaleString();
  $('no-fault').hidden = marks.faults.length > 0;
  $('fault-table').hidden = !marks.faults.length;
  fill($('fault-rows'), [{text: 'when'}, {text: 'step', number: true}, {text: 'worker'}, {text: 'what'}],
    [...marks.faults].reverse().map(line => [at(line), short(line.step), line.worker, line.text]));
  $('requests').hidden = !marks.requests.length;
  fill($('request-rows'), [{text: 'when'}, {text: 'step', number: true}, {text: 'by'}, {text: 'request'}, {text: 'what came of it'}],
    [...marks.requests].reverse().map(line => [at(line), short(line.step), line.by, line.request, line.refused ? `refused: ${line.answer}` : line.answer]));
}

// Why nothing comes; what is seen stays as it was.
function trouble(error) {
  const gone = error instanceof TypeError || error.name === 'TimeoutError';
  const why = gone ? 'The server of this page does not answer: dataflow live was ended, or the way to its machine is cut' : error.message;
  const old = heard ? ` What you see is ${seconds((Date.now() - heard) / 1000)} old; the page goes on asking.` : '';
  say($('trouble'), `${why}.${old}`);
  $('trouble').hidden = false;
}

async function tick() {
  timer = null;
  let wait = EVERY_MS;
  const asked = run;
  try {
    const now = await ask('now', {run});
    if (asked === run) {
      header(now);
      showNow(now);
      await series(now);
      heard = Date.now();
      failed = 0;
      if (now.state !== 'under way' && now.read >= 1) wait = SLOW_MS;
    }
  } catch (error) {
    failed += 1;
    wait = Math.min(30000, EVERY_MS * 2 ** failed);
    trouble(error);
  }
  if (!failed) $('trouble').hidden = true;
  if (!document.hidden) timer = setTimeout(tick, wait);
}

function again() { if (timer !== null) clearTimeout(timer); timer = null; if (!document.hidden) tick(); }
document.addEventListener('visibilitychange', () => { if (!document.hidden) again(); else if (timer !== null) { clearTimeout(timer); timer = null; } });

async function follow() {
  const to = place();
  if (to.run !== run) { await choose(to.run); again(); }
  if (to.rollout) await open(to); else shut();
}

async function start() {
  try {
    const found = await ask('runs');
    $('trouble').hidden = true;
    runs = found.runs;
    $('run').replaceChildren(); $('beside').replaceChildren();
    allowSteering(found.steers);
    for (const each of runs) {
      add($('run'), 'option', each.name).value = each.run;
      add($('beside'), 'option', each.name).value = each.run;
    }
    const none = document.createElement('option');
    none.value = ''; none.textContent = 'none';
    $('beside').prepend(none);
    $('beside').value = '';
    $('run-choice').hidden = $('beside-choice').hidden = runs.length < 2;
    await choose(place().run);
    if (place().rollout) open(place());
    tick();
  } catch (error) { trouble(error); setTimeout(start, 5000); }
}

$('run').onchange = async () => { history.replaceState(null, '', `#run=${$('run').value}`); await choose(+$('run').value); again(); };
$('beside').onchange = () => {
  beside = $('beside').value === '' ? null : +$('beside').value;
  restart(runs[run].name, beside === null ? '' : runs[beside].name);
  changes = -1; drawn = 0;
  again();
};
onPicked(steerNode);
onChosen(() => { changes = -1; drawn = 0; again(); });
window.addEventListener('hashchange', () => { if (place().rollout || location.hash.includes('run=')) follow(); else shut(); });
start();
