// Changes to a run, on a page that may make them: each is asked about once, made once, and answered in a sentence.
import {add, post, say} from './text.js';

const $ = id => document.getElementById(id);
const dialog = $('confirm');
let may = false, run = 0, live = false, node = null, ask = null, sending = false;

export function allowSteering(steers) {
  may = steers;
  say($('rights'), may ? 'may steer' : 'read-only');
  $('rights').title = may ? 'Whoever has the address of this page may stop and change its runs' : 'Nothing on this page changes a run';
  show();
}

export function steerRun(number) { run = number; node = null; show(); }
export function steerLive(isLive) { if (isLive !== live) { live = isLive; show(); } }
export function steerNode(picked) { node = picked; show(); }

function show() {
  $('steer').hidden = !may;
  $('stop-run').disabled = $('keep-checkpoint').disabled = !live;
  const form = $('steer-node');
  form.hidden = !may || !live || node === null;
  if (form.hidden) return;
  form.replaceChildren();
  add(form, 'h3', `Change ${node.name}`);
  field(form, 'replicas', {type: 'number', min: 0, max: 4096, step: 1, required: true, value: node.replicas ?? 1}, 'scale …', value => wish(
    `Let ${node.name} have ${value} replica${+value === 1 ? '' : 's'}?`, 'Replicas that leave finish what they have.',
    {action: 'scale', node: node.name, replicas: +value}));
  if (node.knobs?.length) knobField(form);
  if (node.swaps) field(form, 'another operator', {type: 'text', placeholder: 'MODULE:ATTRIBUTE', required: true, maxLength: 500, pattern: '[^:\\s]+:[^:\\s]+', title: 'as the program would import it: rewards:strict'}, 'swap …', value => wish(
    `Let ${value} take the place of ${node.name}?`,
    'It is tried first, and nothing changes where it does not fit. Its code runs with the rights of the run. What was scored and not trained may be scored anew.',
    {action: 'swap', node: node.name, reference: value}));
}

function field(form, name, attributes, verb, then) {
  const line = add(form, 'form');
  const label = add(line, 'label', `${name} `);
  const input = add(label, 'input');
  Object.assign(input, attributes);
  add(line, 'button', verb);
  line.onsubmit = event => { event.preventDefault(); then(input.value.trim()); };
}

function knobField(form) {
  const line = add(form, 'form'), picked = add(add(line, 'label', 'knob '), 'select');
  for (const knob of node.knobs) add(picked, 'option', knob.name).value = knob.name;
  const input = add(add(line, 'label', 'value '), 'input'), told = add(line, 'small');
  Object.assign(input, {type: 'text', required: true, maxLength: 500});
  const known = () => node.knobs.find(knob => knob.name === picked.value);
  (picked.onchange = () => { input.value = known().value; say(told, known().at); })();
  add(line, 'button', 'set …');
  line.onsubmit = event => {
    event.preventDefault();
    wish(`Let ${node.name}.${picked.value} be ${input.value.trim()}?`, `It counts ${known().at}. The ledger keeps from which step on.`,
      {action: 'set', node: node.name, knob: picked.value, value: input.value.trim()});
  };
}

function wish(question, detail, request) {
  ask = {...request, number: crypto.randomUUID()};
  say($('confirm-title'), question);
  say($('confirm-text'), detail);
  say($('confirm-answer'), '');
  $('confirm-answer').className = '';
  $('confirm-do').hidden = false;
  $('confirm-do').disabled = false;
  say($('confirm-cancel'), 'cancel');
  dialog.showModal();
  $('confirm-cancel').focus();
}

$('stop-run').onclick = () => wish('Stop this run?',
  'It finishes the step under way, writes a checkpoint and ends. dataflow resume goes on with it.', {action: 'stop'});
$('keep-checkpoint').onclick = () => wish('Write a checkpoint now?',
  'Each trainer writes one after the step under way, and it stays.', {action: 'checkpoint'});
$('confirm-cancel').onclick = () => dialog.close();
$('confirm-do').onclick = async () => {
  if (sending || ask === null) return;
  sending = true;
  $('confirm-do').disabled = true;
  say($('confirm-answer'), 'the run is asked …');
  try {
    const found = await post('steer', {run}, ask);
    say($('confirm-answer'), found.answer);
    $('confirm-answer').className = 'done';
    $('confirm-do').hidden = true;
    const changed = ask.action === 'set' && node?.name === ask.node && node.knobs?.find(knob => knob.name === ask.knob);
    if (changed) { changed.value = ask.value; show(); }
  } catch (error) {
    say($('confirm-answer'), error.message);
    $('confirm-answer').className = 'bad';
    $('confirm-do').hidden = true;
  }
  ask = null;
  sending = false;
  say($('confirm-cancel'), 'close');
};
