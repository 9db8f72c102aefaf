// A field above the page of words that leaves the rows with all that one types. Without it all rows show.

// A word, what it means, and the names of other frameworks; not the pages that explain it
const known = tr => plain([0, 1, 3].map(i => tr.cells[i].textContent).join(' '))

// clip_ratio, clip-ratio and "clip ratio" are the same
function plain(text) {
  return text.toLowerCase().replace(/[-_.\s]+/g, ' ').trim()
}

function wordField(tables) {
  const rows = tables.flatMap(table => [...table.tBodies[0].rows]).map(tr => ({ tr, text: known(tr) }))
  const sections = [...new Set(tables.map(table => table.closest('section')))]
  const folds = sections.map(section => section.querySelector('details:has(table.words)')).filter(fold => fold)
  const field = Object.assign(document.createElement('input'), { type: 'search', id: 'word-field', autocomplete: 'off' })
  const label = Object.assign(document.createElement('label'), { htmlFor: field.id })
  label.textContent = 'Find a word, or its name in verl, TRL, slime or NeMo-RL: '
  const says = document.createElement('span')
  says.setAttribute('role', 'status')

  function show() {
    const asked = plain(field.value).split(' ')
    for (const { tr, text } of rows) tr.hidden = !asked.every(word => text.includes(word))
    for (const section of sections) section.hidden = !section.querySelector('tbody tr:not([hidden])')
    for (const fold of folds) fold.open = Boolean(field.value)
    const left = rows.filter(({ tr }) => !tr.hidden).length
    says.textContent = field.value ? ` ${left} of ${rows.length} words` : ` ${rows.length} words`
    if (!left) says.textContent += '. Try the search (Ctrl + K): it also forgives typing errors.'
  }

  // A link to a word finds it, whatever is hidden
  function follow() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
    if (!target?.closest('section:has(table.words)')) return
    if (target.closest('[hidden]')) {
      field.value = ''
      show()
    }
    const fold = target.closest('details')
    if (fold) fold.open = true
    target.scrollIntoView()
  }

  field.addEventListener('input', show)
  field.addEventListener('keydown', e => {
    if (e.key !== 'Escape') return
    field.value = ''
    show()
  })
  const box = document.createElement('p')
  box.className = 'word-field'
  box.append(label, field, says)
  sections[0].before(box)
  show()
  addEventListener('hashchange', follow)
  if (location.hash) follow()
}

document.addEventListener('DOMContentLoaded', () => {
  const tables = [...document.querySelectorAll('table.words')]
  if (tables.length) wordField(tables)
})
