// Countdown lab: the search that a policy would write, for any three numbers and target
import { button, drawn, h, show, slider, toggle } from './shared.js'

// ---- mathematics: the family `countdown_search` of compassrl.data.toys

const SIGNS = '+-*'
const value = (a, b, sign) => {
  const [x, y] = a > b ? [a, b] : [b, a]
  return sign === '+' ? x + y : sign === '-' ? x - y : x * y
}

// The 27 ways, in order: a pair and its sign, then the number that is left and a sign
export function ways(numbers) {
  const [a, b, c] = [...numbers].sort((x, y) => y - x)
  return [[a, b, c], [a, c, b], [b, c, a]].flatMap(([x, y, left]) => [...SIGNS].flatMap(inner => {
    const pair = `${x}${inner}${y}`, made = value(x, y, inner)
    return [...SIGNS].map(sign => ({ pair, made, left, sign, value: value(made, left, sign),
      expr: made >= left ? `(${pair})${sign}${left}` : `${left}${sign}(${pair})` }))
  }))
}

// What is written, how many ways were read, and the way that reaches the target (-1: none does)
export function search(numbers, target) {
  const all = ways(numbers)
  const hit = all.findIndex(w => w.made < 100 && w.value === target), read = hit < 0 ? 27 : hit + 1
  const lines = []
  all.slice(0, read).forEach((w, n) => {
    if (w.made > 99) return
    if (n % 3 === 0) lines.push(`${w.pair}=${w.made},${w.left}:`)
    else lines.push(lines.pop() + ' ')
    lines.push(lines.pop() + (w.value < 100 ? w.value : '.'))
  })
  const text = lines.join(';') + (hit < 0 ? '' : `!#${all[hit].expr}`)
  return { text, read, hit, guesses: all.filter(w => w.value === target).length }
}

// ---- the lab

const LOOKS = `
.lab .way { fill: var(--wash); }
.lab .way.read { fill: var(--pull); }
.lab .way.hit { fill: var(--hot); }
.lab .way.right { stroke: var(--hot); stroke-width: 2; }
.lab svg text.on { fill: var(--paper); }
.lab .thinking { font: 13px/1.5 "JetBrains Mono", ui-monospace, monospace; overflow-wrap: anywhere; min-height: 6em; }
.lab .said { min-height: 2.8em; }
.lab .numbers input[type="range"] { width: 5rem; }
.lab .numbers output { min-width: 1.4rem; }
`

// `open`: the ways that the search does not write have their values as well
function grid(all, { hit, read, target, open }) {
  const high = 21, wide = 60
  const cell = (n, columns, look, says) => {
    const x = 110 + wide * (n % 3), y = high * Math.floor(n / 3), width = wide * columns - 3
    return [drawn('rect', { x, y, width, height: high - 3, rx: 3, class: `way ${look}` }),
      drawn('text', { x: x + width / 2, y: y + 13, 'text-anchor': 'middle', class: look === 'hit' ? 'on' : '' }, says)]
  }
  const cells = all.flatMap((w, n) => {
    const says = w.value < 100 ? w.value : '.'
    if (n < read && w.made < 100) return cell(n, 1, n === hit ? 'hit' : 'read', says)
    if (open) return cell(n, 1, w.value === target ? 'spare right' : 'spare', says)
    if (w.made > 99) return n % 3 ? [] : cell(n, 3, '', 'pair above 99: left out')
    return cell(n, 1, '', '')
  })
  const names = [...Array(9)].map((_, i) => all[3 * i]).map((w, i) => drawn('text',
    { x: 0, y: high * i + 13 }, `${w.pair} = ${w.made}, ${w.left}`.replace('*', '×')))
  const heads = [...'+−×'].map((s, i) => drawn('text',
    { x: 110 + wide * i + wide / 2 - 2, y: -5, 'text-anchor': 'middle' }, s))
  return drawn('svg', { viewBox: `0 -18 300 ${9 * high + 18}`, 'aria-hidden': 'true', style: 'max-width:420px' },
    ...heads, ...names, ...cells)
}

function render({ el }) {
  const numbers = [24, 20, 17]
  let target = 27, open = false, written = Infinity, timer = 0 // characters that are written so far
  const picture = h('div'), paper = h('p', { class: 'thinking' })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })

  function draw() {
    const found = search(numbers, target), { text, hit } = found
    const ended = written >= text.length
    // a value is read once the character after it is written
    const read = ended ? found.read : (text.slice(0, written).match(/(?<=[:\d.]) |;|!/g) ?? []).length
    const kept = ways(numbers).map((w, n) => w.made > 99 ? -1 : n).filter(n => n >= 0)
    picture.replaceChildren(grid(ways(numbers),
      { hit, read: ended ? found.read : (kept[read] ?? 27), target, open }))
    paper.textContent = text.slice(0, written)
    line.textContent = !ended ? '' : (hit < 0 ? `None of the 27 ways makes ${target}. The search wrote ${kept.length} of them, `
      + `${text.length} characters, and has no answer.`
      : `Way ${found.read} of 27 makes ${target}. The response has ${text.length + 1} tokens with its end.`)
      + ` Of 27 guesses ${found.guesses} would be right.`
      + (numbers.includes(target) ? ' (The number alone would do; no problem has such a target.)' : '')
  }

  function write() {
    clearInterval(timer)
    written = 0
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) written = Infinity
    else timer = setInterval(() => {
      written++
      draw()
      if (written >= search(numbers, target).text.length) clearInterval(timer)
    }, 40)
    draw()
  }

  const changed = set => x => { clearInterval(timer); written = Infinity; set(x); draw() }
  const knobs = ['first number', 'second number', 'third number'].map((name, i) => slider(name,
    { min: 1, max: 30, step: 1, value: numbers[i] }, changed(x => { numbers[i] = x })))
  const goal = slider('target', { min: 1, max: 99, step: 1, value: target }, changed(x => { target = x }))
  draw()
  show(el, 'Countdown lab', h('style', {}, LOOKS), h('div', { class: 'knobs numbers' }, ...knobs.map(k => k.box)),
    h('div', { class: 'knobs' }, goal.box, button('Write it', write),
      toggle('Show all ways', false, down => { open = down; draw() })), picture, paper, line,
    h('p', { class: 'quiet' }, 'A row is a pair and the number that is left, a column the second sign. '
      + 'Teal: tried. Orange: the target. A dot is a value above 99; a row whose pair is above 99 is left out. '
      + '“Show all ways” adds, in grey, what the search does not write; an orange border marks further ways to the target.'))
}

export default { render }
