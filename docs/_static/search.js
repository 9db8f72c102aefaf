// The search page: adds up the weights of the words of a query, section by section
const stem = w => w.length > 4 ? w.replace(/(ings?|ed|es|s|ly)$/, '') : w

function tokens(text) {
  const found = text.toLowerCase().replaceAll('-', ' ').match(/[a-z0-9_]+/g) ?? []
  const parts = found.filter(w => w.includes('_')).flatMap(w => w.split('_'))
  return [...new Set([...found, ...parts].filter(Boolean).map(stem))]
}

// Pages in order, each with its best sections
export function find(query, site = globalThis.SITE) {
  const asked = tokens(query).filter(t => Object.hasOwn(site.words, t))
  const score = new Map(), met = new Map()
  for (const t of asked) {
    const list = site.words[t]
    for (let i = 0; i < list.length; i += 2) {
      score.set(list[i], (score.get(list[i]) ?? 0) + list[i + 1])
      met.set(list[i], (met.get(list[i]) ?? 0) + 1)
    }
  }
  const pages = new Map()
  for (const [section, sum] of score) {
    const [page, anchor, heading] = site.sections[section], [url, title, place, boost] = site.pages[page]
    const value = sum * (0.4 + 0.6 * met.get(section) / asked.length)
    if (!pages.has(page)) pages.set(page, { url, title, place, boost, sections: [] })
    pages.get(page).sections.push({ anchor, heading, value })
  }
  for (const page of pages.values()) {
    page.sections.sort((a, b) => b.value - a.value)
    const [best, ...rest] = page.sections.map(s => s.value)
    const named = tokens(page.title).filter(t => Object.hasOwn(site.words, t))
    const whole = page.boost > 0.6 && named.length && named.every(t => asked.includes(t)) ? 1.5 : 1  // its title is asked for
    page.value = whole * page.boost * (best + 0.25 * (rest[0] ?? 0) + 0.1 * (rest[1] ?? 0))
  }
  return [...pages.values()].sort((a, b) => b.value - a.value).slice(0, 20)
}

// The list below the form
export function show(query, list, root) {
  const line = (url, text) => Object.assign(document.createElement('a'), { href: root + url, textContent: text })
  list.replaceChildren(...find(query).map(page => {
    const item = document.createElement('li'), more = document.createElement('div')
    for (const s of page.sections.slice(0, 3).filter(s => s.anchor)) {
      more.append(line(`${page.url}#${s.anchor}`, s.heading), document.createElement('br'))
    }
    item.append(line(page.url, page.title), ` (${page.place})`, more)
    return item
  }))
  if (!list.children.length) list.textContent = 'Nothing found. Try other words, or the questions.'
}
