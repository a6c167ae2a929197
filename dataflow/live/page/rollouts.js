// The table of rollouts, and one of them in full.
import {add, ask, plain, put, say, short} from './text.js';

const $ = id => document.getElementById(id);
const dialog = $('rollout'), body = $('rollout-body');
const LEADING = ['step', 'group_id', 'rollout_id', 'prompt', 'completion', 'length', 'staleness', 'finish_reason'];
const IDS = new Set(['step', 'group_id', 'rollout_id']);
let run = 0, order = {sort: 'step', order: 'down'}, page = 0, older = null, newest = 0, asked = {};

export function useRun(number) {
  run = number; page = 0; older = null;
  $('upto').value = ''; $('search').value = '';
  return show();
}

// There are steps up to this one: an empty table is filled, another is left as it is, and offers to go on.
export function sawStep(step) {
  if (!step || asked.kind !== 'step') return;
  if (newest === null) { newest = step; show(); return; }
  $('newer').hidden = step <= newest;
  say($('newer'), `show up to step ${short(step)}`);
}
$('newer').onclick = () => { page = 0; $('upto').value = ''; show(); };

async function show() {
  $('newer').hidden = true;
  asked = {run, kind: $('kind').value, node: $('owner').value, search: $('search').value, upto: $('upto').value.trim(), page, ...order};
  say($('looked'), 'looking ...');
  let found;
  const mine = asked;
  try { found = await ask('rollouts', asked); } catch (error) { if (mine === asked) say($('looked'), `${error.message}; press show to ask again`); return; }
  if (mine !== asked) return;
  older = found.older;
  newest = found.newest;
  const owners = found.nodes;
  $('owner-choice').hidden = owners.length < 2;
  if ($('owner').dataset.told !== owners.join('\u0000')) {
    $('owner').dataset.told = owners.join('\u0000');
    $('owner').replaceChildren();
    for (const owner of owners) { const each = add($('owner'), 'option', owner || 'the only one'); each.value = owner; }
  }
  if (owners.length && !owners.includes(asked.node)) { show(); return; }
  rows(found);
  const between = found.steps ? (found.steps[0] === found.steps[1] ? `step ${found.steps[0]}` : `steps ${found.steps[0]} to ${found.steps[1]}`) : '';
  const what = asked.search ? `match '${asked.search}'` : 'are there';
  const sorted = `sorted by ${order.sort}, ${order.order === 'down' ? 'greatest first' : 'least first'}`;
  say($('looked'), found.files ? `${short(found.count)} rollouts of ${between} ${what}, ${sorted}.${found.problems.length ? ' ' + found.problems.join('; ') : ''}`
    : asked.kind === 'eval' ? 'No evaluation has written rollouts yet.' : 'No step has been trained yet, or its rollouts were not kept (--keep-steps).');
  const pages = Math.max(1, Math.ceil(found.count / found.rows_a_page));
  say($('page'), `page ${page + 1} of ${pages}`);
  $('before').disabled = page < 1;
  $('after').disabled = page + 1 >= pages;
  $('older').hidden = older === null;
  say($('older'), `look further back, from step ${older}`);
}

function rows(found) {
  const table = $('rows'), names = [...LEADING.slice(0, 5), ...found.columns, ...LEADING.slice(5)];
  if (found.rows.some(row => row.error !== null)) names.push('error');
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  for (const name of names) {
    const cell = add(head, 'th'), button = add(cell, 'button', name + (order.sort === name ? (order.order === 'down' ? ' ↓' : ' ↑') : ''));
    cell.scope = 'col';
    cell.ariaSort = order.sort === name ? (order.order === 'down' ? 'descending' : 'ascending') : 'none';
    button.onclick = () => {
      order = {sort: name, order: order.sort === name && order.order === 'down' ? 'up' : 'down'};
      page = 0;
      show();
    };
  }
  const made = table.createTBody();
  for (const row of found.rows) {
    const line = made.insertRow();
    line.className = 'row';
    names.forEach((name, at) => {
      const cell = line.insertCell(), value = row[name];
      if (typeof value === 'number') { cell.className = 'n'; head.cells[at].className = 'n'; }
      if (name === 'prompt' || name === 'completion' || name === 'error') cell.className = name === 'error' ? 'wide bad' : 'wide';
      if (name === 'rollout_id') { const link = add(cell, 'a', value); link.href = fragment(row); link.setAttribute('aria-label', `open rollout ${value}`); }
      else put(add(cell, 'span', undefined, 'said'), typeof value === 'number' && !IDS.has(name) ? short(value) : value ?? '–');
    });
    line.addEventListener('click', e => { if (!e.target.closest('a') && !String(getSelection())) location.hash = fragment(row); });
  }
}

const fragment = row => `#run=${run}&rollout=${row.kind}/${encodeURIComponent(asked.node ?? '')}/${row.step}/${row.row}`;

