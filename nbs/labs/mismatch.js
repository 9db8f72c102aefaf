// Mismatch lab: the same weights in two engines, and what their log-probabilities disagree about
import { button, choice, drawn, h, normals, rounded, show, shown, slider, toggle } from './shared.js'

// ---- mathematics: one logit per context and token; expectations are exact, not sampled

export function logSoftmax(logits, temperature = 1) {
  const x = logits.map(v => v / temperature), top = Math.max(...x)
  const all = Math.log(x.reduce((a, v) => a + Math.exp(v - top), 0))
  return x.map(v => v - top - all)
}

// Both engines: what training computes, what really was sampled, what the rollout says of it
export function engines({ logits, drift, stale, format, temperature, raw }) {
  const old = logits.map((row, c) => row.map((x, v) => rounded(x - stale * drift[c][v], format)))
  const sampled = old.map(row => logSoftmax(row, temperature))
  return {
    train: logits.map(row => logSoftmax(row, temperature)),
    sampled,
    reported: raw ? old.map(row => logSoftmax(row)) : sampled,
  }
}

export function tisWeight(delta, kind, cap, low = 0.5) {
  const rho = Math.exp(Math.min(Math.max(delta, -20), 20))
  if (kind === 'off') return 1
  if (kind === 'truncate') return Math.min(rho, cap)
  return rho < low || rho > cap ? 0 : rho
}

// Mean gap, k3, share of ratios beyond 2, and how near the expected gradient is to the true one.
// The first token of a context is right: it earns 1
export function measures(state) {
  const { train, sampled, reported } = engines(state), n = train.length
  const out = { gap: 0, k3: 0, f2: 0, changed: 0 }
  let [dot, mine, exact] = [0, 0, 0]
  train.forEach((row, c) => {
    const p = row.map(Math.exp), got = row.map(() => 0)
    row.forEach((lp, v) => {
      const q = Math.exp(sampled[c][v]), delta = lp - reported[c][v]
      const w = tisWeight(delta, state.tis, state.cap)
      out.gap += q * Math.abs(delta) / n
      out.k3 += q * (Math.expm1(delta) - delta) / n
      out.f2 += q * (Math.abs(delta) > Math.LN2) / n
      out.changed += q * (state.tis !== 'off' && w !== Math.exp(delta)) / n
      const A = +(v === 0) - p[0]
      p.forEach((x, u) => { got[u] += q * w * A * (+(u === v) - x) })
    })
    p.forEach((x, u) => {
      const right = x * (+(u === 0) - p[0]) // by hand: the derivative of p[0]
      dot += right * got[u]
      mine += got[u] ** 2
      exact += right ** 2
    })
  })
  return { ...out, cosine: mine ? dot / Math.sqrt(mine * exact) : 0, size: Math.sqrt(mine / exact) }
}

// ---- the lab

const normal = normals(1)
const table = (size, f) => Array.from({ length: 24 }, (_, c) => Array.from({ length: 6 }, (_, v) => size * f(c, v)))
export const LOGITS = table(2.5, normal)
export const DRIFT = table(0.25, (c, v) => c % 4 ? 0 : +(v === 0) - 0.2 * normal()) // some contexts learn

const FAULTS = {
  'coarse numbers': { format: 'e4m3' },
  'raw temperature': { temperature: 0.7, raw: true },
  'old weights': { stale: 4 },
  'no fault': {},
}
const SOUND = { format: 'fp32', temperature: 1, raw: false, stale: 0, tis: 'off', cap: 2 }
const LOOKS = `
.lab .two { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .6rem 1rem; }
.lab .two svg { max-width: 20rem; }
.lab table.facts { align-self: center; border-collapse: collapse; width: 100%; font-size: 13px; color: inherit; }
.lab table.facts td { padding: .15rem .3rem; border-bottom: 1px solid var(--line); color: var(--ink);
  background: var(--paper); text-align: left; }
.lab table.facts td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.lab .dot { fill: var(--hot); fill-opacity: .65; }
.lab .same { stroke: var(--quiet); stroke-width: 1; }
`
const WORDS = {
  gap: 'mean |gap|, nats', k3: 'k3', f2: 'ratios beyond 2', changed: 'weights cut by TIS',
  cosine: 'gradient: cosine', size: 'gradient: length',
}

