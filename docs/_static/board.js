// The scoreboard's filters, by verdict and by chapter, and the signs of open verdicts. Without it all claims show.

// Rows of the board, each with its chapter; a row whose other cells are empty names a chapter
function readRows(table) {
  let chapter = ''
  return [...table.tBodies[0].rows].map(tr => {
    const cells = [...tr.cells].map(td => td.textContent.trim())
    const head = cells.slice(1).every(text => !text)
    if (head) chapter = cells[0]
    const verdict = head ? '' : tr.querySelector('.verdict').textContent.trim()
    return { tr, head, chapter, verdict }
  })
}

// How many claims a button would leave, given the other choice
function count(rows, verdict, chapter) {
  const fits = r => !r.head && (!verdict || r.verdict === verdict) && (!chapter || r.chapter === chapter)
  return rows.filter(fits).length
}

// Two verdicts have the same look; the signs of the others are in styles.css
const SIGNS = { 'not seen here': '≈', 'cannot tell': '?' }

function sign(el) {
  const found = SIGNS[el.textContent.trim()]
  if (found) el.dataset.sign = found
}

function filters(table) {
  const rows = readRows(table), claims = rows.filter(r => !r.head)
  const chosen = { verdict: '', chapter: '' }, buttons = []
  const box = document.createElement('div')
  box.className = 'board-filters'
  const says = document.createElement('p')
  says.setAttribute('role', 'status')

  function show() {
    const left = new Set()
    for (const r of claims) {
      r.tr.hidden = count([r], chosen.verdict, chosen.chapter) === 0
      if (!r.tr.hidden) left.add(r.chapter)
    }
    for (const r of rows) if (r.head) r.tr.hidden = !left.has(r.chapter)
    for (const { el, kind, name } of buttons) {
      const n = count(rows, ...['verdict', 'chapter'].map(k => (k === kind ? name : chosen[k])))
      el.textContent = `${name || 'all'} ${n}`
      el.setAttribute('aria-pressed', chosen[kind] === name)
      el.disabled = n === 0 && chosen[kind] !== name
    }
    says.textContent = `${count(rows, chosen.verdict, chosen.chapter)} of ${claims.length} claims shown`
  }

  for (const kind of ['verdict', 'chapter']) {
    const group = document.createElement('div')
    group.setAttribute('role', 'group')
    group.setAttribute('aria-label', `Claims by ${kind}`)
    group.append(`${kind}: `)
    const names = [...new Set(claims.map(r => r[kind]))]
    if (kind === 'verdict') names.sort((a, b) => count(rows, b, '') - count(rows, a, ''))
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

if (typeof document !== 'undefined') {
  const start = () => {
    const table = document.querySelector('#the-board table')
    if (table) filters(table)
    document.querySelectorAll('.verdict').forEach(sign)
  }
  document.addEventListener('DOMContentLoaded', start)
}
