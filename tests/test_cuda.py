"On a GPU: what the CPU computes, at half precision, too. Skipped where there is no GPU."
import copy, os, subprocess, sys
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # for deterministic products, before the first
import pytest, torch
from allatt_prune import attention
from allatt_prune.config import get_recipe
from allatt_prune.engine import checkpoint, fused, run as running
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.engine.resume import Stopped, train_run
from allatt_prune.engine.run import run
from allatt_prune.importance import METHODS, score
from allatt_prune.model import LMConfig
from allatt_prune.remove import remove_heads
from allatt_prune.training import evaluate
from test_fused import fused_attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SIZES = dict(text8=(2, 3, 512, 1024, 512, 256, 64), narrow=(2, 3, 70, 110, 40, 30, 16), start=(2, 2, 130, 130, 192, 64, 32),
             no_persistent=(2, 2, 64, 128, 64, 0, 64), long=(1, 2, 64, 900, 800, 64, 128))

def inputs(b, h, t, s, m, n, d, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (b, h, t, d), (b, h, s, d), (b, h, s, d), (h, m, d), (h, d), (h, d), (h, n, d), (h, n, d)
    return [(torch.randn(x, generator=generator, dtype=torch.float64) / 2).to(dtype) for x in shapes]

def results(f, x, **kw): # output and gradients
    x = [y.detach().requires_grad_() for y in x]
    torch.manual_seed(1)
    out = f(*x, **kw)
    g = torch.linspace(-1, 1, out.numel()).bfloat16().to(out).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, x, g, materialize_grads=True)]

def error(got, want): # the largest of relative errors in norm
    assert all(x.isfinite().all() for x in got)
    return max(float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True) if y.numel())

def chosen(dtype, d=64): return fused.choose(torch.empty(1, 1, 3, 1, d, device='cuda', dtype=dtype), 0.)

@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('dtype', LIMITS)
@pytest.mark.parametrize('kernel', ['chosen', 'rows'])
def test_attention_is_the_oracles(monkeypatch, kernel, dtype, size):
    x = inputs(*SIZES[size], dtype)
    assert chosen(dtype, x[0].shape[-1]) == ('rows' if dtype == torch.float32 else 'triton')
    if kernel != 'chosen': monkeypatch.setattr(fused, 'choose', lambda z, dropout: kernel)
    assert error(results(fused_attend, [y.cuda() for y in x]), results(attention.attend, [y.double() for y in x])) < LIMITS[dtype]

@pytest.mark.parametrize('dtype', LIMITS)
def test_dropout(dtype):
    "Rate, independence of neighbours, and the same mask backward: the output is linear in the values."
    b, h, t, n, d = 4, 8, 192, 64, 64
    q, k, v, r, u, w, pk, pv = (x.cuda() for x in inputs(b, h, t, t, t, n, d, dtype))
    def attend(v, pv, seed=1):
        torch.manual_seed(seed)
        return fused_attend(q * 0, k, v, r, u * 0, w * 0, pk, pv, dropout=.2)
    assert torch.equal(attend(v, pv), attend(v, pv)) and not torch.equal(attend(v, pv), attend(v, pv, 2))
    for which in ('context', 'persistent'):
        eye = torch.zeros(h, n if which == 'persistent' else t, d)
        eye[:, :d] = torch.eye(d)[:len(eye[0])]
        if which == 'context': out = attend(eye.expand(b, h, t, d).cuda().to(dtype), pv * 0)[:, :, d:]  # these see all of the first d keys
        else: out = attend(v * 0, eye.cuda().to(dtype))
        gone = (out == 0).double()
        assert abs(gone.mean() - .2) < 4 * (.16 / gone.numel())**.5, which
        for dim in (-1, -2):
            both = gone.narrow(dim, 1, gone.shape[dim] - 1) * gone.narrow(dim, 0, gone.shape[dim] - 1)
            assert abs(both.mean() - .04) < 6 * (.04 / both.numel())**.5, which
    v, pv = v.requires_grad_(), pv.requires_grad_()
    out = attend(v, pv)
    g, (dv, dpv) = torch.randn_like(out), (torch.randn_like(v), torch.randn_like(pv))
    grads = torch.autograd.grad(out, [v, pv], g)
    with torch.no_grad(): change = (attend(dv, dpv).double() * g).sum()                # linear: the output's change along (dv, dpv)
    found = sum((a.double() * x).sum() for a, x in zip(grads, (dv, dpv)))
    assert abs(found - change) < 10 * LIMITS[dtype] * change.abs().clamp(min=g.double().norm())

