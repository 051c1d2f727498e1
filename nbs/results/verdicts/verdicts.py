"""Intervals for the verdicts: trainings whose loss is kept for each passage.    python verdicts.py REPO --until 14:25 [--list]

Run it in a folder that holds books8-small and books-word-small; REPO needs the baselines of seeds 1 and 2, which commit a6e696c has
(git checkout a6e696c -- nbs/results/tiny-books{,-word}-{1,2}). It does the jobs of `jobs()` in their order, skips those that have
a file of results, goes on with half-done ones, and can run twice at once: a job is locked while it is worked on."""
import argparse, datetime, json, logging, math, os, signal, sys, threading, time
from dataclasses import asdict, replace
from pathlib import Path
import numpy as np, torch
from filelock import FileLock, Timeout
from allatt_prune import LM, load_corpus
from allatt_prune.config import Recipe, get_recipe
from allatt_prune.engine.checkpoint import load, write_file
from allatt_prune.engine.processes import Stopped
from allatt_prune.engine.run import run
from allatt_prune.engine.report import environment
sys.path.append(str(Path(__file__).resolve().parents[2]/'experiments'))
from experiment import provenance

PASSAGE = 2_500
BASELINES = ('allatt_prune/models/tiny-books', 'nbs/results/tiny-books-1', 'nbs/results/tiny-books-2')
WORD_BASELINES = tuple(b.replace('tiny-books', 'tiny-books-word') for b in BASELINES)
BOOKS, WORDS = (get_recipe(name, save_every=1500) for name in ('tiny-books', 'tiny-books-word'))
SHORT = dict(prune_steps=3_000, prune_warmup=150, gate_steps=1_200, lam_warmup=300, gate_lr=.04) # as in table3
WITHOUT = {'warmup': dict(lam_warmup=0), 'init': dict(gate_init=0.), 'scale': dict(output_scale=False)}
VARIANTS = dict(all={}, **WITHOUT, none={k: x for v in WITHOUT.values() for k, x in v.items()})
GATED, ALONE = ('baseline', 'gated', 'pruned'), ('baseline', 'pruned')

def jobs(repo): # name, recipe, models, baseline; in order of importance
    table3 = json.loads((repo/'nbs/results/table3.json').read_text())
    kept = {r['seed']: sum(r['heads']) for r in table3['rows'] if r['variant'] == 'all techniques'}
    for name, change in VARIANTS.items(): # Table 3 at an equal number of heads, the reference too
        for seed in range(3):
            r = replace(BOOKS, seed=seed, sparsity=1 - kept[seed]/24, **SHORT | change)
            yield f'table3-{name}-{seed}', r, GATED, repo/BASELINES[seed]
    for seed in range(3): # Table 2, the middle lambda, with its control
        yield f'gates-0.08-{seed}', replace(BOOKS, seed=seed, lam=.08), (*GATED, 'control'), repo/BASELINES[seed]
    for seed in range(3): # as many heads as those gates kept, chosen otherwise, with the same training
        if gates := result(f'gates-0.08-{seed}'):
            for method in ('leave_one_out', 'random'):
                r = replace(BOOKS, seed=seed, method=method, sparsity=1 - float(np.mean(gates['keep'])), repair='scaled', score_tokens=20_000)
                yield f'{method}-0.08-{seed}', r, ALONE, repo/BASELINES[seed]
    for lam in (.06, .15): # Table 2, the other lambdas
        for seed in range(3): yield f'gates-{lam}-{seed}', replace(BOOKS, seed=seed, lam=lam), GATED, repo/BASELINES[seed]
    for seed in range(3): # best, as many heads as the gates of the middle lambda kept, with its whole model
        if gates := result(f'gates-0.08-{seed}'):
            r = replace(get_recipe('best', save_every=1500), seed=seed, sparsity=1 - float(np.mean(gates['keep'])))
            yield f'best-0.08-{seed}', r, (*ALONE, 'control'), repo/BASELINES[seed]
    for lam, seed in ((.05, 0), (.05, 1), (.05, 2), (.04, 0), (.07, 0)): # Table 1
        yield f'words-{lam}-{seed}', replace(WORDS, seed=seed, lam=lam), (*GATED, *['control']*(lam == .05)), repo/WORD_BASELINES[seed]
    for seed in range(3): # best on words, with dropout
        if gates := result(f'words-0.05-{seed}'):
            r = replace(WORDS, prune_lr=2e-3, teacher=.5, seed=seed, sparsity=1 - float(np.mean(gates['keep'])), method='leave_one_out',
                        repair='scaled', score_tokens=20_000)
            yield f'best-words-{seed}', r, (*ALONE, 'control'), repo/WORD_BASELINES[seed]

