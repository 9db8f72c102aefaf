// Of a drawing: texts that leave the paper or their box, that overlap, that are small, or faint
svg => {
  const rgb = text => text.match(/[\d.]+/g).slice(0, 3).map(Number)
  const light = color => {
    const [r, g, b] = rgb(color).map(x => x / 255).map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const inside = (a, b) => a.x >= b.x - 0.5 && a.y >= b.y - 0.5 &&
    a.x + a.width <= b.x + b.width + 0.5 && a.y + a.height <= b.y + b.height + 0.5
  const apart = (a, b) => a.x + a.width <= b.x + 1 || b.x + b.width <= a.x + 1 || a.y + a.height <= b.y + 6 || b.y + b.height <= a.y + 6
  const faults = [], [paper, ...boxes] = svg.querySelectorAll('rect')
  const texts = [...svg.querySelectorAll('text')], sheet = paper.getBBox()
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
  texts.forEach((t, i) => {
    const own = t.getBBox(), said = t.textContent
    const middle = { x: own.x + own.width / 2, y: own.y + own.height / 2, width: 0, height: 0 }
    const behind = boxes.filter(b => inside(middle, b.getBBox())).pop()
    if (!inside(own, sheet)) faults.push(`leaves the paper: ${said}`)
    if (behind && !inside({ x: own.x, width: own.width, y: middle.y, height: 0 }, behind.getBBox())) faults.push(`leaves its box: ${said}`)
    if (texts.slice(0, i).some(o => !apart(own, o.getBBox()))) faults.push(`overlaps: ${said}`)
    const size = scale * parseFloat(getComputedStyle(t).fontSize)
    if (size < 11) faults.push(`${size.toFixed(1)} pixels high: ${said}`)
    const pair = [t, behind || paper].map(e => light(getComputedStyle(e).fill)).sort((a, b) => b - a)
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05)
    if (ratio < 4.5) faults.push(`contrast ${ratio.toFixed(2)}: ${said}`)
  })
  for (const e of svg.querySelectorAll('.line, .head, .box')) {
    if (!inside(e.getBBox(), sheet)) faults.push(`leaves the paper: ${e.outerHTML.slice(0, 60)}`)
    const style = getComputedStyle(e), ink = style.stroke === 'none' ? style.fill : style.stroke
    const pair = [light(ink), light(getComputedStyle(paper).fill)].sort((a, b) => b - a)
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 3) faults.push(`faint: ${e.outerHTML.slice(0, 60)}`)
  }
  return { texts: texts.length, faults }
}
