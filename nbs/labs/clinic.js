// Sick-run clinic: live runs with one planted fault each; find it from the fewest curves
import { button, drawn, h, random, show, shown } from './shared.js'
import DATA from './clinic.json' with { type: 'json' }

export { DATA }

// ---- mathematics: what is normal, what is not, and which diagnoses fit what was seen

// What a curve is called, and what is too small to matter in it
export const CURVES = {
  reward_mean: ['mean reward', 0.03],
  heldout: ['held-out exam', 0.03],
  fresh: ['exam of new prompts', 0.03],
  zero_variance_frac: ['silent groups', 0.05],
  failed_frac: ['no verdict', 0.02],
  truncated_frac: ['cut off', 0.02],
  entropy: ['entropy, nats', 0.05],
  loss: ['loss', 0.01],
  approx_kl: ['KL of the update', 0.005],
  grad_norm: ['norm of the gradient', 0.5],
  rollout_train_gap: ['gap of the engines', 1e-5],
  routes_agree_frac: ['same experts', 0.02],
  expert_busiest_frac: ['busiest expert', 0.05],
}
const LIMIT = 3 // so many half widths of the healthy band from its middle is sick
const WRONG = 3 // points of a wrong diagnosis
export const GIVEN = ['reward_mean', 'heldout'] // what everybody looks at: open from the start, free
const FIRST = 9 // the round that begins with a patient whose reward rises while the exam falls

const mean = x => x.reduce((a, b) => a + b, 0) / x.length

// A curve in two numbers: its first step, and the mean of its last five
export const ends = curve => [curve[0], mean(curve.slice(-5))]

// Per end: the value, the healthy range, and how many half widths lie between it and the middle
export function compare(curve, healthy, floor) {
  const all = healthy.map(ends)
  return ends(curve).map((value, i) => {
    const low = Math.min(...all.map(e => e[i])), high = Math.max(...all.map(e => e[i]))
    const away = (value - (low + high) / 2) / Math.max((high - low) / 2, floor)
    return { value, low, high, away, sick: Math.abs(away) > LIMIT ? Math.sign(away) : 0 }
  })
}

// Patient -> curve -> its two ends
export const examine = (data, curves = CURVES) =>
  Object.fromEntries(Object.entries(data.patients).map(([name, own]) => [name,
    Object.fromEntries(Object.entries(curves).map(([key, [, floor]]) =>
      [key, compare(own[key], data.healthy[key], floor)]))]))

const alike = (a, b, key) => a[key].every((end, i) => end.sick === b[key][i].sick)

// The patients who are as sick as this one in each curve that was opened
export const compatible = (all, name, opened) => Object.keys(all).filter(other =>
  opened.every(key => alike(all[name], all[other], key)))

const furthest = two => Math.max(...two.map(end => Math.abs(end.away)))

// The smallest set of curves that leaves one diagnosis next to those that are given, of several the
// one whose least clear curve is the clearest; null if all curves leave several
export function fewest(all, name, given = []) {
  const keys = Object.keys(all[name]).filter(k => !given.includes(k))
  const others = compatible(all, name, given).filter(n => n !== name)
  let best = null
  for (let bits = 0; bits < 1 << keys.length; bits++) {
    const set = keys.filter((_, i) => bits >> i & 1)
    if (best && set.length > best.set.length) continue
    if (!others.every(n => set.some(k => !alike(all[name], all[n], k)))) continue
    const clear = Math.min(...set.map(k => furthest(all[name][k])))
    if (!best || set.length < best.set.length || clear > best.clear) best = { set, clear }
  }
  return best && best.set
}

// The curve and the end that lie furthest from the healthy runs
export function tellTale(patient) {
  const all = Object.entries(patient).flatMap(([key, two]) => two.map((end, i) => ({ key, i, ...end })))
  return all.reduce((a, b) => Math.abs(b.away) > Math.abs(a.away) ? b : a)
}

export const points = ({ opened, wrong }) => opened + WRONG * wrong

// ---- the lab

