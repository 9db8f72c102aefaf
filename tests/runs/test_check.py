"`compassrl check` notices what is wrong, says so, and exits with 1"

import json

import pytest
import torch

from compassrl.model.policy import Policy
from compassrl.model.pretrained import hf_weights
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs import check
from compassrl.runs.check import Bench, check_gap, check_rollout, drawn, prepare_bench


@pytest.fixture(scope='module')
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp('bench'), 'cpu', True)
    prepare_bench(made)
    return made


def wrong(findings):
    return [f.what for f in findings if f.ok is False]


def engine_of(bench, kind=TorchRollout):
    return kind(bench.shape, 8)


def test_weights_of_another_policy_are_a_gap(bench):
    engine, policy = engine_of(bench), bench.policy()
    engine.load_weights(hf_weights(policy), 0)
    samples, speed = drawn(engine, bench.requests(8, 12))
    assert speed > 0 and not wrong(check_gap(samples, policy, 1e-4))
    other = Policy(bench.shape, seed=1)
    gaps = [f'gap to the trainer, replay {r}' for r in ('off', 'R3')]
    assert wrong(check_gap(samples, other, 1e-4)) == gaps


def test_an_engine_that_keeps_old_weights_or_another_seed_is_wrong(bench):
    class Stale(TorchRollout):
        def load_weights(self, weights, version):
            if self.version is None:
                super().load_weights(weights, version)

    class Restless(TorchRollout):
        count = 0

        def generate(self, requests, whole_groups=False):
            Restless.count += 1
            with torch.inference_mode():
                self.policy.head.add_(1e-2 * Restless.count)
                self.policy.head[Restless.count % 50] += 3
            yield from super().generate(requests)

    assert not wrong(check_rollout(bench, engine_of(bench), bench.policy(), 1e-4))
    assert 'equal tokens with other weights' in wrong(
        check_rollout(bench, engine_of(bench, Stale), bench.policy(), 1e-4)
    )
    assert 'equal seeds, equal tokens, again' in wrong(
        check_rollout(bench, engine_of(bench, Restless), bench.policy(), 1e-4)
    )


def test_the_command_exits_with_1(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    good = dict(what='versions', value='1', want='', ok=None)
    bad = dict(what='gap', value=0.5, want='0.1', ok=False)
    rows = {
        'machine': ([good], ''),
        'embedded': ([bad], ''),
        'megatron': ([good], 'exit code 3: x'),
    }
    monkeypatch.setattr(check, 'run_part', lambda bench, name, limit_s: rows[name])
    with pytest.raises(SystemExit) as e:
        check.check_command(parts=tuple(rows))()
    assert e.value.code == 1
    said = capsys.readouterr().out
    assert 'WRONG gap' in said and 'exit code 3' in said and '2 of 4 findings are wrong' in said
    stored = json.loads((tmp_path / 'check.json').read_text())
    assert [r['ok'] for r in stored['rows']] == [None, False, None, False]
    check.check_command(parts=('machine',))()  # nothing is wrong: no exit
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match='no CUDA device was found'):
            check.check_command(device='cuda')()


def test_a_part_that_hangs_ends(bench):
    rows, why = check.run_part(bench, 'embedded', 0.2)
    assert rows == [] and why == 'not ready after 0.2 s'
