"""Time training, reading and writing at both of the paper's sizes and batches on a GPU.

  python time_gpu.py OUT.json COMMIT    (three minutes on an H100)

Models have random weights and a vocabulary of 27 symbols. `blocks` forces the context part that PyTorch's own operations compute."""
import json, sys, time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from allatt_prune import attention
from allatt_prune.config import get_recipe
from allatt_prune.cost import count_macs
from allatt_prune.engine import fused
from allatt_prune import LM
from allatt_prune.engine.report import environment
from experiment import provenance # of nbs/experiments, which PYTHONPATH names
from allatt_prune.timing import in_turns, segment_job, train_job

UNEVEN = [8, 3, 7, 6, 6, 6, 6, 7, 6, 7, 8, 8, 7, 8, 7, 6] # heads kept in each layer, one in six removed
SHARES = 0, .16, .27, .37, .57 # of the heads that are removed
DROPOUT = dict(dropout=.1, attn_dropout=.2)
torch._dynamo.config.recompile_limit = 64

def spread(kept, layers): return [kept // layers + (i < kept % layers) for i in range(layers)]
def rate(): # of a large product in bfloat16, TFLOP/s
    a, b = torch.randn(2, 8192, 8192, device='cuda', dtype=torch.bfloat16)
    return 2e-9 * 8192**3 / in_turns([lambda: a @ b], repeats=15)[0].median
def needed(cfg, batch): # MACs of a segment of all streams, without masked scores
    masked = 3 * (cfg.mem_len + cfg.seg_len - cfg.window) * cfg.d_head * cfg.seg_len * batch
    return count_macs(cfg, batch)['total'] * batch * cfg.seg_len - sum(cfg.layer_heads) * masked

@contextmanager
def only(context): # the kernel of the context part
    usual = fused.choose
    if context: fused.choose = lambda q, dropout, part='persistent': context if part == 'context' else usual(q, dropout)
    try: yield
    finally: fused.choose = usual

def job(cfg, batch, what, how): # -> a function; how: plain, blocks, triton, compiled
    torch.manual_seed(0)
    cfg = replace(cfg, **DROPOUT if what == 'train, dropout' else dict(dropout=0., attn_dropout=0.))
    model = LM(cfg, attention.attend if how == 'plain' else fused.fused_attend).cuda()
    ids = torch.randint(27, (batch, cfg.mem_len + cfg.seg_len + 1), device='cuda')
    if what == 'read': model = model.bfloat16()
    if how == 'compiled':
        for layer in model.layers: layer.compile(dynamic=False)
    f = segment_job(model, ids[:, 1:]) if what == 'read' else train_job(model, ids, torch.bfloat16)
    def run():
        with only('blocks' if how == 'blocks' else None): return f()
    return run

def timed(cases, repeats=11): # list of cfg, batch, what, how, label -> rows
    rows, jobs = [], []
    for cfg, batch, what, how, label in cases:
        torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
        f, before = job(cfg, batch, what, how), torch.cuda.memory_allocated()
        for _ in range(2): f()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        macs = needed(cfg, batch) * (1 if what == 'read' else 3)
        rows.append(dict(label, job=what, attend=how, batch=batch, heads=sum(cfg.layer_heads), macs=macs, peak_mb=peak))
        jobs.append(f)
    for r, t in zip(rows, in_turns(jobs, repeats=repeats)): r |= dict(ms=t.median, quartiles=t.quartiles)
    for r in rows: print(r['recipe'], r['job'], r['attend'], r['batch'], r['heads'], f"{r['ms']:.2f} ms, {2e-9*r['macs']/r['ms']/TFLOPS:.1%}, {r['peak_mb']:.0f} MiB", flush=True)
    return rows

def writing(name, cfg, n=64): # tokens per second of all streams
    rows = []
    for heads in (cfg.n_head, cfg.n_head // 2):
        torch.manual_seed(0)
        model = LM(replace(cfg, heads=[heads]*cfg.n_layer), fused.fused_attend).cuda().bfloat16().eval()
        for b in (1, 64):
            ids = torch.randint(27, (b, 256), device='cuda')
            t, = in_turns([lambda: model.generate(ids, n)], repeats=3, warmup=1)
            rows.append(dict(recipe=name, batch=b, heads=heads*cfg.n_layer, per_second=1000*b*n/t.median))
            print(rows[-1], flush=True)
    return rows

def save(): Path(sys.argv[1]).write_text(json.dumps(dict(environment=environment('cuda') | dict(commit=sys.argv[2]), seconds=round(time.time() - began),
    tflops=[TFLOPS, rate()], provenance=provenance(__file__), rows=rows, written=written)))

began, TFLOPS, small, rows, written = time.time(), rate(), '--small' in sys.argv, [], []
r, batch = get_recipe('wt103', cutoffs=[], **dict(n_layer=2) if small else {}), get_recipe('wt103').batch
cfg = r.config(27)
cases = [(s, 'even', spread(round((1 - s) * cfg.n_layer*cfg.n_head), cfg.n_layer)) for s in SHARES]
if not small: cases.append((round(1 - sum(UNEVEN)/128, 3), 'uneven', UNEVEN))
for what in ('train', 'read'):
    rows += timed([(replace(cfg, heads=heads), batch, what, 'triton', dict(recipe='wt103', removed=s, layers=which)) for s, which, heads in cases])
save()
for name in ('wt103', 'text8'):
    r, batch = get_recipe(name, cutoffs=[], **dict(n_layer=2) if small else {}), get_recipe(name).batch
    cfg, label = r.config(27), dict(recipe=name)
    rows += timed([(cfg, batch, what, how, label) for what in ('train', 'train, dropout', 'read') for how in ('blocks', 'triton', 'compiled')], 7)
    save()
    rows += timed([(cfg, 8, what, how, label) for what in ('train', 'train, dropout', 'read') for how in ('plain', 'triton')], 7)
    written += writing(name, cfg)
    save()
