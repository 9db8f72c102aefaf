// The scoreboard's filters, by verdict, by chapter and by the star; the chapters of
// the map of the paper. Without it all claims show.

// Rows of the board, each with its chapter; a row whose other cells are empty names a chapter
function readRows(table) {
  let chapter = ''
  return [...table.tBodies[0].rows].map(tr => {
    const cells = [...tr.cells].map(td => td.textContent.trim())
    const head = cells.slice(1).every(text => !text)
    if (head) chapter = cells[0]
    const said = head ? null : tr.querySelector('.verdict')
    const verdict = said?.textContent.trim() ?? ''
    const star = said?.closest('td').textContent.includes('★') ? '★' : ''
    return { tr, head, chapter, verdict, star }
  })
}

// What a row can be chosen by, and what is said of it
const KINDS = { verdict: 'verdict', chapter: 'chapter', star: 'after the correction for chance' }

// How many claims a choice leaves
function count(rows, chosen) {
  const fits = r => !r.head && Object.keys(KINDS).every(k => !chosen[k] || r[k] === chosen[k])
  return rows.filter(fits).length
}

function filters(table) {
  const rows = readRows(table), claims = rows.filter(r => !r.head)
  const chosen = {}, buttons = []
  const box = document.createElement('div')
  box.className = 'board-filters'
  const says = document.createElement('p')
  says.setAttribute('role', 'status')

  function show() {
    const left = new Set()
    for (const r of claims) {
      r.tr.hidden = count([r], chosen) === 0
      if (!r.tr.hidden) left.add(r.chapter)
    }
    for (const r of rows) if (r.head) r.tr.hidden = !left.has(r.chapter)
    for (const { el, kind, name } of buttons) {
      const n = count(rows, { ...chosen, [kind]: name })
      const on = (chosen[kind] ?? '') === name
      el.textContent = `${name || 'all'} ${n}`
      el.setAttribute('aria-pressed', on)
      el.disabled = n === 0 && !on
    }
    says.textContent = `${count(rows, chosen)} of ${claims.length} claims shown`
  }

  for (const [kind, words] of Object.entries(KINDS)) {
    const names = [...new Set(claims.map(r => r[kind]))].filter(name => name)
    if (!names.length) continue
    if (kind === 'verdict') names.sort((a, b) => count(rows, { verdict: b }) - count(rows, { verdict: a }))
    const group = document.createElement('div')
    group.setAttribute('role', 'group')
    group.setAttribute('aria-label', `Claims by ${kind}`)
    group.append(`${words}: `)
    for (const name of ['', ...names]) {
      const el = document.createElement('button')
      el.type = 'button'
      el.onclick = () => {
        chosen[kind] = chosen[kind] === name ? '' : name
        show()
      }
      buttons.push({ el, kind, name })
      group.append(el)
    }
    box.append(group)
  }
  box.append(says)
  for (const r of rows) if (r.head) r.tr.cells[0].colSpan = r.tr.cells.length
  for (const r of rows) if (r.head) while (r.tr.cells.length > 1) r.tr.deleteCell(1)
  show()
  const output = table.closest('.cell') ?? table
  output.before(box)
}

// The map of the paper: where a state is chosen, the chapters that have it open and say how often, and the
// others are hidden; with "all" every chapter is there and closed
function chapters(choice) {
  const folds = [...document.querySelectorAll('.paper-chapter')].map(el => ({ el, says: el.querySelector('summary') }))
  for (const fold of folds) fold.whole = fold.says.textContent
  choice.addEventListener('change', ({ target }) => {
    const state = target.id.replace('paper-', ''), every = state === 'all'
    for (const { el, says, whole } of folds) {
      const left = el.querySelectorAll(`tbody tr.${state}`).length
      el.open = !every && left > 0
      says.textContent = every ? whole : `${left} ${state.replace('-', ' ')}`
      const chapter = el.closest('section') ?? el
      chapter.hidden = !every && !left
    }
  })
  // A link to a chapter finds it, whatever is hidden
  addEventListener('hashchange', () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
    if (!target?.closest('[hidden]')) return
    choice.querySelector('#paper-all').click()
    for (const { el } of folds) el.open = target.contains(el)
    target.scrollIntoView()
  })
}

if (typeof document !== 'undefined') {
  const start = () => {
    const choice = document.querySelector('.paper-choice')
    if (choice) chapters(choice)
    const table = document.querySelector('#the-board table')
    if (table) filters(table)
  }
  document.addEventListener('DOMContentLoaded', start)
}
