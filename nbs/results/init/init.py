"How the first values of the embedding change the first hundreds of steps at width 512. init.py REPO TEXTS; REPO at commit 3a26c65"
import json, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from allatt_prune.config import get_recipe
from allatt_prune.engine.checkpoint import build, write_file
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.engine.report import environment
from allatt_prune.training import evaluate, train_steps

torch.set_num_threads(1)
SMALLER = dict(n_layer=4, n_persistent=512, seg_len=128, mem_len=128, batch=8, steps=300, warmup=100)
WORDS = dict(batch=4, cutoffs=[2_000, 4_000], unit='word')
JOBS = [('text8', 'books8-small', SMALLER, std, 0) for std in (.02, .002, .006)]
JOBS += [('text8', 'books8-small', SMALLER, std, 1) for std in (.02, .006)]
JOBS += [('wt103', 'books-word-small', SMALLER | WORDS, std, 0) for std in (.02, .006)]

for name, text, changes, std, seed in JOBS:
    out, since = Path(f'{name}-{std}-{seed}.json'), time.monotonic()
    if out.exists(): continue
    r = get_recipe(name, corpus=str(Path(sys.argv[2])/text), seed=seed, **changes)
    corpus = load_corpus(r.corpus, None, r.unit or None)
    torch.manual_seed(seed)
    model = build(r.config(len(corpus.vocab)))
    with torch.no_grad():
        for table in model.words.emb: table.mul_(std / .02)   # drawn with .02
    losses, valid = [], []
    def look(step): valid.append([step, float(evaluate(model, corpus.valid[:10_000], batch=8))])
    look(0)
    for s in train_steps(model, corpus, r):
        losses.append(round(s.loss, 4))
        if s.step in (50, 100, 200, 300): look(s.step)
    about = dict(environment=environment('cpu'), seconds=round(time.monotonic() - since), recipe=name, changes=changes,
                 corpus=text, std=std, seed=seed, losses=losses, valid=valid)
    write_file(out, (json.dumps(about) + '\n').encode())
    print(out, valid, about['seconds'], flush=True)
