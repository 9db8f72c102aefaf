// Trace viewer: a run's trace.jsonl, token by token, and its loss computed once more
import { h, show, shown } from './shared.js'
import SAMPLE from './trace.json' with { type: 'json' }

// ---- mathematics: compassrl.runs.trace.recompute_loss

const AVERAGE = {
  grpo: 'seq-mean-token-mean', gspo: 'seq-mean-token-mean', gmpo: 'seq-mean-token-mean',
  dapo: 'token-mean', cispo: 'token-mean',
  dr_grpo: 'seq-mean-token-sum-norm', espo: 'seq-mean-token-sum',
}
const CLIP = { grpo: [0.2, 0.2], dr_grpo: [0.2, 0.2], espo: [0.2, 0.2], dapo: [0.2, 0.28],
  gspo: [3e-4, 4e-4], gmpo: [-Math.expm1(-0.4), Math.expm1(0.4)], cispo: [1, 4] }
const MAX_NATS = 20
const bound = (x, low, high) => Math.min(Math.max(x, low), high)
const mean = x => x.reduce((a, b) => a + b, 0) / x.length
const moved = (a, b) => Math.max(a, -1e4) - Math.max(b, -1e4)
const share = (n, frac) => Math.ceil(n * frac - 1e-9)

// Whole steps with their samples; what a kill cut short at the end is left out
export function readTrace(text) {
  const steps = []
  text.split('\n').slice(0, -1).forEach((line, i) => {
    let row
    try {
      row = JSON.parse(line)
    } catch {
      throw Error(`line ${i + 1} is not JSON: the file is damaged`)
    }
    if (row?.version !== 1) throw Error(`line ${i + 1} is no row of a trace of version 1`)
    if (row.kind === 'step') steps.push({ head: row, rows: [] })
    else if (steps.at(-1)?.head.step !== row.step) throw Error(`line ${i + 1} is a sample of no step`)
    else steps.at(-1).rows.push(row)
  })
  const whole = steps.filter(s => s.rows.length === s.head.num_samples)
  if (!whole.length) throw Error('there is no whole step in it')
  return whole
}

// What a loss needs of config.json, with the choices of its own paper filled in
export function settingsOf(config) {
  const loss = { ...config.loss }
  if (!(loss.name in AVERAGE)) throw Error(`the loss ${loss.name} is not one that this page knows`)
  loss.aggregation ??= AVERAGE[loss.name]
  loss.clip_eps_low ??= CLIP[loss.name][0]
  loss.clip_eps_high ??= CLIP[loss.name][1]
  return { loss, espo: config.espo, vocab: config.policy.vocab_size }
}

// A response without the tokens that a tool wrote: no loss sees them
const LISTS = ['response_ids', 'log_probs', 'old_log_probs', 'ref_log_probs', 'rollout_log_probs',
  'entropy', 'advantages']
function chosen(row) {
  const own = row.policy_mask
  if (!own) return row
  const kept = LISTS.filter(k => row[k]).map(k => [k, row[k].filter((_, t) => own[t])])
  return { ...row, ...Object.fromEntries(kept), policy_mask: null }
}

// The entropy from which on a token is high, of the whole step
function threshold(rows, { loss, espo }) {
  if (loss.name !== 'espo' || espo.groups !== 'batch_quantile') return null
  const all = rows.flatMap(r => chosen(r).entropy).sort((a, b) => b - a)
  return all[share(all.length, espo.top_frac) - 1]
}

function espoGroups(entropy, espo, least) {
  if (least !== null) return entropy.map(x => +(x < least))
  const n = entropy.length, rank = []
  entropy.map((_, i) => i).sort((a, b) => entropy[b] - entropy[a] || a - b)
    .forEach((i, place) => { rank[i] = place })
  if (espo.groups === 'bins') return rank.map(p => Math.floor(p * Math.min(n, espo.num_bins) / n))
  return rank.map(p => +(p >= share(n, espo.top_frac)))
}

// Of each token the mean of the response's ratios, each up to the limit that its advantage asks for
function geometric(row, delta, low, high) {
  const most = Math.log1p(high), least = Math.log1p(-low), up = t => row.advantages[t] > 0
  const near = delta.map(d => bound(d, -MAX_NATS, MAX_NATS))
  const kept = near.map((d, t) => up(t) ? Math.min(d, most) : Math.max(d, least))
  return near.map((d, t) => ({ ratio: Math.exp(mean(kept)), low: Infinity, high: Infinity, own: 1,
    silent: row.advantages[t] !== 0 && kept[t] !== d }))
}

