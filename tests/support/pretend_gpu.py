"""A GPU that is pretended: tensors say `device='meta'`, their numbers are computed on the CPU

A tensor on the wrong device raises as on a GPU; kernels and waits for the GPU are counted.
'meta' and not 'cuda', because autograd asks a GPU for streams: library code asks for `!= 'cpu'`."""

import contextlib
import importlib
import sys
from collections import Counter
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
DEVICE = 'meta'
counts: Counter = Counter()  # 'kernel', 'wait', and what by name
waits: Counter = Counter()  # kind and line of compassrl
attention: list[dict] = []  # calls of scaled_dot_product_attention

MOVES = {aten._to_copy.default, aten.copy_.default, aten.set_.source_Tensor}
INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
INDEX |= {aten._unsafe_index.Tensor, aten._index_put_impl_.default}
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}
FREE = {aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default}
FREE |= {aten.detach.default, aten._local_scalar_dense.default, aten.is_same_size.default}


class Gpu(torch.Tensor):
    "A tensor that says it is on the GPU; `t` holds its numbers"

    @staticmethod
    def __new__(cls, t):
        shape = dict(strides=t.stride(), storage_offset=t.storage_offset(), dtype=t.dtype)
        r = torch.Tensor._make_wrapper_subclass(cls, t.size(), device=DEVICE, **shape)
        r.t = t
        return r

    def __init__(self, t):
        pass

    def __repr__(self):
        return f'Gpu({self.t!r})'

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, v):
        torch._C.TensorBase.data.__set__(self, v)
        self.t = v.t

    def data_ptr(self):
        return self.t.data_ptr()

    def __deepcopy__(self, memo):
        return Gpu(self.t.clone()).requires_grad_(self.requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def inside(x):
    return x.t if isinstance(x, Gpu) else x


def outside(x):
    return Gpu(x) if isinstance(x, torch.Tensor) else x


def is_gpu(device):
    return device is not None and torch.device(device).type == DEVICE


def wait(kind):
    f = sys._getframe(2)
    while f and '/compassrl/' not in f.f_code.co_filename:
        f = f.f_back
    counts['wait'] += 1
    waits[
        f'{kind} {f.f_code.co_filename.split("/compassrl/")[-1]}:{f.f_lineno}' if f else kind
    ] += 1


def check_devices(func, args, tensors):
    "What CUDA refuses: a CPU tensor among GPU tensors, unless it is a number or an index"
    off = [x for x in tensors if not isinstance(x, Gpu)]
    if func in INDEX and isinstance(args[0], Gpu):
        allowed = all(any(x is i for i in args[1]) for x in off)
    else:
        one = torch.Tag.pointwise in func.tags or 'masked_fill' in func.name()
        allowed = one and all(x.dim() == 0 for x in off)
    if not allowed:
        on = [(tuple(x.shape), 'gpu' if isinstance(x, Gpu) else 'cpu') for x in tensors]
        raise RuntimeError(f'{func.name()}: tensors on two devices: {on}')


def count(func, args, there, on, moved):
    "Kernels, and what waits for them"
    if func in WAITS:
        wait(func.name())
    if func in INDEX and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        wait('bool index')
    if moved or func is aten.copy_.default and isinstance(args[0], Gpu) != isinstance(args[1], Gpu):
        wait('copy')
    if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        wait('grouped_mm in fp32')
    views = [a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments]
    if not any(views) and func not in FREE:
        counts['kernel'] += 1
        counts[func.name()] += 1


def compute(func, args, kwargs):
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    on = [x for x in tensors if isinstance(x, Gpu)]
    device = kwargs.get('device')
    there = is_gpu(device) if device is not None else bool(on)
    if on and func not in MOVES and len(on) < len(tensors):
        check_devices(func, args, tensors)
    if on or there:
        moved = func is aten._to_copy.default and device is not None and there != bool(on)
        count(func, args, there, on, moved)
    kw = {k: 'cpu' if k == 'device' and v is not None else inside(v) for k, v in kwargs.items()}
    kw |= {k: False for k in kw if k == 'pin_memory'}
    out = func(*tree_map(inside, args), **tree_map(inside, kw))
    if not there or func is aten._local_scalar_dense.default:
        return out
    out = tree_map(outside, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if on else out


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class _Fused(torch.autograd.Function):
    "One kernel there and, for gradients, one back; numbers are those of the plain computation"

    @staticmethod
    def forward(ctx, call, *xs):
        ctx.call = call
        ctx.save_for_backward(*xs)
        counts['kernel'] += 1
        with torch.no_grad():
            return Gpu(call(*(x.t for x in xs)))

    @staticmethod
    def backward(ctx, dy):
        counts['kernel'] += 1
        xs = [x.t.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            grads = torch.autograd.grad(ctx.call(*xs), xs, inside(dy))
        return None, *map(outside, grads)


def fused(call, *xs):
    with torch._C.DisableTorchFunction():
        return _Fused.apply(call, *xs)


def sdpa(q, k, v, attn_mask=None, plain=F.scaled_dot_product_attention, **kw):
    if not isinstance(q, Gpu):
        return plain(q, k, v, attn_mask=attn_mask, **kw)
    attention.append(dict(dtype=q.dtype, shape=tuple(q.shape), **kw))
    mask = inside(attn_mask)
    return fused(lambda *x: plain(*x, attn_mask=mask, **kw), q, k, v)


def rms_norm(x, shape, weight=None, eps=None, plain=F.rms_norm):
    if not isinstance(x, Gpu):
        return plain(x, shape, weight, eps)
    weights = [] if weight is None else [weight]
    counts['kernel'] += not x.is_contiguous()  # a copy comes first
    return fused(lambda x, *w: plain(x, shape, *w, eps=eps), x, *weights)


def index_of(j):
    return torch.tensor(j, dtype=torch.bool if j and isinstance(j[0], bool) else torch.long).to(
        DEVICE
    )


class Functions(TorchFunctionMode):
    "What torch decides by the device before it comes to a kernel"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kw = kwargs or {}
        on = bool(args) and isinstance(args[0], Gpu)
        if func in (torch.Tensor.cpu, torch.Tensor.tolist) and on:
            moved = args[0].to('cpu')
            return moved if func is torch.Tensor.cpu else moved.tolist()
        if func in (torch.tensor, torch.as_tensor) and is_gpu(kw.get('device')):
            return func(*args, **{k: v for k, v in kw.items() if k != 'device'}).to(DEVICE)
        if func is torch.Tensor.new_tensor and on:
            return torch.tensor(args[1], dtype=kw.get('dtype') or args[0].dtype).to(DEVICE)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and on:
            i = args[1] if isinstance(args[1], tuple) else (args[1],)
            i = tuple(index_of(j) if isinstance(j, list) else j for j in i)
            return func(args[0], i, *args[2:])
        return func(*args, **kw)


def _no_grad_in(mode):
    mode._before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)


@contextlib.contextmanager
def pretend():
    "Within it `DEVICE` is a GPU; yields the counts, which begin at 0"
    for c in (counts, waits, attention):
        c.clear()
    mode = torch.autograd.grad_mode.inference_mode  # its tensors have no counter of versions
    with contextlib.ExitStack() as s:
        s.enter_context(patch.object(mode, '__enter__', _no_grad_in))
        s.enter_context(
            patch.object(mode, '__exit__', lambda m, *e: torch._C._set_grad_enabled(m._before))
        )
        fused_adamw = importlib.import_module('torch.optim.optimizer')
        name = '_get_fused_kernels_supported_devices'
        s.enter_context(patch.object(fused_adamw, name, lambda: ['cpu', DEVICE]))
        # functions and not a mode, which the backward pass of a GPU would not see
        s.enter_context(patch.object(F, 'scaled_dot_product_attention', sdpa))
        s.enter_context(patch.object(F, 'rms_norm', rms_norm))
        s.enter_context(Dispatch())
        s.enter_context(Functions())
        yield counts
