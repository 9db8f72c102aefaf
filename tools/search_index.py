"""What the search page of the site knows: the words of each section, and how much each says.

A word counts by where it stands: in a title, a heading, a promise or the text. The questions of
nbs/questions.ipynb and the names that other frameworks use (nbs/words.yml) count for the section
that answers them. docs/_static/search.js adds up the weights of the words of a query.
"""

import json
import math
import re
import unicodedata
from collections import Counter, defaultdict

import yaml
from front import pieces, slug, source
from toc import read

# how much a page of each kind counts; a step of the spine first, what is not needed last
BOOST = {'lesson': 1.0, 'how-to': 1.1, 'study': 0.75, 'reference': 0.6}
STEP, NAMES = 1.25, 0.5
PAGES = {'questions': 0.8, 'words': 0.5, 'paper_map': 0.4, 'what_next': 0.6}
STOP = set(
    'a an and are as at be by can do does for from has have how i in is it its my not of on or '
    'that the their then there this to was what when where which who why will with you your'.split()
)


def stem(word):
    "Singular and plural are one, and so are the forms of a verb; search.js has the same"
    if len(word) < 5:
        return word
    word = re.sub(r'ies$', 'y', re.sub(r'(ss|x|ch|sh)es$', r'\1', word))
    word = re.sub(r'(ings?|ed|ly|(?<!s)s)$', '', word)
    return re.sub(r'e$', '', word) if len(word) > 5 else word


def words_of(text):
    "The words of a text that are searched for, and the parts of `names_with_lines`"
    found = re.findall(r'[a-z0-9_]+', text.lower().replace('-', ' '))
    parts = [p for w in found if '_' in w for p in w.split('_')]
    return [w for w in [*found, *parts] if w and w not in STOP]


def tokens(text):
    "Their stems"
    return [*map(stem, words_of(text))]


def plain(text):
    text = re.sub(r'```.*?```|\$\$.*?\$\$|<[^>]*>|<!--.*?-->', ' ', text, flags=re.S)
    return re.sub(r'\]\([^)]*\)', '] ', text)


SIGNS = {'cdot': '·', 'times': '×', 'le': '≤', 'leq': '≤', 'ge': '≥', 'geq': '≥', 'approx': '≈'}
SIGNS |= {'sum': '∑', 'prod': '∏', 'ne': '≠', 'neq': '≠', 'in': '∈', 'to': '→', 'infty': '∞'}


def letters(math):
    "A formula of one line in letters and signs: its commands are signs, Greek letters or words"

    def sign(m):
        if m[1] in SIGNS:
            return SIGNS[m[1]]
        name = m[1].removeprefix('var')
        try:
            return unicodedata.lookup(f'GREEK SMALL LETTER {name.upper()}')
        except KeyError:
            return f'{m[1]} '

    math = re.sub(r'\\frac\{([^{}]*)\}\{([^{}]*)\}', r'\1/\2', math)
    math = re.sub(r'\\(?:math\w+|text|operatorname|left|right|[,;!])(?![a-z])', '', math)
    text = re.sub(r'[\\{}]', '', re.sub(r'\\([a-zA-Z]+) ?', sign, math)).replace('^2', '²')
    return re.sub(r' +(?=[(\[,.)]|$)', '', text)


def begins(text, most=150):
    "How a section begins, as a line of a list of results: the words without their marks"
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', text)
    text = re.sub(r'^(#.*|\|.*|>.*|\s*- )', ' ', plain(text), flags=re.M)
    text = re.sub(r'\$([^$]+)\$', lambda m: letters(m[1]), text)
    text = ' '.join(re.sub(r'[`*]|\\(?=[^a-z])', '', text).split())
    text = re.sub(r' (?=[).,;:](\s|$))', '', text)
    return text if len(text) <= most else text[:most].rpartition(' ')[0] + ' ...'


class Index:
    "Sections, each with the weight of its words"

    def __init__(self):
        self.pages, self.sections, self.weights = [], [], []
        self.at = {}

    def page(self, url, title, place, boost):
        self.pages.append([url, title, place, boost])
        return len(self.pages) - 1

    def section(self, page, anchor, heading):
        self.at[self.pages[page][0], anchor] = len(self.sections)
        self.sections.append([page, anchor, heading, ''])
        self.weights.append(Counter())
        return self.weights[-1]

    def postings(self):
        "Stem -> sections and weights, one after another: what is rare counts more"
        found, num = defaultdict(list), len(self.sections)
        sizes = [sum(w.values()) for w in self.weights]
        usual = sum(sizes) / max(1, num)
        held = Counter(t for w in self.weights for t in w)
        for i, (w, size) in enumerate(zip(self.weights, sizes)):
            for t, n in w.items():
                rare = math.log(1 + (num - held[t] + 0.5) / (held[t] + 0.5))
                value = round(20 * rare * n * 2.2 / (n + 1.2 * (0.4 + 0.6 * size / usual)))
                if value:
                    found[t] += [i, value]
        return found


