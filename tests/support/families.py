"""A tiny model of every family, made and saved by transformers with tokenizer and chat template;
and what has to hold of each, one function per column of the table in README"""

import json
from functools import cache
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from compassrl.model.pretrained import from_pretrained, hf_weights, save_pretrained
from compassrl.records import Request, SamplingParams, collate
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.megatron.parallel import ParallelConfig, check_parallel
from compassrl.train.routes import routes_agreement
from compassrl.train.torch_train import response_log_probs
from course.gradients import hf_gradients

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

CLOSE = 1e-5
END = (1, 2)  # <|im_end|> and <|endoftext|>: either ends a response
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
CHAT = [{'role': 'user', 'content': 'What is 12 + 30?'}]
SIZES = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=96,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=list(END),
    pad_token_id=0,
)
MIXTURE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
YARN = dict(rope_type='yarn', rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=32)
LLAMA = dict(
    rope_type='llama3',
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
GLM = dict(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.8,
    head_dim=32,
    attention_bias=True,
    use_qk_norm=True,
    num_mtp_layers=0,
)
FAMILIES = {  # name -> transformers' configuration: class, what is not in SIZES
    'Qwen3': ('Qwen3Config', dict(head_dim=32)),
    'Qwen3-MoE': ('Qwen3MoeConfig', MIXTURE | dict(head_dim=32, norm_topk_prob=True)),
    'Qwen3-MoE, YaRN': (
        'Qwen3MoeConfig',
        MIXTURE | dict(head_dim=32, mlp_only_layers=[1], rope_parameters=YARN),
    ),
    'Qwen2': ('Qwen2Config', {}),
    'Qwen2-MoE': (
        'Qwen2MoeConfig',
        MIXTURE | dict(shared_expert_intermediate_size=64, decoder_sparse_step=2),
    ),
    'Mixtral': ('MixtralConfig', dict(num_local_experts=6, num_experts_per_tok=2)),
    'OLMoE': ('OlmoeConfig', dict(num_experts=6, num_experts_per_tok=3)),
    'GLM-4-MoE': ('Glm4MoeConfig', GLM),
    'Llama': ('LlamaConfig', dict(tie_word_embeddings=True)),
    'Llama 3.1': ('LlamaConfig', dict(rope_parameters=LLAMA)),
    'Mistral': ('MistralConfig', dict(sliding_window=None, head_dim=32)),
}
MIXTURES = [n for n in FAMILIES if 'MoE' in n or n == 'Mixtral']


@cache
def bpe():
    "A real byte-level BPE, with the marks of a chat"
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ['<|pad|>', '<|im_end|>', '<|endoftext|>', '<|im_start|>']
    text = ['What is 12 + 30?', 'user', 'assistant', 'the answer of the sum is 42'] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(text, trainer)
    names = dict(zip(('pad_token', 'eos_token'), special))
    return PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=TEMPLATE, **names)


def lively(model, seed=0):
    "Weights large enough for a fault in any part to show; buffers of routers too"
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in model.state_dict().items():
            t.normal_(std=0.15, generator=gen).add_('norm' in name)
    return model.eval()


def original(name, folder: Path):
    "The model as its makers publish it: weights, tokenizer, template, generation settings"
    cls, values = FAMILIES[name]
    config = getattr(transformers, cls)(**SIZES | values)
    torch.manual_seed(0)
    model = lively(AutoModelForCausalLM.from_config(config, dtype=torch.float))
    model.generation_config.update(eos_token_id=list(END), temperature=0.7, do_sample=True)
    model.save_pretrained(folder)
    bpe().save_pretrained(folder)
    return opened(folder)


def opened(folder):
    "As transformers sees it; every name must be found and none left over"
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float, experts_implementation='eager', output_loading_info=True
    )
    assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
    return model.eval()


def there_and_back(folder: Path, out: Path):
    "Read by us, written by us"
    policy = from_pretrained(folder)
    save_pretrained(policy, out, like=folder)
    return policy


def made(name, home: Path):
    "The model as published, in `home/in`; our policy; and our folder, `home/out`"
    model, out = original(name, home / 'in'), home / 'out'
    return model, there_and_back(home / 'in', out), out


def relative(a, b):
    return ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()