@pytest.mark.parametrize('dtype', LIMITS)
def test_a_kernel_that_does_not_work_is_not_used(dtype):
    assert not fused.works('library', 'cuda', dtype, 64) and chosen(dtype, 24) == 'rows' # a width that Triton cannot

def test_dropout_of_queries_and_keys_is_replayed():
    x = [y.cuda().requires_grad_() for y in inputs(2, 2, 5, 7, 4, 6, 4)]
    def same_mask(*x):
        torch.manual_seed(3)
        return fused_attend(*x, dropout=.4)
    assert torch.autograd.gradcheck(same_mask, x, nondet_tol=1e-10)

CFG = dict(vocab=40, n_layer=3, d_model=128, n_head=4, n_persistent=64, seg_len=64, mem_len=64)

def make(**changes):
    torch.manual_seed(0)
    model = checkpoint.build(LMConfig(**CFG | changes)).eval()
    with torch.no_grad():
        for p in model.parameters(): p.normal_(std=.2)
    return model, torch.randint(40, (8*129 + 1,))

@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_models(dtype):
    "Evaluation, scores, writing and removal, at any place."
    for cutoffs in ([], [10, 20]):
        (model, ids), keep = make(cutoffs=cutoffs), torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
        model, there, z = model.to(dtype), copy.deepcopy(model).to('cuda', dtype), keep * torch.rand(3, 4).add(.5)
        close = 1e-11 if dtype == torch.float64 else 1e-4
        assert abs(evaluate(there, ids, batch=4) - evaluate(model, ids, batch=4)) < close
        assert abs(evaluate(there, ids, z.cuda()) - evaluate(model, ids, z)) < close
        small = remove_heads(there, keep, z)
        assert small.pos.is_cuda and abs(evaluate(small, ids) - evaluate(there, ids, z.cuda())) < close
        assert torch.equal(there.generate(ids[None, :70].cuda(), 20, top_k=1).cpu(), model.generate(ids[None, :70], 20, top_k=1))
    for method in METHODS:
        (model, ids) = make()
        a, b = score(model.to(dtype), ids, method), score(copy.deepcopy(model).to('cuda', dtype), ids, method)
        assert (a - b.cpu()).abs().max() < (1e-9 if dtype == torch.float64 else 1e-3) * a.abs().max(), method

@pytest.mark.parametrize('backend', ['eager', 'inductor'])
def test_compiled(backend):
    model, ids = make(dropout=0., attn_dropout=0.)
    model = model.cuda().train()
    x, y = (i[:1024].view(8, 128)[:, :64].cuda() for i in (ids, ids[1:]))
    def loss_and_grads(f):
        model.zero_grad()
        with torch.autocast('cuda', torch.bfloat16): loss = f(x, y)[0]
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    got, want = loss_and_grads(torch.compile(model, backend=backend)), loss_and_grads(model)
    assert error(got, [y.cpu().double() for y in want]) < 2e-2

