/* Sections "For the careful: ..." of the lessons are folded until one opens them, or follows a link
   into them. Without this script they stand open. Newer browsers open a fold by themselves for a
   link on the same page, older ones do not. */
for (const section of document.querySelectorAll('section[id^="for-the-careful"]')) {
  const fold = document.createElement('details');
  const heading = section.querySelector('h2');
  const summary = document.createElement('summary');
  fold.className = 'careful';
  summary.append(heading);
  fold.append(summary, ...section.childNodes);
  section.append(fold);
}

// What a link leads to is seen: the folds around it are opened, and the first one of a section that
// holds little more than a fold
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const folds = [];
  for (let e = target.closest('details'); e; e = e.parentElement.closest('details')) folds.push(e);
  if (target.matches('section') && target.innerText.length < 250) folds.push(target.querySelector('details'));
  const closed = folds.filter(fold => fold && !fold.open);
  for (const fold of closed) fold.open = true;
  if (closed.length) target.scrollIntoView();
}

addEventListener('hashchange', openTarget);
openTarget();

/* The list of all pages stands where the page is, unless it is in sight already. The theme puts it
   where it stood on the page before, so this comes after the theme. */
function showPage() {
  const pages = document.querySelector('.bd-sidebar-primary');
  const self = pages?.querySelector('.current > a, a.current');
  if (!self) return;
  const at = self.getBoundingClientRect(), box = pages.getBoundingClientRect();
  if (at.top < box.top || at.bottom > Math.min(box.bottom, innerHeight)) {
    pages.scrollTop += at.top - box.top - box.height / 3;
  }
}
addEventListener('load', () => requestAnimationFrame(showPage));

/* The list of a page's headings scrolls to the one that is being read. The theme marks it. */
const list = document.querySelector('#pst-page-toc-nav');
const side = list?.closest('.bd-sidebar-secondary');
if (side) new MutationObserver(() => {
  const here = list.querySelector('a[aria-current]')?.getBoundingClientRect();
  const box = side.getBoundingClientRect();
  if (here && (here.top < box.top + 20 || here.bottom > box.bottom - 20)) {
    side.scrollTop += here.top - box.top - box.height / 3;
  }
}).observe(list, { subtree: true, attributeFilter: ['aria-current'] });

/* The theme marks a heading as it passes the top of the window. After a jump none has passed, so the
   last heading in the upper third of the window, or above it, is marked here. */
const entries = [...list?.querySelectorAll('a[href^="#"]') ?? []].map(a => {
  const section = document.getElementById(decodeURIComponent(a.getAttribute('href').slice(1)));
  return { a, heading: section?.querySelector('h1, h2, h3, h4') ?? section };
});
let waits = 0;
function markHeading() {
  const seen = entries.filter(({ heading }) => heading?.offsetParent
    && heading.getBoundingClientRect().top < 0.3 * innerHeight);
  const here = seen.at(-1)?.a;
  for (const { a } of entries) {
    a.classList.toggle('active', a === here);
    if (a === here) a.setAttribute('aria-current', 'true'); else a.removeAttribute('aria-current');
  }
  for (const item of list.querySelectorAll('li')) item.classList.toggle('active', item.contains(here ?? null));
}
if (entries.length) addEventListener('scroll', () => {
  clearTimeout(waits);
  waits = setTimeout(markHeading, 100); // after the theme
}, { passive: true });

/* A short piece of code is not cut at the end of a line */
for (const code of document.querySelectorAll('.bd-article :is(p, li, td) code')) {
  if (code.textContent.length < 25) code.style.whiteSpace = 'nowrap';
}

/* On a phone wide figures keep letters that can be read, and scroll; so does the map, to its box.
   A printed line wraps. */
function roomy(figure) {
  if (figure.naturalWidth < 700) return; // one panel shrinks and can still be read
  figure.classList.add('wide');
  figure.parentElement.tabIndex = 0;
}
if (matchMedia('(max-width: 600px)').matches) {
  for (const map of document.querySelectorAll('svg.map[data-at]')) {
    const box = map.parentElement;
    box.tabIndex = 0;
    box.scrollLeft = map.dataset.at * map.getBoundingClientRect().width - box.clientWidth / 3;
  }
  const markTables = () => {
    for (const box of document.querySelectorAll('.pst-scrollable-table-container')) {
      if (box.scrollWidth > box.clientWidth + 4) box.classList.add('wide');
    }
  };
  markTables();
  addEventListener('load', () => (globalThis.MathJax?.startup?.promise ?? Promise.resolve()).then(markTables)); // formulas widen them
  for (const text of document.querySelectorAll('.bd-article .cell_output pre')) {
    if (!text.textContent.trim().includes('\n')) text.style.whiteSpace = 'pre-wrap'; // a line is no table
    else if (text.scrollWidth > text.clientWidth) text.classList.add('small');
    if (text.scrollWidth > text.clientWidth + 4) text.parentElement.classList.add('wide');
  }
  for (const figure of document.querySelectorAll('.bd-article .cell_output > img')) {
    if (figure.complete) roomy(figure); else figure.addEventListener('load', () => roomy(figure));
  }
}
