// FP8 ruler: where the numbers of a format lie, and what the scale of a block does to one of them
import { choice, drawn, FORMATS, h, rounded, show, shown, slider } from './shared.js'

// ---- mathematics: compassrl.rollout.fp8; `Math.fround` stands where the library computes in fp32

const f32 = Math.fround

// All numbers from 0 to the largest, in the order of their codes
export function numbers(format) {
  const { bits, least, largest } = FORMATS[format], steps = 2 ** bits, all = []
  for (let code = 0; ; code++) {
    const power = Math.floor(code / steps), part = code % steps
    const x = power ? (1 + part / steps) * 2 ** (power + least - 1) : part / steps * 2 ** least
    if (x > largest) return all
    all.push(x)
  }
}

// The code of a number of the format: sign, exponent and fraction side by side
export const encode = (x, format) =>
  numbers(format).indexOf(Math.abs(x)) + (x < 0 || Object.is(x, -0) ? 128 : 0)

// A block of numbers with one scale: what is stored, and what it stands for
export function quantise(block, format) {
  const top = Math.max(...block.map(x => Math.abs(f32(x)))), { largest } = FORMATS[format]
  const scale = f32(top / largest) || 1
  const stored = block.map(x => rounded(f32(f32(x) / scale), format))
  return { scale, stored, values: stored.map(x => f32(x * scale)) }
}

// ---- the lab

const LOOKS = `
.lab .tick { stroke: var(--quiet); stroke-width: 1; }
.lab .power { stroke: var(--ink); stroke-width: 1.5; }
.lab .mine { fill: var(--hot); }
.lab .kept { fill: var(--cool); }
.lab .ruler { overflow-x: auto; }
.lab .ruler svg { min-width: 48rem; }
.lab .ruler:focus-visible { outline-offset: -3px; }
`

function ruler(format, asked, kept) {
  const all = numbers(format).slice(1), low = Math.log2(all[0]) - 1, high = Math.log2(all.at(-1)) + 0.5
  const at = x => 10 + 980 * (Math.log2(Math.min(Math.max(x, 2 ** low), 2 ** high)) - low) / (high - low)
  const lines = all.map(x => {
    const power = Number.isInteger(Math.log2(x))
    return drawn('line', { x1: at(x), x2: at(x), y1: power ? 28 : 38, y2: 56, class: power ? 'power' : 'tick' })
  })
  const names = all.filter(x => Math.log2(x) % 3 === 0 || x === all.at(-1)).map(x =>
    drawn('text', { x: at(x), y: 72, 'text-anchor': 'middle', style: 'font-size:17px' }, x < 0.1 ? `2^${Math.log2(x)}`.replace('-', '−') : String(x)))
  const mark = (x, y, name) => drawn('path', { class: name, d: `M${at(x)} ${y}l-7 -14h14z` })
  return drawn('svg', { viewBox: '0 0 1000 80', 'aria-hidden': 'true' }, ...lines, ...names,
    mark(Math.abs(asked), 26, 'mine'), drawn('path', { class: 'kept', d: `M${at(Math.abs(kept))} 56l-6 12h12z` }))
}

function render({ el }) {
  const settings = { format: 'e4m3', x: -1, top: 0 }
  const picture = h('div', { class: 'ruler', tabindex: '0', role: 'group', 'aria-label': 'ruler' })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })
  const power = x => shown(10 ** x, 3)

  function draw() {
    const { format } = settings, x = 10 ** settings.x, top = Math.max(10 ** settings.top, x)
    const { scale, stored, values } = quantise([x, top], format)
    const bits = encode(stored[0], format).toString(2).padStart(8, '0'), cut = 8 - FORMATS[format].bits
    const code = `${bits[0]} ${bits.slice(1, cut)} ${bits.slice(cut)}`
    picture.replaceChildren(ruler(format, x / scale, stored[0]))
    const mark = picture.querySelector('.kept').getBoundingClientRect(), seen = picture.getBoundingClientRect()
    picture.scrollLeft += mark.left - seen.left - seen.width / 2 // where the ruler is wider than the page
    line.textContent = `Scale ${shown(scale, 5)}. Asked for ${shown(x / scale, 5)}, stored ${shown(stored[0], 5)}, `
      + `code ${code}. Stands for ${shown(values[0], 5)}: off by ${(100 * Math.abs(values[0] - x) / x).toFixed(2)} %.`
  }

  const set = key => x => { settings[key] = x; draw() }
  const format = choice('Format', { e4m3: 'e4m3', e5m2: 'e5m2' }, 'e4m3', set('format'))
  const range = { step: 0.01, say: power }
  const number = slider('number', { ...range, min: -6, max: 3, value: -1 }, set('x'))
  const top = slider('largest of its block', { ...range, min: -2, max: 3, value: 0 }, set('top'))
  show(el, 'FP8 ruler', h('style', {}, LOOKS), h('div', { class: 'knobs' }, format.row),
    h('div', { class: 'knobs' }, number.box, top.box), picture, line,
    h('p', { class: 'quiet' }, 'Every line is a number that the format has, a long one a power of 2. Above, the number '
      + 'over the scale of its block; below, what is stored.'))
  draw()
}

export default { render }
