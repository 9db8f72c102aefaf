// Clip lab: which tokens of a response lose their gradient, by five losses at once
import { button, choice, h, show, shown, slider } from './shared.js'

// ---- mathematics: compassrl.algo.losses and compassrl.algo.losses.espo for one response

// clip_eps_low and clip_eps_high of each paper; ESPO's depend on the entropies
export const CLIPS = { grpo: [0.2, 0.2], dapo: [0.2, 0.28], gspo: [3e-4, 4e-4], cispo: [1, 4] }

const mean = x => x.reduce((a, b) => a + b, 0) / x.length

// 0 for the uncertain tokens, 1 for the others; of equal entropies the earlier is the higher
export function entropyGroups(entropy, topFrac) {
  const order = entropy.map((_, i) => i).sort((a, b) => entropy[b] - entropy[a] || a - b)
  const top = Math.ceil(entropy.length * topFrac - 1e-9)
  const groups = entropy.map(() => 1)
  order.slice(0, top).forEach(i => { groups[i] = 0 })
  return groups
}

// Per token: its ratio, its range, its weight in the average
function views(name, { delta, entropy, alpha, topFrac, vocab, epsMin }) {
  const n = delta.length
  if (name !== 'espo') {
    const [low, high] = CLIPS[name], whole = mean(delta)
    return delta.map(d => ({ ratio: Math.exp(name === 'gspo' ? whole : d), low, high, weight: 1 / n }))
  }
  const groups = entropyGroups(entropy, topFrac), used = new Set(groups).size
  return delta.map((_, t) => {
    const mine = x => x.filter((_, i) => groups[i] === groups[t])
    const eps = Math.max(alpha / Math.log(vocab) * mean(mine(entropy)), epsMin)
    const weight = 1 / (used * mine(delta).length)
    return { ratio: Math.exp(mean(mine(delta))), low: eps, high: eps, weight, group: groups[t] }
  })
}

// ... and whether it is silent (has no gradient), and the loss's derivative by its log-probability
export function tokens(name, state) {
  const A = state.advantage
  return views(name, state).map(v => {
    const below = v.ratio < 1 - v.low, above = v.ratio > 1 + v.high
    const silent = name !== 'cispo' && ((A < 0 && below) || (A > 0 && above))
    const pull = name === 'cispo' ? Math.min(Math.max(v.ratio, 1 - v.low), 1 + v.high) : v.ratio
    return { ...v, silent, gradient: silent ? 0 : -A * pull * v.weight }
  })
}

// The place of a handle, -1 to 1, as a log-ratio: fine near 0, so that all ranges can be seen
export const stretch = x => Math.sign(x) * 5e-5 * (10 ** (4 * Math.abs(x)) - 1)
export const place = d => Math.sign(d) * Math.log10(Math.abs(d) / 5e-5 + 1) / 4

// ---- the lab

const TEXT = ['3', '+', '4', '=', 'so', '7', '.', '∎']
const NAMES = { grpo: 'GRPO', dapo: 'DAPO', gspo: 'GSPO', cispo: 'CISPO', espo: 'ESPO' }
const ENTROPY = [0.2, 0.1, 0.6, 0.02, 2.6, 1.4, 0.3, 0.05]
const PRESETS = {
  'One outlier token': [0, 0, 0, 0, 0.3, 0, 0, 0],
  'All a little': ENTROPY.map(() => 0.01),
  'The unsure move': ENTROPY.map(x => x > 1 ? 0.1 : 1e-4),
  'Rounding noise': [0.004, -0.002, 0.003, -0.004, 0.002, -0.003, 0.004, -0.001],
}
const LOOKS = `
.lab .strip { display: grid; grid-template-columns: 3.6rem repeat(8, minmax(0, 1fr)); gap: 2px;
  align-items: center; text-align: center; }
.lab .strip > :nth-child(9n + 1) { text-align: left; }
.lab .strip .mono { font-family: "JetBrains Mono", ui-monospace, monospace; }
.lab .strip .number { font-size: 10.5px; white-space: nowrap; }
.lab .strip input { writing-mode: vertical-lr; direction: rtl; height: 6.5rem; width: 1.5rem;
  justify-self: center; }
.lab .strip .cell { height: 1.9rem; border-radius: 4px; display: grid; place-items: center;
  background: var(--pull); color: var(--ink); }
.lab .strip .cell.silent { background: var(--off); color: var(--on-off); }
.lab .strip button { padding: 0 .2rem; width: 100%; font-size: 12px; }
`
const START = { alpha: 0.02, topFrac: 0.25, vocab: 100, epsMin: 3e-4, advantage: 1 }

