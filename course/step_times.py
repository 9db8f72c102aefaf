"""How long a step will take on a cluster, estimated before the cluster is rented."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from compassrl.model.policy import PolicyConfig
from compassrl.plan.memory import Estimate
from compassrl.plan.sizing import Gpu, Workload, kv_bytes, num_params, server_memory, weight_bytes
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.torch_rollout import RolloutConfig
from compassrl.train.megatron.parallel import ParallelConfig


@dataclass(frozen=True)
class Guess:
    "What no data sheet says: shares of the peak that are reached, and a fixed cost"

    matrix_frac: float = 0.35  # share of the matrix units' peak, in training
    memory_frac: float = 0.6  # share of the memory's bandwidth, in decoding
    link_frac: float = 0.7  # share of a link's bandwidth, in the weight sync
    token_s: float = 0.003  # seconds of each decoding step that no data sheet explains


def token_flops(
    policy: PolicyConfig,
    length: float,  # tokens in its sequence
) -> float:
    "Forward, per token: 2 per parameter that it meets, and attention over half the sequence"
    c = policy
    look_up = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size  # multiplies nothing
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * length
    return 2 * (num_params(c)[1] - look_up) + attention


def decode_s(
    policy: PolicyConfig,
    vllm: VllmConfig,
    gpu: Gpu,
    running: float,  # responses at the same time on one server
    length: float,  # tokens that each has in the cache
    guess: Guess = Guess(),
    rollout: RolloutConfig = RolloutConfig(),  # how weights and cache are stored
) -> float:  # seconds until each has one more token
    "Decoding reads every weight that any response needs, and everyone's cache"
    E, K = policy.num_experts, policy.num_experts_per_tok
    size = weight_bytes(policy, rollout.quantization)
    # the share of the experts that somebody needs, if all were equally likely
    met = 1 - (1 - K / E) ** running
    read = sum(size.values()) - size.get('experts', 0) * (1 - met)
    read = read / vllm.tensor_parallel + running * length * kv_bytes(policy, vllm, rollout)
    flops = running * token_flops(policy, 2 * length) / vllm.tensor_parallel
    reading = read / (gpu.bandwidth_gbs * 1e9 * guess.memory_frac)
    multiplying = flops / (gpu.bf16_tflops * 1e12 * guess.matrix_frac)
    return max(reading, multiplying) + guess.token_s


def rollout_s(
    policy: PolicyConfig,
    vllm: VllmConfig,
    gpu: Gpu,
    workload: Workload = Workload(),
    guess: Guess = Guess(),
    taken: float = 0.0,  # bytes of each GPU that something else holds
    rollout: RolloutConfig = RolloutConfig(),  # how weights and cache are stored
) -> float:
    "Equal waves of as many as the cache holds; then the longest response is drawn to its end alone"
    w, servers = workload, len(vllm.urls) or vllm.num_replicas
    each, mean = ceil(w.responses / servers), w.prompt_tokens + w.response_tokens / 2
    room = server_memory(policy, vllm, gpu, taken, rollout)['cached_tokens']
    fit = room / (w.prompt_tokens + w.response_tokens)
    running = max(1, min(each, w.num_slots, fit))
    token = decode_s(policy, vllm, gpu, running, mean, guess, rollout)
    bulk = each / running * w.response_tokens * token
    alone = decode_s(policy, vllm, gpu, 1, w.max_tokens, guess, rollout)
    return bulk + (w.max_tokens - w.response_tokens) * alone


def train_s(
    policy: PolicyConfig,
    parallel: ParallelConfig,
    world_size: int,
    gpu: Gpu,
    workload: Workload = Workload(),
    guess: Guess = Guess(),
) -> dict[str, float]:  # seconds without and with gradient
    "Operations over those that all GPUs can do; a pipeline stands still while it fills and drains"
    w, p = workload, parallel
    length = w.prompt_tokens + w.response_tokens
    tokens = w.responses * length
    speed = world_size * gpu.bf16_tflops * 1e12 * guess.matrix_frac
    forward = tokens * token_flops(policy, length) / speed
    micro = max(1, tokens / (p.dp(world_size) * w.micro_batch_tokens))
    forward *= 1 + (p.pp - 1) / (p.vpp * micro)
    passes = 4 if p.recompute == 'full' else 3
    return dict(log_probs_s=w.num_forward * forward, update_s=passes * forward)


def sync_s(
    policy: PolicyConfig, vllm: VllmConfig, gpu: Gpu, num_nodes: int = 1, guess: Guess = Guess()
) -> float:
    "The whole model in bfloat16, once through the slowest link from the first rank to the servers"
    link = gpu.network_gbs if num_nodes > 1 or vllm.urls else gpu.link_gbs
    return 2 * num_params(policy)[0] / (link * 1e9 * guess.link_frac)


def step_times(
    e: Estimate,  # one layout on one kind of GPU
    vllm: VllmConfig | None = None,  # None = nothing of the rollout is estimated
    guess: Guess = Guess(),
    rollout: RolloutConfig = RolloutConfig(),  # how its weights and cache are stored
) -> dict[str, float]:  # seconds by part of a step
    p, c, n, gpu = e.layout.parallel, e.layout.policy, len(e.layout.places), e.gpu
    assert gpu, 'no data sheet says how fast a CPU is'
    times = train_s(c, p, n, gpu, e.workload, guess)
    if not vllm:
        return times
    own = bool(vllm.urls or e.layout.servers)  # has the rollout GPUs of its own?
    taken = 0.0 if own else max(sum(s.values()) - s.get('rollout', 0) for s in e.stages)
    drawn = rollout_s(c, vllm, gpu, e.workload, guess, taken, rollout)
    return dict(rollout_s=drawn, sync_s=sync_s(c, vllm, gpu, e.layout.num_nodes, guess)) | times


def ahead_s(times: dict[str, float]) -> float:
    "Seconds of a step with `schedule.max_staleness` of 1 or more, if all steps are alike"
    drawn, sync = times['rollout_s'], times['sync_s']
    return sync + max(drawn, sum(times.values()) - drawn - sync)


def times_table(times: dict[str, float], apart: bool = True) -> str:
    "The time of a step; `apart`: has the rollout GPUs of its own, so that it may sample ahead?"
    rows = {k.removesuffix('_s').replace('_', ' '): v for k, v in times.items()}
    rows['step, one after the other'] = sum(times.values())
    if apart:
        rows['step, sampling ahead'] = ahead_s(times)
    return '\n'.join(f'  {k:28} {f"{v:,.1f} s":>14}' for k, v in rows.items())