// Of each token its ratio, its range, and its weight within the response where the loss gives one
function views(row, delta, { loss, espo, vocab }, least) {
  const [low, high] = [loss.clip_eps_low, loss.clip_eps_high]
  if (loss.name === 'gspo') delta = delta.map(() => mean(delta))
  if (loss.name === 'gmpo') return geometric(row, delta, low, high)
  if (loss.name !== 'espo')
    return delta.map(d => ({ ratio: Math.exp(bound(d, -MAX_NATS, MAX_NATS)), low, high, own: 1 }))
  const groups = espoGroups(row.entropy, espo, least)
  const say = g => g ? espo.low_entropy_weight : 1
  const all = [...new Set(groups)].reduce((a, g) => a + say(g), 0)
  return delta.map((d, t) => {
    const of = x => x.filter((_, i) => groups[i] === groups[t])
    const near = mean(of(delta)) + (espo.ratio === 'literal' ? d : 0)
    const eps = Math.max(espo.alpha / Math.log(vocab) * mean(of(row.entropy)), espo.eps_min)
    return { ratio: Math.exp(bound(near, -MAX_NATS, MAX_NATS)), low: eps, high: eps,
      own: all ? say(groups[t]) / (all * of(delta).length) : 0 }
  })
}

function tis(delta, { tis: kind, tis_cap: cap, tis_low: low }) {
  if (kind === 'off') return 1
  const rho = Math.exp(bound(delta, -MAX_NATS, MAX_NATS))
  return kind === 'truncate' ? Math.min(rho, cap) : rho < low || rho > cap ? 0 : rho
}

function klOf(d, kind) {
  if (kind === 'k1') return d
  if (kind === 'k2') return d * d / 2
  return Math.expm1(-bound(d, -MAX_NATS, MAX_NATS)) + bound(d, -MAX_NATS, MAX_NATS)
}

// How much a token of a response counts in its mini-batch
function weight(mode, row, tokens, samples, budget) {
  if (mode === 'token-mean') return 1 / tokens
  if (mode === 'seq-mean-token-sum') return 1 / samples
  if (mode === 'seq-mean-token-mean') return 1 / (Math.max(row.response_ids.length, 1) * samples)
  return 1 / (budget * samples)
}

// Of each token that the policy drew the loss before it is averaged, and whether it is silent
function tokenLosses(row, settings, least) {
  const { loss } = settings
  const start = loss.ratio_to === 'behaviour' ? row.rollout_log_probs : row.old_log_probs
  const delta = row.log_probs.map((x, t) => moved(x, start[t]))
  return views(row, delta, settings, least).map((v, t) => {
    const A = row.advantages[t], clipped = bound(v.ratio, 1 - v.low, 1 + v.high)
    const silent = v.silent ?? (loss.name !== 'cispo'
      && ((A < 0 && v.ratio < 1 - v.low) || (A > 0 && v.ratio > 1 + v.high)))
    const value = loss.name === 'cispo' ? -clipped * A * row.log_probs[t]
      : -Math.min(v.ratio * A, clipped * A)
    const w = loss.tis === 'off' ? 1 : tis(moved(row.old_log_probs[t], row.rollout_log_probs[t]), loss)
    return { value: value * v.own * w, silent, ratio: v.ratio }
  })
}

// The mean over the step's mini-batches, as a run logs it
export function recomputeLoss({ head, rows: written }, settings) {
  if (!written[0].log_probs) throw Error(`step ${head.step} has no log_probs: no update was made of it`)
  const rows = written.map(chosen), { loss } = settings, least = threshold(rows, settings), parts = []
  const [size, more] = [Math.floor(rows.length / head.num_mini_batches), rows.length % head.num_mini_batches]
  for (let i = 0, at = 0; i < head.num_mini_batches; i++) {
    const n = size + (i < more)
    parts.push(rows.slice(at, at + n))
    at += n
  }
  const count = part => part.reduce((a, r) => a + r.response_ids.length, 0)
  return mean(parts.filter(count).map(part => {
    const tokens = count(part)
    let total = 0
    for (const row of part) {
      const w = weight(loss.aggregation, row, tokens, part.length, loss.max_response_tokens)
      total += w * tokenLosses(row, settings, least).reduce((a, t) => a + t.value, 0)
      if (!loss.kl_coef) continue
      const mode = loss.name === 'espo' ? 'seq-mean-token-mean' : loss.aggregation
      const kl = row.log_probs.reduce((a, x, t) => a + klOf(moved(x, row.ref_log_probs[t]), loss.kl_estimator), 0)
      total += loss.kl_coef * weight(mode, row, tokens, part.length, loss.max_response_tokens) * kl
    }
    return total
  }))
}

