"""Width 512 on a CPU: time over the roofline of float32 products, and what bfloat16 saves and costs.

    PYTHONPATH=REPO:REPO/nbs/experiments python cpu.py FOLDER

Writes FOLDER/cpu-times.json (two threads, on a quiet machine; two minutes) and FOLDER/cpu-bits.json (ten minutes). Times: wt103's width,
three layers, four streams of 192 symbols, a vocabulary of 60; jobs take turns, 15 times. The roofline: the multiply-accumulates of a
forward pass, three times that in training, at the rate of a 768 x 512 by 512 x 2048 product in the same run. Bits: the baseline of `tiny`, seeds
0 to 4, trained and read in either type.
"""
import statistics, sys, time, torch
from dataclasses import replace
from pathlib import Path
from allatt_prune import evaluate, get_recipe, load_corpus, train
from allatt_prune.cost import count_macs
from allatt_prune.engine.checkpoint import build
from allatt_prune.timing import in_turns, segment_job, train_job
from experiment import recorded

def autocast(half): return torch.autocast('cpu', torch.bfloat16, enabled=half)
def reading(model, ids, half):
    with autocast(half): job = segment_job(model, ids) # joins and casts the weights
    def read():
        with autocast(half): return job()
    return read

def times():
    torch.set_num_threads(2)
    r = get_recipe('wt103', n_layer=3, batch=4, cutoffs=[])
    def model(share):
        torch.manual_seed(0)
        return build(replace(r.config(60), dropout=.1*share, attn_dropout=.2*share))
    ids, (plain, dropped) = torch.randint(60, (r.batch, r.mem_len + r.seg_len + 1)), map(model, (0, 1))
    jobs = {}
    for half in (False, True):
        a, b = torch.randn(768, 512).to(kind := torch.bfloat16 if half else torch.float32), torch.randn(512, 2048).to(kind)
        jobs |= {('product', half): lambda a=a, b=b: [a @ b for _ in range(10)], ('reading', half): reading(plain, ids[:, :-1], half),
                 ('training', half): train_job(plain, ids, kind), ('training with dropout', half): train_job(dropped, ids, kind)}
    ms = {job: t.median for job, t in zip(jobs, in_turns([*jobs.values()], repeats=15))}
    least = r.batch * r.seg_len * count_macs(plain.cfg)['total'] / (10*768*512*2048) * ms['product', False]
    return dict(rows=[dict(job=job, bfloat16=half, ms=ms[job, half], roofline=ms[job, half] / least / (1 if job == 'reading' else 3))
                      for job, half in jobs if job != 'product'],
                gflops=[2e-6 * 10*768*512*2048 / ms['product', half] for half in (False, True)])

def bits():
    torch.set_num_threads(1)
    corpus, rows = load_corpus('pydocs'), []
    for seed in range(5):
        for dtype in ('float32', 'bfloat16'):
            r = get_recipe('tiny', seed=seed, dtype=dtype)
            torch.manual_seed(seed)
            model = build(r.config(len(corpus.vocab)))
            train(model, corpus, r, progress=False)
            def test(half):
                with autocast(half): return evaluate(model, corpus.test, progress=False).bits
            rows.append(dict(seed=seed, dtype=dtype, read_in_float32=test(False), read_in_bfloat16=test(True)))
            print(time.strftime('%H:%M'), rows[-1], flush=True)
    return dict(rows=rows)

if __name__ == '__main__':
    for name, make in dict(times=times, bits=bits).items(): print(name, recorded(Path(sys.argv[1])/f'cpu-{name}.json', make, __file__))
