// Run lab: a recorded run of the default preset, to start, stop, kill, resume and look into
import run from './run.json'
import { button, drawn, h, show, slider } from './shared.js'

// ---- mathematics: what is left of a run when it ends, and where it goes on (compassrl.runs.run)

export const FRESH = { how: 'ready', at: 0, saved: 0, again: 0 }

// `at`: steps that are done; `saved`: the newest checkpoint; `again`: steps that were done twice
export function after(state, event, { steps, save_every } = run) {
  const { how, at, saved, again } = state
  if (event === 'start') return how === 'ready' ? { ...state, how: 'runs' } : state
  if (event === 'resume') {
    if (how !== 'stopped' && how !== 'killed') return state
    return { how: 'runs', at: saved, saved, again: again + at - saved }
  }
  if (how !== 'runs') return state
  // a stop waits for the end of its step and saves; a kill waits for nothing
  if (event === 'stop') return { ...state, how: 'stopped', saved: at }
  if (event === 'kill') return { ...state, how: 'killed' }
  const done = at + 1, last = done === steps
  return { how: last ? 'finished' : 'runs', at: done, saved: last || done % save_every === 0 ? done : saved, again }
}

// The evaluation that is the newest at a step
export const examAt = (step, exams = run.exams) => exams.filter(e => e.step <= step).at(-1)

// ---- the lab

const LOOKS = `
.lab .exam { fill: none; stroke: var(--ink); stroke-width: 2; }
.lab .dot { fill: var(--ink); }
.lab .train { fill: var(--cool); opacity: .45; }
.lab .axis { stroke: var(--line); stroke-width: 1; }
.lab .kept { stroke: var(--ink); stroke-width: 3; }
.lab .lost { fill: var(--wash); }
.lab .look { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; }
.lab .shell { font: 13px/1.5 "JetBrains Mono", ui-monospace, monospace; overflow-wrap: anywhere; min-height: 3em; white-space: pre-wrap; }
.lab table.says { width: 100%; border-collapse: collapse; font: 13px/1.6 "JetBrains Mono", ui-monospace, monospace; }
.lab table.says :is(th, td) { text-align: left; padding: .1rem .6rem .1rem 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
.lab table.says th { font-weight: 400; color: var(--quiet); white-space: nowrap; }
.lab td.right { color: var(--cool); }
.lab td.wrong { color: var(--hot); }
.lab button:disabled { color: var(--quiet); border-color: var(--line); cursor: default; }
.lab td.marks { white-space: nowrap; letter-spacing: .1em; }
`
const H = 150

// `wide`: as many units as the lab has pixels, so that the numbers of the axes can be read on a phone
function curve(state, looked, wide) {
  const x = step => 44 + (wide - 60) * step / run.steps, y = share => 8 + (H - 16) * (1 - share)
  const seen = run.exams.filter(e => e.step <= state.at)
  const axis = [0, 0.5, 1].flatMap(v => [drawn('line', { x1: x(0), x2: x(run.steps), y1: y(v), y2: y(v), class: 'axis' }),
    drawn('text', { x: 38, y: y(v) + 4, 'text-anchor': 'end' }, `${100 * v} %`)])
  const ticks = [0, 40, 80, 120, 160, 200].filter(s => s <= run.steps).map(s =>
    drawn('text', { x: x(s), y: H + 14, 'text-anchor': 'middle' }, s ? `${s}` : 'step 0'))
  const kept = []
  for (let s = run.save_every; s <= state.saved; s += run.save_every) kept.push(s)
  if (state.saved && !kept.includes(state.saved)) kept.push(state.saved)
  const lost = state.how === 'killed' ? [drawn('rect', { x: x(state.saved), y: y(1), width: x(state.at) - x(state.saved),
    height: y(0) - y(1), class: 'lost' })] : []
  return drawn('svg', { viewBox: `0 0 ${wide} ${H + 18}`, 'aria-hidden': 'true' }, ...lost, ...axis, ...ticks,
    ...run.correct.slice(0, state.at).map((r, i) => drawn('circle', { cx: x(i + 1), cy: y(r), r: 2, class: 'train' })),
    drawn('polyline', { points: seen.map(e => `${x(e.step)},${y(e.right)}`).join(' '), class: 'exam' }),
    ...seen.map(e => drawn('circle', { cx: x(e.step), cy: y(e.right), r: 3, class: 'dot' })),
    ...kept.map(s => drawn('line', { x1: x(s), x2: x(s), y1: H - 8, y2: H, class: 'kept' })),
    drawn('line', { x1: x(looked), x2: x(looked), y1: y(1), y2: y(0), class: 'look' }))
}

