"""Is half of the heads half of the time on a GPU? Kernels, heads, tiles, writing and peers, at both of the paper's sizes.

  python half_the_time.py OUT.json [--seconds 540] [--parts right heads] [--rehearse]

Random weights, 27 symbols, bfloat16. OUT.json is written after every row, and a part that may not end in time is left out.
--rehearse runs all of it on a CPU, with models so small that the times mean nothing."""
import argparse, gc, importlib.util, json, sys, time, traceback
from dataclasses import replace
from pathlib import Path
import torch, torch.nn.functional as F
from torch import nn
from allatt_prune import LM
from allatt_prune.config import get_recipe
from allatt_prune.cost import count_macs
from allatt_prune.engine import cuda, fused
from allatt_prune.engine.checkpoint import build
from allatt_prune.engine.generate import Writer
from allatt_prune.engine.report import environment
from allatt_prune.timing import captured, segment_job, train_job
sys.path.insert(0, str(Path(__file__).resolve().parents[2]/'experiments'))
from experiment import provenance

SHARES = 0, .16, .27, .37, .57 # of the heads that are removed, as in the paper
UNEVEN = [8, 3, 7, 6, 6, 6, 6, 7, 6, 7, 8, 8, 7, 8, 7, 6] # heads kept in each layer of wt103, one in six removed
# Written before the first run. From the sketch's times on an H100 (sketch/README.txt), with our kernels for all keys.
PREDICTED = dict(
    right='worst relative error of a kernel 1e-2, of a gradient of the whole model 3e-2',
    host='11 to 25 us a launch; wt103 trains in 640 launches and 16 layers',
    heads={ # ms at 0 / 57 % removed, captured
        'text8 train': '65 / 33; compiled 60 / 29', 'wt103 train': '39 / 21; compiled 36 / 18',
        'text8 read': '16.5 / 8.3', 'wt103 read': '9.4 / 5.0', 'half of the heads': 'at most .57 of the time in all four cases',
        'eager': 'wt103 still trains in the same time, whatever is removed', 'peak': 'text8 train 9 / 5 GiB'},
    dropout='text8 train captured 90 / 48 ms', tiles='64 x 64 with four warps stays within a tenth of the best',
    writing='captured: one stream 1250 symbols/s, 32 streams 27,000; with 57 % removed 1.1 and 1.2 times as many',
    peers='a GPT of as many parameters trains twice as fast, compiled and captured; x-transformers takes three times as long')

a = argparse.ArgumentParser()
a.add_argument('out')
a.add_argument('--seconds', type=float, default=540)
a.add_argument('--parts', nargs='*')
a.add_argument('--rehearse', action='store_true')
a = a.parse_args()
began, DEV, HALF = time.time(), 'cpu' if a.rehearse else 'cuda', torch.float32 if a.rehearse else torch.bfloat16
torch._dynamo.config.recompile_limit = 64
out = dict(environment=environment(DEV), provenance=provenance(__file__), predicted=PREDICTED, parts={})

def save(): Path(a.out).write_text(json.dumps(out | dict(seconds=round(time.time() - began)), default=str) + '\n')
def left(): return a.seconds - (time.time() - began)
def free():
    gc.collect(); torch._dynamo.reset()
    if not a.rehearse: torch.cuda.empty_cache()
def part(f): # a generator of rows
    name, need = f.__name__, f.__defaults__[0]
    if a.parts and name not in a.parts: return f
    if left() < need: print(f'{name}: no time left'); return f
    here = out['parts'][name] = dict(at=round(time.time() - began, 1), rows=[])
    try:
        for row in f():
            here['rows'].append(row); print(name, row, flush=True); save()
            if left() < 30: here['cut'] = 'no time left'; break
    except Exception: here['error'] = traceback.format_exc()[-2000:]; print(here['error'], flush=True)
    here['seconds'] = round(time.time() - began - here['at'], 1)
    free(); save()
    return f
def tried(f, *args, **label): # a row, or why there is none
    try: return label | f(*args)
    except Exception as e: return label | dict(error=f'{type(e).__name__}: {e}'[:300])
    finally: free()