$('question').addEventListener('submit', e => { e.preventDefault(); page = 0; show(); });
for (const id of ['kind', 'owner']) $(id).addEventListener('change', () => { page = 0; $('upto').value = ''; show(); });
$('before').onclick = () => { page -= 1; show(); };
$('after').onclick = () => { page += 1; show(); };
$('older').onclick = () => { $('upto').value = older; page = 0; show(); };

// One rollout, from a link: #run=0&rollout=step//300/3
export async function open(place) {
  const [kind, node, step, row] = place.rollout.split('/');
  const where = {run: place.run, kind, node: decodeURIComponent(node ?? ''), step, row};
  body.replaceChildren();
  add(body, 'p', 'reading ...', 'muted');
  if (!dialog.open) dialog.showModal();
  try {
    const found = await ask('rollout', where);
    draw(found, where);
  } catch (error) { body.replaceChildren(); add(body, 'p', error.message, 'bad'); }
}

export function shut() { if (dialog.open) dialog.close(); }
dialog.addEventListener('close', () => { if (location.hash.includes('rollout=')) history.replaceState(null, '', '#rollouts'); });
$('close').onclick = () => dialog.close();
$('link').onclick = async () => {
  try { await navigator.clipboard.writeText(location.href); say($('link'), 'copied'); } catch { say($('link'), 'the address bar has it'); }
  setTimeout(() => say($('link'), 'copy link'), 2000);
};

function draw(found, where) {
  say($('rollout-title'), `Rollout ${found.rollout_id}, group ${found.group_id}, step ${where.step}`);
  body.replaceChildren();
  const card = add(body, 'div', undefined, 'card'), told = add(card, 'dl');
  const tell = (name, value) => { const pair = add(told, 'div'); add(pair, 'dt', name); put(add(pair, 'dd', undefined, 'said'), value); };
  tell('prompt id', found.prompt_id); tell('position', `${found.position} of ${found.group_count} in its group`);
  tell('ended', found.finish_reason); tell('tokens', `${short(found.tokens)}, prompt included`);
  if (found.turns > 1) tell('turns', `${short(found.turns)} of the policy; see its tokens`);
  for (const [name, value] of Object.entries(found.columns)) tell(name, value);
  for (const name of ['error', 'prompt', 'completion']) if (found.texts[name]) text(name, found.texts[name], where);
  tokens(found, where);
  add(body, 'h3', `Its group: ${found.group_count} rollouts of the same prompt` + (found.group.length < found.group_count ? `, the first ${found.group.length}` : ''));
  const shared = Object.entries(found.group[0]?.columns ?? {}).filter(([name, value]) => found.group.every(each => each.columns[name] === value) && found.group.length > 1);
  if (shared.length) put(add(body, 'p', undefined, 'said muted small'), `the same for all: ${shared.map(([name, value]) => `${name} ${value}`).join(', ')}`);
  const group = add(body, 'div', undefined, 'group');
  for (const member of found.group) {
    const one = add(group, 'div', undefined, member.row === +where.row ? 'member this' : 'member');
    const link = add(one, 'a', `rollout ${member.rollout_id}`);
    link.href = `#run=${where.run}&rollout=${where.kind}/${encodeURIComponent(where.node)}/${where.step}/${member.row}`;
    if (member.row === +where.row) add(one, 'span', ' this one', 'muted');
    const list = add(one, 'dl');
    const values = Object.entries(member.columns).filter(([name]) => !shared.some(([other]) => other === name));
    for (const [name, value] of [...values, ['length', `${short(member.length)} tokens, ${member.finish_reason}`]]) { add(list, 'dt', name); add(list, 'dd', value); }
    if (member.error) put(add(one, 'div', undefined, 'bad said'), member.error);
    put(add(one, 'div', undefined, 'text'), member.completion);
  }
}

function text(name, part, where) {
  add(body, 'h3', `${name} (${short(part.of)} characters)`);
  const box = put(add(body, 'div', undefined, 'text'), part.text);
  box.tabIndex = 0;
  let end = part.begin + part.text.length;
  if (end >= part.of) return;
  const more = add(body, 'button', `show more: ${short(part.of - end)} characters are left`);
  more.onclick = async () => {
    more.disabled = true;
    try {
      const next = await ask('text', {...where, field: name, from: end});
      put(box, next.text);
      end = next.begin + next.text.length;
      if (end >= next.of || !next.text) more.remove(); else say(more, `show more: ${short(next.of - end)} characters are left`);
    } catch (error) { say(more, error.message); }
    more.disabled = false;
  };
}

