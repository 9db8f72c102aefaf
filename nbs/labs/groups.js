// Group lab: from the verdicts of three groups to an advantage for every token
import { button, choice, drawn, h, random, show, slider } from './shared.js'

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

// How many more responses each group gets, { raw, valid, lengths } of each: a silent one as many as
// it has, if the tokens fit the budget. Who earns least comes first, then who costs least. Who earns
// most waits until no other can grow
export function growth(groups, budget, maxGroupSize) {
  const stats = groups.map(({ raw, valid, lengths }, g) =>
    ({ ...groupStats(raw, valid), g, size: raw.length, cost: sum(lengths) }))
  const want = stats.filter(s => s.flat && s.num > 1 && 2 * s.size <= maxGroupSize)
  const may = want.filter(s => s.cost <= budget), most = Math.max(...may.map(s => s.mean))
  const others = may.filter(s => s.mean < most - TOLERANCE)
  const more = groups.map(() => 0)
  for (const s of (others.length ? others : may).sort((a, b) =>
    a.mean - b.mean || a.cost - b.cost || a.g - b.g)) {
    if (s.cost > budget) continue
    more[s.g] = s.size
    budget -= s.cost
  }
  return more
}

// Why no group grows: [group, reason] of each silent one
export function refused(groups, budget, maxGroupSize) {
  const found = []
  groups.forEach(({ raw, valid, lengths }, g) => {
    const s = groupStats(raw, valid), cost = sum(lengths)
    if (!s.flat) return
    if (s.num < 2) found.push([g, 'has fewer than two verdicts'])
    else if (2 * raw.length > maxGroupSize) found.push([g, `has ${raw.length} responses, the most allowed`])
    else if (cost > budget) found.push([g, `needs ${cost} tokens`])
  })
  return found
}

// ---- the lab

const MAX_TOKENS = 12, MAX_GROUP_SIZE = 32, WAVE = 8, FIRST_BUDGET = 0.5
const START = { estimator: 'grpo', stdFloor: 0.35, lengthWeight: 0, zvpAlpha: 0, overlongFrac: 0.5,
  maxTokens: MAX_TOKENS }
const NAMES = ['easy', 'mixed', 'hard']
const VERDICTS = [[1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]]
const LENGTHS = [[5, 6, 12, 7, 5, 6, 8, 5], [6, 9, 12, 7, 10, 8, 11, 6], [9, 8, 10, 7, 9, 12, 8, 9]]
// whether a further response is right: drawn from its prompt's pass rate, the same for everybody
const PASS_RATES = [0.9, 0.4, 0.1], next = random(2)
const FURTHER = PASS_RATES.map(p =>
  Array.from({ length: MAX_GROUP_SIZE - WAVE }, () => +(next() < p)))
