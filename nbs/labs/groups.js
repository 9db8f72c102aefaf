// Group lab: from the verdicts of three groups to an advantage for every token
import { choice, drawn, h, show, slider } from './shared.js'

// ---- mathematics: compassrl.algo.advantages and compassrl.algo.zero_variance
// `Math.fround` stands where the library keeps fp32; sums run in fp64 there, too

const TOLERANCE = 1e-6, STD_EPS = 1e-6, f32 = Math.fround
const sum = x => x.reduce((a, b) => a + b, 0)

// Mean, unbiased std and flatness of the rewards that have a verdict, of one group
export function groupStats(rewards, valid) {
  const r = rewards.filter((_, i) => valid[i]), num = r.length
  const mean = sum(r) / Math.max(num, 1)
  const std = Math.sqrt(sum(r.map(x => (x - mean) ** 2)) / Math.max(num - 1, 1))
  const top = Math.max(...r), low = Math.min(...r)
  const scale = Math.max(Math.abs(top), Math.abs(low), 1)
  return { num, mean, std, flat: num < 2 || top - low <= TOLERANCE * scale }
}

export function groupAdvantages(rewards, valid, { estimator, stdFloor = 0 }) {
  const s = groupStats(rewards, valid)
  const scale = {
    grpo: 1 / (Math.max(s.std, stdFloor) + STD_EPS),
    dr_grpo: 1,
    rloo: s.num / Math.max(s.num - 1, 1),
  }[estimator]
  return rewards.map((r, i) => s.flat || !valid[i] ? 0 : (r - s.mean) * scale)
}

// Soft overlong penalty, -1 to 0
export function lengthPenalty(length, maxTokens, frac) {
  const window = frac * maxTokens
  return f32(Math.min(Math.max((maxTokens - window - length) / window, -1), 0))
}

// Right answers earn 1 and wrong ones 0; penalties are in units of the smallest gap, here 1
export const shapeRewards = (raw, lengths, { maxTokens, overlongFrac, lengthWeight }) =>
  raw.map((r, i) => f32(r + f32(f32(lengthWeight) * lengthPenalty(lengths[i], maxTokens, overlongFrac))))

// One group: entropies of each token -> an advantage for each token, and which stages spoke
export function tokenAdvantages(group, settings) {
  const { raw, valid, entropy } = group
  const rewards = shapeRewards(raw, entropy.map(e => e.length), settings)
  const before = groupStats(raw, valid), after = groupStats(rewards, valid)
  const stdFloor = before.flat ? settings.stdFloor : 0
  const outcome = groupAdvantages(rewards, valid, { ...settings, stdFloor }).map(f32)
  const right = before.mean >= 1 - TOLERANCE, wrong = before.mean <= TOLERANCE
  const sign = after.flat && before.flat && before.num > 1 ? right - wrong : 0
  const alpha = f32(settings.zvpAlpha)
  const tokens = entropy.map((row, i) => {
    const H = row.map(f32), top = Math.max(...H)
    const push = x => f32(Math.min(Math.max(f32(alpha * x), -1), 1))
    return H.map(x => {
      const own = sign && valid[i] ? push(sign > 0 ? x : f32(x - top)) : 0
      return f32(outcome[i] + own)
    })
  })
  return { rewards, tokens, rawFlat: before.flat, flat: after.flat, sign }
}

// ---- the lab

const MAX_TOKENS = 12
const NAMES = ['easy', 'mixed', 'hard']
const VERDICTS = [[1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]]
const LENGTHS = [[5, 6, 12, 7, 5, 6, 8, 5], [6, 9, 12, 7, 10, 8, 11, 6], [9, 8, 10, 7, 9, 12, 8, 9]]
const MARKS = { 1: '✓', 0: '✗', '-1': '?' }, WORDS = { 1: 'right', 0: 'wrong', '-1': 'no verdict' }
// the entropy of a token: made up, the same for everybody
const nats = (g, i, t) => [0.1, 0.4, 2.2, 0.05, 0.9, 0.2, 1.5, 0.3, 0.02, 0.6, 1.1, 0.1][(5 * g + 3 * i + t) % 12]
const LOOKS = `
.lab .group { border-top: 1px solid var(--line); padding: .5rem 0 .2rem; }
.lab .group .verdicts { display: grid; grid-template-columns: repeat(8, minmax(0, 1fr)); gap: 3px; }
.lab .group .verdicts button { padding: 0; width: 100%; white-space: nowrap; font-size: 12px; }
.lab .group .verdicts small { font-size: 10px; }
.lab .group .verdicts button.right { background: var(--pull); }
.lab .group .verdicts button.wrong { background: var(--off); color: var(--on-off); }
.lab .group .number { font-size: 10.5px; text-align: center; white-space: nowrap; }
.lab .group .state { float: right; }
.lab .up { fill: var(--cool); }
.lab .down { fill: var(--hot); }
.lab .zero { stroke: var(--quiet); stroke-width: 1; }
`
const HIGH = 26 // pixels of an advantage of 1, at most