// ---- the viewer

const byTool = (row, t) => row.policy_mask && !row.policy_mask[t]
// Values of the tokens that the policy drew, at their places; null where a tool wrote
function placed(row, values) {
  let next = 0
  return row.response_ids.map((_, t) => byTool(row, t) ? null : values[next++])
}

// Shares of layers; null of a token that was never fed, or whose experts nobody named
const agreement = row =>
  row.routes_agree.map((x, t) => row.routes_valid?.[row.prompt_ids.length + t] ? x : null)

// Of each colour its name, the list that not every trace has, and its values for the tokens of a
// response, or for those that the policy drew; `deep`: how strong a value is, if not by its size
const COLORS = {
  entropy: { name: 'entropy', own: r => r.entropy },
  advantages: { name: 'advantage', signed: true, own: r => r.advantages },
  silent: { name: 'silent: clipped', needs: 'log_probs', signed: true,
    own: (r, s, least) => tokenLosses(r, s, least).map(t => +t.silent) },
  moved: { name: 'moved by the update', needs: 'log_probs', signed: true,
    own: r => r.log_probs.map((x, t) => x - r.old_log_probs[t]) },
  gap: { name: 'gap between engines', signed: true,
    own: r => r.old_log_probs.map((x, t) => x - r.rollout_log_probs[t]) },
  routes: { name: 'route agreement', needs: 'routes_agree', all: agreement, deep: x => 1 - x },
}
const valuesOf = (row, { own, all }, settings, least) =>
  all ? all(row) : placed(row, own(chosen(row), settings, least))
const LOOKS = `
.lab .drop { border: 2px dashed var(--quiet); border-radius: 8px; padding: .8rem; margin: 0 0 .6rem; }
.lab .drop.over { border-color: var(--hot); }
.lab .drop input { color: var(--ink); max-width: 100%; }
.lab .responses { font: 12px/1.9 "JetBrains Mono", ui-monospace, monospace; overflow-wrap: anywhere; max-height: 26rem;
  overflow-y: auto; }
.lab .responses .token { display: inline-block; line-height: 1.4; padding: 1px 3px; border: 1px solid var(--line); border-radius: 3px;
  background: color-mix(in srgb, var(--hot) calc(var(--a) * 45%), var(--paper)); }
.lab .responses .token.up { background: color-mix(in srgb, var(--cool) calc(var(--a) * 45%), var(--paper)); }
.lab .responses .token.tool { border-style: dashed; color: var(--quiet); }
.lab .times { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px .6rem;
  align-items: center; font-size: 12px; margin: .6rem 0 0; }
.lab .times i { display: block; height: .7rem; background: var(--cool); border-radius: 2px; }
`