const lengthOf = (g, i) => LENGTHS[g][i % WAVE]
const FIRST_WAVE = sum(LENGTHS.flat())
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
.lab .group .head { display: flex; flex-wrap: wrap; justify-content: space-between; }
.lab .group .lane + .lane { border-top: 1px dashed var(--line); padding-top: 3px; }
.lab .up { fill: var(--cool); }
.lab .down { fill: var(--hot); }
.lab .zero { stroke: var(--quiet); stroke-width: 1; }
`
const HIGH = 26 // pixels of an advantage of 1, at most
// An advantage of a millionth or less is rounding: a reward in fp32, minus the mean of equal ones
const speaks = a => Math.abs(a) > 1e-6

function bars(tokens, most) {
  const unit = HIGH / most, wide = WAVE * 40
  const picture = drawn('svg', { viewBox: `0 0 ${wide} ${2 * HIGH + 4}`, 'aria-hidden': 'true',
    preserveAspectRatio: 'none', style: 'height:56px' })
  tokens.forEach((row, i) => row.forEach((a, t) => {
    const w = 36 / row.length, tall = speaks(a) ? Math.max(Math.abs(a) * unit, 0.8) : 0
    picture.append(drawn('rect', { x: 40 * i + 2 + t * w, y: HIGH + 2 - (a > 0 ? tall : 0), width: w * 0.85,
      height: tall, class: a > 0 ? 'up' : 'down' }))
  }))
  picture.append(drawn('line', { x1: 0, x2: wide, y1: HIGH + 2, y2: HIGH + 2, class: 'zero' }))
  return picture
}

// Eight responses of a group, from number `from` on: their buttons, bars and numbers
function lane(group, from, changed) {
  function turn(i) {
    group.verdicts[i] = { 1: 0, 0: -1, '-1': 1 }[group.verdicts[i]]
    changed()
  }
  const buttons = Array.from({ length: WAVE }, (_, k) =>
    h('button', { type: 'button', click: () => turn(from + k) }))
  const picture = h('div'), numbers = buttons.map(() => h('span', { class: 'number' }))
  const box = h('div', { class: 'lane' }, h('div', { class: 'verdicts' }, ...buttons), picture,
    h('div', { class: 'verdicts' }, ...numbers))
  return { from, buttons, picture, numbers, box }
}

function drawLane({ g, verdicts }, { from, buttons, picture, numbers }, tokens, most) {
  buttons.forEach((b, k) => {
    const i = from + k, v = verdicts[i], length = lengthOf(g, i)
    b.replaceChildren(MARKS[v], h('small', {}, `\u2009${length}`))
    b.className = WORDS[v]
    b.setAttribute('aria-label', `${NAMES[g]} ${i + 1}: ${WORDS[v]}, ${length} tokens`)
    const A = sum(tokens[i]) / length
    numbers[k].textContent = Math.abs(A) < 5e-3 ? '0' : A.toFixed(2).replace('-', '−')
    numbers[k].title = `mean advantage ${A}; ${length} tokens`
  })
  picture.replaceChildren(bars(tokens.slice(from, from + WAVE), most))
}

// What the mathematics needs of a group
function columns({ g, verdicts }) {
  const lengths = verdicts.map((_, i) => lengthOf(g, i))
  const entropy = lengths.map((n, i) => Array.from({ length: n }, (_, t) => nats(g, i, t)))
  const valid = verdicts.map(v => v >= 0), raw = verdicts.map(v => Math.max(v, 0))
  return { lengths, entropy, valid, raw }
}

function drawGroup(group, found, most) {
  const all = found.tokens.flat(), moved = all.filter(speaks).length
  group.lanes.forEach(l => drawLane(group, l, found.tokens, most))
  const why = !found.rawFlat ? 'verdicts differ' : !found.flat ? 'penalties differ'
    : found.sign && moved ? 'RL-ZVP' : 'silent'
  group.state.textContent = `${group.verdicts.length} responses, ${all.length} tokens: ${why}`
  return [moved, all.length]
}

function render({ el }) {
  const settings = { ...START }
  const groups = NAMES.map((name, g) => {
    const state = h('span', { class: 'quiet' })
    const group = { g, verdicts: [...VERDICTS[g]], lanes: [], state }
    group.box = h('div', { class: 'group' },
      h('div', { class: 'head' }, h('b', {}, `${name} prompt`), group.state))
    return group
  })
  let times = FIRST_BUDGET // tokens for growth, times those of the first wave
  const line = h('p', { class: 'said', 'aria-live': 'polite' })
  const grown = h('p', { class: 'grown', 'aria-live': 'polite' })

  // Rows of eight buttons for as many responses as there are
  function lanes(group) {
    group.lanes.splice(group.verdicts.length / WAVE).forEach(l => l.box.remove())
    while (group.lanes.length * WAVE < group.verdicts.length) {
      group.lanes.push(lane(group, group.lanes.length * WAVE, draw))
      group.box.append(group.lanes.at(-1).box)
    }
  }

  function draw() {
    const found = groups.map(group => tokenAdvantages(columns(group), settings))
    const most = Math.max(1, ...found.flatMap(f => f.tokens.flat().map(Math.abs))) // one scale for all
    const counts = groups.map((group, g) => drawGroup(group, found[g], most))
    const [moved, all] = [0, 1].map(k => sum(counts.map(c => c[k])))
    line.textContent = `${moved} of ${all} tokens have an advantage.`
    return all
  }

  // After the tokens of growth were counted or its budget changed
  function say(what) {
    const spent = draw() - FIRST_WAVE, most = times * FIRST_WAVE
    grown.textContent = `${what} ${spent} of ${most} extra tokens are spent.`
  }

  function grow() {
    const left = (1 + times) * FIRST_WAVE - draw()
    const more = growth(groups.map(columns), left, MAX_GROUP_SIZE)
    groups.forEach((group, g) => {
      const num = group.verdicts.length
      group.verdicts.push(...FURTHER[g].slice(num - WAVE, num - WAVE + more[g]))
      lanes(group)
    })
    const who = NAMES.map((name, g) => `The ${name} group has ${more[g]} more responses.`)
    say(who.filter((_, g) => more[g]).join(' ') || nobody(left))
  }

  function nobody(left) {
    const why = refused(groups.map(columns), left, MAX_GROUP_SIZE)
    if (!why.length) return 'No group grows: none is silent.'
    const each = why.map(([g, reason]) => `the ${NAMES[g]} group ${reason}`)
    return `No group grows: ${each.join('; ')}. ${left} tokens are left.`
  }

  function back() {
    groups.forEach(group => { group.verdicts.splice(WAVE); lanes(group) })
    say('Every group has eight responses.')
  }

  // Everything as it was when the page was opened
  function reset() {
    Object.assign(settings, START)
    times = FIRST_BUDGET
    by.press(START.estimator)
    floor.set(START.stdFloor)
    long.set(START.lengthWeight)
    alpha.set(START.zvpAlpha)
    budget.set(FIRST_BUDGET)
    groups.forEach((group, g) => { group.verdicts = [...VERDICTS[g]] })
    back()
  }

  const set = key => x => { settings[key] = x; draw() }
  const by = choice('Advantage: reward minus', { grpo: 'mean, ÷ std', dr_grpo: 'mean',
    rloo: 'mean of the others' }, 'grpo', set('estimator'))
  const floor = slider('std_floor', { min: 0, max: 0.5, step: 0.01, value: 0.35 }, set('stdFloor'))
  const long = slider('length penalty', { min: 0, max: 0.35, step: 0.01, value: 0 }, set('lengthWeight'))
  const alpha = slider('RL-ZVP alpha', { min: 0, max: 0.5, step: 0.01, value: 0 }, set('zvpAlpha'))
  const budget = slider('budget of growth', { min: 0, max: 3, step: 0.25, value: times },
    x => { times = x; say('') })
  const eight = button('Back to eight', back)
  eight.title = 'Every group keeps its first eight responses only. Verdicts and sliders stay.'
  show(el, 'Group lab', h('style', {}, LOOKS),
    h('div', { class: 'knobs' }, by.row), h('div', { class: 'knobs' }, floor.box, long.box, alpha.box),
    h('div', { class: 'knobs' }, budget.box, button('Grow silent groups', grow),
      eight, button('Reset', reset)),
    ...groups.map(g => g.box), line, grown,
    h('p', { class: 'quiet' }, 'Click a verdict: ✓ right, ✗ wrong, ? none; next to it the '
      + 'response’s tokens. Bars: the advantage of every token, up or down, at one scale for the three '
      + 'groups; below, its mean over a response. The limit is 12 tokens; from 6 on the penalty grows. New verdicts are drawn with pass rates of 0.9 (easy), '
      + '0.4 (mixed) and 0.1 (hard), from a fixed seed, so every reader sees the same. A budget of 1 allows as many '
      + `extra tokens as there were at the start (${FIRST_WAVE}).`))
  back()
}

export default { render }
