// Scheduler lab: who is generated when, and what the slots do meanwhile
import { button, choice, drawn, h, normals, show, shown, slider } from './shared.js'

// ---- mathematics: course.simulator with one replica

// Places in the queue: as they come, or by predicted length; of equal ones the first comes first
export const queue = (predicted, kind) => {
  const order = predicted.map((_, i) => i)
  return kind === 'fifo' ? order : order.sort((a, b) => predicted[b] - predicted[a] || a - b)
}

// The slot that is free first takes the next request
export function schedule(lengths, order, slots) {
  const free = Array(slots).fill(0)
  return order.map(request => {
    const slot = free.indexOf(Math.min(...free)), start = free[slot]
    free[slot] = start + lengths[request]
    return { request, slot, start, end: free[slot] }
  })
}

// When the last ends, the share of slot time that is idle until then, and the least time possible
export function facts(lengths, spans, slots) {
  const end = Math.max(...spans.map(s => s.end)), work = lengths.reduce((a, b) => a + b, 0)
  return { end, idle: 1 - work / (end * slots), bound: Math.max(work / slots, ...lengths) }
}

// ---- the lab

const COUNT = 40, draws = seed => Array.from({ length: COUNT }, normals(seed)), SHAPE = draws(7)
// Wider spread from the same draws; the mean stays 10 seconds
export function lengthsOf(spread) {
  const raw = SHAPE.map(z => Math.exp(spread * z)), all = raw.reduce((a, b) => a + b, 0)
  return raw.map(x => 10 * COUNT * x / all)
}
// A prediction is the length times a random factor; each seed is another draw
export function guesses(lengths, noise, seed) {
  const errors = draws(seed)
  return lengths.map((x, i) => x * Math.exp(noise * errors[i]))
}

const LOOKS = `
.lab .span { fill: var(--cool); stroke: var(--paper); stroke-width: 1; }
.lab .span.longest { fill: var(--hot); }
.lab .now { stroke: var(--ink); stroke-width: 1.5; }
.lab .least { stroke: var(--quiet); stroke-width: 1.5; stroke-dasharray: 4 3; }
.lab .other { stroke: var(--edge); stroke-width: 1.5; }
.lab .seconds { position: relative; height: 1.2rem; margin: 0 1rem 0 0; }
.lab .seconds span { position: absolute; }
.lab .idle { fill: var(--wash); }
.lab button:disabled { color: var(--quiet); border-color: var(--line); cursor: default; }
`

const ROUND = [1, 2, 5, 10, 20, 50, 100, 200, 500]

// Both orders share the axis, so that the gain is seen: `last` is the later end of the two
function gantt(spans, slots, { end, bound }, now, other, last) {
  const high = 150, unit = high / slots, at = t => 600 * t / last
  const [, second] = spans.map(s => s.end - s.start).sort((a, b) => b - a)
  const tick = ROUND.find(x => last / x <= 8), ticks = []
  for (let t = 0; t <= last; t += tick) ticks.push(t)
  const bar = (s, to) => drawn('rect', { x: at(s.start), y: s.slot * unit + 1, width: Math.max(at(to) - at(s.start), 0),
    height: unit - 2, class: s.end - s.start < second ? 'span' : 'span longest' })
  const upright = (t, name) => drawn('line', { x1: at(t), x2: at(t), y1: 0, y2: high, class: name })
  const picture = drawn('svg', { viewBox: `0 0 600 ${high + 4}`, 'aria-hidden': 'true', preserveAspectRatio: 'none',
    style: 'height:150px' },
    drawn('rect', { x: 0, y: 0, width: at(Math.min(now, end)), height: high, class: 'idle' }),
    ...spans.filter(s => s.start < now).map(s => bar(s, Math.min(s.end, now))),
    upright(other, 'other'), upright(bound, 'least'), upright(now, 'now'))
  return [picture, h('div', { class: 'seconds quiet', 'aria-hidden': 'true' },
    ...ticks.map(t => h('span', { style: `left:${100 * t / last}%` }, t ? `${t}` : '0 s')))]
}

function render({ el }) {
  const settings = { kind: 'fifo', slots: 6, spread: 1, noise: 0, seed: 1 }
  let now = 1, timer = 0 // the share of the time that has passed
  const picture = h('div'), line = h('p', { class: 'said', 'aria-live': 'polite' })

  function draw() {
    const lengths = lengthsOf(settings.spread), predicted = guesses(lengths, settings.noise, settings.seed)
    const spans = schedule(lengths, queue(predicted, settings.kind), settings.slots)
    const found = facts(lengths, spans, settings.slots), fifo = settings.kind === 'fifo'
    const rest = schedule(lengths, queue(predicted, fifo ? 'longest' : 'fifo'), settings.slots)
    const other = facts(lengths, rest, settings.slots).end
    noise.input.disabled = again.disabled = fifo
    only.style.visibility = fifo ? 'visible' : 'hidden' // it keeps its place, so nothing jumps
    picture.replaceChildren(...gantt(spans, settings.slots, found, now * found.end, other, Math.max(found.end, other)))
    const done = spans.filter(s => s.end <= now * found.end + 1e-9).length
    line.textContent = `Second ${(now * found.end).toFixed(1)}: ${done} of ${COUNT} have ended. The last ends at `
      + `second ${found.end.toFixed(1)}; slots are idle ${(100 * found.idle).toFixed(1)} % of the time. `
      + `${fifo ? 'Longest first' : 'As they come'} it would be second ${other.toFixed(1)}. `
      + `No order can end before second ${found.bound.toFixed(1)}.`
  }

  function stop() {
    clearInterval(timer)
    timer = 0
    start.textContent = 'Play'
  }

  function play() {
    if (timer) return stop()
    if (now === 1) now = 0
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) now = 1
    else {
      start.textContent = 'Pause'
      timer = setInterval(tick, 60)
    }
    clock.set(now)
    draw()
  }

  function tick() {
    now = Math.min(now + 0.02, 1)
    clock.set(now)
    draw()
    if (now === 1) stop()
  }

  const set = key => x => { settings[key] = x; draw() }
  const kind = choice('Order', { fifo: 'as they come', longest: 'longest first' }, 'fifo', set('kind'))
  const slots = slider('slots', { min: 2, max: 12, step: 1, value: 6 }, set('slots'))
  const spread = slider('spread', { min: 0, max: 2, step: 0.1, value: 1 }, set('spread'))
  const noise = slider('noise of the prediction', { min: 0, max: 3, step: 0.1, value: 0 }, set('noise'))
  const only = h('span', { class: 'quiet' }, '(only for longest first)')
  const again = button('New noise', () => set('seed')(settings.seed + 1))
  const percent = x => `${shown(100 * x)} %`
  const start = button('Play', play)
  const clock = slider('time', { min: 0, max: 1, step: 0.01, value: 1, say: percent },
    x => { stop(); now = x; draw() })
  draw()
  show(el, 'Scheduler lab', h('style', {}, LOOKS), h('div', { class: 'knobs' }, kind.row),
    h('div', { class: 'knobs' }, slots.box, spread.box, noise.box, again, only),
    h('div', { class: 'knobs' }, start, clock.box), picture, line,
    h('p', { class: 'quiet' }, 'A row is a slot, a bar a response; the two longest are orange. Solid: now. '
      + 'Dashed: the even share or the longest response, whichever is later. Grey: where the other order ends.'))
}

export default { render }
