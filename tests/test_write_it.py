"""The exercises: solutions obey their laws, planted mistakes are named, and a loop of the solutions
has the library's weights bit for bit"""

import ast
import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.data.selection import prompts_of_step
from compassrl.data.tokenizer import EOS_ID
from compassrl.loop import fit
from compassrl.rollout.torch_rollout import TorchRollout
from course.lesson import check
from course.own_file import own_file
from tests.algo.losses.test_espo import batches
from tests.support import ROOT, loss_laws

FOLDER = ROOT / 'nbs' / 'write_it'
EXERCISES = {  # number: page, functions
    1: ('update', 'group_advantages'),
    2: ('update', 'clipped_surrogate aggregate'),
    3: ('update', 'group_ratio adaptive_clip'),
    4: ('update', 'zvp_advantages'),
    5: ('engine', 'replay_gates'),
    6: ('engine', 'cached_attention'),
    7: ('engine', 'continuous_batching'),
    8: ('loop', 'pass_at_k'),
}


def sources(page):
    found = json.loads((FOLDER / f'{page}.ipynb').read_text())['cells']
    return [''.join(c['source']) for c in found if c['cell_type'] == 'code']


@pytest.fixture(scope='module')
def pages():
    "What each page defines once all its cells have run, up to the mistakes that it plants itself"
    here, spaces = os.getcwd(), {}
    os.chdir(FOLDER)
    try:
        for page in dict.fromkeys(p for p, _ in EXERCISES.values()):
            spaces[page] = {}
            for source in sources(page):
                if 'def population_std' in source:
                    break
                exec(compile(source, page, 'exec'), spaces[page])
    finally:
        os.chdir(here)
    return spaces


def with_change(pages, number, old, new):
    "The exercise's solutions, one line of them changed: by name"
    page, functions = EXERCISES[number]
    first = functions.split()[0]
    (source,) = [s for s in sources(page) if f'def {first}_solution' in s]
    assert source.count(old) == 1, old
    body = ast.parse(source.replace(old, new)).body
    space = dict(pages[page])
    exec(
        compile(ast.Module([n for n in body if not isinstance(n, ast.Assert)], []), page, 'exec'),
        space,
    )
    return {f: space[f'{f}_solution'] for f in functions.split()}


@pytest.mark.parametrize('number', EXERCISES)
def test_a_stub_says_whose_turn_it_is_and_a_solution_is_correct(pages, number):
    page, functions = EXERCISES[number]
    space, names = pages[page], functions.split()
    laws = space[f'laws_{number}']
    assert check(laws, *(space[f] for f in names)) == f'not yet: {names[0]} is your turn'
    assert check(laws, *(space[f'{f}_solution'] for f in names)) == 'correct'