def add_page(index, name, nb, title, place, boost):
    "A notebook, cut before each of its headings"
    page = index.page(f'{name}.html', title, place, boost)
    words = index.section(page, '', title)
    for piece in pieces(nb):
        if piece['cell_type'] != 'markdown' or 'nbs/course.yml' in source(piece):
            continue
        text = source(piece)
        if text.startswith('## You are here'):
            continue  # the map alone
        if m := re.match(r'(#{2,3}) (.+)', text):
            words = index.section(page, slug(m[2]), m[2].replace('`', ''))
            words.update({t: 5 for t in set(tokens(m[2]))})
            words.update({t: 1.5 for t in set(tokens(title))})
        elif text.startswith('# '):
            words.update({t: 8 for t in set(tokens(title))})
            promise = re.search(r'^> (.+)', text, flags=re.M)
            words.update({t: 3 for t in set(tokens(plain(promise[1] if promise else '')))})
            index.sections[-1][3] = begins(promise[1] if promise else '')
        words.update(tokens(plain(text)))
        index.sections[-1][3] = index.sections[-1][3] or begins(text)


def credit(index, place, text, weight):
    "Words that lead to a section of another page"
    page, _, anchor = place.partition('#')
    if (at := index.at.get((page, anchor), index.at.get((page, '')))) is not None:
        index.weights[at].update({t: weight for t in set(tokens(text))})


def search_index(course, nbs, titles, names):
    "The script that the search page loads"
    index = Index()
    add_page(index, 'index', read(course.nbs / 'index.ipynb'), 'CompassRL', 'front page', 0.9)
    for n, part in course.order.items():
        boost = PAGES.get(n, STEP if n in course.spine else BOOST[part.kind])
        add_page(index, n, nbs[n], titles[n], course.place(n), boost)
    for place, text in course.data.get('asked', {}).items():
        name, _, anchor = place.partition('#')
        credit(index, f'{name}.html#{anchor}', text, 25)
    for piece in pieces(nbs['questions']):
        m = re.match(r'## \d+\. (.+)', source(piece))
        to = re.search(r'\]\(([^)]+?)\.ipynb(#[^)]*)?\)', source(piece))
        if m and to:
            credit(index, f'{to[1]}.html{to[2] or ""}', m[1], 6)
    words = [url for url, *_ in index.pages].index('words.html')
    for group in yaml.safe_load((course.nbs / 'words.yml').read_text())['groups']:
        for row in group['words']:
            name, _, anchor = row['in'][0].partition('#')
            other = ' '.join(str(x) for x in row.get('elsewhere', {}).values())
            credit(index, f'{name}.html#{anchor}', f'{row["word"]} {other}', 4)
            anchor = f'word-{row["word"].lower().replace(" ", "-")}'  # the page has the same
            entry = index.section(words, anchor, row['word'])
            entry.update({t: 3 for t in set(tokens(row['word']))})
            index.sections[-1][3] = begins(row['means'])
    for page, own in names.items():
        api = index.page(f'api/compassrl.{page.replace("/", ".")}.html', page, 'API', NAMES)
        for name in own:
            anchor = f'compassrl.{page.replace("/", ".")}.{name}'
            index.section(api, anchor, name).update({t: 4 for t in set(tokens(name))})
    data = dict(pages=index.pages, sections=index.sections, words=index.postings())
    data['stop'] = sorted(STOP)  # what is left out on purpose is no slip of the keyboard
    cells = [c for nb in nbs.values() for c in nb['cells'] if c['cell_type'] == 'markdown']
    read_in = [*map(source, cells), *course.data.get('asked', {}).values()]
    whole = {w for text in read_in for w in words_of(plain(text))}  # what a slip is read as
    data['whole'] = sorted(w for w in whole if w.isalpha() and stem(w) in data['words'])
    return f'globalThis.SITE = {json.dumps(data, separators=(",", ":"))}\n'
