// Sick-run clinic: live runs with one planted fault each; find it from the fewest curves
import { button, choice, drawn, h, random, show, shown } from './shared.js'
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
// The same in a clause
const MEANS = {
  reward_mean: 'what the verifier paid per response',
  heldout: 'right answers to prompts kept out of training',
  fresh: 'the same for other prompts: a second exam',
  zero_variance_frac: 'share of groups with equal rewards',
  failed_frac: 'share of responses that nobody judged',
  truncated_frac: 'share of responses that hit the token limit',
  entropy: 'how undecided the policy is at a token',
  loss: 'value of the loss',
  approx_kl: 'how far a step moves the policy',
  grad_norm: 'length of the gradient',
  rollout_train_gap: 'how far their log-probs are apart',
  routes_agree_frac: 'share of equal choices in both engines',
  expert_busiest_frac: 'share of tokens in the fullest expert',
}
const SHARES = Object.keys(MEANS).filter(k => k.endsWith('_frac') || ['heldout', 'fresh'].includes(k))
const LIMIT = 3 // so many half widths of the healthy band from its middle is sick
const WRONG = 3 // cost of a wrong diagnosis
export const GIVEN = ['reward_mean', 'heldout'] // what everybody looks at: open from the start, free
const FIRST = 24 // begins with a patient whose reward rises while the exams fall

// What the lesson of this lab explains, and what needs step 10. Round 2 offers all diagnoses
const EXPERTS = ['routes_agree_frac', 'expert_busiest_frac']
const EARLY = ['healthy', 'broken verifier', 'fooled verifier', 'cut off', 'too hard', 'learning rate',
  'stale weights']
const later = Object.keys(DATA.patients).filter(n => !EARLY.includes(n))
export const ROUNDS = {
  first: { name: '1: faults of this lesson', patients: EARLY, diagnoses: EARLY,
    curves: Object.keys(CURVES).filter(k => !EXPERTS.includes(k)) },
  second: { name: '2: more faults, after step 10', patients: later, diagnoses: [...EARLY, ...later],
    curves: Object.keys(CURVES) },
}

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

const some = (all, keys) => Object.fromEntries(keys.map(k => [k, all[k]]))

// Patient -> curve -> its two ends
export const examine = (data, curves = CURVES) =>
  Object.fromEntries(Object.entries(data.patients).map(([name, own]) => [name,
    Object.fromEntries(Object.entries(curves).map(([key, [, floor]]) =>
      [key, compare(own[key], data.healthy[key], floor)]))]))

// The same for who may be met in a round
export const ward = ({ diagnoses, curves }) =>
  examine({ ...DATA, patients: some(DATA.patients, diagnoses) }, some(CURVES, curves))

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
export function tellTale(patient, keys = Object.keys(patient)) {
  const all = Object.entries(some(patient, keys)).flatMap(([key, two]) => two.map((end, i) => ({ key, i, ...end })))
  return all.reduce((a, b) => Math.abs(b.away) > Math.abs(a.away) ? b : a)
}

export const cost = ({ opened, wrong }) => opened + WRONG * wrong

// ---- the lab

