// What all labs share: elements, sliders, buttons, looks. A lab exports its mathematics and `render`.

const COMMON_LOOKS = `
.lab { --paper: #fafaf9; --ink: #1c1917; --quiet: #57534e; --line: #d6d3d1; --hot: #c2410c;
  --cool: #0f766e; --off: #d6d3d1; --on-off: #292524; --wash: #e7e5e4;
  --pull: #99f6e4; --key: #ffffff; --edge: #78716c; }
html[data-theme="dark"] .lab, [data-jp-theme-light="false"] .lab, .quarto-dark .lab,
.vscode-dark .lab { --paper: #1c1917; --ink: #fafaf9; --quiet: #d6d3d1; --line: #57534e;
  --hot: #fb923c; --cool: #5eead4; --off: #44403c; --on-off: #fafaf9; --wash: #292524;
  --pull: #115e59; --key: #292524; --edge: #a8a29e; }
.lab > .bench { background: var(--paper); color: var(--ink); border: 1px solid var(--line);
  border-radius: 8px; padding: .75rem; font: 14px/1.4 Inter, system-ui, sans-serif;
  container-type: inline-size; }
.lab .bench * { box-sizing: border-box; }
.lab .knobs { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; margin: 0 0 .6rem; }
.lab [hidden] { display: none !important; }
.lab p { margin: .5rem 0 0; }
.lab .quiet { color: var(--quiet); font-size: 12px; }
.lab output, .lab .number { font-variant-numeric: tabular-nums; }
.lab label { display: inline-flex; flex-wrap: nowrap; gap: .4rem; align-items: center;
  margin: 0; }
.lab input[type="range"] { accent-color: var(--hot); margin: 0; padding: 0; }
.lab label input[type="range"] { width: 8rem; min-width: 4rem; }
.lab label output { min-width: 3.2rem; }
.lab button, .lab select { font: inherit; color: var(--ink); background: var(--key); cursor: pointer;
  border: 1px solid var(--edge); border-radius: 6px; padding: .2rem .7rem; min-height: 1.9rem; }
.lab button:hover { border-color: var(--hot); }
.lab button[aria-pressed="true"] { background: var(--hot); color: var(--paper);
  border-color: var(--hot); }
.lab :focus-visible { outline: 3px solid var(--cool); outline-offset: 1px; }
.lab svg { display: block; width: 100%; height: auto; overflow: visible; }
.lab svg text { fill: var(--ink); font: 11px Inter, system-ui, sans-serif; }
@media (prefers-reduced-motion: no-preference) {
  .lab .cell, .lab svg rect { transition: background-color .15s, height .15s, y .15s; }
}
`

const PICTURE = 'http://www.w3.org/2000/svg'

function filled(e, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === 'function') e.addEventListener(key, value)
    else if (value !== undefined && value !== false) e.setAttribute(key, value)
  }
  e.append(...children)
  return e
}

// An element with attributes, listeners and children; `drawn` is the same in a picture
export const h = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children)
export const drawn = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(PICTURE, tag), attributes, children)

// Bits behind the point, exponent of the smallest normal number, largest number
export const FORMATS = {
  fp32: { bits: 23, least: -126, largest: Infinity },
  bf16: { bits: 7, least: -126, largest: Infinity },
  e4m3: { bits: 3, least: -6, largest: 448 },
  e5m2: { bits: 2, least: -14, largest: 57344 },
}

// The nearest number of a format, ties to the even one; its largest beyond
export function rounded(x, format) {
  const { bits, least, largest } = FORMATS[format]
  const size = Math.min(Math.abs(x), largest)
  if (!size) return 0
  let power = Math.floor(Math.log2(size))
  if (2 ** power > size) power--
  const unit = 2 ** (Math.max(power, least) - bits), n = size / unit, low = Math.floor(n)
  const up = n - low > 0.5 || (n - low === 0.5 && low % 2 === 1)
  return Math.sign(x) * Math.min((low + up) * unit, largest)
}

// A stream of numbers in [0, 1) that a seed decides (mulberry32), and nearly normal ones from it
export function random(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0
    let x = Math.imul(seed ^ (seed >>> 15), 1 | seed)
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32
  }
}
export const normals = seed => {
  const next = random(seed)
  return () => Array.from({ length: 12 }, next).reduce((a, b) => a + b) - 6
}

// A number with so many digits that matter; a real minus sign, no exponent unless it is tiny
export function shown(x, digits = 3) {
  const size = Math.abs(x)
  const text = size && size < 1e-3 ? x.toExponential(digits - 1) : String(+x.toPrecision(digits))
  return text.replace('-', '−').replace('e-', 'e−')
}

// A horizontal slider with its name and its value
export function slider(name, { min, max, step, value, say = shown }, changed) {
  const said = h('output', {}, say(value))
  const input = h('input', {
    type: 'range', min, max, step, value, 'aria-label': name,
    input: () => { said.value = say(+input.value); changed(+input.value) },
  })
  const set = x => { input.value = x; said.value = say(+input.value) }
  return { box: h('label', {}, h('span', {}, name), input, said), input, set }
}

// Buttons of which one is pressed; returns the row and what presses one
export function choice(name, options, chosen, changed) {
  const press = key => buttons.forEach(([k, b]) => b.setAttribute('aria-pressed', String(k === key)))
  const buttons = Object.entries(options).map(([key, text]) =>
    [key, h('button', { type: 'button', click: () => { press(key); changed(key) } }, text)])
  press(chosen)
  const row = h('span', { class: 'knobs', role: 'group', 'aria-label': name, style: 'margin:0' },
    h('span', {}, name), ...buttons.map(([, b]) => b))
  return { row, press }
}

// A button that stays down until it is pressed again
export function toggle(name, down, changed) {
  const b = h('button', { type: 'button', 'aria-pressed': String(down), click: () => {
    const now = b.getAttribute('aria-pressed') !== 'true'
    b.setAttribute('aria-pressed', String(now))
    changed(now)
  } }, name)
  return b
}

export const button = (name, click) => h('button', { type: 'button', click }, name)

// The lab takes the place of its still picture once all of it is there
export function show(el, title, ...children) {
  el.classList.add('lab')
  el.replaceChildren(h('style', {}, COMMON_LOOKS),
    h('section', { class: 'bench', 'aria-label': title }, ...children))
}