function render({ el }) {
  let steps = null, config = null, words = {}
  const line = h('p', { class: 'said', 'aria-live': 'polite' }), body = h('div')
  const pick = (name, changed) => h('select', { 'aria-label': name, change: changed })
  const [step, group, color] = [pick('step', () => draw(true)), pick('group', () => draw()), pick('colour', () => draw())]
  const fill = (list, options) => list.replaceChildren(...options.map(([value, text]) => h('option', { value }, text)))
  const knobs = h('div', { class: 'knobs', hidden: '' }, h('label', {}, 'step', step), h('label', {}, 'group', group),
    h('label', {}, 'colour', color))

  const named = vocabulary => Object.fromEntries(
    Object.entries(vocabulary).map(([word, id]) => [id, word.replace('Ġ', '␣')]))

  // Step 4 of a run of smoke-cpu, until files of another run are there
  let sampled = true
  function sample() {
    steps = readTrace(SAMPLE.trace.map(row => JSON.stringify(row)).join('\n') + '\n')
    config = settingsOf(SAMPLE.config)
    words = named(SAMPLE.vocab)
    look()
  }

  async function take(files) {
    if (sampled) [steps, config, words, sampled] = [null, null, {}, false]
    try {
      for (const file of files) {
        const text = await file.text()
        if (file.name.endsWith('.jsonl')) steps = readTrace(text)
        else if (file.name === 'tokenizer.json') words = named(JSON.parse(text).model.vocab)
        else config = settingsOf(JSON.parse(text))
      }
    } catch (e) {
      line.textContent = `This cannot be read: ${e.message}.`
      return
    }
    if (!steps) return void (line.textContent = 'trace.jsonl is missing.')
    look()
  }

  function look() {
    fill(step, steps.map((s, i) => [i, s.head.step]))
    const was = color.value, has = key => steps.some(s => s.rows[0][key])
    const there = Object.entries(COLORS).filter(([, { needs }]) => !needs || has(needs))
    fill(color, there.map(([key, { name }]) => [key, name]))
    if (there.some(([key]) => key === was)) color.value = was
    knobs.hidden = false
    draw(true)
  }

  function verdict(now) {
    const logged = now.head.metrics.loss
    if (!config) return 'Add config.json of the run, and the loss is computed once more.'
    if (!now.rows[0].log_probs) return 'No update was made of this step.'
    const ours = recomputeLoss(now, config)
    return `Loss logged ${logged.toFixed(9)}, recomputed ${ours.toFixed(9)}: `
      + (Math.abs(ours - logged) < 1e-6 * Math.max(1, Math.abs(logged)) ? 'equal within 1e-6.' : `off by ${shown(ours - logged)}.`)
  }

  function responses(rows, least) {
    const { name, needs, signed, deep = Math.abs } = COLORS[color.value]
    if (needs && !rows[0][needs]) throw Error(`This step has no ${needs}`)
    const values = rows.map(r => valuesOf(r, COLORS[color.value], config, least))
    const depth = x => x === null ? 0 : deep(x)
    const top = Math.max(1e-12, ...values.flat().map(depth))
    return rows.map((r, i) => h('div', {}, h('b', {}, `${shown(r.reward)} `), ...r.response_ids.map((id, t) => {
      const x = values[i][t], tool = byTool(r, t)
      const looks = ['token', tool && 'tool', signed && x > 0 && 'up'].filter(Boolean).join(' ')
      const title = `${name} ${x ?? 'unknown'}\n${tool ? 'a tool wrote this' : `log-prob ${r.old_log_probs?.[t]}`}`
      return h('span', { class: looks, style: `--a:${depth(x) / top}`, title }, words[id] ?? String(id))
    })))
  }

  function draw(newStep = false) {
    const now = steps[+step.value]
    if (newStep) fill(group, [...new Set(now.rows.map(r => r.group))].map(g => [g, g]))
    const rows = now.rows.filter(r => r.group === +group.value)
    const times = Object.entries(now.head.metrics).filter(([k]) => /^time_(?!step).*(?<!busy)_s$/.test(k))
    const longest = Math.max(...times.map(([, x]) => x))
    const prompt = rows[0].prompt_ids.map(id => words[id] ?? id).join(' ')
    body.replaceChildren(h('p', { class: 'quiet' }, `prompt: ${prompt}`))
    try {
      line.textContent = `${verdict(now)} Mean reward ${shown(mean(now.rows.map(r => r.reward)))}.`
      body.append(h('div', { class: 'responses' }, ...responses(rows, config && threshold(now.rows, config))),
        h('div', { class: 'times' }, ...times.flatMap(([k, x]) => [h('span', {}, k.slice(5, -2)),
          h('span', {}, h('i', { style: `width:${100 * x / longest}%` })), h('span', { class: 'number' }, `${shown(x)} s`)])))
    } catch (e) {
      line.textContent = color.value === 'silent' && !config ? 'Clipping needs config.json of the run.' : `${e.message}.`
    }
  }

  const input = h('input', { type: 'file', multiple: '', accept: '.json,.jsonl', 'aria-label': 'files of a run',
    change: () => {
      const files = [...input.files]
      input.value = '' // so that a file that has grown can be chosen again
      take(files)
    } })
  const zone = h('div', { class: 'drop',
    dragover: e => { e.preventDefault(); zone.classList.add('over') },
    dragleave: () => zone.classList.remove('over'),
    drop: e => { e.preventDefault(); zone.classList.remove('over'); take([...e.dataTransfer.files]) } },
    h('p', { style: 'margin:0 0 .4rem' }, 'This is a step of smoke-cpu. Drop trace.jsonl and config.json of your run here, and tokenizer.json of its model '
      + 'to see words. The files stay on this page; nothing is sent.'), input)
  show(el, 'Trace viewer', h('style', {}, LOOKS), zone, knobs, line, body)
  sample()
}

export default { render }
