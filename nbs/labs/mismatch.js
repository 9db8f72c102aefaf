// Mismatch lab: one mixture of experts in two engines, and what their log-probabilities disagree on
import { button, choice, drawn, h, normals, rounded, show, shown, slider, toggle } from './shared.js'

// ---- mathematics: a mixture of experts gives each context a logit per token; expectations are
// exact, not sampled

export function logSoftmax(logits, temperature = 1) {
  const x = logits.map(v => v / temperature), top = Math.max(...x)
  const all = Math.log(x.reduce((a, v) => a + Math.exp(v - top), 0))
  return x.map(v => v - top - all)
}

// The experts with the highest scores, in ascending order; of equal ones the first
export const choose = (scores, top) => scores.map((_, e) => e)
  .sort((a, b) => scores[b] - scores[a] || a - b).slice(0, top).sort((a, b) => a - b)

// Logits of a context: its own, and those of the experts `ids`, weighed by a softmax of the scores
export function mixture(own, scores, experts, ids) {
  const gates = logSoftmax(ids.map(e => scores[e])).map(Math.exp)
  return own.map((x, v) => x + ids.reduce((a, e, k) => a + gates[k] * experts[e][v], 0))
}

// What the rollout recorded of its routes ('late': each is given to the next context), what the
// trainer's own router takes, and what the trainer uses
export function routes({ scores, top, routes: mode }, chosen) {
  const recorded = mode === 'late' ? chosen.map((_, c) => chosen.at(c - 1)) : chosen
  const own = scores.map(row => choose(row, top))
  return { recorded, own, used: mode === 'live' ? own : recorded }
}

const equal = (a, b) => a.every((e, k) => e === b[k])

// Both engines: what training computes, what really was sampled, what the rollout says of it; in
// which contexts the trainer's router agrees with the record, and where other experts are used
export function engines(state) {
  const { logits, drift, scores, turn, experts, top, stale, format, temperature, raw } = state
  const kept = (now, change) =>
    now.map((row, c) => row.map((x, i) => rounded(x - stale * change[c][i], format)))
  const oldScores = kept(scores, turn), chosen = oldScores.map(row => choose(row, top))
  const coarse = experts.map(own => own.map(row => row.map(x => rounded(x, format))))
  const old = kept(logits, drift).map((row, c) =>
    mixture(row, oldScores[c], coarse[c], chosen[c]))
  const { recorded, own, used } = routes(state, chosen)
  const sampled = old.map(row => logSoftmax(row, temperature))
  return {
    train: logits.map((row, c) =>
      logSoftmax(mixture(row, scores[c], experts[c], used[c]), temperature)),
    sampled,
    reported: raw ? old.map(row => logSoftmax(row)) : sampled,
    agree: own.map((ids, c) => equal(ids, recorded[c])),
    other: used.map((ids, c) => !equal(ids, chosen[c])),
  }
}

export function tisWeight(delta, kind, cap, low = 0.5) {
  const rho = Math.exp(Math.min(Math.max(delta, -20), 20))
  if (kind === 'off') return 1
  if (kind === 'truncate') return Math.min(rho, cap)
  return rho < low || rho > cap ? 0 : rho
}

