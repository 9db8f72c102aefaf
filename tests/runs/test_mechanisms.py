"Gauges of the mechanisms against sums by hand"

from compassrl.runs.report import mechanisms, what_each_did

STEP = dict(
    samples=8.0,
    response_tokens_mean=10.0,
    group_size_mean=4.0,
    zero_variance_first_frac=1.0,
    zero_variance_raw_frac=0.5,
    zero_variance_frac=0.5,
    zero_variance_residual_frac=0.0,
    penalty_mean=0.25,
    clip_frac=0.1,
    tokens_agree_frac=0.95,
    tis_clip_frac=0.0125,
    rollout_train_gap=0.02,
    staleness_max=1.0,
    time_reward_busy_s=0.5,
)
# Two such steps have 16 responses in 4 groups, and 160 tokens.
BY_HAND = {
    'growth of silent groups': 2.0,
    'penalties': 4.0,
    'RL-ZVP': 2.0,
    'clip of the loss': 16.0,
    'router replay': 8.0,
    'truncated importance sampling': 2.0,
    'sampling in fewer bits': 0.02,
    'sampling ahead': 1.0,
    'reward workers': 1.0,
}
ON = {'rollout.dtype': 'bfloat16', 'rewards.workers': 1}


def test_gauges_are_sums_over_the_run():
    found = {m['name']: m for m in what_each_did([STEP, STEP], ON)}
    assert {k: round(m['gauge'], 9) for k, m in found.items()} == BY_HAND
    assert not any('idle' in m['says'] for m in found.values())
    assert '16 tokens' in found['clip of the loss']['says']
    assert 'experts of 8 tokens' in found['router replay']['says']


def test_a_mechanism_that_did_nothing_says_why():
    still = dict(STEP, zero_variance_raw_frac=1.0, zero_variance_residual_frac=0.5, clip_frac=0.0)
    still |= dict(penalty_mean=0.0, tokens_agree_frac=1.0, tis_clip_frac=0.0, staleness_max=0.0)
    off = {'rollout.dtype': 'float32', 'rewards.workers': 0}
    for rows in ([still], [dict.fromkeys(STEP)], [{}], []):
        found = what_each_did(rows, off)
        assert [m['says'] for m in found] == [f'idle: {m.idle}' for m in mechanisms]