TOY = dict(n_layer=2, d_model=64, n_head=4, n_persistent=64, seg_len=32, mem_len=32, batch=4, dropout=.1, attn_dropout=.1, log_every=1, save_every=4,
           valid_every=0, eval_tokens=2000, steps=12, warmup=2, prune_steps=14, prune_warmup=2, lam_warmup=4, gate_steps=8, gate_lr=.3, lam=.5)

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_training_is_the_cpus(dtype):
    corpus, found = load_corpus('pydocs'), {}
    for device in ('cpu', 'cuda'):
        recipe = get_recipe('tiny', **TOY | dict(dropout=0., attn_dropout=0., dtype=dtype))
        torch.manual_seed(0)
        found[device] = [r['loss'] for r in train_run(checkpoint.build(recipe.config(27)).to(device), corpus, recipe)]
    assert found['cuda'] == pytest.approx(found['cpu'], rel=1e-4 if dtype == 'float32' else 1e-2) and found['cuda'] != found['cpu']

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('optimizer', ['adamw', 'lamb'])
def test_a_run_stopped_and_resumed(tmp_path, monkeypatch, dtype, optimizer):
    def go(name, **how): return run(get_recipe('tiny', **TOY, dtype=dtype, optimizer=optimizer), run_dir=tmp_path/name, device='cuda', **how)
    rows = go('whole')
    assert [r['model'] for r in rows] == list(running.MODELS) and 0 < rows[2]['heads'] <= 8
    assert abs(rows[1]['test'] - rows[2]['test']) < 1e-3                                # gated and pruned
    def watched(*args, phase=None, **kw):
        def after(s):
            if (phase, s.step) == ('gated', 6): raise Stopped(15)
        return train_run(*args, phase=phase, after=after, **kw)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(running, 'train_run', watched)
        go('cut')
    again = go('cut', resume=True)
    assert [r['test'] for r in again] == pytest.approx([r['test'] for r in rows], abs=1e-3 if dtype == 'float32' else .02)

def test_deterministic_algorithms_resume_to_the_last_bit(tmp_path, monkeypatch):
    def go(name, **how): return run(get_recipe('tiny', **TOY, dtype='bfloat16'), run_dir=tmp_path/name, device='cuda', **how)
    def watched(*args, **kw):
        def after(s):
            if s.step == 6: raise Stopped(15)
        return train_run(*args, **kw, after=after)
    torch.use_deterministic_algorithms(True)
    try:
        rows = go('whole')
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(running, 'train_run', watched)
            go('cut')
        assert [r['test'] for r in go('cut', resume=True)] == [r['test'] for r in rows]
    finally: torch.use_deterministic_algorithms(False)

def test_torchrun(tmp_path):
    (tmp_path/'nccl.py').write_text('''
import os, torch, torch.distributed as dist
from allatt_prune.engine.processes import Processes
torch.cuda.set_device(0)
dist.init_process_group('nccl')
world = Processes()
world.size = 2                                          # one process twice: a sum over one, a mean over two
x = torch.ones(3, device='cuda', requires_grad=True)
world.barrier()
world.backward((x * torch.arange(3., device='cuda')).sum(), [x])
assert x.grad.tolist() == [0., .5, 1.], x.grad
assert world.all_reduce(torch.tensor(3., device='cuda'), 'MAX') == 3
dist.destroy_process_group()
''')
    for script in ('nccl.py', '-m'):
        args = ['-m', 'allatt_prune', 'train', '--device', 'cuda', '--run-dir', 'x', *(x for k, v in TOY.items() for x in (f"--{k.replace('_', '-')}", str(v)))]
        job = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '1', *(args if script == '-m' else [script])], cwd=tmp_path,
                             capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='4'))
        assert job.returncode == 0, job.stderr

def test_hugging_face():
    transformers = pytest.importorskip('transformers')
    from allatt_prune import hf
    torch.manual_seed(0)
    cfg = transformers.GPT2Config(vocab_size=60, n_embd=64, n_layer=3, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2)
    model, ids = transformers.AutoModelForCausalLM.from_config(cfg).cuda().eval(), torch.randint(3, 60, (2, 20)).cuda()
    batches, keep = [dict(input_ids=ids, labels=ids)], torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0]])
    for method in ('gradient', 'entropy', 'leave_one_out'): assert hf.HFHeads(model, batches).shape == (3, 4) and len(score(model, batches, method)) == 3
    whole = hf.HFHeads(model, batches).mean_loss(keep.float().cuda())
    small = hf.remove_heads(copy.deepcopy(model), keep)
    assert abs(hf.HFHeads(small, batches).mean_loss(None) - whole) < 1e-4
