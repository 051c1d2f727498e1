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
forward, backward = fused.KERNELS['library']
def wrong(*args):
    out, saved = forward(*args)
    return out * 1.5, saved

@pytest.mark.parametrize('broken', [(missing, missing), (forward, missing), (wrong, backward)],
                         ids=['missing', 'no backward', 'wrong'])
def test_without_its_kernel_the_numbers_stay(kernels, broken):
    kernels['library'] = broken
    x = inputs()
    assert fused.choose(torch.empty(1, 1, 3, 3, 16, dtype=torch.float64), 0.) == 'rows'
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

def check_triton(b, h, t, s, m, n, d, dtype): # in Triton's interpreter, which works on a CPU
    (forward, backward), rows = fused.KERNELS['triton'], fused.KERNELS['rows']
    shapes = (b, t, 3, h, d), (b, s, 2, h, d), (h, m, d), (h, d), (h, d), (h, n, d), (h, n, d), (b, t, h, d)
    *x, g = [(torch.randn(shape) / 2).to(dtype) for shape in shapes]
    (out, saved), (want, more) = forward(*x, 0.), rows[0](*(y.double() for y in x), 0.)
    got, wanted = (out, *backward(g, out, saved, 0., s)), (want, *rows[1](g.double(), want, more, 0., s))
    for y, z in zip(got, wanted, strict=True):
        if z is not None: assert (y.double() - z).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * z.norm()
    if dtype != torch.float32: return
    def loss(i=None, step=0.): # with one input moved along a line, the seeds being equal
        torch.manual_seed(0)
        y = [z + step*line if j == i else z.clone() for j, z in enumerate(x)]
        if i == 4: y[0][:, :, 0] += step*line                                            # queries hold w, and it has the whole gradient
        out, saved = forward(*y, .3)
        return (out.double() * g).sum(), out, saved
    _, *state = loss()
    for i, grad in enumerate(backward(g, *state, .3, s)):
        if not grad.numel(): continue
        line = torch.randn_like(grad)
        found, want = (loss(i, .01)[0] - loss(i, -.01)[0]) / .02, (grad.double() * line).sum()
        assert abs(found - want) < .01 * grad.double().norm(), i

@pytest.mark.parametrize('dtype', ('torch.float32', 'torch.float16'))
@pytest.mark.parametrize('shape', ((2, 2, 90, 50, 50, 24, 16), (1, 1, 30, 100, 100, 70, 32), (1, 3, 64, 0, 64, 64, 16),
                                   (1, 2, 130, 20, 90, 0, 16)), ids=str) # streams, heads, queries, memory, window, persistent, width
def test_triton_kernels_in_their_interpreter(shape, dtype):
    pytest.importorskip('triton', reason="triton: not installed; pip install -e '.[triton]' for its tests")
    here = dict(cwd=Path(__file__).parent, env=os.environ | dict(TRITON_INTERPRET='1'))
    subprocess.run([sys.executable, '-c', f'import torch, test_fused; test_fused.check_triton(*{shape}, {dtype})'], check=True, **here)