// What the button says, what it is, and the lesson
export const DIAGNOSES = {
  healthy: ['healthy', 'Nothing is wrong with this run', 'loop.ipynb#a-real-run'],
  'broken verifier': ['the verifier crashes', 'The verifier raises an error on some of the responses',
    'loop.ipynb#steps-without-a-signal'],
  'fooled verifier': ['the verifier can be fooled', 'The verifier pays a letter twice in a row as if it were the answer',
    'judges/verifiers.ipynb#what-an-outcome-means'],
  'cut off': ['responses are cut off', 'The longest answers do not fit into the tokens that a response may have',
    'loop.ipynb#why-does-my-reward-not-rise'],
  'too hard': ['prompts are too hard', 'Nearly no response is right, so nearly all groups are silent',
    'algo/zero_variance.ipynb#groups-that-agree-teach-nothing'],
  'learning rate': ['learning rate too high', 'Twelve times the learning rate of the healthy runs',
    'loop.ipynb#a-learning-rate-from-the-cold-start'],
  'stale weights': ['stale weights', 'New weights never reach the engine that samples',
    'loop.ipynb#stale-weights'],
  'wrong experts': ['wrong experts are replayed', 'Each token is trained with the experts of the next one',
    'algo/engine_gap.ipynb#wrong-routes-are-worse-than-none'],
  'off by one': ['loss mask off by one', 'The mask of the loss begins and ends one token early',
    'train/torch_train.ipynb#token-t-is-predicted-from-token-t-1'],
  entropy: ['entropy bonus with the wrong sign', 'The entropy bonus is subtracted, so likely tokens become likelier',
    'loop.ipynb#a-real-run'],
  herd: ['balance of experts with the wrong sign', 'The balancing loss is subtracted, so busy experts get busier',
    'train/routes.ipynb#an-auxiliary-loss'],
  leak: ['held-out prompts have leaked', 'The cold start has read the solutions of the held-out prompts',
    'data/prompts.ipynb#the-split-and-names-that-last'],
}

// A notebook's address: beside this one in Jupyter, or as a page of the site
export const address = (notebook, pathname) => pathname.endsWith('.html')
  ? notebook.replace(/(^|\/)\d+_/g, '$1').replace('.ipynb', '.html') : notebook

const LOOKS = `
.lab .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .6rem 1rem; }
.lab .bench figure { margin: 0; padding: 0; width: auto; }
.lab .bench figcaption { font: 12px/1.4 system-ui, sans-serif; color: var(--ink); margin: 0; padding: 0; text-align: left; }
.lab .bench figcaption b { display: block; }
.lab .sound { fill: var(--cool); fill-opacity: .35; stroke: var(--cool); stroke-opacity: .5; }
.lab .sick { fill: none; stroke: var(--hot); stroke-width: 2; }
.lab .frame { stroke: var(--line); stroke-width: 1; }
.lab button:disabled { cursor: default; }
.lab button:disabled:not([aria-pressed="true"]) { color: var(--quiet); border-color: var(--line); }
.lab .bench a { color: var(--ink); text-decoration: underline; }
`
const FIRST_LAST = ['in its first step', 'in its last five steps']
const range = ({ low, high }) => low === high ? shown(low) : `${shown(low)} to ${shown(high)}`
const span = ({ low, high }) => low === high ? shown(low, 2) : `${shown(low, 2)}…${shown(high, 2)}`
const named = keys => keys.map(k => CURVES[k][0]).join(', ')