def batch(config):
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config.vocab_size, (3, 40), generator=gen)  # beyond what YaRN stretches
    mask = torch.arange(40) < torch.tensor([[40], [23], [40]])
    return ids, mask


def their_routes(model, ids, mask):
    "Logits and, of each mixture, the experts that its router returns"
    seen, hooks = [], []
    for name, m in model.named_modules():
        if name.endswith('mlp.gate') and hasattr(m, 'top_k'):
            hooks.append(m.register_forward_hook(lambda m, i, out: seen.append(out[-1])))
    logits = model(ids, attention_mask=mask.long()).logits[mask]
    for h in hooks:
        h.remove()
    return logits, [r[mask.flatten()] for r in seen]


# ---- what the columns of the table claim ---------------------------------------------------------


def values(model, policy, out):
    ids, mask = batch(policy.config)
    ours = policy.logits(policy(ids, mask)[0])
    assert relative(ours, their_routes(model, ids, mask)[0]) < CLOSE


def routes(model, policy, out):
    "Own choices, and those of an engine with a cache; replayed, they change nothing"
    c = policy.config
    ids, mask = batch(c)
    hidden, own = policy(ids, mask)
    sparse = [i for i in range(c.num_hidden_layers) if c.is_sparse(i)]
    _, theirs = their_routes(model, ids, mask)
    assert len(sparse) == len(theirs) > 0
    for i, r in zip(sparse, theirs):
        assert torch.equal(own[:, i].sort(-1).values, r.sort(-1).values), f'layer {i}'
        assert own[:, i].unique().numel() == c.num_experts, 'every expert is used'
    stored = torch.zeros(*ids.shape, *own.shape[1:], dtype=torch.uint8)
    stored[mask] = own.to(torch.uint8)
    assert torch.equal(policy(ids, mask, stored, mask)[0], hidden)


def gradients(model, policy, out):
    ids, mask = batch(policy.config)
    logits = policy.logits(policy(ids, mask)[0])
    w = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    policy.zero_grad()
    (logits * w).sum().backward()
    model.zero_grad()
    (model(ids, attention_mask=mask.long()).logits[mask] * w).sum().backward()
    want = their_gradients(model)
    ours = dict(hf_gradients(policy))
    if policy.config.family == 'mixtral':
        ours = {as_in_memory(n): g for n, g in ours.items()}
    assert ours.keys() == want.keys()
    worst = {n: relative(ours[n], g) for n, g in want.items() if g.norm() > 1e-4}
    assert len(worst) > 0.9 * len(want) and max(worst.values()) < CLOSE, worst


def as_in_memory(name):
    "Mixtral's experts, as transformers calls them once they are loaded"
    halves = dict(w1='gate_proj', w3='up_proj', w2='down_proj')
    name = name.replace('.block_sparse_moe.', '.mlp.')
    return next((name.replace(a, b) for a, b in halves.items() if f'.{a}.' in name), name)


def their_gradients(model):
    "By the names of the files, one expert at a time"
    out = {}
    for name, p in model.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        if '.experts.' not in name:
            out[name] = g
            continue
        for e in range(len(g)):
            if 'gate_up' in name:
                for half, part in zip(('gate', 'up'), g[e].chunk(2)):
                    out[name.replace('gate_up_proj', f'{e}.{half}_proj.weight')] = part
            else:
                out[name.replace('down_proj', f'{e}.down_proj.weight')] = g[e]
    return out


def round_trip(model, policy, out):
    "Names, numbers, and every other file, as transformers had written them"
    source = Path(model.name_or_path)
    ours, theirs = (load_file(f / 'model.safetensors') for f in (out, source))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], t) and ours[n].dtype == t.dtype for n, t in theirs.items())
    names = [{p.name for p in f.iterdir()} for f in (out, source)]
    assert names[0] == names[1]
    for name in names[1] - {'model.safetensors'}:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert json.loads((out / 'config.json').read_text())['eos_token_id'] == list(END)


