// Play: what Python computed for a grid of values; sliders and lists choose what is shown of it
import { h, show, slider } from './shared.js'

// ---- mathematics: where a choice stands in a grid whose last control moves first

export const place = (sizes, chosen) => sizes.reduce((at, size, i) => at * size + chosen[i], 0)

// What a picture says, without its axes: "title; y against x"
export const titles = says => says.split('; ').filter(part => part && !/ against /.test(part)).join('; ')

// ---- the box

const FADE = 200 // ms from one picture to the next

const LOOKS = `
.lab[data-lab="play"] canvas { display: block; max-width: 100%; height: auto; background: #fff; }
.lab[data-lab="play"] .frame { overflow-x: auto; }
.lab[data-lab="play"] .title { display: none; font-weight: 600; margin: 0 0 .4rem; }
@container (max-width: 480px) { .lab[data-lab="play"] canvas { max-width: none; }
  .lab[data-lab="play"] .title { display: block; } /* the one in the picture is cut */
  .lab[data-lab="play"] .frame.wide::after { content: "swipe to see the rest →"; position: sticky; left: 0;
    display: block; width: 12rem; font-size: .75rem; color: var(--quiet); } }
.lab[data-lab="play"] .bench pre { margin: .5rem 0 0; padding: 0; border: 0;
  color: var(--ink); background: none; font: 12px/1.4 "JetBrains Mono", ui-monospace, monospace; overflow-x: auto; }
.lab[data-lab="play"] .knobs label { flex-wrap: wrap; max-width: 100%; }
.lab[data-lab="play"] .knobs select { max-width: 100%; }
`

function list(name, labels, start, changed) {
  const options = labels.map((text, i) => h('option', { value: i, selected: i === start }, text))
  const input = h('select', { 'aria-label': name, change: () => changed(+input.value) }, ...options)
  return h('label', {}, h('span', {}, name), input)
}

function track(name, labels, start, changed) {
  const { box, input } = slider(name, { min: 0, max: labels.length - 1, step: 1, value: start,
    say: i => labels[i] }, i => { input.setAttribute('aria-valuetext', labels[i]); changed(i) })
  input.setAttribute('aria-valuetext', labels[start])
  return box
}

function render({ el }) {
  const { controls, frames, width, height } = JSON.parse(el.dataset.frames)
  const sizes = controls.map(c => c.labels.length), chosen = controls.map(c => c.start)
  const strip = new Image(), canvas = h('canvas', { width, height, role: 'img' })
  const words = h('div', { class: 'said', 'aria-live': 'polite' })
  const title = h('p', { class: 'title', 'aria-hidden': 'true' })

  const still = matchMedia('(prefers-reduced-motion: reduce)')
  let shown = -1, motion = 0

  // The picture of before makes way to the new one, at once where motion is unwanted
  function fade(picture) {
    const ink = canvas.getContext('2d'), begun = performance.now(), before = canvas.cloneNode()
    before.getContext('2d').drawImage(canvas, 0, 0)
    const first = shown < 0 || picture < 0 || still.matches
    shown = picture
    cancelAnimationFrame(motion)
    const paint = now => {
      const part = first ? 1 : Math.min(1, Math.max(0, (now - begun) / FADE))
      ink.globalAlpha = 1
      if (part < 1) ink.drawImage(before, 0, 0)
      ink.globalAlpha = part
      ink.drawImage(strip, -picture * width, 0)
      if (part < 1) motion = requestAnimationFrame(paint)
    }
    paint(begun)
  }

  function draw() {
    const { picture, says, html } = frames[place(sizes, chosen)]
    canvas.hidden = picture < 0
    canvas.setAttribute('aria-label', says)
    title.textContent = titles(says)
    if (picture !== shown) fade(picture)
    words.innerHTML = html
  }

  const knobs = controls.map(({ name, labels, start, slides }, i) => {
    const changed = now => { chosen[i] = now; draw() }
    return labels.length < 2 ? h('span', { class: 'quiet' }, `${name} = ${labels[0]}`)
      : (slides ? track : list)(name, labels, start, changed)
  })
  const note = `${frames.length} settings are computed here; JupyterLab computes any.`
  if (width) el.style.maxWidth = `calc(${Math.max(width, 640)}px + 1.6rem)` // it ends where its pictures end
  const start = () => {
    show(el, 'Play', h('style', {}, LOOKS), h('div', { class: 'knobs' }, ...knobs),
      width > 480 ? title : '', h('div', { class: width > 480 ? 'frame wide' : 'frame' }, canvas), words,
      h('p', { class: 'quiet' }, note))
    draw()
  }
  if (!el.dataset.strip) return start()
  strip.onload = start
  strip.src = el.dataset.strip
}

export default { render }