function bars(tokens) {
  const most = Math.max(1, ...tokens.flat().map(Math.abs)), unit = HIGH / most, wide = 8 * 40
  const picture = drawn('svg', { viewBox: `0 0 ${wide} ${2 * HIGH + 4}`, 'aria-hidden': 'true',
    preserveAspectRatio: 'none', style: 'height:56px' })
  tokens.forEach((row, i) => row.forEach((a, t) => {
    const w = 36 / row.length, tall = Math.max(Math.abs(a) * unit, a ? 0.8 : 0)
    picture.append(drawn('rect', { x: 40 * i + 2 + t * w, y: HIGH + 2 - (a > 0 ? tall : 0), width: w * 0.85,
      height: tall, class: a > 0 ? 'up' : 'down' }))
  }))
  picture.append(drawn('line', { x1: 0, x2: wide, y1: HIGH + 2, y2: HIGH + 2, class: 'zero' }))
  return picture
}

function render({ el }) {
  const settings = { estimator: 'grpo', stdFloor: 0.35, lengthWeight: 0.1, zvpAlpha: 0.1,
    overlongFrac: 0.5, maxTokens: MAX_TOKENS }
  const groups = NAMES.map((name, g) => {
    const verdicts = [...VERDICTS[g]]
    const buttons = verdicts.map((_, i) => h('button', { type: 'button', click: () => {
      verdicts[i] = { 1: 0, 0: -1, '-1': 1 }[verdicts[i]]
      draw()
    } }))
    const state = h('span', { class: 'state quiet' }), picture = h('div')
    const numbers = verdicts.map(() => h('span', { class: 'number' }))
    const box = h('div', { class: 'group' }, h('b', {}, `${name} prompt`), state,
      h('div', { class: 'verdicts' }, ...buttons), picture, h('div', { class: 'verdicts' }, ...numbers))
    return { g, verdicts, buttons, state, picture, numbers, box }
  })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })

  function drawGroup({ g, verdicts, buttons, state, picture, numbers }) {
    const entropy = LENGTHS[g].map((n, i) => Array.from({ length: n }, (_, t) => nats(g, i, t)))
    const valid = verdicts.map(v => v >= 0), raw = verdicts.map(v => Math.max(v, 0))
    const found = tokenAdvantages({ raw, valid, entropy }, settings)
    verdicts.forEach((v, i) => {
      buttons[i].replaceChildren(MARKS[v], h('small', {}, `\u2009${LENGTHS[g][i]}`))
      buttons[i].className = WORDS[v]
      buttons[i].setAttribute('aria-label',
        `${NAMES[g]} ${i + 1}: ${WORDS[v]}, ${LENGTHS[g][i]} tokens`)
      const A = sum(found.tokens[i]) / entropy[i].length
      numbers[i].textContent = Math.abs(A) < 5e-3 ? '0' : A.toFixed(2).replace('-', '−')
      numbers[i].title = `mean advantage ${A}; ${entropy[i].length} tokens`
    })
    const moved = found.tokens.flat().filter(a => a).length, all = found.tokens.flat().length
    state.textContent = !found.rawFlat ? 'verdicts differ' : !found.flat ? 'penalties differ'
      : found.sign && moved ? 'RL-ZVP' : 'silent'
    picture.replaceChildren(bars(found.tokens))
    return [moved, all]
  }

  function draw() {
    const counts = groups.map(drawGroup)
    const [moved, all] = [0, 1].map(k => sum(counts.map(c => c[k])))
    line.textContent = `${moved} of ${all} tokens have an advantage.`
  }

  const set = key => x => { settings[key] = x; draw() }
  const by = choice('Divide by the std', { grpo: 'yes', dr_grpo: 'no', rloo: 'leave one out' }, 'grpo',
    set('estimator'))
  const floor = slider('std_floor', { min: 0, max: 0.5, step: 0.01, value: 0.35 }, set('stdFloor'))
  const long = slider('length penalty', { min: 0, max: 0.35, step: 0.01, value: 0.1 }, set('lengthWeight'))
  const alpha = slider('RL-ZVP alpha', { min: 0, max: 0.5, step: 0.01, value: 0.1 }, set('zvpAlpha'))
  show(el, 'Group lab', h('style', {}, LOOKS),
    h('div', { class: 'knobs' }, by.row), h('div', { class: 'knobs' }, floor.box, long.box, alpha.box),
    ...groups.map(g => g.box), line,
    h('p', { class: 'quiet' }, 'Click a verdict: ✓ right, ✗ wrong, ? none; beside it the response’s tokens. Bars: the advantage of every '
      + 'token, up or down; below, its mean over a response. The limit is 12 tokens; from 6 on the penalty grows.'))
  draw()
}

export default { render }
