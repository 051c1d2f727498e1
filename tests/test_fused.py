"Fused attention where it can break: compiled, without its kernels, at a GPU's call."
import os, subprocess, sys
from pathlib import Path
import pytest, torch
from allatt_prune import LM, LMConfig, attention
from allatt_prune.engine import fused

def inputs(b=2, h=3, t=70, s=110, m=40, n=30, d=16, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (b, h, t, d), (b, h, s, d), (b, h, s, d), (h, m, d), (h, d), (h, d), (h, n, d), (h, n, d)
    return [torch.randn(x, dtype=dtype).requires_grad_() for x in shapes]

def results(f, x, **kw):
    torch.manual_seed(1)
    out = f(*x, **kw)
    return [out, *torch.autograd.grad(out, x, torch.ones_like(out))]

def same(a, b, eps=1e-10): assert all((x - y).abs().max() < eps for x, y in zip(a, b, strict=True))

@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(fused, 'KERNELS', dict(fused.KERNELS))
    fused.works.cache_clear()
    yield fused.KERNELS
    fused.works.cache_clear()

def missing(*args): raise NotImplementedError('no such operator')
forward, backward = fused.KERNELS['cpu']
def wrong(*args): return tuple(x * 1.5 if torch.is_tensor(x) else x for x in forward(*args))

@pytest.mark.parametrize('broken', [(missing, missing), (forward, missing), (wrong, backward)],
                         ids=['missing', 'no backward', 'wrong'])
def test_without_its_kernel_the_numbers_stay(kernels, broken):
    kernels['cpu'] = broken
    x = inputs()
    assert fused.choose(x[0], 0.) == 'rows'
    same(results(fused.fused_attend, x), results(attention.attend, x))

SHAPES = dict(usual={}, uneven=dict(heads=[4, 0, 2]), no_memory=dict(mem_len=0), short_memory=dict(mem_len=5),
              long_memory=dict(mem_len=20), plain_keys=dict(n_persistent=0, d_ff=24))

@pytest.mark.parametrize('shape', SHAPES)
def test_a_saved_model_opens_as_either(shape, tmp_path):
    "The engine's model and the method's have the same parameters, numbers, memories and gradients."
    torch.manual_seed(0)
    cfg = LMConfig(n_layer=3, d_model=32, n_head=4, seg_len=12, dropout=0., attn_dropout=0.,
                   **dict(mem_len=12, n_persistent=16) | SHAPES[shape])
    LM(cfg).save_pretrained(tmp_path/'m')
    fast, plain = LM.from_pretrained(tmp_path/'m').double(), LM(cfg).double().eval()
    plain.load_state_dict(fast.state_dict())
    assert {type(l.attn) for l in fast.layers if l.attn} == {fused.FastAttention}
    ids, found = torch.randint(27, (2, 36)), []
    z = None if cfg.heads else torch.rand(3, 4, dtype=torch.float64).requires_grad_()
    for m in (plain, fast):
        mems, losses = None, []
        for i in (0, 12, 19):                                  # segments of 12, 7 and 16
            part = ids[:, i:{0: 12, 12: 19, 19: 35}[i]]
            loss, mems = m(part, part, mems, z)
            losses.append(loss)
        x = [p for p in m.parameters() if p.numel()] + ([] if z is None else [z])
        found.append([*losses, *([] if mems is None else [mems]), *torch.autograd.grad(sum(losses), x)])
    same(*found)

@pytest.mark.parametrize('dropout', [0., .3])
def test_compiles_as_one_graph_with_the_same_numbers(dropout):
    x = inputs()
    compiled = torch.compile(fused.fused_attend, fullgraph=True, backend='aot_eager')
    same(results(compiled, x, dropout=dropout), results(fused.fused_attend, x, dropout=dropout))

@pytest.mark.parametrize('name,dtype', [('flash', torch.bfloat16), ('efficient', torch.float32)])
@pytest.mark.parametrize('dropout', [0., .2])
def test_gpu_kernels_are_called_as_they_want_to_be(name, dtype, dropout):
    "Operators check the number, types and shapes of what they get even where no GPU is: on tensors without data."
    forward, backward = fused.KERNELS[name]
    q, k, v = (torch.empty(3, n, 64, device='meta', dtype=dtype) for n in (50, 70, 70))
    out, lse, state = forward(q, k, v, dropout)
    assert (out.shape, lse.shape, lse.dtype) == ((3, 50, 64), (3, 50), torch.float32)
    grads = backward(out, q, k, v, out, lse, state, dropout)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]

def check_triton(h, b, t, m, d, dtype): # in Triton's interpreter, which works on a CPU
    cuda, eps = fused.cuda, 1e-5 if dtype == torch.float32 else 1e-2
    *x, g = [torch.randn(s).to(dtype) for s in ((h*b, t, d),)*2 + ((h*b, t + m, d),)*2 + ((h, m, d), (h*b, t, d))]
    exact = [y.double() for y in x]
    def near(a, b): assert all((x.double() - y).norm() <= eps * y.norm() for x, y in zip(a, b, strict=True))
    for pad in (0, m - 5, t):
        (out, lse, seed), want = cuda.context_forward(*x, pad, 0.), fused.CONTEXT['blocks'][0](*exact, pad, 0.)
        there = want[1] > -1e20                                                          # queries that see a key
        near([out[there], lse[there]], [x[there] for x in want[:2]])
        more = want[0] / 2, want[1].clamp(min=-9) + 1                                   # any others
        near(cuda.context_backward(g, *x, pad, *(y.float() for y in more), seed, 0.), fused.CONTEXT['blocks'][1](g.double(), *exact, pad, *more, seed, 0.))
    if dtype != torch.float32: return
    def loss(i=None, step=0.): # with one input moved along a line, the seeds being equal
        torch.manual_seed(0)
        out, *rest = cuda.context_forward(*(z + step*line if j == i else z for j, z in enumerate(x)), 20, .3)
        return (out.double() * g).sum(), out, *rest
    _, *state = loss()
    for i, grad in enumerate(cuda.context_backward(g, *x, 20, *state, .3)):
        line = torch.randn_like(grad)
        found, want = (loss(i, .01)[0] - loss(i, -.01)[0]) / .02, (grad.double() * line).sum()
        assert abs(found - want) < .01 * grad.double().norm(), i

@pytest.mark.parametrize('dtype', ('torch.float32', 'torch.float16'))
@pytest.mark.parametrize('shape', ((2, 2, 90, 50, 16), (1, 1, 30, 100, 32), (3, 1, 64, 64, 16)), ids=str) # heads, streams, queries, window, width
def test_triton_kernels_in_their_interpreter(shape, dtype):
    pytest.importorskip('triton', reason="triton: not installed; pip install -e '.[triton]' for its tests")
    here = dict(cwd=Path(__file__).parent, env=os.environ | dict(TRITON_INTERPRET='1'))
    subprocess.run([sys.executable, '-c', f'import torch, test_fused; test_fused.check_triton(*{shape}, {dtype})'], check=True, **here)
