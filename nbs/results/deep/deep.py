"""Table 3 with twelve layers: does training gates become unstable in a deeper model (section 3.3 of the paper)?

    python deep.py [--toy]

Run it in a folder of its own that holds books8-small (see books.py), with the package's repository on PYTHONPATH. Each seed trains one
whole model, then, from it, a control without gates and the four variants at the same lambda. A finished run is skipped, a half-done one
goes on: stop it and start it again at any time. Each result is a file of JSON."""
import argparse, datetime, hashlib, json, logging, sys
from dataclasses import asdict, replace
from pathlib import Path
import numpy as np, torch
HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent/'verdicts'), str(HERE.parents[1]/'experiments')]
from allatt_prune import LM, get_recipe, load_corpus
from allatt_prune.engine.checkpoint import write_file
from allatt_prune.engine.report import environment
from experiment import finished
from verdicts import passages

# the shape of tiny-books, but 12 layers of 4 heads and width 64. Lambda: half of Table 3's, as there are twice as many heads
DEEP = dict(n_layer=12, n_head=4, d_model=64, n_persistent=128, steps=6_000, warmup=300, lam=.04, save_every=500)
SHORT = dict(prune_steps=2_000, prune_warmup=150, gate_steps=1_200, lam_warmup=300, gate_lr=.04, log_every=25) # as in table3, fewer steps
TOY = dict(n_layer=3, d_model=32, n_persistent=16, seg_len=16, mem_len=16, steps=20, warmup=2, prune_steps=40, prune_warmup=2, gate_steps=20,
           lam_warmup=5, gate_lr=.3, log_every=2, eval_tokens=1000)
VARIANTS = dict(all={}, warmup=dict(lam_warmup=0), init=dict(gate_init=0.), scale=dict(output_scale=False)) # what each goes without
SEEDS = 0, 1

# Written before the first run. start: nats of training loss above the control's in steps 1 to 125; test: bits per character of test text
# above `all`; jump: the largest rise of the training loss (mean of 25 steps) above its lowest value before, in steps 1 to 1,000, nats.
PREDICTED = dict(start=dict(all=.15, warmup=.2, init=1., scale=.15), test=dict(warmup=0., init=.05, scale=.08),
                 jump='at most 0.2 in every run, so no instability; the highest without warm-up', heads='24 to 36 of 48 stay with all techniques')

def sha(path): return hashlib.sha256(Path(path).read_bytes()).hexdigest()

def do(name, recipe, models, baseline, toy):
    if Path(f'{name}.json').exists(): return
    about = environment('cpu')
    if not toy and about['commit'].endswith(('dirty', 'unknown')): raise ValueError(f"commit={about['commit']}: not a clean checkout")
    found, corpus = finished(recipe, name, models, baseline), load_corpus(recipe.corpus)
    last = {}
    for m in models:
        if m == 'gated': continue # equals pruned
        model = LM.from_pretrained(f'{name}/{m}')
        last[m] = dict(passages=passages(model, corpus.test[:recipe.eval_tokens]), heads=model.cfg.layer_heads)
    found = dict(name=name, date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'), recipe=asdict(recipe), models=last,
                 curves=found['curves'], keep=found.get('keep'), seconds=found['seconds'], environment=about, predicted=PREDICTED,
                 script=sha(__file__), texts={s: sha(f'books8-small/{s}.txt') for s in ('train', 'valid', 'test')} if not toy else {})
    write_file(Path(f'{name}.json'), (json.dumps(found) + '\n').encode())
    bits = {m: round(float(sum(n for n, _ in x["passages"]) / sum(k for _, k in x["passages"]) / np.log(2)), 4) for m, x in last.items()}
    logging.info(f"{name}: test bits {bits}, heads {last[models[-1]]['heads']}, {sum(found['seconds'].values())/60:.0f} minutes")

if __name__ == '__main__':
    say = argparse.ArgumentParser()
    say.add_argument('--toy', action='store_true', help="a minute, on Python's documentation")
    toy = say.parse_args().toy
    logging.basicConfig(format='%(asctime)s %(message)s', level=logging.INFO)
    torch.set_num_threads(1)
    for seed in SEEDS:
        r = get_recipe('tiny-books', seed=seed, **DEEP | SHORT, corpus='books8-small')
        if toy: r = replace(r, corpus='pydocs', **TOY)
        do(f'whole-{seed}', r, ('baseline',), None, toy)
        base = Path(f'whole-{seed}/baseline')
        do(f'control-{seed}', r, ('baseline', 'control'), base, toy)
        for name, change in VARIANTS.items(): do(f'{name}-{seed}', replace(r, **change), ('baseline', 'gated', 'pruned'), base, toy)