// What a loss looks at, in words
function said(name, state) {
  const all = tokens(name, state), t = all[0]
  const range = v => `${shown(1 - v.low, 5)} to ${shown(1 + v.high, 5)}`
  const dead = all.filter(v => v.silent).length, end = `Without a gradient: ${dead} of ${all.length} tokens.`
  if (name === 'gspo') return `One ratio for the whole response, ${shown(t.ratio, 5)}, in a range of ${range(t)}. ${end}`
  if (name === 'cispo') return `A ratio per token is a weight, at most ${1 + t.high}. ${end}`
  if (name !== 'espo') return `A ratio per token, each in a range of ${range(t)}. ${end}`
  const groups = [0, 1].map(g => all.filter(v => v.group === g)).filter(x => x.length)
  const many = x => groups.length < 2 ? `All ${x.length}` : `${x.length} ${x[0].group ? 'sure' : 'unsure'}`
  const parts = groups.map(x =>
    `${many(x)}: ratio ${shown(x[0].ratio, 5)}, range ${range(x[0])}`)
  return `A ratio per group. ${parts.join('; ')}. ${end}`
}

function column(label, changed, value, max, min) {
  const step = (max - min) / 200
  return TEXT.map((t, i) => {
    const input = h('input', { type: 'range', min, max, step, value: value[i],
      'aria-label': `${label} of token ${i + 1}, ${t}`, input: () => changed(i, +input.value) })
    return input
  })
}

function render({ el }) {
  const state = { ...START, entropy: [...ENTROPY], delta: [...PRESETS['One outlier token']] }
  let chosen = 'espo'
  const entropies = column('entropy', (i, x) => { state.entropy[i] = x; draw() }, ENTROPY, 4.6, 0)
  const ratios = column('log-ratio', (i, x) => { state.delta[i] = stretch(x); draw() },
    state.delta.map(place), 1, -1)
  const numbers = () => TEXT.map(() => h('span', { class: 'number' }))
  const [nats, moved] = [numbers(), numbers()]
  const rows = Object.entries(NAMES).map(([name, text]) => ({
    name,
    label: h('button', { type: 'button', click: () => { chosen = name; draw() } }, text),
    cells: TEXT.map(() => h('span', { class: 'cell', role: 'img' })),
  }))
  const line = h('p', { class: 'said', 'aria-live': 'polite' })

  function draw() {
    nats.forEach((e, i) => { e.textContent = state.entropy[i].toFixed(1) })
    moved.forEach((e, i) => {
      e.textContent = shown(state.delta[i], Math.abs(state.delta[i]) < 1e-3 ? 1 : 2)
      e.title = state.delta[i]
    })
    for (const { name, label, cells } of rows) {
      label.setAttribute('aria-pressed', String(name === chosen))
      tokens(name, state).forEach((v, i) => {
        cells[i].className = v.silent ? 'cell silent' : 'cell'
        cells[i].textContent = v.silent ? '×' : v.gradient < 0 ? '▲' : '▼'
        cells[i].title = v.silent ? 'no gradient' : `gradient ${shown(v.gradient, 4)}`
        cells[i].setAttribute('aria-label', cells[i].title)
      })
    }
    line.textContent = `${NAMES[chosen]}. ${said(chosen, state)}`
  }

  // Everything as at first, but for the log-ratios
  const presets = Object.entries(PRESETS).map(([name, delta]) => button(name, () => {
    Object.assign(state, START, { delta: [...delta], entropy: [...ENTROPY] })
    sign.press(String(START.advantage))
    ratios.forEach((input, i) => { input.value = place(delta[i]) })
    entropies.forEach((input, i) => { input.value = ENTROPY[i] })
    alpha.set(START.alpha)
    top.set(START.topFrac)
    draw()
  }))
  const sign = choice('The response is', { 1: 'good, A = +1', '-1': 'bad, A = −1' }, '1',
    key => { state.advantage = +key; draw() })
  const alpha = slider('ESPO: alpha', { min: 0, max: 0.4, step: 0.005, value: START.alpha },
    x => { state.alpha = x; draw() })
  const top = slider('ESPO: top_frac', { min: 0.125, max: 1, step: 0.125, value: START.topFrac },
    x => { state.topFrac = x; draw() })
  const head = text => h('span', { class: 'quiet' }, text)
  show(el, 'Clip lab', h('style', {}, LOOKS),
    h('div', { class: 'knobs' }, ...presets), h('div', { class: 'knobs' }, sign.row),
    h('div', { class: 'strip' },
      head('token'), ...TEXT.map(t => h('span', { class: 'mono' }, t)),
      head('entropy'), ...entropies, head('nats'), ...nats,
      head('log-ratio'), ...ratios, head('moved'), ...moved,
      ...rows.flatMap(r => [r.label, ...r.cells])),
    line,
    h('p', { class: 'quiet' }, '▲ raised, ▼ lowered, × no gradient. A name says what its loss looks at.'),
    h('div', { class: 'knobs', style: 'margin:.6rem 0 0' }, alpha.box, top.box))
  draw()
}

export default { render }
