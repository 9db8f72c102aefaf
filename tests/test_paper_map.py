"nbs/paper_map.yml against the code: lessons, names, calls, tests, numbers; and the page of it"

import ast
import json
import re
import sys
from functools import cache
from html import unescape

import pytest
import yaml

from tests.support import ROOT
from tests.test_notebooks import notebooks
from tests.test_toc import COURSE

sys.path.insert(0, str(ROOT / 'tools'))
from links import anchors, prose, slug  # noqa: E402

MAP = yaml.safe_load((ROOT / 'nbs' / 'paper_map.yml').read_text())
ENTRIES = [e for g in MAP['groups'] for e in g['entries']]
KEYS = set('paper claim source state missing looked_for lesson'.split())
KEYS |= set('symbols called_by tests measured more read idea'.split())
SOURCES, STATES = {'quoted', 'second-hand', 'our reading', 'ours'}, ('here', 'in part', 'absent')
PAGE = ROOT / 'nbs' / 'paper_map.ipynb'


def each_entry(check):
    "One test over all entries, which names those that fail"

    def test():
        faults = {}
        for e in ENTRIES:
            try:
                check(e)
            except AssertionError as said:
                faults[f'{e["paper"]}: {e["claim"]}'] = str(said)
        assert faults == {}

    return test


# ---- what a module holds, by its syntax: nothing is imported, Megatron-Core may be missing


def module_of(name):
    "algo.espo.espo -> its file, its module, what is left; None if there is none"
    parts = name.split('.')
    for i in range(len(parts) - 1, 0, -1):
        path = ROOT.joinpath('compassrl', *parts[:i])
        for file in (path.with_suffix('.py'), path / '__init__.py'):
            if file.is_file():
                return file, '.'.join(parts[:i]), '.'.join(parts[i:])
    return None


def targets(node):
    found = getattr(node, 'targets', [getattr(node, 'target', None)])
    return [n.id for t in found if t for n in ast.walk(t) if isinstance(n, ast.Name)]


def class_of(fn):
    "The class that a function is patched into"
    if not any(isinstance(d, ast.Name) and d.id == 'patch' for d in fn.decorator_list):
        return ''
    return ast.unparse(fn.args.args[0].annotation).strip('\'"')


@cache
def contents(path):
    "Name -> node of all that a module defines, `Class.method` too; name -> what it imports"
    tree, names, imported = ast.parse(path.read_text()), {}, {}
    here = ['compassrl', *path.relative_to(ROOT / 'compassrl').with_suffix('').parts]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node
            inside = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
            names |= {f'{node.name}.{n.name}': n for n in reversed(inside)}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[f'{class_of(node)}.{node.name}'.strip('.')] = node
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level] if node.level else []
            module = '.'.join([*above, *filter(None, [node.module])])
            imported |= {a.asname or a.name: f'{module}.{a.name}' for a in node.names}
        else:
            names |= dict.fromkeys(targets(node), node)
    return names, imported


def calls(caller):
    "What a function calls: dotted names, and `.method` of anything"
    path, module, rest = module_of(caller)
    names, imported = contents(path)
    for node in ast.walk(names[rest]):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            own = node.func.id
            yield imported.get(own, f'compassrl.{module}.{own}').removeprefix('compassrl.')
        elif isinstance(node.func, ast.Attribute):
            yield f'.{node.func.attr}'


def is_called(symbol, called):
    owner, _, last = symbol.rpartition('.')
    is_method = owner.rpartition('.')[2][:1].isupper()
    return symbol in called or is_method and f'.{last}' in called


# ---- a number that is stored


@cache
def stored(name):
    "A benchmark's result, or the text that a notebook's cells have printed"
    path = ROOT / 'benchmarks' / 'results' / f'{name}.json'
    if path.is_file():
        return json.loads(path.read_text())
    cells = json.loads((COURSE.nbs / COURSE.paths[name]).read_text())['cells']
    shown = ((o, o.get('data', {})) for o in outputs(cells))
    texts = [o.get('text') or d.get('text/markdown') or d.get('text/plain', '') for o, d in shown]
    return '\n'.join(map(''.join, texts))


def outputs(cells):
    return [o for c in cells for o in c.get('outputs', [])]


def number(name, where, form=''):
    "One value as the page shows it"
    found = stored(name)
    if isinstance(found, str):
        hits = set(re.findall(where, found))
        assert len(hits) == 1, f'{name}: {where!r} finds {hits or "nothing"}, it needs one value'
        return format(float(hits.pop()), form) if form else hits.pop()
    for key in where.split('.'):
        found = found[int(key) if isinstance(found, list) else key]
    return format(found, form)