// The responses at an evaluation: the first of each prompt, and all eight as marks
function responses(exam) {
  const row = ({ prompt, answer }, [says, right]) => h('tr', {}, h('th', { scope: 'row' }, prompt), h('td', {}, answer),
    h('td', { class: right[0] === '1' ? 'right' : 'wrong' }, `${says} ${right[0] === '1' ? '✓' : '✗'}`),
    h('td', { class: 'marks', 'aria-label': `${[...right].filter(r => r === '1').length} of ${right.length} are right` },
      [...right].map(r => r === '1' ? '●' : '○').join('')))
  const head = ['prompt', 'answer', 'first response', 'all eight'].map(t => h('th', { scope: 'col' }, t))
  return h('table', { class: 'says' }, h('thead', {}, h('tr', {}, ...head)),
    h('tbody', {}, ...run.prompts.map((p, i) => row(p, exam.says[i]))))
}

function render({ el }) {
  let state = FRESH, looked = 0, timer = 0, typed = ''
  const picture = h('div'), table = h('div'), shell = h('p', { class: 'shell' })
  const line = h('p', { class: 'said', 'aria-live': 'polite' })
  const percent = share => `${Math.round(100 * share)} %`

  const says = {
    ready: () => `A policy after its cold start: ${percent(run.exams[0].right)} of the held-out answers are right. Start the run.`,
    runs: () => `Step ${state.at} of ${run.steps}.`,
    stopped: () => `Stopped: step ${state.at} was finished and saved. Nothing is lost.`,
    killed: () => `Killed at step ${state.at}. The newest checkpoint is step ${state.saved}: `
      + (state.at > state.saved ? `${state.at - state.saved} steps are lost (grey).` : 'nothing is lost.'),
    finished: () => `Finished: ${percent(run.exams.at(-1).right)} of the held-out answers are right. `
      + (state.again ? `${state.again} steps were done twice, and it ends where it would have ended without that.`
        : 'Start over, and try to make it end elsewhere.'),
  }

  function draw() {
    const exam = examAt(looked)
    picture.replaceChildren(curve(state, looked, Math.max(300, (picture.clientWidth || 600))))
    table.replaceChildren(responses(exam))
    look.input.max = state.at
    look.set(looked)
    shell.textContent = typed
    line.textContent = says[state.how]() + (exam.step || state.at ? ` Below: the evaluation at step ${exam.step}, ${percent(exam.right)} right.` : '')
    start.disabled = !['ready', 'stopped', 'killed'].includes(state.how)
    start.textContent = state.how === 'ready' ? 'Start' : 'Resume'
    for (const b of [stop, kill]) b.disabled = state.how !== 'runs'
  }

  function happen(event) {
    state = after(state, event)
    if (state.how !== 'runs') clearTimeout(timer)
    looked = state.at
    draw()
  }

  function go() {
    const event = state.how === 'ready' ? 'start' : 'resume'
    typed = event === 'start' ? '$ compassrl train tiny-cpu --run-dir runs/first' : '$ compassrl resume runs/first'
    clearTimeout(timer)
    happen(event)
    next()
  }

  // each step takes as long as it took
  function next() {
    timer = setTimeout(() => { happen('step'); if (state.how === 'runs') next() }, 1000 * run.seconds[state.at])
  }

  const start = button('Start', go)
  const stop = button('Stop (Ctrl-C)', () => { typed += ' ^C'; happen('stop') })
  const kill = button('Kill (power cut)', () => { typed += '\nKilled'; happen('kill') })
  const over = button('Start over', () => { clearTimeout(timer); state = FRESH; looked = 0; typed = ''; draw() })
  const look = slider('look at step', { min: 0, max: 0, step: 1, value: 0 }, to => {
    if (state.how === 'runs') { clearTimeout(timer); typed += ' ^C'; state = after(state, 'stop') }
    looked = to
    draw()
  })
  show(el, 'Run lab', h('style', {}, LOOKS), h('div', { class: 'knobs' }, start, stop, kill, over), shell, picture,
    line, h('div', { class: 'knobs' }, look.box), table,
    h('p', { class: 'quiet' }, 'Curve: right answers to held-out problems. Teal: right answers in training, a dot a step. '
      + 'Training asks more often for sums of those lengths that are solved sometimes, so this share need not rise; '
      + 'where nearly all sums of a step have three digits, as in steps 29 to 31, it is low. '
      + 'Thick marks on the axis: checkpoints. ● right, ○ wrong. Each step takes as long as it took when the run was recorded; '
      + 'the cold start and the evaluations are left out.'))
  draw() // once there is a width
}

export default { render }
