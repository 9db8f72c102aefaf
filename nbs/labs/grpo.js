// GRPO in a hundred lines: a policy with 64 responses, sampled, judged and moved in the page
import { button, choice, drawn, h, random, show, shown, slider } from './shared.js'

// ---- mathematics: a table of logits, one row of four for each beginning of a response

export const START = () => Array.from({ length: 21 }, () => [0, 0, 0, 0])
export const RESPONSES = Array.from({ length: 64 }, (_, i) => [i >> 4, (i >> 2) & 3, i & 3])
export const TASKS = {
  rising: y => +(y[0] <= y[1] && y[1] <= y[2]),
  three: y => +y.includes(3),
  constant: () => 1,
}

// The rows of the table that a response passes through
const rows = y => [0, 1 + y[0], 5 + 4 * y[0] + y[1]]

function softmax(logits) {
  const top = Math.max(...logits), e = logits.map(x => Math.exp(x - top))
  const all = e.reduce((a, b) => a + b)
  return e.map(x => x / all)
}

// The probability of each of the 64 responses
export function probabilities(theta) {
  const p = theta.map(softmax)
  return RESPONSES.map(y => rows(y).reduce((all, s, t) => all * p[s][y[t]], 1))
}

// Exact: no sampling
export const expectedReward = (theta, task) =>
  probabilities(theta).reduce((all, p, i) => all + p * TASKS[task](RESPONSES[i]), 0)

const mean = x => x.reduce((a, b) => a + b, 0) / x.length

// Mean, unbiased std, and the advantage of each reward by a formula of r, mean and std
export function advantages(rewards, formula) {
  const m = mean(rewards)
  const std = Math.sqrt(rewards.reduce((a, r) => a + (r - m) ** 2, 0) / (rewards.length - 1)) + 1e-6
  return rewards.map(r => formula(r, m, std))
}

// One step down GRPO's loss. Sampled just now, every ratio is 1, so nothing is clipped
export function step(theta, picks, A, lr) {
  const p = theta.map(softmax), next = theta.map(row => [...row])
  picks.forEach((pick, i) => rows(RESPONSES[pick]).forEach((s, t) => {
    const share = lr * A[i] / (3 * picks.length) // three tokens, the mean over responses
    next[s].forEach((_, v) => { next[s][v] += share * (+(v === RESPONSES[pick][t]) - p[s][v]) })
  }))
  return { theta: next, loss: -mean(A) }
}

export function sample(theta, n, draw) {
  const p = probabilities(theta)
  return Array.from({ length: n }, () => {
    let left = draw(), i = 0
    while (i < 63 && left >= p[i]) left -= p[i++]
    return i
  })
}

// ---- the lab

const FORMULAS = ['(r - mean) / std', 'r - mean', 'r', '(mean - r) / std']
const GROUP = 'last group: response and its advantage'
const LOOKS = `
.lab .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .6rem 1rem; }
.lab .pair.one { max-width: 27rem; }
.lab .chips { display: flex; flex-wrap: wrap; gap: 3px; margin: .5rem 0; min-height: 1.6rem; }
.lab .chips span { font: 11px "JetBrains Mono", ui-monospace, monospace; padding: .1rem .3rem; border-radius: 4px;
  background: var(--off); color: var(--on-off); }
.lab .chips i { font-style: normal; margin-right: .4rem; }
.lab .chips span.right { background: var(--pull); color: var(--ink); }
.lab input[type="text"] { font: 13px "JetBrains Mono", ui-monospace, monospace; width: 12rem; padding: .2rem .4rem;
  color: var(--ink); background: var(--paper); border: 1px solid var(--quiet); border-radius: 6px; }
.lab .fault { color: var(--hot); }
.lab .right { fill: var(--cool); }
.lab .wrong { fill: var(--quiet); }
.lab .curve { fill: none; stroke-width: 2; }
.lab .gain { stroke: var(--cool); }
.lab .cost { stroke: var(--quiet); }
.lab circle.gain { fill: var(--cool); }
.lab circle.cost { fill: var(--quiet); }
.lab .axis { position: relative; padding-right: 2.2rem; }
.lab .axis span { position: absolute; right: 0; width: 2rem; font-size: 11px; line-height: 1; }
.lab .axis span:first-child { top: 7%; }
.lab .axis span:nth-child(2) { bottom: 7%; }
.lab .frame { stroke: var(--line); stroke-width: 1; }
.lab .even { stroke: var(--quiet); stroke-dasharray: 2 3; vector-effect: non-scaling-stroke; }
.lab .named { position: relative; padding-top: 18px; }
.lab .named b { position: absolute; top: 2px; transform: translateX(-50%); white-space: nowrap;
  font: 12px/1.2 "JetBrains Mono", ui-monospace, monospace; }
.lab .named { padding-bottom: 15px; }
.lab .named i { position: absolute; bottom: 0; padding-left: 3px; border-left: 1px solid var(--quiet);
  color: var(--quiet); font: 11px/1.2 "JetBrains Mono", ui-monospace, monospace; }
.lab[data-plays] .named { padding-bottom: 0; }
.lab[data-plays] .named i { display: none; }
.lab[data-plays] .pair { grid-template-columns: 1fr 1fr; }
.lab[data-plays] .bars { height: 77px; }
.lab[data-plays] .chips { height: 37px; min-height: 0; overflow: hidden; }
@media (max-width: 500px) {
  .lab[data-plays] .chips { height: 19px; }
  .lab[data-plays] .chips i { display: none; }
  .lab[data-plays] .bars { height: 51px; }
  .lab[data-plays] .knobs { gap: .25rem .4rem; }
  .lab[data-plays] .knobs button { padding: .1rem .35rem; min-height: 1.6rem; }
}
.lab[data-plays] .bench > .knobs { margin: .4rem 0 0; }
.lab[data-plays] > .bench { margin-bottom: .6rem; }
`