MISTAKES = [  # exercise, the solution's line, with the mistake, what the check says
    (1, 'r.std()', 'r.std(correction=0)', 'rewards 1, 0, 0, 0 .* 1.73'),
    (1, 'r.mean())', 'rewards.double().mean())', 'its own group alone'),
    (1, '> 1e-6', '> 0', 'equal but for rounding'),
    (1, 'r.std()', 'r.float().std()', 'every bit'),
    (2, 'minimum', 'maximum', 'ratios .5, 1, 1.5'),
    (2, '-torch.minimum(ratio * adv, ratio', '-(ratio', 'ratios .5, 1, 1.5 .* -0.8'),
    (2, 'clamp(1 - eps_low, 1 + eps_high)', 'clamp(1 - eps_high, 1 + eps_low)', 'upper range'),
    (2, 'advantages.masked_fill(~mask, 0.0)', 'advantages * mask', 'outside the mask .* nan'),
    (2, "'token-mean': num_tokens", "'token-mean': mask.sum()", 'parts of a mini-batch add up'),
    (2, "sum': num_samples", "sum': num_tokens", 'mean of sums 9/2'),
    (2, 'values.masked_fill(~mask, 0.0) *', 'values *', 'even NaN'),
    (2, '.clamp(min=1) * num', ' * num', 'a row may be empty'),
    (3, 'group_mean_solution(delta.detach()', 'group_mean_solution(delta', 'nobody else'),
    (3, '(mean + (delta - delta.detach())).exp()', 'mean.exp()', "a token's gradient"),
    (3, '(mean + (delta - delta.detach())).exp()', 'delta.exp()', r'log-ratios .3'),
    (3, 'scatter_add(1, groups, values.m', 'scatter_add(1, groups * 0, values.m', 'log-ratios .3'),
    (3, 'values.masked_fill(~mask, 0.0)', 'values', 'mean entropy'),
    (3, 'log(vocab_size)', 'vocab_size', 'gives half of alpha'),
    (3, '.clamp(min=eps_min)', ' + eps_min', 'gives eps_min'),
    (4, 'H - H.amax(1, keepdim=True)', '-H', 'the most uncertain is spared'),
    (4, 'H.amax(1, keepdim=True)', 'H.amax()', 'every bit'),
    (4, '.masked_fill(~mask, -inf)', '', 'a wrong response'),
    (4, '.clamp(-1, 1)', '', 'between -1 and 1'),
    (4, '.detach()', '', 'detach it'),
    (4, ' & (sign[:, None] != 0)', '', 'does not agree'),
    (5, '.gather(-1, experts).softmax(-1)', '.softmax(-1).gather(-1, experts)', '.622459'),
    (5, 'scores.gather(', 'scores.detach().gather(', 'the live router learns'),
    (5, 'valid[:, None]', 'valid[:, None] | True', 'the live router chooses'),
    (5, 'recorded.long(), own)', 'recorded.long(), own).sort(-1)[0]', 'the live router chooses'),
    (6, ' * d**-0.5', '', 'its own token and at all before it'),
    (6, 'int(place.max()) + 1', 'int(place.max())', 'its own token'),
    (6, 'later[:, None, None], -torch', 'later[:, None, None] & False, -torch', 'behind their own'),
    (6, 'q.unflatten(1, (KV, -1))', 'q.unflatten(1, (-1, KV)).transpose(1, 2)', 'share a key head'),
    (6, 'keys[rows, :, :T], values', 'keys[: len(q), :, :T], values', 'may live in any slot'),
    (7, 'if s not in running]', 'if not running]', 'filled before the next step'),
    (7, 'token in request.params.stop_ids or ', '', r'slots \[\] are busy, a step'),
    (7, '== request.params.max_tokens', '> request.params.max_tokens', 'max_tokens'),
    (7, 'iter(requests)', 'iter(list(requests))', 'requests were taken'),
    (7, 'free[: len(new)]', '[0] * len(new)', 'slot 0 is busy'),
    (8, 'math.comb(n - c, k) / math.comb(n, k)', '(1 - c / n) ** k', 'share of subsets'),
    (8, 'if k > n', 'if k > 99 * n', 'k above n is refused'),
]  # fmt: skip


def test_every_function_has_two_mistakes_at_least():
    numbers = [number for number, *_ in MISTAKES]
    assert min(numbers.count(n) for n in EXERCISES) >= 2


@pytest.mark.parametrize('number, old, new, says', MISTAKES)
def test_a_mistake_is_named(pages, number, old, new, says):
    wrong = with_change(pages, number, old, new)
    verdict = check(pages[EXERCISES[number][0]][f'laws_{number}'], *wrong.values())
    assert verdict.startswith('not yet: ') and re.search(says, verdict), verdict


def test_the_solutions_have_the_weights_of_the_library_bit_for_bit(pages):
    "The loop in the notebook against `fit`; the engines share no function of the eight"
    loop = pages['loop']
    steps = list(loop['library_run'].steps)
    assert len(steps) == loop['cfg'].steps > 1
    for (batch, engine), want in zip(loop['small_loop'](loop['solutions']), steps, strict=True):
        assert torch.equal(batch.token_ids, want.batch.token_ids)
        weights = list(engine.policy.parameters())
        assert all(torch.equal(a, b) for a, b in zip(weights, want.weights, strict=True))
    assert loop['report'](loop['solutions']) == 'bit for bit'


IN_THE_LOOP = [  # exercise, the solution's line, with the mistake, the function
    (1, 'r.std()', 'r.std(correction=0)', 'group_advantages'),
    (2, 'minimum', 'maximum', 'clipped_surrogate'),
    (2, "sum': num_samples", "sum': num_tokens", 'aggregate'),
    (3, '(mean + (delta - delta.detach())).exp()', 'mean.exp()', 'group_ratio'),
    (3, 'log(vocab_size)', 'vocab_size', 'adaptive_clip'),
    (4, 'H - H.amax(1, keepdim=True)', '-H', 'zvp_advantages'),
    (5, 'scores.gather(', 'scores.detach().gather(', 'replay_gates'),
    (6, ' * d**-0.5', '', 'cached_attention'),
    (6, '(weights @ seen_values).flatten(1, 2)', '1 / 0', 'cached_attention raised ZeroDivision'),
    (7, 'token in request.params.stop_ids or ', '', 'continuous_batching has other samples'),
    (7, 'waiting, len(free)', 'waiting, 1, 1 + len(free)', 'continuous_batching: .* lost'),
]  # fmt: skip


