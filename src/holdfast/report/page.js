'use strict';
(() => {
const data = JSON.parse(document.getElementById('data').textContent);
const NS = 'http://www.w3.org/2000/svg';
const $ = id => document.getElementById(id);
const make = (tag, attributes, parent) => {
  const node = tag.startsWith('svg:') ? document.createElementNS(NS, tag.slice(4)) : document.createElement(tag);
  for (const key in attributes) key === 'text' ? node.textContent = attributes[key] : node.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(node);
  return node;
};
const seconds = s => {
  const a = Math.abs(s);
  if (a < 5e-7) return '0 ms';
  if (a < 0.0005) return Math.round(s * 1e6) + ' µs';
  if (a < 1) return +(s * 1e3).toPrecision(3) + ' ms';
  return a < 100 ? +s.toPrecision(3) + ' s' : Math.floor(s / 60) + ' min ' + Math.round(s % 60) + ' s';
};
const bytes = n => {
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let u = 0;
  while (n >= 999.5 && u < 5) { n /= 1000; u++; }
  return +n.toPrecision(3) + ' ' + units[u];
};
const choose = (label, options, parent, change) => {
  const box = make('label', { text: label + ' ' }, parent);
  const select = make('select', {}, box);
  options.forEach((text, n) => make('option', { value: n, text }, select));
  select.addEventListener('change', () => change(+select.value));
  return select;
};

/* Hover: anything with data-tip says it. */
const tip = $('tip');
const hide = () => { tip.hidden = true; };
document.addEventListener('pointermove', event => {
  const found = event.target.closest && event.target.closest('[data-tip]');
  if (!found) return hide();
  tip.textContent = found.getAttribute('data-tip');
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const y = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
  tip.style.left = Math.max(x, 4) + 'px';
  tip.style.top = Math.max(y, 4) + 'px';
});
document.addEventListener('scroll', hide, true);
document.addEventListener('keydown', event => { if (event.key === 'Escape') hide(); });

/* One save: a row for each rank, zoomed by dragging. */
const waterfall = place => {
  const all = data.waterfalls;
  if (!all || !all.length) return make('p', { class: 'empty', text: 'No save has been measured yet.' }, place);
  const tools = make('div', { class: 'tools' }, place);
  const note = make('p', { class: 'lead' });
  const rows = make('div', { class: 'rows', tabindex: 0 }, place);
  const keys = make('p', { class: 'legend' }, place);
  place.appendChild(note);
  let now = 0, view = [0, 1];
  const reset = () => { view = all[now].range.slice(); draw(); };
  const zoom = (factor, at) => {
    const [a, b] = view, [low, high] = all[now].range;
    const middle = at === undefined ? (a + b) / 2 : at;
    const left = middle - (middle - a) * factor, right = middle + (b - middle) * factor;
    view = [Math.max(left, low), Math.min(right, high)];
    if (view[1] - view[0] < 2) view = [middle - 1, middle + 1];
    draw();
  };
  choose('Save', all.map(w => w.label), tools, n => { now = n; reset(); }).id = 'save';
  for (const [text, label, act] of [['+', 'zoom in', () => zoom(0.5)], ['−', 'zoom out', () => zoom(2)], ['All', 'show all', reset]]) {
    const button = make('button', { type: 'button', 'aria-label': label, 'data-zoom': label, text }, tools);
    button.addEventListener('click', act);
  }
  make('span', { text: 'Drag over a part to zoom in.' }, tools);
  const draw = () => {
    const save = all[now], head = 22, gutter = 78;
    const width = Math.max(rows.clientWidth - 2, 300), count = save.rows.length;
    const tall = count <= 16 ? 20 : count <= 64 ? 11 : 5;
    const scale = (width - gutter - 8) / Math.max(view[1] - view[0], 1);
    const svg = make('svg:svg', { width, height: head + tall * count + 4, role: 'img', 'aria-label': 'when each rank did what' });
    const x = us => gutter + (us - view[0]) * scale;
    const span = (view[1] - view[0]) / (width > 700 ? 8 : 4), power = 10 ** Math.floor(Math.log10(span));
    const unit = [1, 2, 5, 10].map(m => m * power).find(m => m >= span);
    for (let t = Math.ceil(view[0] / unit) * unit; t <= view[1]; t += unit) {
      make('svg:line', { class: 'grid', x1: x(t), x2: x(t), y1: head - 4, y2: head + tall * count }, svg);
      make('svg:text', { class: 'axis middle', x: x(t), y: 13, text: seconds(t / 1e6) }, svg);
    }
    const every = tall >= 11 ? 1 : Math.ceil(14 / tall);
    const met = new Set();
    save.rows.forEach((row, n) => {
      const [rank, host, spans] = row, y = head + n * tall;
      const where = 'rank ' + rank + (data.hosts[host] ? ' on ' + data.hosts[host] : '');
      for (let i = 0; i < spans.length; i += 4) {
        const phase = data.phases[spans[i]], a = Math.max(spans[i + 1], view[0]), b = Math.min(spans[i + 2], view[1]);
        met.add(phase);
        if (b < a) continue;
        const over = phase === 'encode' || (phase === 'stage' && save.overlaps);
        const took = (spans[i + 2] - spans[i + 1]) / 1e6, size = spans[i + 3] * 1000;
        let text = where + '\n' + phase + ' ' + seconds(took) + ', from ' + seconds(spans[i + 1] / 1e6);
        if (size) text += '\n' + bytes(size) + (took > 0 ? ', ' + bytes(size / took) + '/s' : '');
        make('svg:rect', { class: 'p-' + phase, x: x(a), width: Math.max((b - a) * scale, 0.6),
          y: y + (over ? tall * 0.08 : tall > 8 ? 1.5 : 0.5), height: over ? tall * 0.3 : tall - (tall > 8 ? 3 : 1), 'data-tip': text }, svg);
      }
      if (n % every === 0) make('svg:text', { class: 'axis end', x: gutter - 8, y: y + tall / 2 + 4, text: 'rank ' + rank }, svg);
    });
    const old = rows.querySelector('svg');
    old ? old.replaceWith(svg) : rows.appendChild(svg);
    rows.dataset.from = view[0]; rows.dataset.to = view[1];
    keys.textContent = '';
    data.phases.filter(p => met.has(p)).forEach(p => {
      const item = make('span', {}, keys);
      make('i', { class: 'p-' + p }, item);
      item.appendChild(document.createTextNode(p));
    });
    note.textContent = save.note;
    svg.addEventListener('pointerdown', down => {
      if (down.button) return;
      const left = svg.getBoundingClientRect().left, time = e => view[0] + (e.clientX - left - gutter) / scale;
      const from = time(down), mark = make('svg:rect', { class: 'zoom', y: head, height: tall * count, width: 0 }, svg);
      const move = e => {
        const [a, b] = [x(from), x(time(e))].sort((p, q) => p - q);
        mark.setAttribute('x', a); mark.setAttribute('width', b - a);
      };
      const up = e => {
        removeEventListener('pointermove', move); removeEventListener('pointerup', up);
        const [a, b] = [from, time(e)].sort((p, q) => p - q);
        mark.remove();
        if ((b - a) * scale < 6) return;
        view = [Math.max(a, save.range[0]), Math.min(b, save.range[1])];
        draw();
      };
      addEventListener('pointermove', move); addEventListener('pointerup', up);
    });
    svg.addEventListener('dblclick', reset);
  };
  rows.addEventListener('keydown', event => {
    const wide = view[1] - view[0], shift = d => { view = [view[0] + d, view[1] + d]; draw(); };
    const keys = { '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), '0': reset, ArrowLeft: () => shift(-wide / 4), ArrowRight: () => shift(wide / 4) };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  let last = 0;
  new ResizeObserver(() => { if (rows.clientWidth !== last) { last = rows.clientWidth; draw(); } }).observe(rows);
  reset();
};

/* Hosts × local ranks, or the mesh, for each phase. */
const heatmap = place => {
  const heat = data.heat;
  if (!heat || !heat.rows.length) return;
  const tools = make('div', { class: 'tools' }, place);
  const box = make('div', { class: 'scroll' }, place);
  const keys = make('p', { class: 'legend' }, place);
  let phase = heat.first, layout = 0;
  const slow = new Set(heat.slow.map(s => s.join('/')));
  const places = () => {
    if (layout === 0) {
      const hosts = [...new Set(heat.rows.map(r => r[1]))];
      if (hosts.length === 1 && heat.rows.length > 16) {
        const wide = 32;
        return { down: Math.ceil(heat.rows.length / wide), across: wide, name: n => String(n * wide), at: (r, n) => [Math.floor(n / wide), n % wide] };
      }
      return { down: hosts.length, across: Math.max(...heat.rows.map(r => r[2])) + 1, name: n => data.hosts[hosts[n]] || 'ranks', at: r => [hosts.indexOf(r[1]), r[2]] };
    }
    const { names, shape } = heat.mesh, across = shape[shape.length - 1];
    const index = rank => { const found = []; for (let d = shape.length - 2, left = Math.floor(rank / across); d >= 0; d--) { found.unshift(names[d] + ' ' + left % shape[d]); left = Math.floor(left / shape[d]); } return found.join(', '); };
    return { down: Math.ceil(heat.rows.length / across), across, name: n => index(n * across), at: r => [Math.floor(r[0] / across), r[0] % across] };
  };
  const draw = () => {
    const grid = places(), gutter = grid.down === 1 && layout === 0 ? 130 : 130, high = Math.max(14, Math.min(34, 480 / grid.down));
    const room = Math.max(box.clientWidth - gutter - 4, 120), wide = Math.max(12, Math.min(64, room / grid.across));
    const width = gutter + wide * grid.across + 4, height = high * grid.down + 22;
    const svg = make('svg:svg', { width, height, role: 'img', 'aria-label': 'seconds of each rank' });
    const values = heat.rows.map(r => r[3][phase]), top = Math.max(...values, 1e-9), low = Math.min(...values);
    for (let n = 0; n < grid.across; n++)
      if (wide > 20 || n % 4 === 0) make('svg:text', { class: 'axis middle', x: gutter + (n + 0.5) * wide, y: 12, text: n }, svg);
    for (let n = 0; n < grid.down; n++) {
      const text = grid.name(n);
      const label = make('svg:text', { class: 'axis end', x: gutter - 8, y: 20 + (n + 0.5) * high + 3, text: text.length > 18 ? text.slice(0, 8) + '…' + text.slice(-9) : text }, svg);
      label.setAttribute('data-tip', text);
    }
    const marked = [];
    heat.rows.forEach((row, n) => {
      const [y, x] = grid.at(row, n), value = row[3][phase];
      const share = Math.sqrt(top > low ? (value - low) / (top - low) : 0);
      const host = data.hosts[row[1]], is_slow = slow.has(row[0] + '/' + phase);
      const cell = make('svg:rect', { class: 'cell' + (is_slow ? ' slow' : ''), x: gutter + x * wide, y: 20 + y * high, width: wide, height: high,
        'data-tip': 'rank ' + row[0] + (host ? ' on ' + host : '') + '\n' + heat.phases[phase] + ' ' + seconds(value) + (is_slow ? '\nstraggler' : '') }, svg);
      cell.style.fill = 'color-mix(in srgb, var(--heat1) ' + Math.round(share * 100) + '%, var(--heat0))';
      if (is_slow) marked.push(cell);
    });
    marked.forEach(cell => svg.appendChild(cell));
    box.textContent = ''; box.appendChild(svg);
    keys.textContent = heat.phases[phase] + ': from ' + seconds(low) + ' (faint) to ' + seconds(top) + ' (strong)';
  };
  const select = choose('Phase', heat.phases, tools, n => { phase = n; draw(); });
  select.value = phase; select.id = 'phase';
  if (heat.mesh) choose('Rows', ['hosts', heat.mesh.names.join(' × ')], tools, n => { layout = n; draw(); });
  let last = 0;
  new ResizeObserver(() => { if (box.clientWidth !== last) { last = box.clientWidth; draw(); } }).observe(box);
  draw();
};

/* The treemap's colours. */
const colour = $('colour');
if (colour) colour.addEventListener('change', () => {
  const key = { compression: 'c', loss: 'l' }[colour.value];
  document.querySelectorAll('.treemap .leaf').forEach(leaf => {
    const level = key === 'c' ? leaf.dataset.c / 8 : leaf.dataset.l / 8;
    leaf.style.fill = key ? 'color-mix(in srgb, ' + (key === 'c' ? '#e69f3c' : '#d3567b') + ' ' + Math.round(level * 100) + '%, #dfeadf)' : '';
  });
});

if ($('waterfall')) waterfall($('waterfall'));
if ($('heatmap')) heatmap($('heatmap'));
document.documentElement.dataset.drawn = 'yes';
})();