def generates(model, policy, out):
    "What comes back answers a chat, with its template and its end tokens, as our engine does"
    tok, back = AutoTokenizer.from_pretrained(out), opened(out)
    assert back.generation_config.eos_token_id == list(END) and tok.eos_token_id == END[0]
    ask = dict(add_generation_prompt=True, return_tensors='pt', return_dict=True)
    prompt = tok.apply_chat_template(CHAT, **ask)
    text = back.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    assert text.tolist() == greedy(policy, prompt['input_ids'][0].tolist(), 24)
    padded = tok(['a', 'a longer text'], padding=True, return_tensors='pt')
    assert padded['attention_mask'].sum(1).diff() > 0


def greedy(policy, prompt, num):
    "The embedded rollout engine, token by token with its cache"
    engine = TorchRollout(policy.config, num_slots=2)
    engine.load_weights(hf_weights(policy), 0)
    params = SamplingParams(num, temperature=0, stop_ids=policy.config.eos_ids)
    sample = next(engine.generate([Request('q', tuple(prompt), params=params)]))
    return sample.prompt_ids + sample.response_ids


def serves(folder, routes):
    "vLLM, in this process: a chat from the folder as it lies, then a rollout as in a run"
    from compassrl.rollout.vllm.in_process import VllmRollout, set_environment

    set_environment()
    chats(folder)
    policy = from_pretrained(folder)
    engine = VllmRollout(folder, num_slots=8, return_routes=routes, max_len=64)
    engine.load_weights(hf_weights(policy), 0)
    gen = torch.Generator().manual_seed(3)
    ids = torch.randint(3, policy.config.vocab_size, (8, 12), generator=gen).tolist()
    params = SamplingParams(24, stop_ids=policy.config.eos_ids)
    asked = [Request(f'q{i}', tuple(r), 0, i, params) for i, r in enumerate(ids)]
    samples = list(engine.generate(asked))
    engine.close()
    b = collate(samples)
    with torch.no_grad():
        log_probs = response_log_probs(policy, b, 1.0, False)[0]
        own = policy(b.token_ids, b.token_mask)[1]
    gap = (log_probs - b.rollout_log_probs)[b.response_mask].abs()
    assert gap.mean() < CLOSE, gap.mean()
    if routes:
        same = routes_agreement(own, b.routed_experts[b.token_mask], policy.config)
        # Among thousands, a near tie may fall the other way
        assert (same[b.routes_valid[b.token_mask]] == 1).float().mean() > 0.99


def serve(folders):
    "Says of each family that vLLM serves it. Mixtures first: vLLM's expert ranks begin with them"
    for name in sorted(folders, key=lambda n: n not in MIXTURES):
        serves(folders[name], name in MIXTURES)
        print(f'served: {name}', flush=True)


def served(families, log, run):
    "Which of those `made` one process has served, one after another; what it said of others"
    folders = {name: out for name, (*_, out) in families.items()}
    r = run(log, serve, folders, timeout=600)
    names = {n for n in folders if f'served: {n}' in r.stdout.split('\n')}
    return names, f'exit code {r.returncode}: {r.stderr[-3000:]}'


def chats(folder):
    from vllm import LLM
    from vllm import SamplingParams as Params

    small = dict(max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=8 << 20)
    llm = LLM(str(folder), dtype='float32', enforce_eager=True, **small)
    out = llm.chat(CHAT, Params(temperature=0, max_tokens=24), use_tqdm=False)[0]
    prompt, policy = list(out.prompt_token_ids), from_pretrained(folder)
    tok = AutoTokenizer.from_pretrained(folder)
    assert prompt == tok.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert prompt + list(out.outputs[0].token_ids) == greedy(policy, prompt, 24)


COLUMNS = {  # columns of the table: the head -> what is executed
    'values': values,
    'gradients': gradients,
    'routes': routes,
    'round trip': round_trip,
    'generates in transformers': generates,
    'serves in vLLM': serves,
    'layout accepted by Megatron-Core': check_parallel,
}


def claim(name, column, model, policy, out, served):
    """Is it so? `served` are the names of those that vLLM serves, and what it said of others

    None where there is nothing to claim; raises where it should be and is not"""
    if column == 'routes' and name not in MIXTURES:
        return None
    if column == 'layout accepted by Megatron-Core':
        try:
            check_parallel(ParallelConfig(), policy.config, 1)
        except ValueError:
            return False
        return True
    if column == 'serves in vLLM':
        names, said = served
        assert name in names, said
    else:
        COLUMNS[column](model, policy, out)
    return True