@pytest.mark.parametrize('number, old, new, says', IN_THE_LOOP)
def test_the_loop_names_the_first_function_that_differs(pages, number, old, new, says):
    loop, wrong = pages['loop'], with_change(pages, number, old, new)
    verdict = loop['report'](SimpleNamespace(**{**vars(loop['solutions']), **wrong}))
    assert re.match(rf'not yet: step \d: {says}', verdict), verdict


def test_another_order_of_rounding_is_no_mistake(pages):
    loop = pages['loop']
    by_division = '(p := scores.softmax(-1).gather(-1, experts)) / p.sum(-1, keepdim=True)'
    other = with_change(pages, 5, 'scores.gather(-1, experts).softmax(-1)', by_division)
    verdict = loop['report'](SimpleNamespace(**{**vars(loop['solutions']), **other}))
    assert verdict.startswith('equal but for rounding') and 'first replay_gates' in verdict


def test_the_loop_finds_what_a_reader_has_saved(pages, tmp_path):
    loop = pages['loop']
    notebook = json.loads((FOLDER / 'update.ipynb').read_text())
    for cell in notebook['cells']:
        if ''.join(cell['source']).startswith('def group_advantages('):
            cell['source'] = ['def group_advantages(rewards, group):\n', '    return rewards + 1\n']
    page = tmp_path / 'mine.ipynb'
    page.write_text(json.dumps(notebook))
    found = loop['defined'](page)
    assert found['group_advantages'](1, None) == 2
    assert set(loop['todo']) == set(loop['NAMES']), 'the stored page has stubs alone'


def test_the_loss_of_the_solutions_obeys_the_laws_of_every_loss(pages):
    loop = pages['loop']

    def make(_):
        return lambda *args: loop['espo_loss'](loop['solutions'], *args)

    loss_laws.split(make, batches(), st.none())
    loss_laws.padding(make, batches(), st.none(), ('old_log_probs', 'advantages', 'entropy'))


def test_each_step_gives_a_function_to_the_readers_own_file(tmp_path):
    "Solutions where nothing is written yet, the reader's cell where it is"
    text = own_file(ROOT)
    steps = re.findall(r'^# Step (\d+), (\S+): (.*)$', text, flags=re.M)
    assert [int(n) for n, *_ in steps] == [*range(1, 13)]
    space = {}
    exec(text, space)
    assert space['same_number']('#+075', '75') and not space['same_number']('#7_5', '75')
    loss = space['my_reinforce'](torch.zeros(2, 3), torch.tensor([1.0, 0]), torch.ones(2, 3) > 0)
    assert loss == 0 and not any(who == 'yours' for *_, who in steps)
    always = [SimpleNamespace(text='Verdict: Better')] * 2  # the first place wins: a tie
    assert space['verdict'](lambda questions: always, 'one', 'other').reward == 0.5
    (tmp_path / 'nbs').mkdir()
    for name in {page for _, page, _ in steps}:
        path = tmp_path / 'nbs' / f'{name}.ipynb'
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = (ROOT / 'nbs' / f'{name}.ipynb').read_text()
        path.write_text(mine.replace('return (log_probs * 0).sum()  # your turn', 'return 42'))
    (tmp_path / 'nbs' / 'course.yml').write_text((ROOT / 'nbs' / 'course.yml').read_text())
    assert '# Step 3, algo/policy_gradient: yours' in own_file(tmp_path)


@pytest.mark.parametrize('change, same', [('', True), ('0 * ', False)])
def test_the_readers_own_loop_has_the_weights_of_the_library(pages, change, same):
    "The loop of the own file, with the own file's advantages"
    there, space = pages['loop'], {}
    exec(own_file(ROOT).replace('adv = group', f'adv = {change}group'), space)
    nothing = ZeroVarianceConfig('uniform', length_weight=0, repetition_weight=0, zvp_alpha=0)
    cfg = replace(there['cfg'], steps=2, loss=LossConfig('grpo'), zero_variance=nothing)
    theirs, mine = there['fresh_engine'](), there['fresh_engine']()
    for engine, train in (
        (theirs, lambda r: fit(cfg, there['train'], r, theirs, there['tokenizer'], Still, EOS_ID)),
        (mine, lambda r: space['my_loop'](prompts, r, mine, cfg.group_size)),
    ):
        prompts = [prompts_of_step(there['train'], i, 8, cfg.seed) for i in range(2)]
        rollout = TorchRollout(cfg.policy, num_slots=12, dtype=torch.double)
        rollout.load_weights(engine.weights(), 0)
        train(rollout)
    assert theirs.num_steps == 4
    assert there['equal_bits'](mine, list(theirs.policy.parameters())) == same


class Still:
    "Hooks that do nothing"

    @staticmethod
    def on_step(step, metrics, samples, batch): ...