// The patient's curve over what the healthy runs span, with the numbers in words
function chart(key, curve, healthy, two) {
  const [w, tall] = [150, 64], steps = curve.map((_, i) => healthy.map(run => run[i]))
  const all = [...curve, ...steps.flat()], middle = (Math.min(...all) + Math.max(...all)) / 2
  // noise below the floor stays flat
  const half = Math.max(Math.max(...all) - middle, 2 * CURVES[key][1])
  const x = i => w * i / (curve.length - 1), y = v => tall * (middle + half - v) / (2 * half)
  const at = (v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`
  const edge = side => steps.map((s, i) => at(side(...s), i))
  const said = two.map((e, i) => `${shown(e.value)} ${FIRST_LAST[i]}, healthy runs ${range(e)}`)
  return h('figure', { class: 'opened' },
    drawn('svg', { viewBox: `-2 -4 ${w + 4} ${tall + 8}`, role: 'img', 'aria-label': `${CURVES[key][0]}: ${said.join('; ')}` },
      drawn('line', { x1: 0, x2: w, y1: tall + 2, y2: tall + 2, class: 'frame' }),
      drawn('polygon', { class: 'sound', points: [...edge(Math.max), ...edge(Math.min).reverse()].join(' ') }),
      drawn('polyline', { class: 'sick', points: curve.map(at).join(' ') })),
    h('figcaption', { 'aria-hidden': 'true' }, h('b', {}, CURVES[key][0]),
      `${shown(two[0].value)} → ${shown(two[1].value)}`, h('br'), `healthy ${span(two[0])} → ${span(two[1])}`))
}

function shuffled(names, seed) {
  const draw = random(seed), left = [...names]
  return names.map(() => left.splice(Math.floor(draw() * left.length), 1)[0])
}

function render({ el }) {
  const all = examine(DATA), names = Object.keys(all), keys = Object.keys(CURVES)
  const par = Object.fromEntries(names.map(n => [n, fewest(all, n, GIVEN)]))
  let round = FIRST, order, at, opened = [], wrong = 0, spent, done
  const head = h('p', { class: 'score', style: 'margin:0 0 .6rem' }), charts = h('div', { class: 'charts' })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })
  const open = Object.fromEntries(keys.map(k => [k, h('button',
    { type: 'button', 'aria-pressed': 'false', click: () => look(k) }, CURVES[k][0])]))
  const guess = Object.fromEntries(names.map(n => [n, button(DIAGNOSES[n][0], () => answer(n))]))
  const next = button('Next patient', () => { at++; admit(); open[keys.find(k => !GIVEN.includes(k))].focus() })

  const now = () => points({ opened: opened.length - GIVEN.length, wrong })

  function score() {
    const least = order.slice(0, at + done).reduce((sum, n) => sum + par[n].length, 0)
    head.textContent = `Patient ${at + 1} of ${order.length}. Points: ${spent + now()}. `
      + `Fewest possible so far: ${least}.`
  }

  function start() {
    order = shuffled(names, round++)
    at = spent = 0
    admit()
  }

  function admit() {
    opened = []
    done = 0
    next.hidden = true
    keys.forEach(k => open[k].setAttribute('aria-pressed', 'false'))
    names.forEach(n => { guess[n].disabled = false; guess[n].removeAttribute('aria-pressed') })
    charts.replaceChildren()
    GIVEN.forEach(look)
    line.textContent = 'Two curves of a run, over what five healthy runs span. What is wrong? '
      + 'Say it, or open another curve (1 point).'
  }

  function look(key) {
    if (open[key].getAttribute('aria-pressed') === 'true') return
    if (!done) opened.push(key) // afterwards it costs nothing
    open[key].setAttribute('aria-pressed', 'true')
    charts.append(chart(key, DATA.patients[order[at]][key], DATA.healthy[key], all[order[at]][key]))
    score()
  }

  function answer(name) {
    const is = order[at], fits = compatible(all, is, opened)
    if (name === is) return cured(is, fits)
    wrong++
    const against = opened.find(k => !alike(all[is], all[name], k))
    line.textContent = `No (${WRONG} points). ` + (against
      ? `With “${DIAGNOSES[name][0]}” the curve “${CURVES[against][0]}” looks otherwise.`
      : 'It fits what you have opened, as others do: open another curve.')
    score()
  }

  function cured(is, fits) {
    const [, what, lesson] = DIAGNOSES[is], tale = tellTale(all[is])
    done = 1
    names.forEach(n => { guess[n].disabled = true })
    guess[is].setAttribute('aria-pressed', 'true')
    const also = fits.filter(n => n !== is).map(n => DIAGNOSES[n][0])
    line.replaceChildren(`Right. ${what}. ${tale.sick ? 'What gives it away' : 'Even the furthest curve is near'}: `
      + `${CURVES[tale.key][0]} is ${shown(tale.value)} ${FIRST_LAST[tale.i]}, healthy runs have ${range(tale)}. `
      + (also.length ? `By your curves it could also have been: ${also.join(', ')}. ` : '')
      + (par[is].length ? `Enough would have been: ${named(par[is])}. ` : 'The two curves were enough. '), h('a', { href: address(lesson, location.pathname) }, 'The lesson'), '.')
    score()
    spent += now()
    opened = [...GIVEN]
    wrong = 0
    if (at + 1 === order.length) return line.append(' That was the last patient.')
    next.hidden = false
    next.focus()
  }

  start()
  show(el, 'Sick-run clinic', h('style', {}, LOOKS), head,
    h('div', { class: 'knobs', role: 'group', 'aria-label': 'curves' }, 'Curves', ...Object.values(open)),
    charts, h('div', { class: 'knobs', role: 'group', 'aria-label': 'diagnoses', style: 'margin-top:.6rem' },
      'Diagnosis', ...Object.values(guess)), line,
    h('div', { class: 'knobs', style: 'margin:.6rem 0 0' }, next, button('New round', start)),
    h('p', { class: 'quiet' }, 'Orange: the patient. Band: five healthy runs. All runs have 20 steps. A further curve costs 1 point, a wrong diagnosis '
      + `${WRONG}; few points are good.`))
}

export default { render }
