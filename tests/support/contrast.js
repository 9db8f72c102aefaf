// In an element of a page: texts whose contrast with what is behind them is below WCAG AA
root => {
  const rgba = text => {
    const n = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number)
    return text.startsWith('color(srgb') ? [...n.slice(0, 3).map(x => 255 * x), n[3] ?? 1] : [...n.slice(0, 3), n[3] ?? 1]
  }
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1)
  const light = color => {
    const [r, g, b] = color.slice(0, 3).map(x => x / 255).map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const known = new Map()
  const paper = e => {
    if (!e) return [255, 255, 255, 1]
    if (!known.has(e)) known.set(e, over(rgba(getComputedStyle(e).backgroundColor), paper(e.parentElement)))
    return known.get(e)
  }
  const shown = new Map()
  const opacity = e => {
    if (!e) return 1
    if (!shown.has(e)) shown.set(e, getComputedStyle(e).opacity * opacity(e.parentElement))
    return shown.get(e)
  }
  root.querySelectorAll('details').forEach(d => (d.open = true))
  const found = new Map()
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
  const code = new Map() // in a block of code, words of one class look alike
  const again = e => {
    const block = e.parentElement
    if (e.tagName !== 'SPAN' || block?.tagName !== 'PRE' || e.hasAttribute('style')) return false
    const known = code.get(block) ?? code.set(block, new Set()).get(block)
    return known.has(e.className) || !known.add(e.className)
  }
  let texts = 0
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement
    if (!node.data.trim()) continue
    if (again(e)) {
      texts++
      continue
    }
    if (e.closest('svg, script, style, noscript') || !e.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue
    texts++
    const style = getComputedStyle(e), back = paper(e)
    const full = rgba(style.color), ink = [...full.slice(0, 3), full[3] * opacity(e)]
    const [high, low] = [light(over(ink, back)), light(back)].sort((a, b) => b - a)
    const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize)
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700)
    if (ratio < (large ? 3 : 4.5)) {
      const key = `${e.tagName.toLowerCase()}.${e.className} ${style.color} on ${back.slice(0, 3).map(Math.round)}`
      if (!found.has(key)) found.set(key, `${ratio.toFixed(2)}: ${key}: ${node.data.trim().slice(0, 40)}`)
    }
  }
  return { texts, faint: [...found.values()] }
}
