// Judge lab: eight answers against a reference, by a judge that may favour what it reads first
import { button, choice, drawn, h, normals, show, shown, slider } from './shared.js'

// ---- mathematics: labels as in compassrl.judges.genrm, advantages as in compassrl.algo.advantages

export const REWARDS = { Better: 1, Tie: 0.5, Worse: 0 }
const SWAPPED = { Better: 'Worse', Tie: 'Tie', Worse: 'Better' }
const TOLERANCE = 1e-6, STD_EPS = 1e-6
const sum = x => x.reduce((a, b) => a + b, 0)

// What a judge says of the text it reads first, if it feels it to be so much better
export const labelOf = (felt, tie) => Math.abs(felt) < tie ? 'Tie' : felt > 0 ? 'Better' : 'Worse'

// Both labels are about the text that was read first: the answer, then the reference
export const combined = (forward, backward) => forward === SWAPPED[backward] ? forward : 'Tie'

// Relative to the group: minus its mean, by its unbiased std; equal rewards give exactly 0
export function advantages(rewards) {
  const mean = sum(rewards) / rewards.length
  const std = Math.sqrt(sum(rewards.map(r => (r - mean) ** 2)) / (rewards.length - 1))
  const flat = Math.max(...rewards) - Math.min(...rewards) <= TOLERANCE
  return rewards.map(r => flat ? 0 : (r - mean) / (std + STD_EPS))
}

// `gaps`: quality of each answer minus that of the reference; `errors`: two for each, one per
// order; `habit`: how much better whatever is read first seems
function labelled({ gaps, errors, noise, tie, twice }, habit) {
  return gaps.map((gap, i) => {
    const forward = gap + habit + noise * errors[i][0], backward = habit - gap + noise * errors[i][1]
    const first = labelOf(forward, tie), second = labelOf(backward, tie)
    return { forward, backward, first, second: SWAPPED[second],
      label: twice ? combined(first, second) : first }
  })
}

// What the judge says of each answer, what it would say without its habit, and what is true
export function judged(state) {
  const said = labelled(state, state.habit), rewards = said.map(s => REWARDS[s.label])
  const unbiased = labelled(state, 0).map(s => s.label)
  const truth = state.gaps.map(gap => labelOf(gap, state.tie))
  return { said, rewards, advantages: advantages(rewards), unbiased, truth,
    placed: said.filter((s, i) => s.label !== unbiased[i]).length,
    right: said.filter((s, i) => s.label === truth[i]).length }
}

// ---- the lab

export const GAPS = [-0.95, -0.7, -0.3, -0.15, 0, 0.2, 0.35, 0.8], TIE = 0.5
export function errorsOf(seed) {
  const next = normals(seed)
  return GAPS.map(() => [next(), next()])
}

const WIDE = 46, HIGH = 26 // of a column; of the highest bar
const LOOKS = `
.lab .judge .eight { display: grid; grid-template-columns: repeat(8, minmax(0, 1fr)); gap: 2px;
  margin: .1rem 0 .4rem; }
.lab .judge .eight span { font-size: clamp(9px, 2.2cqi, 13px); text-align: center; border-radius: 4px;
  white-space: nowrap; color: var(--ink); }
.lab .judge .name { margin: 0; }
.lab .judge .eight .result { padding: .2rem 0; box-shadow: inset 0 0 0 1px var(--line); background: var(--wash); }
.lab .judge .eight .Better { background: var(--pull); }
.lab .judge .eight .Worse { background: var(--off); color: var(--on-off); }
.lab .judge .eight .placed { box-shadow: inset 0 0 0 2px var(--hot); }
.lab .judge .sight { position: relative; font-size: 12px; }
.lab .judge .sight span { position: absolute; }
.lab .judge .bar { fill: var(--cool); }
.lab .judge .zone { fill: var(--wash); }
.lab .judge .true { fill: var(--paper); stroke: var(--ink); stroke-width: 1.5; }
.lab .judge .seen { fill: var(--cool); }
.lab .judge .way { stroke: var(--quiet); stroke-width: 1; }
`

// The quality of each answer, and where the judge sees it: ▲ read first, ▼ read second
function sight(said, twice) {
  const unit = 26, middle = 62, y = x => middle - unit * Math.max(-2.2, Math.min(x, 2.2))
  const parts = said.flatMap((s, i) => {
    const x = WIDE * (i + 0.5), first = y(s.forward), second = y(-s.backward), at = y(GAPS[i])
    const marks = [drawn('path', { class: 'seen', d: `M${x - 5} ${first + 4}h10l-5 -9z` })]
    const ways = [drawn('line', { x1: x, x2: x, y1: at, y2: first, class: 'way' })]
    if (twice) {
      marks.push(drawn('path', { class: 'seen', d: `M${x - 5} ${second - 4}h10l-5 9z` }))
      ways.push(drawn('line', { x1: x, x2: x, y1: at, y2: second, class: 'way' }))
    }
    return [...ways, drawn('circle', { cx: x, cy: at, r: 4, class: 'true' }), ...marks]
  })
  return drawn('svg', { viewBox: `0 0 ${8 * WIDE} ${2 * middle}`, 'aria-hidden': 'true' },
    drawn('rect', { x: 0, width: 8 * WIDE, y: y(TIE), height: 2 * unit * TIE, class: 'zone' }),
    ...parts)
}

