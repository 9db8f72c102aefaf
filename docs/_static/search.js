/* The search: adds up the weights of the words of a query, section by section. What it knows,
   search_data.js (tools/search_index.py), is loaded when somebody begins to type. */
const ends = w => w.replace(/(ss|x|ch|sh)es$/, '$1').replace(/ies$/, 'y').replace(/(ings?|ed|ly|(?<!s)s)$/, '')
const stem = w => w.length < 5 ? w : ends(w).length > 5 ? ends(w).replace(/e$/, '') : ends(w)

function tokens(text) {
  const found = text.toLowerCase().replaceAll('-', ' ').match(/[a-z0-9_]+/g) ?? []
  const parts = found.filter(w => w.includes('_')).flatMap(w => w.split('_'))
  return [...new Set([...found, ...parts].filter(Boolean).map(stem))]
}

// A word that is still being typed: the sections of all words that begin so, each at its best
function begun(text, site) {
  const word = text.toLowerCase().match(/[a-z0-9_]+$/)?.[0] ?? '', best = new Map()
  if (word.length < 2) return []
  for (const t of Object.keys(site.words).filter(t => t.startsWith(stem(word)) || t.startsWith(word))) {
    const list = site.words[t], sure = t === stem(word) ? 1 : 0.7
    for (let i = 0; i < list.length; i += 2) best.set(list[i], Math.max(best.get(list[i]) ?? 0, sure * list[i + 1]))
  }
  return [...best].flat()
}

// Letters to change, leave out, put in or swap with their neighbour until one word is the other (optimal string
// alignment); more than `most` count as `most + 1`
function apart(a, b, most) {
  if (Math.abs(a.length - b.length) > most) return most + 1
  let before = [], row = [...Array(b.length + 1).keys()]
  for (let i = 1; i <= a.length; i++) {
    const next = [i]
    for (let j = 1; j <= b.length; j++) {
      next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] !== b[j - 1]))
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) next[j] = Math.min(next[j], before[j - 2] + 1)
    }
    if (Math.min(...next) > most) return most + 1
    before = row
    row = next
  }
  return row[b.length]
}

// The query with each unknown word as the known one that it resembles most: with the same first letter if there is
// one, of equals the one in more sections. Names with lines are left alone
function mend(query, site = globalThis.SITE) {
  return query.replace(/(?<![A-Za-z0-9_])[A-Za-z0-9]{4,}(?![A-Za-z0-9_])/g, typed => {
    const word = typed.toLowerCase(), most = word.length < 8 ? 1 : 2
    if (site.stop.includes(word) || Object.keys(site.words).some(t => t === stem(word) || t.startsWith(word))) return typed
    let best = '', least = Infinity
    for (const w of site.whole) {
      const far = apart(word, w, most), worth = far + 0.5 * (w[0] !== word[0]) - 1e-5 * site.words[stem(w)].length
      if (w.length > 3 && far <= most && worth < least) [best, least] = [w, worth]
    }
    return best || typed
  })
}

// Pages in order, each with its best sections
function find(query, site = globalThis.SITE, typing = false) {
  const done = typing ? query.replace(/[A-Za-z0-9_]{2,}$/, '') : query // one letter is no word that begins
  const said = tokens(query)
  const asked = tokens(done).filter(t => Object.hasOwn(site.words, t))
  const lists = asked.map(t => site.words[t])
  if (done !== query) lists.push(begun(query, site))
  const score = new Map(), met = new Map()
  for (const list of lists) {
    for (let i = 0; i < list.length; i += 2) {
      score.set(list[i], (score.get(list[i]) ?? 0) + list[i + 1])
      met.set(list[i], (met.get(list[i]) ?? 0) + 1)
    }
  }
  const pages = new Map()
  for (const [section, sum] of score) {
    const [page, anchor, heading, says] = site.sections[section], [url, title, place, boost] = site.pages[page]
    const value = sum * (0.4 + 0.6 * met.get(section) / lists.length)
    if (!pages.has(page)) pages.set(page, { url, title, place, boost, sections: [] })
    pages.get(page).sections.push({ anchor, heading, says, value })
  }
  for (const page of pages.values()) {
    page.sections.sort((a, b) => b.value - a.value)
    const [best, ...rest] = page.sections.map(s => s.value)
    const named = tokens(page.title).filter(t => Object.hasOwn(site.words, t))
    const whole = page.boost > 0.6 && named.length && named.every(t => said.includes(t)) ? 1.5 : 1  // its title is asked for
    const asks = /^(why|how|what|which|should)\b/i.test(query) && page.url === 'questions.html' ? 1.5 : 1
    page.value = asks * whole * page.boost * (best + 0.25 * (rest[0] ?? 0) + 0.1 * (rest[1] ?? 0))
  }
  const found = [...pages.values()].sort((a, b) => b.value - a.value)
  // a word of the glossary, asked for by itself: what it means stands second
  const word = query.trim().toLowerCase().replace(/^(what (is|are|does)|define) (an? |the )?|( mean)?\??$/g, '')
  const means = s => s.anchor.startsWith('word-') && s.heading.toLowerCase() === word
  const at = found.findIndex(page => page.sections.some(means))
  if (at >= 0) found[at].sections.sort((a, b) => means(b) - means(a))
  if (at > 1) found.splice(1, 0, ...found.splice(at, 1))
  return found.slice(0, 20)
}

