"The search of the site: what people ask, and the page that should come first"

import json
import subprocess
import sys
from shutil import which

import pytest

from tests.support import ROOT
from tests.test_toc import COURSE

sys.path.insert(0, str(ROOT / 'tools'))
from build_docs import symbols  # noqa: E402
from search_index import begins, letters, search_index, tokens  # noqa: E402
from toc import read, title  # noqa: E402

# the questions of learners, in their words
ASKED = {
    'GRPO loss is zero': 'algo/losses',
    'reward_std 0 all rewards equal': 'algo/zero_variance',
    'clip_ratio always 0': 'algo/losses',
    'GSPO sequence or token ratio': 'algo/losses/gspo',
    'KL estimator k1 k2 k3': 'algo/ratios',
    'divide by std length bias': 'algo/advantages',
    'why does my reward not rise': 'loop',
    'entropy collapse': 'loop',
    'vllm trainer log probs disagree': 'algo/engine_gap',
    'log probs before or after temperature': 'rollout/torch_rollout',
    'top-p or top-k': 'rollout/answers',
    'recompute old log probs': 'train/torch_train',
    'router replay R2 or R3': 'algo/engine_gap',
    'does dynamic sampling pay': 'algo/zero_variance',
    'out of memory': 'model/log_probs',
    'LoRA': 'questions',
    'reward hacking': 'data/tasks',
    # ours
    'policy gradient': 'algo/policy_gradient',
    'REINFORCE': 'algo/policy_gradient',
    'baseline variance': 'algo/policy_gradient',
    'PPO critic': 'algo/losses',
    'group advantage': 'algo/advantages',
    'leave-one-out': 'algo/advantages',
    'Dr.GRPO': 'algo/losses',
    'clip higher DAPO': 'algo/losses',
    'ESPO': 'algo/losses/espo',
    'zero variance': 'algo/zero_variance',
    'RL-ZVP': 'algo/zero_variance',
    'truncated importance sampling': 'algo/ratios',
    'FP8': 'rollout/fp8',
    'KV cache': 'rollout/torch_rollout',
    'continuous batching': 'rollout/torch_rollout',
    'partial rollouts': 'rollout/partial',
    'longest first scheduling': 'rollout/schedule',
    'TIES merge': 'model/merge',
    'cold start SFT': 'train/sft',
    'pass@k': 'runs/evaluate',
    'generative reward model': 'judges/genrm',
    'judge tie labels': 'judges/genrm',
    'position bias': 'judges/genrm',
    'verifier': 'data/tasks',
    'sandbox code reward': 'judges/verifiers',
    'my own reward function': 'how_to/own_reward',
    'my own data': 'how_to/own_data',
    'Qwen3': 'how_to/qwen3',
    'resume a run': 'launch/background',
    'troubleshooting error message': 'how_to/troubleshooting',
    'tensor parallel expert parallel layout': 'plan/layout',
    'tool calls over several turns': 'rollout/episodes',
    'glossary verl TRL names': 'words',
    'mixture of experts policy': 'model/policy',
    'sick run clinic': 'loop',
    'my reward does not go up': 'loop',
    'OOM': 'model/log_probs',
    'git clone': 'index',
    'baselines': 'algo/policy_gradient',
    'beta': 'algo/ratios',
    'off policy': 'runs/ahead',
    'save checkpoint': 'launch/background',
}