// Where the axis of a curve ends: at 1, 2 or 5 times a power of ten, so that all values fit
export function reach(values) {
  const most = Math.max(1, ...values.map(Math.abs).filter(Number.isFinite))
  const unit = 10 ** Math.floor(Math.log10(most))
  return unit * [1, 2, 5, 10].find(n => n * unit >= most)
}

// A curve over steps, between two values; the loss begins one step late, as it has no step 0
function curve(values, low, high, looks, from = 0) {
  const [w, tall] = [260, 70], n = Math.max(values.length - 1 + from, 20)
  const y = v => tall - tall * (Math.min(Math.max(v, low), high) - low) / (high - low)
  const points = values.map((v, i) => `${(w * (i + from) / n).toFixed(1)},${y(v).toFixed(1)}`).join(' ')
  const level = v => drawn('line', { x1: 0, x2: w, y1: y(v), y2: y(v), class: 'frame' })
  const [x, at] = points.split(' ').at(-1).split(',')
  const now = values.length ? [drawn('circle', { cx: x, cy: at, r: 3, class: looks })] : []
  return h('div', { class: 'axis' }, h('span', {}, shown(high)), h('span', {}, shown(low)),
    drawn('svg', { viewBox: `0 -8 ${w + 4} ${tall + 16}`, 'aria-hidden': 'true' },
      level(low), level(high), drawn('polyline', { points, class: `curve ${looks}` }), ...now))
}

// The 64 probabilities, in the order of the responses, and above the tallest bar its response and its probability
function distribution(theta, task) {
  const p = probabilities(theta), most = Math.max(...p), top = Math.max(most, 0.05), i = p.indexOf(most)
  const name = i => RESPONSES[i].join(''), y = x => 70 - 68 * x / top
  const bars = drawn('svg', { viewBox: '0 0 320 74', class: 'bars', preserveAspectRatio: 'none',
    'aria-hidden': 'true' },
    ...p.map((x, i) => drawn('rect', { x: 5 * i, width: 4, y: y(x), height: 68 * x / top,
      class: TASKS[task](RESPONSES[i]) ? 'right' : 'wrong' },
      drawn('title', {}, `${name(i)}: ${shown(x)}`))),
    drawn('line', { x1: 0, x2: 320, y1: y(1 / 64), y2: y(1 / 64), class: 'even' }))
  const leads = most > Math.min(...p) * 1.001 // before the first step no bar is the tallest
  const at = `left: clamp(2.3rem, ${(5 * i + 2) / 3.2}%, calc(100% - 2.3rem))` // within the picture
  const said = most < 0.995 ? most.toFixed(2) : '> 0.99' // it is never 1
  const begins = [0, 16, 32, 48].map(i => h('i', { style: `left: ${i / 0.64}%`, 'aria-hidden': 'true' }, name(i)))
  return h('div', { class: 'named' }, ...(leads ? [h('b', { style: at }, `${name(i)}: ${said}`)] : []), bars,
    ...begins)
}