def ms(job, n=5): # of one of n runs between two events, median of three
    if a.rehearse: since = time.perf_counter(); job(); return 1e3 * (time.perf_counter() - since)
    job(); torch.cuda.synchronize(); found = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); [job() for _ in range(n)]; end.record(); torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / n)
    return sorted(found)[1]
HOW = dict(dynamic=False, **dict(backend='aot_eager') if a.rehearse else {}) # of compiling

def setting(name, share=0., **changes): # -> configuration, streams
    r = get_recipe(name, cutoffs=[])
    cfg = replace(r.config(27), **dict(dropout=0., attn_dropout=0.) | changes)
    if a.rehearse: cfg = replace(cfg, n_layer=2, d_model=32, n_persistent=16, seg_len=16, mem_len=16, heads=cfg.heads and cfg.heads[:2])
    kept = round((1 - share) * cfg.n_layer * cfg.n_head)
    if share: cfg = replace(cfg, heads=[kept // cfg.n_layer + (i < kept % cfg.n_layer) for i in range(cfg.n_layer)])
    return cfg, 2 if a.rehearse else r.batch
def job(cfg, batch, what, compiled=False): # what: train, read; layers are compiled one by one
    torch.manual_seed(0)
    model, ids = build(cfg).to(DEV), torch.randint(27, (batch, cfg.mem_len + cfg.seg_len + 1), device=DEV)
    if what == 'train':
        if compiled: [layer.compile(fullgraph=True, **HOW) for layer in model.layers]
        return train_job(model, ids, HALF)
    model = model.to(HALF)
    if compiled:
        for layer in model.layers: layer.attn.packed = torch.compile(layer.attn.packed, fullgraph=True, **HOW)
    return segment_job(model, ids[:, 1:])
def timed(cfg, batch, what, how): # how: eager, captured, compiled (and captured) -> ms, share of the rate of a large product
    f, times = job(cfg, batch, what, how == 'compiled'), 3 if what == 'train' else 1
    f()
    if not a.rehearse: torch.cuda.reset_peak_memory_stats()
    f()
    peak = 0 if a.rehearse else torch.cuda.max_memory_allocated() / 2**30
    found = ms(f if how == 'eager' else captured(f))
    masked = sum(cfg.layer_heads) * 3 * (cfg.mem_len + cfg.seg_len - cfg.window) * cfg.d_head # counted, but not needed
    macs = (count_macs(cfg, batch)['total'] - masked) * batch * cfg.seg_len * times
    rate = out['parts']['card']['rows'][0]['tflops'] if out['parts'].get('card', {}).get('rows') else None
    return dict(ms=round(found, 3), of_product=rate and round(2e-9 * macs / found / rate, 4), peak_gib=round(peak, 2))

@part
def right(need=30): # in bfloat16 against float64: the operator at several sizes, then a whole model
    def error(got, want):
        pairs = [(x.detach().double(), y.detach()) for x, y in zip(got, want) if y is not None and y.numel()]
        return [float(f'{(x - y).norm() / y.norm():.1e}') for x, y in pairs]
    sizes = dict(text8=(2, 512, 512, 4, 512, 2048, 64), odd=(3, 130, 50, 2, 70, 90, 64), start=(2, 192, 0, 2, 192, 64, 32),
                 no_persistent=(2, 64, 64, 2, 64, 0, 64))
    name = 'library' if a.rehearse else 'triton'
    for label, (b, t, s, h, m, n, d) in sizes.items():
        if a.rehearse: t, s, m, n = t // 8, s // 8, m // 8, n // 8
        shapes = (b, t, 3, h, d), (b, s, 2, h, d), (h, m, d), (h, d), (h, d), (h, n, d), (h, n, d), (b, t, h, d)
        *x, g = [(torch.randn(shape, device=DEV) / 2).to(HALF) for shape in shapes]
        (got, saved), (want, more) = fused.KERNELS[name][0](*x, 0.), fused.KERNELS['rows'][0](*(y.double() for y in x), 0.)
        grads, wanted = fused.KERNELS[name][1](g, got, saved, 0., s), fused.KERNELS['rows'][1](g.double(), want, more, 0., s)
        yield dict(operator=label, errors=error((got, *grads), (want, *wanted)))
    cfg, _ = setting('wt103', n_layer=2)
    for heads in (None, [3, 1]):
        torch.manual_seed(0)
        model, ids, found = build(replace(cfg, heads=heads)).to(DEV), torch.randint(27, (2, 2*cfg.seg_len + 1), device=DEV), []
        for m, half in ((model, True), (LM(model.cfg).to(DEV, torch.float64), False)):
            if not half: m.load_state_dict(model.state_dict())
            x, y, before = ids[:, cfg.seg_len:-1], ids[:, cfg.seg_len + 1:], ids[:, :cfg.seg_len]
            with torch.autocast(DEV, torch.bfloat16, enabled=half and not a.rehearse): loss = m(x, y, m(before)[1])[0]
            found.append([loss, *torch.autograd.grad(loss, list(m.parameters()))])
        errors = sorted(error(*found))
        yield dict(model=heads or 'whole', worst=errors[-1], median=errors[len(errors) // 2])

@part
def card(need=10): # rates of a large product and of a copy
    n = 256 if a.rehearse else 8192
    x, y = torch.randn(2, n, n, device=DEV).to(HALF)
    yield dict(tflops=2e-9 * n**3 / ms(lambda: x @ y), copy_tb_s=2e-9 * x.nbytes / ms(lambda: x.copy_(y)))

@part
def host(need=20): # what a launch costs the host, and where a step's time goes
    from torch.profiler import ProfilerActivity, profile
    def wait(): a.rehearse or torch.cuda.synchronize()
    def spent(e): return (e.self_cpu_time_total if a.rehearse else e.self_device_time_total) / 1e3
    for share in (0, .57):
        f = job(*setting('wt103', share), 'train')
        for _ in range(3): f()
        wait(); since = time.perf_counter(); f(); queued = time.perf_counter() - since; wait()
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not a.rehearse)]) as p: f(); wait()
        events = sorted(p.key_averages(), key=spent, reverse=True)
        launches = sum(e.count for e in events if 'LaunchKernel' in e.key or a.rehearse)
        top = [[e.key[:80], e.count, round(spent(e), 3)] for e in events[:20]]
        yield dict(removed=share, launches=launches, us_a_launch=round(1e6 * queued / launches, 1), top=top)

def cases(how, shares):
    for name in ('text8', 'wt103'):
        for what in ('train', 'read'):
            for s in shares: yield tried(timed, *setting(name, s), what, how, recipe=name, job=what, how=how, removed=s)
@part
def heads(need=60):
    yield from cases('captured', (0, .57) if a.rehearse else SHARES)
    yield from cases('eager', (0, .57))
    for what in ('train', 'read'):
        yield tried(timed, *setting('wt103', heads=UNEVEN), what, 'captured', recipe='wt103', job=what, how='captured', removed='uneven')

@part
def dropout(need=20):
    for s in (0, .57): yield tried(timed, *setting('text8', s, dropout=.1, attn_dropout=.2), 'train', 'captured', removed=s)

@part
def writing(need=30): # symbols a second of all streams
    for share in (0, .57):
        for b in (1, 32):
            cfg, _ = setting('text8', share)
            def symbols(how):
                torch.manual_seed(0)
                model, ids = build(cfg).to(DEV, HALF).eval(), torch.randint(27, (b, cfg.window), device=DEV)
                with torch.no_grad():
                    writer = Writer(model, ids)
                    step = lambda: writer.step(ids[:, 0])
                    if how == 'captured': step = captured(step)
                    return dict(per_second=round(1e3 * b / ms(step, 100)))
            for how in ('captured', 'eager'): yield tried(symbols, how, removed=share, streams=b, how=how)

@part
def tiles(need=40): # a layer's operator, forward and backward, by size of a tile, warps and stages
    cfg, b = setting('text8')
    h, d, n, m = cfg.n_head, cfg.d_head, cfg.n_persistent, cfg.window
    shapes = (b, cfg.seg_len, 3, h, d), (b, cfg.mem_len, 2, h, d), (h, m, d), (h, d), (h, d), (h, n, d), (h, n, d), (b, cfg.seg_len, h, d)
    *x, g = [(torch.randn(shape, device=DEV) / 2).to(HALF) for shape in shapes]
    launch, size = cuda._launch, cuda.SIZE
    def both(tile, warps, stages):
        def changed(*args, **how): # on a CPU nothing is launched
            if not a.rehearse: launch(*args, **how | dict(num_warps=warps, num_stages=stages))
        cuda._launch, cuda.SIZE = changed, tile
        try:
            state = cuda.forward(*x, 0.)
            forward, backward = ms(lambda: cuda.forward(*x, 0.)), ms(lambda: cuda.backward(g, *state, 0., cfg.mem_len))
        finally: cuda._launch, cuda.SIZE = launch, size
        return dict(forward=round(forward, 4), backward=round(backward, 4))
    for tile, warps, stages in ((64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3), (32, 4, 3)):
        yield tried(both, tile, warps, stages, size=tile, num_warps=warps, num_stages=stages)

@part
def compiled(need=60): # half a minute a row
    yield from cases('compiled', (0,) if a.rehearse else (0, .57))

@part
def peers(need=60): # 16 streams of text8's segments, symbols a second
    cfg, _ = setting('text8')
    b, t, s, c, h, n = 2 if a.rehearse else 16, cfg.seg_len, cfg.mem_len, cfg.d_model, cfg.n_head, cfg.n_persistent
    class Block(nn.Module): # of a GPT, as wide inside as there are persistent keys
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(c), nn.Linear(c, 3*c), nn.Linear(c, c)
            self.ff = nn.Sequential(nn.LayerNorm(c), nn.Linear(c, n), nn.GELU(), nn.Linear(n, c))
        def forward(self, x):
            q, k, v = (y.unflatten(-1, (h, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.ff(x)
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.pos = nn.Embedding(27, c), nn.Embedding(t + s, c)
            self.layers, self.norm = nn.Sequential(*(Block() for _ in range(cfg.n_layer))), nn.LayerNorm(c)
        def forward(self, ids): return F.linear(self.norm(self.layers(self.words(ids) + self.pos.weight[:ids.shape[1]])), self.words.weight)
    def gpt(): # as many symbols in windows of t + s, so that their mean context is as long
        ids = torch.randint(27, (max(1, b*t // (t + s)), t + s), device=DEV)
        return GPT().to(DEV), lambda f: f(ids), ids
    def x_transformers():
        from x_transformers import Decoder, TransformerWrapper
        ids, mems = torch.randint(27, (b, t), device=DEV), [torch.randn(b, s, c, device=DEV) for _ in range(cfg.n_layer)]
        layers = Decoder(dim=c, depth=cfg.n_layer, heads=h, attn_dim_head=c // h, custom_layers=('a',) * cfg.n_layer,
                         attn_num_mem_kv=n, attn_flash=True, rotary_pos_emb=True)
        model = TransformerWrapper(num_tokens=27, max_seq_len=t, max_mem_len=s, attn_layers=layers)
        return model.to(DEV), lambda f: f(ids, mems=mems, return_mems=True)[0], ids
    def peer(make, what, how):
        torch.manual_seed(0)
        model, call, ids = make()
        f = torch.compile(model, **HOW) if how == 'compiled' else model
        def run():
            with torch.autocast(DEV, torch.bfloat16), torch.set_grad_enabled(what == 'train'):
                logits = call(f)
                if what == 'read': return logits
                model.zero_grad()
                loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
            loss.backward()
            return loss
        found = ms(captured(run))
        return dict(ms=round(found, 3), per_second=round(1e3 * ids.numel() / found), parameters=sum(p.numel() for p in model.parameters()))
    def ours(what, how):
        found = ms(captured(job(cfg, b, what, how == 'compiled')))
        return dict(ms=round(found, 3), per_second=round(1e3 * b*t / found), parameters=sum(p.numel() for p in build(cfg).parameters()))
    for how in ('captured', 'compiled'):
        for what in ('train', 'read'):
            yield tried(ours, what, how, model='allatt_prune', job=what, how=how)
            yield tried(peer, gpt, what, how, model='GPT', job=what, how=how)
            if importlib.util.find_spec('x_transformers'): yield tried(peer, x_transformers, what, how, model='x-transformers', job=what, how=how)

save()