def measured(e):
    "The sentences of an entry with their numbers, the short one and the folded one"
    values = {k: number(*v) for k, v in e.get('read', {}).items()}
    return [e[k].format(**values) for k in ('measured', 'more') if k in e]


# ---- entries


@each_entry
def test_an_entry_says_what_it_must(e):
    assert set(e) <= KEYS and e['paper'] and e['claim'].endswith(('.', '?', '”'))
    assert e['source'] in SOURCES and e['state'] in STATES
    assert bool(e.get('missing')) == (e['state'] != 'here')
    if e['state'] != 'absent':
        assert e['lesson'] and e['symbols'] and e['tests']
    if e['state'] == 'absent':
        assert not {'measured', 'called_by', 'tests'} & set(e)


def test_no_claim_stands_twice():
    said = [(e['paper'], e['claim']) for e in ENTRIES]
    assert len(said) == len(set(said)) >= 50


@each_entry
def test_the_lesson_has_the_heading(e):
    if 'lesson' not in e:
        return
    name, _, heading = e['lesson'].partition('#')
    assert name in COURSE.paths, f'no notebook {name}'
    there = anchors(COURSE.nbs / COURSE.paths[name])
    assert heading in there, f'no heading {heading} in {name}, it has {sorted(there)}'


@each_entry
def test_the_names_are_exported(e):
    for symbol in e.get('symbols', []):
        path, module, rest = module_of(symbol)
        names, _ = contents(path)
        assert rest in names, f'compassrl.{module} has no {rest}'
        assert rest.split('.')[0] in exported(path), f'{symbol} is not exported'


def exported(path):
    for node in ast.parse(path.read_text()).body:
        if '__all__' in targets(node):
            return ast.literal_eval(node.value)
    return []


@each_entry
def test_the_trainer_calls_it(e):
    if 'called_by' not in e:
        return
    called = set(calls(e['called_by']))
    hit = [s for s in e['symbols'] if is_called(s, called)]
    assert hit, f'{e["called_by"]} calls none of {e["symbols"]}, but {sorted(called)}'


@each_entry
def test_the_tests_exist(e):
    for node in e.get('tests', []):
        file, _, name = node.partition('::')
        path = ROOT / 'tests' / file
        assert path.is_file() and f'def {name}(' in path.read_text(), f'no test {node}'


@each_entry
def test_the_numbers_are_stored_and_none_is_typed(e):
    short, more = e.get('measured', ''), e.get('more', '')
    text = f'{short} {more}'.strip()
    assert set(re.findall(r'{(\w+)}', text)) == set(e.get('read', {}))
    assert bool(short) == bool(e.get('read')) and (short or not more)
    assert len(re.findall(r'{\w+}', short)) <= 5, 'the rest belongs in `more`'
    typed = re.findall(r'\d+\.\d+(?!-)|\d+ ?%', re.sub(r'{\w+}', '', text))
    assert typed == [], 'read numbers from a result'
    assert '{' not in ''.join(measured(e))


def module_name(path):
    "compassrl/algo/losses/__init__.py -> algo.losses"
    parts = path.relative_to(ROOT / 'compassrl').with_suffix('').parts
    return '.'.join(p for p in parts if p != '__init__')


def test_every_name_of_the_algorithm_has_its_place():
    """What compassrl/algo exports is named by an entry, or listed as no part of the paper. A loss
    that no entry names is a loss of another paper"""
    paths = sorted((ROOT / 'compassrl' / 'algo').rglob('*.py'))
    names = {f'{module_name(p)}.{n}' for p in paths for n in exported(p)}
    named = {s for e in ENTRIES for s in e.get('symbols', []) if s.startswith('algo.')}
    named = {s.rpartition('.')[0] if s.split('.')[-2][0].isupper() else s for s in named}
    modules = {s.rpartition('.')[0] for s in named}
    listed = set(MAP['not_the_papers'])
    asked = {n for n in names if n.count('.') == 2 or n.rpartition('.')[0] in modules}
    assert sorted(asked - named - listed) == [], 'give it a place in nbs/paper_map.yml'
    assert sorted(listed - names) == [] and sorted(listed & named) == []


# ---- what is called missing is not there


def one_spelling(name):
    "two_phases, TwoPhases, two-phases, two phases -> _two_phases_"
    words = re.sub(r'(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+', ' ', name).lower().split()
    return f'_{"_".join(words)}_'