function render({ el, model }) {
  const begin = model?.get('begin') ?? el.dataset // where a lesson lets its lab begin
  const settings = { task: 'rising', size: 16, lr: +(begin.lr ?? 2) }
  const losing = +(begin.loss ?? 1) !== 0 // loss=0: a lesson before that of this loss leaves it out
  const first = el.dataset.plays === 'once' // on the front page: what moves stands above the knobs
  let run, timer = 0
  const input = h('input', { type: 'text', 'aria-label': 'advantage', spellcheck: 'false',
    input: () => { stop(); draw() } })
  input.value = begin.formula ?? FORMULAS[0]
  const fault = h('span', { class: 'fault', role: 'status' })
  const [bars, reward, loss] = [0, 1, 2].map(() => h('div')), chips = h('div', { class: 'chips' })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })

  function reset() {
    stop()
    run = { theta: START(), draw: random(0), picks: [], A: [], losses: [], silent: 0 }
    run.rewards = [expectedReward(run.theta, settings.task)]
    draw()
  }

  // The advantage that stands in the line; null where it is no formula
  function formula() {
    try {
      const f = new Function('r', 'mean', 'std', `return ${input.value}`)
      return Number.isFinite(f(1, 0.5, 0.5)) ? f : null
    } catch {
      return null
    }
  }

  function once() {
    const f = formula()
    if (!f) return stop()
    run.picks = sample(run.theta, settings.size, run.draw)
    const r = run.picks.map(i => TASKS[settings.task](RESPONSES[i]))
    run.A = advantages(r, f)
    run.silent += r.every(x => x === r[0])
    const { theta, loss } = step(run.theta, run.picks, run.A, settings.lr)
    Object.assign(run, { theta, losses: [...run.losses, loss] })
    run.rewards.push(expectedReward(theta, settings.task))
    draw()
  }

  function stop() {
    clearInterval(timer)
  }

  function several(left = 20) {
    stop()
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) while (left--) once()
    else timer = setInterval(() => left-- > 1 ? once() : (stop(), once()), 120)
  }

  function draw() {
    bars.replaceChildren(distribution(run.theta, settings.task))
    const named = first && run.picks.length ? [h('i', { class: 'quiet' }, GROUP)] : []
    chips.replaceChildren(...named, ...run.picks.map((i, k) => {
      const right = TASKS[settings.task](RESPONSES[i])
      return h('span', { class: right ? 'right' : '' }, `${RESPONSES[i].join('')} ${run.A[k].toFixed(2).replace('-', '−')}`)
    }))
    reward.replaceChildren('expected reward', curve(run.rewards, 0, 1, 'gain'))
    const end = reach(run.losses)
    if (losing) loss.replaceChildren('loss', curve(run.losses, -end, end, 'cost', 1))
    fault.textContent = formula() ? '' : 'This is not a formula in r, mean and std.'
    for (const b of presets) b.setAttribute('aria-pressed', String(b.textContent === input.value))
    line.textContent = `Step ${run.losses.length}: expected reward ${run.rewards.at(-1).toFixed(4)}`
      + (losing && run.losses.length
        ? `, loss ${run.losses.at(-1).toFixed(6).replace(/^-(0\.0+)$/, '$1')}.` : '.')
      + (losing && !first && run.losses.length // the first screen is full
        ? ` Silent steps (all rewards equal): ${run.silent} of ${run.losses.length}.` : '')
  }

  const tasks = choice('Reward 1 if', { rising: 'digits never fall', three: 'there is a 3',
    constant: 'always' }, 'rising', key => { settings.task = key; reset() })
  const size = slider('group', { min: 2, max: 32, step: 1, value: 16 }, x => { settings.size = x })
  const lr = slider('learning rate', { min: 0.5, max: 20, step: 0.5, value: settings.lr },
    x => { settings.lr = x })
  const presets = FORMULAS.slice(0, first ? 3 : 4).map(text => button(text, () => { input.value = text; stop(); draw() }))
  reset()
  const knobs = [h('div', { class: 'knobs' }, tasks.row),
    h('div', { class: 'knobs' }, h('label', {}, 'advantage =', input), ...presets, fault),
    h('div', { class: 'knobs' }, size.box, lr.box),
    h('div', { class: 'knobs' }, button('Step', () => { stop(); once() }),
      button('Run 20', () => several()), button('Start again', reset))]
  const views = [h('div', {}, first ? 'The 64 responses: height is probability, right ones in colour'
    : 'The probability of each of the 64 responses, 000 to 333; right ones in colour; dotted: 1/64'),
    bars, ...(first ? [] : [h('p', { class: 'quiet' }, GROUP)]), chips,
    h('div', { class: losing ? 'pair' : 'pair one' }, reward, ...(losing ? [loss] : []))]
  show(el, 'GRPO lab', h('style', {}, LOOKS), ...(first ? [...views, line, ...knobs.reverse()]
    : [...knobs, line, ...views]))

  // There it plays once, when it is seen, until somebody touches it
  if (!first || matchMedia('(prefers-reduced-motion: reduce)').matches) return
  const seen = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return
    seen.disconnect()
    several(40)
  })
  seen.observe(el)
  el.addEventListener('pointerdown', () => { seen.disconnect(); stop() }, { once: true, capture: true })
}

export default { render }
