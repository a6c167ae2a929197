// Text of a run on the page: always as text, never as markup; what could hide or reorder it is shown by its code.
const HIDDEN = new RegExp(
  '[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f' +
  '\\u200b-\\u200f\\u2028-\\u202f\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb' +
  '\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]', 'gu');
const NAMES = {0x1b: 'ESC', 0x0d: 'CR', 0x00: 'NUL', 0x07: 'BEL', 0x08: 'BS', 0x7f: 'DEL', 0x200b: 'ZWSP', 0x200e: 'LRM',
  0x200f: 'RLM', 0x202a: 'LRE', 0x202b: 'RLE', 0x202c: 'PDF', 0x202d: 'LRO', 0x202e: 'RLO', 0x2066: 'LRI', 0x2067: 'RLI',
  0x2068: 'FSI', 0x2069: 'PDI', 0xfeff: 'BOM'};

const codeOf = sign => {
  const code = sign.codePointAt(0);
  return NAMES[code] || 'U+' + code.toString(16).toUpperCase().padStart(4, '0');
};

// The same as one string, for attributes and titles.
export const plain = text => String(text ?? '').replace(HIDDEN, sign => `<${codeOf(sign)}>`);

// Put text into an element, after what is there: text nodes, and a small box for each sign that cannot be seen.
export function put(parent, text) {
  const whole = String(text ?? '');
  let from = 0;
  for (const found of whole.matchAll(HIDDEN)) {
    if (found.index > from) parent.append(document.createTextNode(whole.slice(from, found.index)));
    const box = document.createElement('span');
    box.className = 'code';
    box.textContent = codeOf(found[0]);
    parent.append(box);
    from = found.index + found[0].length;
  }
  if (from < whole.length) parent.append(document.createTextNode(whole.slice(from)));
  return parent;
}

// A new element with text in it, at the end of a parent.
export function add(parent, tag, text, name) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined && text !== null) put(made, text);
  parent?.append(made);
  return made;
}

// Change what an element says, if it says something else.
export function say(element, text) {
  const shown = plain(text);
  if (element.textContent !== shown) element.textContent = shown;
}

export const NOT = 'not measured';
const GROUPED = new Intl.NumberFormat('en', {maximumFractionDigits: 0});

export function short(value) {
  if (value === null || value === undefined || value === '') return '–';
  if (typeof value !== 'number') return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return GROUPED.format(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + ' G';
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + ' M';
  if (size >= 1e4) return GROUPED.format(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

export const percent = share => share === null || share === undefined ? NOT : Math.round(share * 100) + '%';

export function bytes(value) {
  if (value === null || value === undefined) return NOT;
  for (const [size, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']])
    if (value >= size) return (value / size).toPrecision(3) + ' ' + unit;
  return value + ' B';
}

export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 10) return value.toFixed(1) + ' s';
  if (value < 120) return Math.round(value) + ' s';
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// What the server says at an address; throws its sentence where it refuses.
export const ask = (path, values = {}) => exchange(path, values, {signal: AbortSignal.timeout(40000), cache: 'no-store'});

// The same of a request that changes something.
export const post = (path, values, body) => exchange(path, values, {
  method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body), signal: AbortSignal.timeout(90000),
});

async function exchange(path, values, how) {
  const question = new URLSearchParams();
  for (const [name, value] of Object.entries(values))
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== '' && each !== null && each !== undefined) question.append(name, each);
  const answer = await fetch(`api/${path}?${question}`, how);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

// Rows of a table, changed in place, so that nothing jumps and a selection stays.
export function fill(table, heads, rows) {
  const wanted = heads.map(head => head.text).join('\u0000');
  if (table.dataset.heads !== wanted) {
    table.replaceChildren();
    const line = table.createTHead().insertRow();
    for (const head of heads) {
      const cell = add(line, 'th', head.text, head.number ? 'n' : '');
      cell.scope = 'col';
    }
    table.createTBody();
    table.dataset.heads = wanted;
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, at) => {
    const line = body.rows[at] || body.insertRow();
    row.forEach((value, column) => {
      const cell = line.cells[column] || line.insertCell();
      const head = heads[column];
      cell.className = [head.number ? 'n' : '', value === NOT ? 'not' : ''].join(' ').trim();
      if (head.draw) head.draw(cell, value);
      else say(cell, value);
    });
  });
}