function bars(advantages) {
  const unit = HIGH / 2.5
  return drawn('svg', { viewBox: `0 0 ${8 * WIDE} ${2 * HIGH + 4}`, 'aria-hidden': 'true' },
    ...advantages.map((a, i) => drawn('rect', { x: WIDE * i + 12, width: WIDE - 24, class: 'bar',
      y: HIGH + 2 - Math.max(a, 0) * unit, height: Math.abs(a) * unit })),
    drawn('line', { x1: 0, x2: 8 * WIDE, y1: HIGH + 2, y2: HIGH + 2, class: 'way' }))
}

// "2 from Tie to Better, 1 from Worse to Tie"
function turns(from, to) {
  const counts = new Map()
  from.forEach((label, i) => {
    const turn = `from ${label} to ${to[i]}`
    if (label !== to[i]) counts.set(turn, (counts.get(turn) ?? 0) + 1)
  })
  return [...counts].map(([turn, n]) => `${n} ${turn}`).join(', ')
}

// What the line under the lab says
export function told({ said, unbiased, placed, right }, twice) {
  const labels = said.map(s => s.label), count = name => labels.filter(l => l === name).length
  const doing = placed === 0 ? 'The preference changes no label.' : `The preference changes ${placed} of 8 labels: `
    + `${turns(unbiased, labels)}.`
  const silent = new Set(labels).size > 1 ? '' : ' All labels are equal, so the group is silent.'
  return `${twice ? 16 : 8} calls: ${Object.keys(REWARDS).map(l => `${count(l)} ${l}`).join(', ')}. ${doing} `
    + `${right} of 8 labels ${right === 1 ? 'is that' : 'are those'} of a perfect judge.${silent}`
}

function render({ el }) {
  const settings = { habit: 0.4, noise: 0, twice: false }
  let seed = 1
  const rows = Object.fromEntries(['first', 'second', 'label', 'reward', 'advantage']
    .map(name => [name, h('div', { class: 'eight' }, ...GAPS.map(() => h('span')))]))
  const picture = h('div'), bottom = h('div'), again = h('div')
  const top = h('div', { class: 'sight' }, h('span', { style: 'left:2px;top:0' }, 'Better'),
    h('span', { style: 'left:2px;top:calc(50% - .7em)' }, 'Tie'),
    h('span', { style: 'left:2px;bottom:0' }, 'Worse'), picture)
  const line = h('p', { class: 'said', 'aria-live': 'polite' })
  const name = text => h('p', { class: 'quiet name' }, text)

  function draw() {
    const found = judged({ gaps: GAPS, errors: errorsOf(seed), tie: TIE, ...settings })
    const write = (row, text, look = () => '') => [...rows[row].children].forEach((e, i) => {
      e.textContent = text(i)
      e.className = look(i)
    })
    write('first', i => found.said[i].first)
    write('second', i => found.said[i].second)
    write('label', i => found.said[i].label, i => `result ${found.said[i].label}`
      + (found.said[i].label === found.unbiased[i] ? '' : ' placed'))
    write('reward', i => shown(found.rewards[i]), () => 'number')
    write('advantage', i => found.advantages[i].toFixed(2).replace(/^-?0\.00$/, '0').replace('-', '−'),
      () => 'number')
    again.hidden = !settings.twice
    picture.replaceChildren(sight(found.said, settings.twice))
    bottom.replaceChildren(bars(found.advantages))
    line.textContent = told(found, settings.twice)
  }

  const set = key => x => { settings[key] = x; draw() }
  const habit = slider('prefers the first place', { min: 0, max: 1.5, step: 0.05, value: settings.habit },
    set('habit'))
  const noise = slider('noise', { min: 0, max: 1, step: 0.05, value: settings.noise }, set('noise'))
  const orders = choice('Asked', { once: 'once', twice: 'in both orders' }, 'once',
    x => set('twice')(x === 'twice'))
  again.append(name('second label: the reference is read first; swapped back'), rows.second)
  draw()
  show(el, 'Judge lab', h('style', {}, LOOKS), h('div', { class: 'knobs' }, orders.row),
    h('div', { class: 'knobs' }, habit.box, noise.box, button('New noise', () => { seed++; draw() })),
    h('div', { class: 'judge' }, top, name('first label: the answer is read first'), rows.first, again,
      name('the result (orange frame: changed by the preference)'), rows.label,
      name('reward'), rows.reward, name('advantage'), bottom, rows.advantage),
    line,
    h('p', { class: 'quiet' }, 'A column is an answer, from worst to best. Circle: its true quality, seen from the '
      + 'reference. ▲: where the judge sees it if the answer is read first, ▼: if the reference is. Grey band: '
      + 'a tie. Orange frame: the same judge without its preference would give another label.'))
}

export default { render }