# words that are still being typed
TYPED = {
    'router rep|': 'algo/engine_gap',
    'countd|': 'how_to/countdown',
    'position bi|': 'judges/genrm',
    'clip high|': 'algo/losses',
    'GRPO loss is zero|': 'algo/losses',
}
# slips of the keyboard, and what is searched for instead; what is known stays
SLIPS = {
    'advantge': 'advantage',
    'polcy gradient': 'policy gradient',
    'rewrad hacking': 'reward hacking',
    'zero varience': 'zero variance',
    'schedulling': 'scheduling',
    'generatve reward modle': 'generative reward model',
    'importence sampling': 'importance sampling',
    'dynamic samling': 'dynamic sampling',
    'Bradly-Terry': 'bradley-Terry',
    'confidance interval': 'confidence interval',
    'num_generations': 'num_generations',
    'what does it do with your rewards': 'what does it do with your rewards',
    'humaneval': 'humaneval',
}
NUMBERS = dict(baseline='baselines', policy='policies', loss='losses', probe='probes')
NUMBERS |= dict(response='responses', temperature='temperatures', group='groups', batch='batches')
WHY = 'why is my loss zero', 'why is my loss 0|', 'should I divide by the std'
WORDS = 'silent group', 'k3', 'stale', 'RL-ZVP', 'pass@k'


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    "Query -> the pages that the site's own script finds, in order"
    if not which('node'):
        pytest.skip('no node')
    nbs = {n: read(COURSE.nbs / COURSE.paths[n]) for n in COURSE.order}
    folder = tmp_path_factory.mktemp('search')
    data = search_index(COURSE, nbs, {n: title(nb) for n, nb in nbs.items()}, symbols())
    (folder / 'data.mjs').write_text(data)
    (folder / 'search.mjs').write_text((ROOT / 'docs' / '_static' / 'search.js').read_text())
    (folder / 'ask.mjs').write_text(
        "import './data.mjs'\nimport './search.mjs'\n"
        'const asked = JSON.parse(process.argv[2])\n'
        'const seen = p => [p.url, p.sections[0].anchor, p.sections[0].says]\n'
        'const answer = q => siteSearch.find(q.replace("|", ""), SITE, q.endsWith("|")).map(seen)\n'
        'const mended = asked.map(q => siteSearch.mend(q))\n'
        'console.log(JSON.stringify([asked.map(answer), mended]))'
    )
    asked = [*ASKED, *TYPED, *WORDS, *(f'what is a {w}?' for w in WORDS), 'xyzzy', 'LossConfig']
    asked += [*SLIPS, *SLIPS.values(), *WHY]
    command = ['node', folder / 'ask.mjs', json.dumps(asked)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pages, mended = json.loads(said)
    return dict(zip(asked, pages)) | {'mended': dict(zip(asked, mended))}


@pytest.mark.parametrize('query, page', [*ASKED.items(), *TYPED.items()])
def test_the_right_page_comes_first(found, query, page):
    first = [url.removesuffix('.html') for url, _, _ in found[query]]
    assert first[0] == page, first[:4]


@pytest.mark.parametrize('query', WHY)
def test_a_question_in_words_has_its_answer_among_the_first_two(found, query):
    assert 'questions.html' in [url for url, *_ in found[query][:2]]


def test_a_section_says_how_it_begins_without_marks(found):
    says = [says for query in ASKED for _, _, says in found[query][:3]]
    assert sum(map(bool, says)) > 0.9 * len(says)
    assert not [
        t for t in says if len(t) > 155 or any(mark in t for mark in ('`', '**', '](', '<', '$$'))
    ]


@pytest.mark.parametrize('one, many', NUMBERS.items())
def test_one_and_many_find_the_same(one, many):
    assert tokens(one) == tokens(many)


def test_a_slip_of_the_keyboard_is_read_as_the_word_it_resembles(found):
    assert {q: found['mended'][q] for q in SLIPS} == SLIPS
    assert {q: found['mended'][q] for q in ASKED} == {q: q for q in ASKED}
    assert found['advantage'][0][0] == 'algo/advantages.html'


@pytest.mark.parametrize('word', [*WORDS, *(f'what is a {w}?' for w in WORDS)])
def test_a_word_of_the_glossary_shows_what_it_means_among_the_first_two(found, word):
    url, anchor, says = next(f for f in found[word][:2] if f[0] == 'words.html')
    assert f'id=\\"{anchor}\\"' in (COURSE.nbs / 'words.ipynb').read_text() and len(says) > 20


def test_a_formula_is_read_in_letters():
    text = r'A $\mathbb{E}[r^2]$, $1+\varepsilon\cdot x$, `pip install "it[envs]"`, [a](b.c).'
    assert begins(text) == 'A E[r²], 1+ε·x, pip install "it[envs]", a.'
    assert letters(r'\frac{a}{b} \le \log p') == 'a/b ≤log p'


def test_a_name_is_found_and_nonsense_is_not(found):
    assert found['xyzzy'] == []
    assert any(anchor.endswith('LossConfig') for _, anchor, _ in found['LossConfig'])


def test_a_name_with_lines_counts_whole_and_in_parts():
    assert tokens('The rewards, `reward_std`') == ['reward', 'reward_std', 'reward', 'std']