def result(name): return json.loads(f.read_text()) if (f := Path(f'{name}.json')).exists() else None

@torch.no_grad()
def passages(model, ids, z=None): # nats and symbols of each passage: the symbols of a text by 2,500, with memory all through
    ids, mems, out, model = torch.from_numpy(np.asarray(ids).astype(np.int64)), None, [], model.eval()
    for a in range(0, len(ids), PASSAGE):
        edges, total = [max(a, 1), *range(a + 125, min(a + PASSAGE, len(ids)), 125), min(a + PASSAGE, len(ids))], 0.
        for i, j in zip(edges, edges[1:]):
            loss, mems = model(ids[None, i-1:j-1], ids[None, i:j], mems, z)
            total += loss.double().item() * (j - i)
        out.append([total, edges[-1] - edges[0]])
    return out

def do(name, recipe, models, baseline):
    folder = Path(name)
    if folder.exists(): recipe = Recipe(**json.loads((folder/'recipe.json').read_text()))
    run(recipe, None, folder, 'cpu', resume=folder.exists(), models=models, baseline=None if folder.exists() else baseline)
    corpus, report = load_corpus(recipe.corpus), json.loads((folder/'report.json').read_text())
    found = {}
    for m in models:
        if m == 'gated': continue # equals pruned
        model = LM.from_pretrained(folder/m)
        found[m] = dict(passages={s: passages(model, getattr(corpus, s)) for s in ('valid', 'test')}, heads=model.cfg.layer_heads)
    about = dict(name=name, recipe=asdict(recipe), keep=report['keep'], models=found, seconds=report['seconds'],
                 environment=environment('cpu'), provenance=provenance(__file__, corpus.train, corpus.valid, corpus.test))
    write_file(Path(f'{name}.json'), (json.dumps(about) + '\n').encode())
    bits = {m: round(sum(n for n, _ in x['passages']['test']) / sum(k for _, k in x['passages']['test']) / math.log(2), 4) for m, x in found.items()}
    logging.info(f"{name}: test bits {bits}, {np.sum(report['keep'])} heads kept, {sum(report['seconds'].values())/60:.1f} minutes")

def one_more(repo): # was there a job to do?
    for name, *job in jobs(repo):
        if result(name): continue
        try:
            with FileLock(f'{name}.lock', timeout=0):
                if not result(name):
                    do(name, *job)
                    return True
        except Timeout: pass # another process is at it
    return False

if __name__ == '__main__':
    say = argparse.ArgumentParser()
    say.add_argument('repo', type=Path)
    say.add_argument('--until', help='14:25, today, UTC')
    say.add_argument('--list', action='store_true')
    given, now = say.parse_args(), datetime.datetime.now(datetime.timezone.utc)
    logging.basicConfig(format='%(asctime)s %(message)s', level=logging.INFO)
    logging.Formatter.converter = time.gmtime
    torch.set_num_threads(1)
    if given.list: sys.exit('\n'.join(f"{name:32} {'done' if result(name) else 'to do'}" for name, *_ in jobs(given.repo)))
    h, m = map(int, (given.until or '23:59').split(':'))
    left = (now.replace(hour=h, minute=m, second=0) - now).total_seconds()
    clock = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM)) # the run saves its state and ends
    clock.daemon = True
    clock.start()
    try:
        while one_more(given.repo): pass
        logging.info('no job is left that can be begun')
    except Stopped: logging.info('stopped; what was done is saved')