const LOGPROBS = [[Math.log(0.9), '≥ 90%'], [Math.log(0.5), '≥ 50%'], [Math.log(0.2), '≥ 20%'], [Math.log(0.05), '≥ 5%'], [-Infinity, 'less likely']];
const RATIO = 'importance ratio';
const RATIOS = [[1.1, '0.91 to 1.1'], [1.5, '0.67 to 1.5'], [2, '0.5 to 2'], [4, '0.25 to 4'], [Infinity, 'further from 1']];
function classOf(value, colour, least, most) {
  if (value === null || typeof value !== 'number') return '';
  if (colour === RATIO) return `t${RATIOS.findIndex(([bound]) => Math.max(value, 1 / value) <= bound)}`;
  if (colour === 'logprobs') return `t${LOGPROBS.findIndex(([bound]) => value >= bound)}`;
  if (colour === 'versions') return `t${(value - least) % 5}`;
  return most > least ? `t${Math.min(4, Math.floor((value - least) / (most - least) * 5))}` : 't0';
}

function tokens(found, where) {
  const head = add(body, 'div', undefined, 'head');
  add(head, 'h3', 'Tokens');
  const label = add(head, 'label', 'coloured by '), choice = add(label, 'select');
  for (const name of found.colours) add(choice, 'option', name === 'logprobs' ? 'log-probability' : name === 'versions' ? 'version' : name).value = name;
  if (!found.has_ratio) add(head, 'span', `importance ratio: ${found.no_ratio}`, 'muted small');
  const scale = add(body, 'p', undefined, 'scale'), box = add(body, 'div', undefined, 'text tokens');
  box.tabIndex = 0;
  box.setAttribute('role', 'group');
  box.setAttribute('aria-label', 'Tokens; the arrow keys read them');
  const said = add(body, 'p', 'Point at a token, or focus the box and use the arrow keys.', 'muted small');
  said.setAttribute('aria-live', 'polite');
  const more = add(body, 'button', 'show more tokens');
  let end = 0, at = -1, told = [], spans = [], turn = null, before = null, count = 0;
  const mark = to => {
    if (to < 0 || to >= told.length) return;
    spans[at]?.classList.remove('now');
    at = to;
    spans[at].classList.add('now');
    spans[at].scrollIntoView({block: 'nearest'});
    const one = told[at];
    say(said, `token ${at} of ${found.tokens}: id ${one.id}${one.text ? `, '${one.text}'` : ''}, ` +
      (one.chosen ? `${choice.selectedOptions[0].textContent} ${short(one.number)}` : 'given, not chosen by the policy'));
  };
  box.addEventListener('pointerover', e => { if (e.target.dataset.at) mark(+e.target.dataset.at); });
  box.addEventListener('keydown', e => {
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: told.length - 1}[e.key];
    if (to !== undefined) { e.preventDefault(); mark(to); }
  });
  const load = async () => {
    more.disabled = true;
    try {
      const part = await ask('tokens', {...where, from: end, colour: choice.value});
      if (!end) legend(scale, choice.value, part);
      part.ids.forEach((id, place) => {
        const chosen = part.chosen[place], number = part.numbers[place];
        const text = part.texts[place] === null || part.texts[place] === '' ? `${id} ` : part.texts[place].replace(/[Ġ▁]/g, ' ').replace(/Ċ/g, '↵');
        if (found.turns > 1 && chosen !== before) {
          turn = add(box, 'div', undefined, chosen ? 'turn policy' : 'turn');
          add(turn, 'b', chosen ? `policy, turn ${++count}` : told.length ? 'world' : 'prompt');
          turn = add(turn, 'div');
          before = chosen;
        }
        const one = put(add(turn ?? box, 'span', undefined, chosen ? classOf(number, choice.value, part.least, part.most) : 'given'), text);
        one.dataset.at = told.length;
        spans.push(one);
        told.push({id, text: part.texts[place], chosen, number});
      });
      end = part.begin + part.ids.length;
      more.hidden = end >= part.of;
      say(more, `show more: ${short(part.of - end)} tokens are left`);
    } catch (error) { say(said, error.message); }
    more.disabled = false;
  };
  more.onclick = load;
  choice.onchange = () => { box.replaceChildren(); told = []; spans = []; end = count = 0; at = -1; turn = before = null; load(); };
  if (found.colours.length) load(); else { more.hidden = true; say(said, 'no number is stored for each token'); }
}

function legend(scale, colour, part) {
  scale.replaceChildren();
  if (colour === 'logprobs') LOGPROBS.forEach(([, label], at) => add(scale, 'span', label, `t${at}`));
  else if (colour === RATIO) RATIOS.forEach(([, label], at) => add(scale, 'span', label, `t${at}`));
  else if (colour === 'versions') for (let each = part.least; each <= part.most && each < part.least + 12; each++) add(scale, 'span', `version ${each}`, `t${(each - part.least) % 5}`);
  else for (let each = 0; each < 5; each++) add(scale, 'span', `from ${short(part.least + (part.most - part.least) * each / 5)}`, `t${each}`);
  add(scale, 'span', 'grey: given, not chosen', 'muted');
}