def kept(value):
    "Keys of a stored result that hold something: of a benchmark that was not run they do not"
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner not in ('', None) and not str(inner).startswith('not run'):
                yield key
                yield from kept(inner)
    elif isinstance(value, list):
        for inner in value[:1]:
            yield from kept(inner)


@cache
def names_there():
    "Of modules, what they export, notebooks, ideas, studies, and what a stored result has"
    names = {*COURSE.paths, *(i['idea'] for i in COURSE.data['ideas'])}
    for path in (ROOT / 'compassrl').rglob('[!_]*.py'):
        names |= {path.stem, *exported(path)}
    for path in (ROOT / 'benchmarks').rglob('[!_]*.py'):
        names.add(path.stem)
    for path in (ROOT / 'benchmarks' / 'results').glob('*.json'):
        names |= set(kept(json.loads(path.read_text())))
    return {one_spelling(n): n for n in names}


def there(word):
    "Names that have this word, or these words one after another"
    return sorted(name for spelled, name in names_there().items() if one_spelling(word) in spelled)


DENIED = r'\b(no|none|nothing|nobody|never)\b|\b(not|never) (\w+ )?'
DENIED += r'(compared|measured|trained|made|read|counted|run|evaluated|tried|there|here)\b'


def words_looked_for(e):
    "The names that were looked for in vain, or an AssertionError"
    words = e.get('looked_for', [])
    if e['state'] == 'here':
        assert words == [], 'nothing is missing'
    elif e['state'] == 'absent' or re.search(DENIED, e['missing']):
        assert words, f'{e["missing"]!r}: name in looked_for what was searched for'
    return words


@each_entry
def test_what_is_missing_was_looked_for_in_vain(e):
    found = {w: there(w) for w in words_looked_for(e) if there(w)}
    assert found == {}, f'{e["missing"]!r}, but there is {found}'


def ideas_of(e):
    "Ideas of nbs/course.yml that an entry is about: it names them, or is in their lesson"
    text = one_spelling(f'{e["paper"]} {e["claim"]}')
    lesson = e.get('lesson', '').partition('#')[0]
    for idea in COURSE.data['ideas']:
        if one_spelling(idea['idea']) in text or lesson == idea['lesson']:
            yield idea


@each_entry
def test_nothing_that_an_idea_has_code_for_is_absent(e):
    has_code = {i['idea']: i['code'] for i in ideas_of(e) if i.get('code')}
    assert e['state'] != 'absent' or has_code == {}, f'the front page has code for {has_code}'


# ---- the page


def page():
    "The stored HTML of the page, and its text"
    found = outputs(json.loads(PAGE.read_text())['cells'])
    html = '\n'.join(''.join(o.get('data', {}).get('text/html', '')) for o in found)
    return html, ' '.join(unescape(re.sub(r'<[^>]+>', ' ', html)).split())


def plain(text):
    return ' '.join(text.split())


def test_the_page_shows_every_entry_with_the_stored_numbers():
    html, text = page()
    run = 'run `python tools/execute_nbs.py nbs/paper_map.ipynb`'
    said = [e[k] for e in ENTRIES for k in ('paper', 'claim', 'missing') if k in e]
    said += [text for e in ENTRIES for text in measured(e)]
    assert [s for s in said if plain(s) not in text] == [], run
    assert html.count('<tr class="') == len(ENTRIES), run


def test_the_page_counts_its_states():
    _, text = page()
    for state in STATES:
        count = sum(e['state'] == state for e in ENTRIES)
        assert f'{state} {count}' in text


def test_links_of_the_page_lead_to_headings():
    html, _ = page()
    links = re.findall(r'href="([^"]+)"', html)
    assert len(links) == sum('lesson' in e for e in ENTRIES) + len(COURSE.data['ideas'])
    for link in links:
        file, _, heading = link.partition('#')
        assert (
            (COURSE.nbs / file).exists() if not heading else heading in anchors(COURSE.nbs / file)
        )


def test_a_link_says_the_heading_it_leads_to():
    html, _ = page()
    found = re.findall(r'<a href="[^"#]+#([^"]+)">([^<]+)</a>', html)
    assert len(found) >= 80
    for heading, words in found:
        assert slug(unescape(words)).endswith(heading), words


