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

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = target?.closest('details.careful') || target?.querySelector(':scope > details.careful');
  if (fold && !fold.open) {
    fold.open = true;
    target.scrollIntoView();
  }
}

addEventListener('hashchange', openTarget);
openTarget();
