"""The look and behaviour of the report page. It fetches nothing."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --rule: #d8dee4; --page: #fff;
  --panel: #f6f8fa; --sent: #1a7f5a; --line: #2563c9; --wait: #c8d1da; --late: #c4432b }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --rule: #30363d;
  --page: #0d1117; --panel: #161b22; --sent: #3fb984; --line: #6ea8fe; --wait: #3d444d; --late: #ff8f73 } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 2em auto; max-width: 90em; padding: 0 1.5em }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin: 2.2em 0 .3em }
p { margin: .3em 0 .8em; max-width: 70em } .soft { color: var(--soft) }
.scroll { overflow: auto; max-height: 40em }
.cards { display: flex; flex-wrap: wrap; gap: .8em; margin: 1.2em 0 }
.card { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  padding: .6em 1em; min-width: 8em; color: var(--soft) }
.card b { display: block; font-size: 1.5em; color: var(--ink) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25em .5em; text-align: right; white-space: nowrap }
th { position: sticky; top: 0; background: var(--page); cursor: pointer; color: var(--soft);
  font-weight: 600; box-shadow: inset 0 -1px var(--rule) }
th:first-child, td:first-child, .text { text-align: left }
td { border-bottom: 1px solid var(--rule) } tbody tr:hover { background: var(--panel) }
td.why { white-space: normal; min-width: 14em; color: var(--soft) } td.late, .late { color: var(--late) }
svg { overflow: visible; display: block } svg text { fill: var(--soft); font-size: 11px }
svg.spark { display: inline-block; vertical-align: middle }
.axis { stroke: var(--rule) } polyline { fill: none; stroke: var(--line); stroke-width: 1.5 }
.bar { display: inline-block; height: .7em; background: var(--sent); vertical-align: baseline;
  border-radius: 2px; margin-right: .5em }
.waits { fill: var(--wait) } .sends { fill: var(--sent) } svg .late { fill: var(--late) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22em, 1fr)); gap: 1.5em }
figure { margin: 0 } figcaption { margin-bottom: .4em }
canvas { width: 100%; border: 1px solid var(--rule); border-radius: 4px; image-rendering: pixelated }
.scale { display: inline-block; width: 8em; height: .7em; vertical-align: middle; border-radius: 2px;
  background: linear-gradient(to right, var(--panel), var(--line)) }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; vertical-align: -1px;
  margin: 0 .3em 0 1em }
input { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--rule);
  border-radius: 6px; padding: .25em .6em; margin-bottom: .6em }
"""

# Sorts a table by the clicked column, hides rows that do not contain the typed text, and paints a map for
# each canvas: a row for each tensor, a column for each sample.
SCRIPT = """
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0];
  table.querySelectorAll('th').forEach((head, i) => head.onclick = () => {
    const down = head.dataset.down = head.dataset.down === '1' ? '0' : '1';
    const key = row => row.cells[i].dataset.v ?? row.cells[i].textContent;
    const sign = down === '1' ? -1 : 1;
    [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], n = x - y;
      return sign * (isNaN(n) ? x.localeCompare(y) : n);
    }).forEach(row => body.append(row));
  });
}
const find = document.getElementById('find');
if (find) find.oninput = () => {
  for (const row of document.getElementById('tensors').tBodies[0].rows)
    row.hidden = !row.textContent.includes(find.value);
};
const rgb = text => {
  const probe = document.createElement('canvas').getContext('2d');
  probe.fillStyle = text; probe.fillRect(0, 0, 1, 1);
  return probe.getImageData(0, 0, 1, 1).data;
};
function paint(canvas) {
  const { rows, most } = JSON.parse(document.getElementById(canvas.dataset.from).textContent);
  const style = getComputedStyle(document.documentElement);
  const [low, high] = ['--panel', '--line'].map(name => rgb(style.getPropertyValue(name).trim()));
  canvas.width = Math.max(...rows.map(([, values]) => values.length));
  canvas.height = rows.length;
  canvas.style.height = Math.min(Math.max(rows.length * 14, 28), Math.max(560, rows.length)) + 'px';
  const context = canvas.getContext('2d');
  const image = context.createImageData(canvas.width, canvas.height);
  let cells = 0;
  rows.forEach(([, values], y) => values.forEach((value, x) => {
    if (value === null) return;
    const part = Math.min(1, value / most), at = 4 * (y * canvas.width + x);
    for (let i = 0; i < 3; i++) image.data[at + i] = low[i] + (high[i] - low[i]) * part;
    image.data[at + 3] = 255;
    cells++;
  }));
  context.putImageData(image, 0, 0);
  canvas.dataset.cells = cells;
  const caption = canvas.nextElementSibling;
  canvas.onmousemove = event => {
    const box = canvas.getBoundingClientRect();
    const y = Math.floor((event.clientY - box.top) / box.height * rows.length);
    const x = Math.floor((event.clientX - box.left) / box.width * canvas.width);
    const value = rows[y]?.[1][x];
    if (value != null) caption.textContent = rows[y][0] + ': ' + Number(value.toPrecision(3));
  };
}
const paintAll = () => document.querySelectorAll('canvas').forEach(paint);
paintAll();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paintAll);
"""