// The list below a form: each page with its best sections, and how the best one begins
function show(asked, list, root, { most = 20, each = 3, typing = false } = {}) {
  const query = mend(asked)
  const line = (url, text) => Object.assign(document.createElement('a'), { href: root + url, textContent: text })
  list.replaceChildren(...find(query, globalThis.SITE, typing).slice(0, most).map(page => {
    const item = document.createElement('li'), more = document.createElement('div')
    for (const s of page.sections.slice(0, each)) {
      if (s.anchor) more.append(line(`${page.url}#${s.anchor}`, s.heading), document.createElement('br'))
      if (s !== page.sections[0] || !s.says) continue
      more.append(Object.assign(document.createElement('small'), { textContent: s.says }), document.createElement('br'))
    }
    item.append(line(page.url, page.title), ` (${page.place})`, more)
    return item
  }))
  if (list.children.length && query !== asked)
    list.prepend(Object.assign(document.createElement('li'), { textContent: `Nothing here has the words “${asked.trim()}”. Found for “${query.trim()}”:` }))
  if (!list.children.length && query.trim())
    list.append('Nothing found. Try other words, the ', line('questions.html', 'questions'), ' or the ', line('words.html', 'words'), '.')
}

// Every field of the site answers while one types; the arrow keys go through what is found
function live(input, list, root, data, options) {
  let known = null
  const load = () => known ??= new Promise((ready, failed) => {
    if (globalThis.SITE) return ready()
    document.head.append(Object.assign(document.createElement('script'), { src: data, onload: ready, onerror: failed }))
  })
  const answer = () => load().then(() => show(input.value, list, root, { ...options, typing: !input.value.endsWith(' ') }))
  input.addEventListener('focus', load)
  input.addEventListener('input', answer)
  input.closest('form').parentElement.addEventListener('keydown', e => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[e.key]
    if (e.key === 'Escape') input.closest('dialog')?.close() // wherever the focus is
    if (e.key.length === 1 && !e.ctrlKey && !e.metaKey && list.contains(document.activeElement)) input.focus() // typing goes on
    if (!step) return
    const stops = [input, ...list.querySelectorAll('a')], at = stops.indexOf(document.activeElement)
    if (at < 0) return
    stops[Math.min(Math.max(at + step, 0), stops.length - 1)].focus()
    e.preventDefault()
  })
  return load
}

globalThis.siteSearch = { find, mend, show, live }
if (globalThis.document) {
  const here = document.currentScript.src, data = new URL('search_data.js', here).href, root = new URL('..', here).href
  const page = document.querySelector('main form[role="search"] input')
  const asked = new URLSearchParams(location.search).get('q') ?? ''
  if (page) {
    const list = document.querySelector('ul.search'), load = live(page, list, root, data)
    page.value = asked
    if (asked) load().then(() => show(asked, list, root))
  }
  const field = document.querySelector('#pst-search-dialog input')
  if (field) {
    const list = document.createElement('ul')
    list.className = 'search'
    list.setAttribute('aria-live', 'polite')
    field.closest('form').after(list)
    live(field, list, root, data, { most: 7, each: 2 })
  }
}