def test_each_idea_stands_for_itself_by_one_entry():
    "The table of ideas has its words, its lesson, and the state and the numbers of its entry"
    html, _ = page()
    table = html.split('</table>')[0]
    rows = re.findall(r'<tr>(<td>.*?)</tr>', table)
    assert [e['idea'] for e in ENTRIES if 'idea' in e] != [] and len(rows) == 10
    for idea, line in zip(COURSE.data['ideas'], rows, strict=True):
        (e,) = [e for e in ENTRIES if e.get('idea') == idea['idea']]
        text = unescape(re.sub(r'<[^>]+>', ' ', line))
        assert all(plain(s) in plain(text) for s in (idea['idea'], idea['says'], measured(e)[0]))
        assert f'>{e["state"]}</span>' in line and f'href="{COURSE.paths[idea["lesson"]]}"' in line


def test_chapters_are_folded_and_say_how_much_is_here():
    html, _ = page()
    folds = re.findall(r'<details class="paper-chapter"><summary>(.*?)</summary>', html)
    assert len(folds) == len(MAP['groups'])
    for said, group in zip(folds, MAP['groups']):
        states = [e['state'] for e in group['entries']]
        assert said == ', '.join(f'{states.count(s)} {s}' for s in STATES if s in states)


def test_a_state_that_is_chosen_opens_the_chapters(browser, tmp_path):
    html, _ = page()
    script = (ROOT / 'docs' / '_static' / 'board.js').read_text()
    (tmp_path / 'map.html').write_text(f'<script>{script}</script>{html}')
    tab = browser.new_page()
    tab.goto((tmp_path / 'map.html').as_uri())

    def shown():
        rows = tab.locator('.paper-chapter tbody tr')
        return rows.evaluate_all('all => all.filter(tr => tr.checkVisibility()).length')

    assert shown() == 0
    for state in STATES:
        tab.get_by_label(re.compile(f'^{state} ')).press('Space')
        assert shown() == sum(e['state'] == state for e in ENTRIES)
    tab.get_by_label(re.compile('^all ')).press('Space')
    assert shown() == 0, 'folded again'
    tab.close()


def test_only_sections_that_are_known_are_cited():
    "The body of the paper could not be had: its quoted and summarised parts are 2.4.1 to 2.4.4"
    known = {f'2.4.{i}' for i in range(1, 5)}
    for path in notebooks():
        cited = re.findall(r'paper[:,]? section (\d[\d.]*\d)', prose(path))
        assert set(cited) <= known, f'{path.name}: {sorted(set(cited) - known)}'
    cited = {s for e in ENTRIES for s in re.findall(r'^Section ([\d.]+)', e['paper'])}
    assert cited == known


# ---- faults are noticed


def test_a_call_that_is_not_there_is_noticed():
    called = set(calls('algo.losses.espo.espo'))
    assert 'algo.losses.espo.adaptive_clip' in called and 'algo.losses.clipped_surrogate' in called
    assert not is_called('algo.losses.grpo', called)
    assert is_called('algo.algo_settings.EspoConfig.for_batch', set(calls('loop.loss_of')))
    assert not is_called('algo.algo_settings.EspoConfig.for_batch', set(calls('loop.unmoved')))
    patched = set(calls('train.torch_train.TorchTrain.update'))
    assert 'train.routes.validate_routes' in patched


def test_what_is_there_after_all_is_noticed():
    "Entries as they once were, when the code had grown and the map had not"
    assert there('instructions') and there('tool calls') and there('shop') and there('literal')
    assert {'make_judge_model', 'runs/judge_model'} <= set(there('judge model'))
    assert there('PromptSelection') and not there('PromptSelector')
    assert not there('rollout_speedup'), 'its result says: not run'
    old = dict(state='absent', claim='One.', missing='No command joins them.')
    with pytest.raises(AssertionError, match='name in looked_for'):
        words_looked_for(old)
    for more in (
        dict(paper='Two phases of RL'),
        dict(paper='', lesson='judges/genrm#equal-answers-unequal-advantages'),
    ):
        assert [i['code'] for i in ideas_of(old | more)]
    assert not list(
        ideas_of(
            old
            | dict(paper='Results', lesson='studies/growth#a-larger-n-or-growth-of-silent-groups')
        )
    )


def test_a_number_that_is_not_there_is_noticed():
    assert number('zero_variance', 'runs.0.seed') == '0'
    with pytest.raises(KeyError):
        number('zero_variance', 'table.grpo.gone')
    with pytest.raises(AssertionError, match='finds nothing'):
        number('algo/losses/espo', 'no such words')
    with pytest.raises(AssertionError, match='it needs one value'):
        number('algo/losses/espo', r'clip range (\S+)')