// What the button says, what it is, and the lesson
export const DIAGNOSES = {
  healthy: ['healthy', 'Nothing is wrong with this run', 'loop.ipynb#a-real-run'],
  'broken verifier': ['the verifier crashes', 'The verifier raises an error on some of the responses',
    'loop.ipynb#steps-without-a-signal'],
  'fooled verifier': ['the verifier can be fooled', 'The verifier also pays each response with a letter twice in a row, right or wrong',
    'judges/verifiers.ipynb#what-an-outcome-means'],
  'cut off': ['responses are cut off', 'An answer of three letters fits, the token that ends it does not: the verifier still pays, and the policy is not taught to stop',
    'loop.ipynb#why-isnt-my-reward-rising'],
  'too hard': ['prompts are too hard', 'Nearly no response is right, so nearly all groups are silent',
    'algo/zero_variance.ipynb#groups-that-agree-teach-nothing'],
  'learning rate': ['learning rate too high', 'Twelve times the learning rate of the healthy runs',
    'loop.ipynb#a-learning-rate-from-the-cold-start'],
  'stale weights': ['stale weights', 'New weights never reach the engine that samples',
    'loop.ipynb#stale-weights'],
  'wrong experts': ['wrong experts are replayed', 'Each token is trained with the experts of the next one',
    'algo/engine_gap.ipynb#break-it-routes-at-the-wrong-place'],
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
.lab .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(15rem, 100%), 1fr)); gap: .9rem 1.2rem; }
.lab .bench figure { margin: 0; padding: 0; width: auto; }
.lab .bench figcaption { font: 12px/1.4 Inter, system-ui, sans-serif; color: var(--ink); margin: 0; padding: 0; text-align: left; }
.lab .bench figcaption b { display: block; }
.lab .ends { display: grid; grid-template-columns: repeat(3, auto); justify-content: start; gap: 0 .8rem; }
.lab .sound { fill: var(--cool); fill-opacity: .35; stroke: var(--cool); stroke-opacity: .5; }
.lab .sick { fill: none; stroke: var(--hot); stroke-width: 2; }
.lab .frame { stroke: var(--line); stroke-width: 1; }
.lab button:disabled { cursor: default; }
.lab button:disabled:not([aria-pressed="true"]) { color: var(--quiet); border-color: var(--line); }
.lab .bench a { color: var(--ink); text-decoration: underline; }
`
const FIRST_LAST = ['in its first step', 'in its last five steps']
const PLACE = { '-1': 'far below', 0: 'near', 1: 'far above' } // the band, by `sick`
const range = ({ low, high }) => low === high ? shown(low) : `${shown(low)} to ${shown(high)}`
const span = ({ low, high }) => low === high ? shown(low, 2) : `${shown(low, 2)} to ${shown(high, 2)}`
const named = keys => keys.map(k => CURVES[k][0]).join(', ')

// What a curve says at one of its ends
const fact = ({ key, i, value, ...end }) =>
  `${CURVES[key][0]} is ${shown(value)} ${FIRST_LAST[i]}, healthy runs have ${range(end)}`

// Where another fault would put a curve, at the first end where it differs from this one
function place(one, other, key) {
  const i = one[key].findIndex((end, i) => end.sick !== other[key][i].sick)
  return `${PLACE[other[key][i].sick]} the band ${FIRST_LAST[i]}`
}

// The patient's curve over what the healthy runs span, with the numbers in words
function chart(key, curve, healthy, two) {
  const [w, tall] = [230, 110], steps = curve.map((_, i) => healthy.map(run => run[i]))
  const all = [...curve, ...steps.flat()], middle = (Math.min(...all) + Math.max(...all)) / 2
  // noise below the floor stays flat
  const half = Math.max(Math.max(...all) - middle, 2 * CURVES[key][1])
  const low = all.every(v => v >= 0) ? Math.max(0, middle - half) : middle - half // no share is below 0
  const high = SHARES.includes(key) ? Math.min(1, middle + half) : middle + half // or above 1
  const x = i => w * i / (curve.length - 1), y = v => tall * (high - v) / (high - low)
  const at = (v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`
  const edge = side => steps.map((s, i) => at(side(...s), i))
  const said = two.map((e, i) => `${shown(e.value)} ${FIRST_LAST[i]}, healthy runs ${range(e)}`)
  const word = (x, y, text, anchor = 'start') => drawn('text', { x, y, 'text-anchor': anchor }, text)
  return h('figure', { class: 'opened' },
    h('figcaption', { 'aria-hidden': 'true' }, h('b', {}, CURVES[key][0]), h('span', { class: 'quiet' }, MEANS[key])),
    drawn('svg', { viewBox: `-2 -6 ${w + 50} ${tall + 24}`, role: 'img', 'aria-label': `${CURVES[key][0]}: ${said.join('; ')}` },
      ...[0, tall].map(at => drawn('line', { x1: 0, x2: w, y1: at, y2: at, class: 'frame' })),
      word(w + 5, 4, shown(high, 2)), word(w + 5, tall + 4, shown(low, 2)),
      word(0, tall + 15, 'step 1'), word(w, tall + 15, curve.length, 'end'),
      drawn('polygon', { class: 'sound', points: [...edge(Math.max), ...edge(Math.min).reverse()].join(' ') }),
      drawn('polyline', { class: 'sick', points: curve.map(at).join(' ') })),
    h('figcaption', { 'aria-hidden': 'true', class: 'ends' },
      ...['', 'first step', 'last five', 'patient', ...two.map(e => shown(e.value)), 'healthy', ...two.map(span)]
        .map(text => h('span', {}, text))))
}

function shuffled(names, seed) {
  const draw = random(seed), left = [...names]
  return names.map(() => left.splice(Math.floor(draw() * left.length), 1)[0])
}