// Every context and token: what the rollout reports across, what training computes upwards
function cloud(state) {
  const { train, sampled, reported } = engines(state), low = -8
  const at = x => 200 * (1 - Math.max(x, low) / low)
  const dots = train.flatMap((row, c) => row.map((y, v) => drawn('circle', { class: 'dot',
    cx: at(reported[c][v]), cy: 200 - at(y), r: 1 + 4 * Math.sqrt(Math.exp(sampled[c][v])) })))
  return drawn('svg', { viewBox: '-14 -6 222 226', role: 'img',
    'aria-label': 'Each dot a token: reported log-probability across, that of training upwards' },
    drawn('line', { x1: 0, y1: 200, x2: 200, y2: 0, class: 'same' }), ...dots,
    drawn('text', { x: 100, y: 216, 'text-anchor': 'middle' }, 'log-prob reported by the rollout'),
    drawn('text', { x: -100, y: -4, 'text-anchor': 'middle', transform: 'rotate(-90)' }, 'of training'))
}

function render({ el }) {
  const settings = { ...SOUND }
  let hidden = null
  const facts = Object.fromEntries(Object.keys(WORDS).map(k => [k, h('td', { class: k })]))
  const picture = h('div'), line = h('p', { class: 'said', 'aria-live': 'polite' })

  function draw() {
    const state = { ...settings, ...(hidden && FAULTS[hidden]), logits: LOGITS, drift: DRIFT }
    const found = measures(state)
    for (const [k, cell] of Object.entries(facts)) cell.textContent = shown(+found[k].toFixed(12), 4)
    picture.replaceChildren(cloud(state))
  }

  const set = key => x => { settings[key] = x; draw() }
  const format = choice('Rollout computes in', { fp32: 'FP32', bf16: 'BF16', e4m3: 'e4m3' }, 'fp32', set('format'))
  const heat = slider('temperature', { min: 0.5, max: 1.5, step: 0.05, value: 1 }, set('temperature'))
  const raw = toggle('reports without temperature', false, set('raw'))
  const stale = slider('steps behind', { min: 0, max: 8, step: 1, value: 0 }, set('stale'))
  const tis = choice('TIS', { off: 'off', truncate: 'truncate', mask: 'mask' }, 'off', set('tis'))
  const cap = slider('cap', { min: 1, max: 5, step: 0.1, value: 2 }, set('cap'))
  const knobs = h('div', {}, h('div', { class: 'knobs' }, format.row),
    h('div', { class: 'knobs' }, heat.box, raw, stale.box))
  const guesses = h('div', { class: 'knobs', hidden: '', style: 'margin:.6rem 0 0' },
    ...Object.keys(FAULTS).map(name => button(name, () => answer(name))))

  function challenge() {
    const names = Object.keys(FAULTS)
    hidden = names[Math.floor(Math.random() * names.length)]
    Object.assign(settings, SOUND, { tis: settings.tis, cap: settings.cap })
    knobs.hidden = true
    guesses.hidden = false
    line.textContent = 'Something may be wrong with the rollout. What is it?'
    draw()
  }

  function answer(name) {
    line.textContent = name === hidden ? `Right: ${hidden}.` : `No: it was "${hidden}".`
    hidden = null
    knobs.hidden = false
    guesses.hidden = true
    format.press('fp32')
    heat.set(1)
    stale.set(0)
    raw.setAttribute('aria-pressed', 'false')
    draw()
  }

  draw()
  show(el, 'Mismatch lab', h('style', {}, LOOKS), knobs, h('div', { class: 'knobs' }, tis.row, cap.box),
    h('div', { class: 'two' }, picture, h('table', { class: 'facts' },
      ...Object.entries(WORDS).map(([k, text]) => h('tr', {}, h('td', {}, text), facts[k])))),
    h('div', { class: 'knobs', style: 'margin:.6rem 0 0' }, button('Hide a fault', challenge)), guesses, line)
}

export default { render }