// Mean gap, k3, share of ratios beyond 2, share of contexts whose routes agree, and how near the
// expected gradient is to the true one. The first token of a context is right: it earns 1
export function measures(state) {
  const { train, sampled, reported, agree } = engines(state), n = train.length
  const out = { gap: 0, k3: 0, f2: 0, agree: agree.filter(x => x).length / n, changed: 0 }
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
const CONTEXTS = 24, TOKENS = 6, EXPERTS = 4
const table = (width, f) => Array.from({ length: CONTEXTS },
  (_, c) => Array.from({ length: width }, (_, i) => f(c, i)))
const learns = (c, i) => c % 4 ? 0 : 0.25 * (+(i === 0) - 0.2 * normal())
// in every sixth context the experts 1 and 2 are nearly equal
const near = [() => 1.5, x => 1 + 0.05 * x, x => 1.001 + 0.05 * x, () => -2]

function world() {
  const logits = table(TOKENS, () => 2.2 * normal()), drift = table(TOKENS, learns)
  const scores = table(EXPERTS, normal), turn = table(EXPERTS, learns)
  scores.forEach((row, c) => c % 6 === 2 && scores.splice(c, 1, near.map(f => f(row[0]))))
  const experts = table(EXPERTS, () => Array.from({ length: TOKENS }, () => 1.5 * normal()))
  return { logits, drift, scores, turn, experts, top: 2 }
}
export const WORLD = world()

const SOUND = { format: 'fp32', temperature: 1, raw: false, stale: 0, routes: 'live',
  tis: 'off', cap: 2 }
// a fault is hidden in a run as it often is: BF16 while sampling, and replayed routes
const RUN = { format: 'bf16', routes: 'replayed' }
export const FAULTS = {
  'e4m3': { format: 'e4m3' },
  'reports without temperature': { temperature: 0.7, raw: true },
  'steps behind': { stale: 4 },
  'live routes': { routes: 'live' },
  'routes one late': { routes: 'late' },
  'no fault': {},
}
// By what one knows it
const SIGNS = {
  'e4m3': 'then all dots lie a little off the line, and none lies far off',
  'reports without temperature': 'then the dots form a line of another slope',
  'steps behind': 'then more contexts lie off the line than have other routes, and the cosine of the gradient falls',
  'live routes': 'then the dots of the few contexts with other routes lie off the line, and no others',
  'routes one late': 'then the router agrees with hardly any list, and the dots lie everywhere',
  'no fault': 'then all dots lie on the line',
}
const LOOKS = `
.lab .two { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .6rem 1rem; }
.lab .two svg { max-width: 20rem; }
.lab table.facts { align-self: center; border-collapse: collapse; width: 100%; font-size: 13px; color: inherit; }
.lab table.facts td { padding: .15rem .3rem; border-bottom: 1px solid var(--line); color: var(--ink);
  background: var(--paper); text-align: left; }
.lab table.facts td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.lab .dot { fill: var(--cool); fill-opacity: .65; }
.lab .dot.other { fill: var(--hot); }
.lab .same { stroke: var(--quiet); stroke-width: 1; }
`
const WORDS = {
  gap: 'mean |gap|, nats', k3: 'k3', f2: 'ratios beyond 2', agree: 'router agrees with the list',
  changed: 'weights cut by TIS',
  cosine: 'gradient: cosine', size: 'gradient: length',
}

// Every context and token: what the rollout reports across, what training computes upwards
function cloud(state, tells) {
  const { train, sampled, reported, other } = engines(state), low = -8
  const at = x => 200 * (1 - Math.max(x, low) / low)
  const looks = c => tells && other[c] ? 'dot other' : 'dot'
  const dots = train.flatMap((row, c) => row.map((y, v) => drawn('circle', { class: looks(c),
    cx: at(reported[c][v]), cy: 200 - at(y), r: 1 + 4 * Math.sqrt(Math.exp(sampled[c][v])) })))
  return drawn('svg', { viewBox: '-32 -8 244 240', role: 'img',
    'aria-label': 'Each dot a token: reported log-probability across, that of training upwards' },
    drawn('line', { x1: 0, y1: 200, x2: 200, y2: 0, class: 'same' }), ...dots,
    ...[-8, -4, 0].flatMap(x => [
      drawn('line', { x1: at(x), x2: at(x), y1: 200, y2: 203, class: 'same' }),
      drawn('line', { x1: -3, x2: 0, y1: 200 - at(x), y2: 200 - at(x), class: 'same' }),
      drawn('text', { x: at(x), y: 212, 'text-anchor': 'middle' }, shown(x)),
      drawn('text', { x: -5, y: 204 - at(x), 'text-anchor': 'end' }, shown(x))]),
    drawn('text', { x: 100, y: 228, 'text-anchor': 'middle' }, 'log-prob reported by the rollout'),
    drawn('text', { x: -100, y: -20, 'text-anchor': 'middle', transform: 'rotate(-90)' },
      'log-prob in training'))
}

function render({ el }) {
  const settings = { ...SOUND, format: 'bf16' } // two engines that disagree a little
  let hidden = null
  const facts = Object.fromEntries(Object.keys(WORDS).map(k => [k, h('td', { class: k })]))
  const picture = h('div'), line = h('p', { class: 'said', 'aria-live': 'polite' })

  function draw() {
    const state = { ...WORLD, ...settings, ...(hidden && { ...RUN, ...FAULTS[hidden] }) }
    const found = measures(state)
    for (const [k, cell] of Object.entries(facts)) cell.textContent = shown(+found[k].toFixed(12), 4)
    picture.replaceChildren(cloud(state, !hidden))
  }

  const set = key => x => { settings[key] = x; draw() }
  const format = choice('Rollout computes in', { fp32: 'FP32', bf16: 'BF16', e4m3: 'e4m3' },
    'bf16', set('format'))
  const heat = slider('temperature', { min: 0.5, max: 1.5, step: 0.05, value: 1 }, set('temperature'))
  const raw = toggle('reports without temperature', false, set('raw'))
  const stale = slider('steps behind', { min: 0, max: 8, step: 1, value: 0 }, set('stale'))
  const sent = choice('Routes', { live: 'live', replayed: 'replayed (R3)', late: 'one late' },
    'live', set('routes'))
  const tis = choice('TIS', { off: 'off', truncate: 'truncate', mask: 'mask' }, 'off', set('tis'))
  const cap = slider('cap', { min: 1, max: 5, step: 0.1, value: 2 }, set('cap'))
  const knobs = h('div', {}, h('div', { class: 'knobs' }, format.row),
    h('div', { class: 'knobs' }, heat.box, raw, stale.box), h('div', { class: 'knobs' }, sent.row))
  const guesses = h('div', { class: 'knobs', hidden: '', style: 'margin:.6rem 0 0' },
    ...Object.keys(FAULTS).map(name => button(name, () => answer(name))))

  function challenge() {
    const names = Object.keys(FAULTS)
    hidden = names[Math.floor(Math.random() * names.length)]
    Object.assign(settings, SOUND, { tis: settings.tis, cap: settings.cap })
    knobs.hidden = true
    guesses.hidden = false
    line.textContent = 'The rollout computes in BF16, and training replays its routes. So it should '
      + 'be, but something may be wrong. What is it?'
    draw()
  }

  function answer(name) {
    if (name !== hidden) {
      line.textContent = `Not "${name}": ${SIGNS[name]}. Try another.`
      return
    }
    line.textContent = `Right, ${hidden}: ${SIGNS[hidden]}. The controls now show this run.`
    Object.assign(settings, RUN, FAULTS[hidden]) // what was guessed stays in view
    hidden = null
    knobs.hidden = false
    guesses.hidden = true
    format.press(settings.format)
    sent.press(settings.routes)
    heat.set(settings.temperature)
    stale.set(settings.stale)
    raw.setAttribute('aria-pressed', String(settings.raw))
    draw()
  }

  draw()
  show(el, 'Mismatch lab', h('style', {}, LOOKS), knobs, h('div', { class: 'knobs' }, tis.row, cap.box),
    h('div', { class: 'two' }, picture, h('table', { class: 'facts' },
      ...Object.entries(WORDS).map(([k, text]) => h('tr', {}, h('td', {}, text), facts[k])))),
    h('div', { class: 'knobs', style: 'margin:.6rem 0 0' }, button('Hide a fault', challenge)),
    guesses, line,
    h('p', { class: 'quiet' }, 'A dot is a token of a context, larger if it is likelier. Orange: '
      + 'training used other experts than the rollout. Dots below −8 are drawn on the border. '
      + 'While a fault is hidden no dot is orange.'))
}

export default { render }