function render({ el }) {
  const wards = Object.fromEntries(Object.entries(ROUNDS).map(([key, r]) => [key, ward(r)]))
  let round = 'first', turn = FIRST, order, at, opened = [], wrong = 0, spent, done
  const head = h('p', { class: 'score', style: 'margin:0 0 .6rem' }), charts = h('div', { class: 'charts' })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })
  const open = Object.fromEntries(Object.keys(CURVES).map(k => [k, h('button',
    { type: 'button', 'aria-pressed': 'false', click: () => look(k) }, CURVES[k][0])]))
  const guess = Object.fromEntries(Object.keys(DIAGNOSES).map(n =>
    [n, button(DIAGNOSES[n][0], () => answer(n))]))
  const next = button('Next patient', () => { at++; admit(); open[closed()[0]].focus() })
  const rounds = choice('Round', Object.fromEntries(Object.entries(ROUNDS).map(([k, r]) => [k, r.name])),
    round, key => { round = key; start() })

  const closed = () => ROUNDS[round].curves.filter(k => !GIVEN.includes(k))
  const least = name => fewest(wards[round], name, GIVEN)
  const now = () => cost({ opened: opened.length - GIVEN.length, wrong })

  function score() {
    const best = order.slice(0, at + done).reduce((sum, n) => sum + least(n).length, 0)
    head.textContent = `Patient ${at + 1} of ${order.length}. Cost: ${spent + now()}. `
      + `The least that was needed so far: ${best}.`
  }

  function start() {
    const { patients, curves, diagnoses } = ROUNDS[round]
    order = shuffled(patients, turn++)
    at = spent = 0
    Object.keys(open).forEach(k => { open[k].hidden = !curves.includes(k) })
    Object.keys(guess).forEach(n => { guess[n].hidden = !diagnoses.includes(n) })
    admit()
  }

  function admit() {
    opened = []
    wrong = done = 0
    next.hidden = true
    Object.values(open).forEach(b => b.setAttribute('aria-pressed', 'false'))
    Object.values(guess).forEach(b => { b.disabled = false; b.removeAttribute('aria-pressed') })
    charts.replaceChildren()
    GIVEN.forEach(look)
    line.textContent = 'Two curves of a run, over what five healthy runs span. What is wrong? '
      + 'Say it, or open another curve (cost 1).'
  }

  function look(key) {
    if (open[key].getAttribute('aria-pressed') === 'true') return
    if (!done) { // afterwards it costs nothing
      opened.push(key)
      line.textContent = `Opened: ${CURVES[key][0]} (${MEANS[key]}). What is wrong?`
    }
    open[key].setAttribute('aria-pressed', 'true')
    charts.append(chart(key, DATA.patients[order[at]][key], DATA.healthy[key], wards[round][order[at]][key]))
    score()
  }

  function answer(name) {
    const is = order[at], all = wards[round], fits = compatible(all, is, opened)
    if (name === is) return cured(is, fits)
    wrong++
    const against = opened.find(k => !alike(all[is], all[name], k))
    line.textContent = `No (cost ${WRONG}). ` + (against
      ? `With “${DIAGNOSES[name][0]}” the curve “${CURVES[against][0]}” would be ${place(all[is], all[name], against)}.`
      : 'What you have opened does not rule it out, and does not settle it: open another curve.')
    score()
  }

  // What showed it: on the curves that were open, and where it is plainest
  function signs(is) {
    const patient = wards[round][is], tale = tellTale(patient), seen = tellTale(patient, opened)
    if (!tale.sick) return `Even its furthest curve is near: ${fact(tale)}. `
    if (tale.key === seen.key) return `What gives it away: ${fact(tale)}. `
    const plainest = `The surest sign was not open: ${fact(tale)}. `
    return seen.sick ? `On your curves: ${fact(seen)}. ${plainest}` : plainest
  }

  function cured(is, fits) {
    const [, what, lesson] = DIAGNOSES[is]
    const also = fits.filter(n => n !== is).map(n => DIAGNOSES[n][0]), best = least(is)
    const said = `Right. ${what}. ${signs(is)}`
      + (also.length ? `Your curves alone do not rule out: ${also.join(', ')}. ` : '')
      + (best.length ? `Enough would have been: ${named(best)}. `
        : 'The two curves from the start were enough: no other fault changes both in this way. ')
    done = 1
    Object.values(guess).forEach(b => { b.disabled = true })
    guess[is].setAttribute('aria-pressed', 'true')
    line.replaceChildren(said, 'Read on: ', h('a', { href: address(lesson, location.pathname) }, 'the lesson'), '.')
    score()
    spent += now()
    opened = [...GIVEN]
    wrong = 0
    if (at + 1 === order.length) return line.append(' That was the last patient of this round.')
    next.hidden = false
    next.focus()
  }

  start()
  const row = (name, buttons, style) =>
    h('div', { class: 'knobs', role: 'group', 'aria-label': name.toLowerCase(), style }, name, ...buttons)
  show(el, 'Sick-run clinic', h('style', {}, LOOKS), h('div', { class: 'knobs' }, rounds.row), head,
    row('Curves', Object.values(open)), charts,
    row('Diagnosis', Object.values(guess), 'margin-top:.9rem'), line,
    h('div', { class: 'knobs', style: 'margin:.6rem 0 0' }, next, button('Start again', start)),
    h('p', { class: 'quiet' }, 'Orange: the patient. Band: five healthy runs. Far from the band: farther outside than it is wide.'))
}

export default { render }
