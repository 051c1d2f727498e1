"Fused attention where it can break: compiled, without its kernels, at a GPU's call."
import os, subprocess, sys
from pathlib import Path
import pytest, torch
from torch.utils._python_dispatch import TorchDispatchMode
from allatt_prune import HeadGates, LM, LMConfig, attention, evaluate
from allatt_prune.engine import checkpoint, fused
from allatt_prune.importance import weights

def inputs(b=2, h=3, t=70, s=110, m=40, n=30, d=16, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (b, h, t, d), (b, h, s, d), (b, h, s, d), (h, m, d), (h, d), (h, d), (h, n, d), (h, n, d)
    return [torch.randn(x, dtype=dtype).requires_grad_() for x in shapes]

def fused_attend(q, k, v, r, u, w, pk, pv, *, dropout=0.): # the operator, with the arguments of `attention.attend`
    t, s, m = q.shape[2], k.shape[2], min(r.shape[1], k.shape[2])
    z, zm = torch.stack([q + w.detach()[:, None], k[:, :, s-t:], v[:, :, s-t:]], 1), torch.stack([k[:, :, :s-t], v[:, :, :s-t]], 1)
    z, zm = (x.permute(0, 3, 1, 2, 4).contiguous() for x in (z, zm))
    return fused.Attend.apply(z, zm, r[:, :m].flip(1) / q.shape[-1]**.5, u, w, pk, pv, dropout).transpose(1, 2)

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
    same(results(fused_attend, x), results(attention.attend, x))

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

def segments(read, ids): # of 12, 7 and 16: logits, and the last loss
    mems, found = None, []
    with torch.no_grad():
        for i, j in ((0, 12), (12, 19), (19, 35)):
            found.append(read(ids[:, i:j], None, mems)[0])
            loss, mems = read(ids[:, i:j], ids[:, i+1:j+1], mems)
    return [*found, loss]

@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('gated', [False, True])
def test_reading_projects_the_memory_once_and_changes_nothing(gated, shape):
    torch.manual_seed(0)
    cfg = LMConfig(vocab=27, n_layer=3, d_model=32, n_head=4, seg_len=12, dropout=.1, attn_dropout=.1,
                   **dict(mem_len=12, n_persistent=16) | SHAPES[shape])
    if gated and cfg.heads: return
    model, z = checkpoint.build(cfg).double().eval(), torch.tensor([[1., 0, 2, 1], [0, 0, 0, 0], [1, 1, 1, 1]]) if gated else None
    for layer in model.layers:
        if layer.attn: [torch.nn.init.normal_(p) for p in (layer.attn.u, layer.attn.w, layer.attn.wo.bias)]
    ids, read = torch.randint(27, (2, 36)), model.attention.reader(model, z)
    same(segments(read, ids), segments(lambda ids, targets, mems: model(ids, targets, mems, z), ids), 1e-12)
    plain, text = LM(cfg).double(), torch.randint(27, (2000,))
    plain.load_state_dict(model.state_dict())
    for batch in (1, 3): assert abs(evaluate(model, text, z, batch) - evaluate(plain, text, z, batch)) < 1e-12

class Doubled(torch.nn.Linear):
    def forward(self, x): return 2 * super().forward(x)

def hooked(attn): attn.wk.register_forward_hook(lambda part, args, out: 2 * out)
def replaced(attn):
    new = Doubled(*attn.wv.weight.shape[::-1], bias=False).double()
    new.load_state_dict(attn.wv.state_dict())
    attn.wv = new
def biased(attn): attn.wv.bias = torch.nn.Parameter(torch.ones_like(attn.wv.weight[:, 0]))
def parametrized(attn): torch.nn.utils.parametrizations.weight_norm(attn.wq)
def own_attend(attn):
    attend = attn.attend
    attn.attend = lambda *args, **how: 2 * attend(*args, **how)

def patched(attn):
    forward = attn.wk.forward
    attn.wk.forward = lambda x: 2 * forward(x)
def outside(attn): attn.register_forward_hook(lambda part, args, out: 2 * out)

@pytest.mark.parametrize('change', [hooked, replaced, biased, parametrized, own_attend, patched, outside])
def test_what_was_changed_in_a_layer_has_its_effect(change):
    torch.manual_seed(0)
    cfg = LMConfig(vocab=27, n_layer=3, d_model=32, n_head=4, n_persistent=16, seg_len=12, mem_len=12, dropout=0., attn_dropout=0.)
    fast, plain, ids = checkpoint.build(cfg).double(), LM(cfg).double(), torch.randint(27, (2, 13))
    plain.load_state_dict(fast.state_dict())
    before = plain(ids[:, :-1], ids[:, 1:])[0]
    for m in (fast, plain): change(m.layers[1].attn)
    found = [m(ids[:, :-1], ids[:, 1:])[0] for m in (fast, plain)]
    assert abs(found[0] - found[1]) < 1e-12 and (abs(found[1] - before) > 1e-6 or change is parametrized)
    assert abs(evaluate(fast, ids[0]) - evaluate(plain, ids[0])) < 1e-12
    for m in (fast, plain): # rings know of none of it
        with pytest.raises(ValueError, match='rings pass by'): m.eval().generate(ids, 2)

@pytest.mark.parametrize('dropout', [0., .3])
def test_compiles_as_one_graph_with_the_same_numbers(dropout):
    x = inputs()
    compiled = torch.compile(fused_attend, fullgraph=True, backend='aot_eager')
    same(results(compiled, x, dropout=dropout), results(fused_attend, x, dropout=dropout))

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

VIEWS = '''view t transpose permute expand slice select unsqueeze squeeze as_strided detach _unsafe_view alias unbind empty empty_like new_empty
    new_empty_strided _reshape_alias split split_with_sizes unflatten unfold promote_types'''.split()

class Operations(TorchDispatchMode): # names of those that compute or copy
    def __init__(self):
        super().__init__()
        self.names = []
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f.name().split('::')[1].split('.')[0]
        if name not in VIEWS: self.names.append(name)
        return f(*args, **kwargs or {})

def operations(training, dtype=torch.float32, layers=(2, 3), **changes): # of a model, by its number of layers
    found = []
    for n in layers:
        torch.manual_seed(0)
        cfg = LMConfig(**dict(vocab=27, n_layer=n, d_model=64, n_head=4, n_persistent=32, seg_len=64, mem_len=64, dropout=0., attn_dropout=0.) | changes)
        model, ids, mems = checkpoint.build(cfg).train(training), torch.randint(27, (2, cfg.seg_len)), torch.randn(n, 2, cfg.mem_len, cfg.d_model)
        f = model if training else model.attention.reader(model.to(dtype))
        if not training: mems = f(ids)[1]
        for _ in range(2):                                                               # the first time chooses a kernel
            model.zero_grad()
            with Operations() as seen, torch.set_grad_enabled(training), torch.autocast('cpu', dtype, enabled=training and dtype != torch.float32):
                out = f(ids, ids if training else None, mems)[0]
                if training: out.backward()
        found.append(seen.names)
    return found

def per_layer(found): return len(found[1]) - len(found[0])

@pytest.mark.parametrize('sizes,train,read', [({}, 64, 24), (dict(seg_len=192, mem_len=192), 92, 40), (dict(attn_dropout=.2), 100, 24)], ids=str)
def test_operations_of_a_layer_on_a_cpu(sizes, train, read):
    assert per_layer(operations(True, **sizes)) <= train and per_layer(operations(False, **sizes)) <= read

@pytest.fixture
def launches(monkeypatch): # kernels that only count
    monkeypatch.setattr(fused, 'choose', lambda z, dropout: 'triton')
    monkeypatch.setattr(fused.cuda, '_launch', lambda *args, **how: torch.ones(1))

@pytest.mark.parametrize('heads', [None, [3, 0, 1], [3, 0, 1, 4]], ids=str)
def test_launches_on_a_gpu(launches, heads):
    "In bfloat16, each kernel replaced by one operation."
    layers = (len(heads) - 1, len(heads)) if heads else (2, 3)
    train, read = ([operations(training, torch.bfloat16, [n], heads=heads and heads[:n])[0] for n in layers] for training in (True, False))
    assert per_layer(train) <= 39 and per_layer(read) <= 6
    assert len(read[1]) <= 6*layers[1] + 5

WAITS = {'_local_scalar_dense', 'nonzero', 'is_nonzero', 'masked_select', 'equal', 'item'}

@pytest.mark.parametrize('changes', [{}, dict(cutoffs=[9, 18])], ids=str)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('frozen', [False, True])
def test_forward_and_backward_ask_a_device_for_nothing(frozen, dtype, changes):
    torch.manual_seed(0)
    cfg = LMConfig(**dict(vocab=27, n_layer=2, d_model=32, n_head=2, n_persistent=16, seg_len=16, mem_len=16, dropout=.1, attn_dropout=0.) | changes)
    model, gates, ids, mems = checkpoint.build(cfg).train(), HeadGates(2, 2).train(), torch.randint(27, (2, 17)), torch.randn(2, 2, 16, 32)
    if frozen: gates.freeze()
    for _ in range(2):                                                                   # the first step chooses a kernel
        with Operations() as seen, torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
            loss, _ = model(ids[:, :-1], ids[:, 1:], mems, gates())
            (loss + .1 * gates.l0()).backward()
    assert not WAITS & {*seen.names} and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

@pytest.mark.parametrize('changes', [{}, dict(heads=[3, 0, 1]), dict(dropout=.2, attn_dropout=.3), dict(seg_len=80, mem_len=70)], ids=str)
def test_a_model_compiles_as_one_graph(changes):
    "Reading and training: the same bits."
    torch.manual_seed(0)
    cfg = LMConfig(**dict(vocab=27, n_layer=3, d_model=32, n_head=4, n_persistent=16, seg_len=12, mem_len=12, dropout=0., attn_dropout=0.) | changes)
    model = checkpoint.build(cfg)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    ids, mems, found = torch.randint(27, (2, cfg.seg_len + 1)), torch.randn(3, 2, cfg.mem_len, 32), []
    for f in (model, compiled):
        model.zero_grad()
        torch.manual_seed(1)
        loss, new = f(ids[:, :-1], ids[:, 1:], mems)
        loss.backward()
        found.append([loss, new, *(p.grad.clone() for p in model.parameters())])
    read = model.attention.reader(model.eval())
    for f in (read, torch.compile(read, dynamic=False, fullgraph=True, backend='aot_eager')):
        with torch.no_grad(): out, kept = f(ids[:, :-1])
        with torch.no_grad(): found[f is not read] += [out, f(ids[:, 1:], None, kept)[0]]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

def compile_for_sm_90(): # registers that ptxas spills to memory: none, in bytes
    import re, tempfile, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    types = dict(L='*fp32', DELTA='*fp32', DU='*fp32', DPKV='*fp32', seed='*i64', VS='fp32')
    types |= dict.fromkeys('Z ZM P U W PK PV O G DZ DP DZM'.split(), '*bf16')
    def spilled(f, stages, **how):
        constants = dict(D=64, SCALE=.125, SIZE=fused.cuda.SIZE) | how
        signature = {n: 'constexpr' if n in constants else types.get(n, 'i32') for n in f.arg_names}
        aligned = [i for i, n in enumerate(f.arg_names) if signature[n].startswith('*') or n in ('T', 'S', 'M', 'N', 'mb', 'mt')]
        source = ASTSource(f, signature, {(f.arg_names.index(n),): x for n, x in constants.items()}, {(i,): [['tt.divisibility', 16]] for i in aligned})
        code = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=dict(num_warps=4, num_stages=stages)).asm['ptx']
        assert 'wgmma' in code and 'cp.async' in code or stages == 1                     # loads ahead of products
        scores = fused.cuda.SIZE**2 // 128 if how.get('CONTEXT', True) else 0            # a tile of position scores, its rows shifted: two bytes at a time
        assert len(re.findall(r'ld\.global[.\w]*\.b16', code)) == scores                 # everything else in vectors
        with tempfile.NamedTemporaryFile('w', suffix='.ptx') as file:
            file.write(code); file.flush()
            ptxas = max(Path(triton.__file__).parent.rglob('ptxas*'))                       # the newest
            said = subprocess.run([ptxas, '-v', '-arch=sm_90a', file.name, '-o', os.devnull], capture_output=True, text=True, check=True).stderr
        return int(re.search(r'(\d+) bytes spill stores', said)[1])
    for drop in (0, int(.2 * 2**31)):
        found = [spilled(fused.cuda._queries, 3, BACK=back, DROP=drop) for back in (False, True)]
        found += [spilled(fused.cuda._keys, 1 if context else 3, CONTEXT=context, DROP=drop) for context in (False, True)]
        assert found == [0]*4, found

def test_kernels_compile_for_sm_90():
    "Without a GPU, by the compiler that would run there."
    pytest.importorskip('triton', reason="triton: not installed; pip install -e '.[triton]' for its tests")
    subprocess.run([sys.executable, '-c', 'import test_fused; test_fused.compile_for_sm_90()'], check=True, cwd=Path(__file__).parent)

@pytest.mark.parametrize('kernel', ['rows', 'library'])
@pytest.mark.parametrize('scale', [40., 1e-3])
def test_a_part_that_gets_no_weight_at_all(monkeypatch, kernel, scale):
    "Where all weight is on the context, the log of the persistent keys' share is -inf."
    monkeypatch.setattr(fused, 'choose', lambda z, dropout: kernel)
    q, k, v, r, u, w, pk, pv = (x.detach() for x in inputs())
    x = [y.requires_grad_() for y in (q, k * scale, v, r, u, w, pk / scale, pv)]
    share = next(weights(*(x[i] for i in (0, 1, 3, 4, 5, 6))))[..., 40:].float().sum(-1)
    assert ((share == 0) if scale > 1 else (share > 1 - 1e-7)).any()
    found, wanted = results(fused_attend, x), results(attention.attend, x)
    assert all(y.isfinite().all() and (y - z).abs().max() < 1e-9 * z.abs().max().clamp(min=1) for y, z in zip(found, wanted))
