"""Does pruning beat training a smaller model?    python prune_or_small.py REPO --until 14:25 [--list]

Run it in a folder that holds books8-small and books-word-small. It does the jobs of `jobs()` in their order, skips those that have
a file of results, goes on with half-done ones, and can run twice at once: a job is locked while it is worked on."""
import argparse, datetime, json, logging, math, os, shutil, signal, time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
import numpy as np, torch, torch.nn.functional as F
from filelock import FileLock, Timeout
from allatt_prune.checkpoint import write_file
from allatt_prune.corpora import load_corpus
from allatt_prune.cost import count_params
from allatt_prune.distill import Distill, last_hidden
from allatt_prune.importance import choose_heads, keep_mask, score
from allatt_prune import LM
from allatt_prune.recipe import get_recipe
from allatt_prune.repair import scaled
from allatt_prune.resume import LOG, Stopped, read_log, train
from allatt_prune.sparsity import gates_for
from allatt_prune.engine.report import environment
from predictions import predicted

RECIPES = dict(char=get_recipe('tiny-books', save_every=2000), word=get_recipe('tiny-books-word', save_every=1000,
    steps=6000, warmup=300, prune_steps=3000, prune_warmup=150, gate_steps=600, valid_every=1000)) # words: a quarter of the steps
BASELINES = dict(char=('allatt_prune/models/tiny-books', 'nbs/results/tiny-books-1', 'nbs/results/tiny-books-2'),
                 word=('allatt_prune/models/tiny-books-word', 'nbs/results/tiny-books-word-1', 'nbs/results/tiny-books-word-2'))
SHIPPED = dict(char={'pruned-best': 'tiny-books-best', 'pruned-gates': 'tiny-books-pruned'},
               word={'pruned-best': 'tiny-books-word-best', 'pruned-gates': 'tiny-books-word-pruned'})
LEVELS = dict(none=0., half=.5, paper=1.) # of the paper's dropout
SMALL = {15: [4, 4, 4, 3], 10: [3, 3, 2, 2]} # heads of each layer
NARROW = { # as many layers and heads as the whole model, less wide; a feed-forward layer of such a width that blocks match
    15: dict(d_model=78, d_ff=135), # 209,112 parameters in blocks, All-attention with 15 heads has 209,184
    10: dict(d_model=60, d_ff=136)} # 139,864, All-attention with 10 heads 139,904
PASSAGE = 2_500

@dataclass(frozen=True)
class Job:
    text: str # char or word
    arm: str # pruned, small, narrow; gates: pruned, its heads chosen by better gates; whole, shipped: only scored
    heads: int # that are left; of narrow: the model that has as many parameters in its blocks
    seed: int
    training: str # first: the first 24,000 steps; paper, best: the 12,000 after them; short: all that there is
    before: str = 'paper' # level of dropout in the first steps
    now: str = 'none' # and in these
    steps: int = 0 # 0: as the recipe says
    @property
    def name(self):
        parts = [self.text, self.arm, self.heads, self.seed, self.training]
        if self.arm not in ('whole', 'shipped'): parts.append(self.before)
        if self.training in ('paper', 'best') and self.arm != 'shipped': parts.append(self.now)
        return '-'.join(map(str, parts + [self.steps]*(self.steps > 0)))

def recipe_of(job):
    r = replace(RECIPES[job.text], seed=job.seed)
    if job.training in ('paper', 'best'):
        best, n = job.training == 'best', job.steps or r.prune_steps
        r = replace(r, prune_steps=n, prune_warmup=n//20, gate_steps=min(r.gate_steps, n),
                    **dict(prune_lr=2e-3, teacher=.5) if best else {}).pruning()
    elif job.training == 'short': r = replace(r, steps=job.steps, warmup=job.steps//20, teacher=.5)
    level = LEVELS[job.before if job.training in ('first', 'short') else job.now]
    shape = dict(heads=SMALL[job.heads]) if job.arm == 'small' else dict(n_persistent=0) | NARROW[job.heads] if job.arm == 'narrow' else {}
    return replace(r, dropout=level*r.dropout, attn_dropout=level*r.attn_dropout, **shape)

class Taught(Distill):
    "By a teacher that may be wider than the student: its memory is kept beside the student's, which is padded."
    def __call__(self, model, x, y, mems, z):
        l, c, t = model.cfg.n_layer, model.cfg.d_model, self.teacher.eval()
        with last_hidden(model) as mine: nll, new = model(x, y, None if mems is None else mems[:l, ..., :c], z)
        with torch.no_grad(), last_hidden(t) as theirs:
            _, old = t(x, None, None if mems is None else mems[l:])
            p = self.probs(t, theirs[0])
        q = self.probs(model, mine[0])
        kl = self.temperature**2 * (p.exp() * (p - q)).sum(-1).mean()
        return torch.lerp(nll, kl, self.weight), torch.cat([F.pad(new, (0, t.cfg.d_model - c)), old]), nll

def teacher_of(job): return Job(job.text, 'base', 24, job.seed, 'first') # whole, with the paper's dropout
def base_of(job, repo): # the teacher of all; of characters: trained already
    return LM.from_pretrained(repo/BASELINES['char'][job.seed] if job.text == 'char' else teacher_of(job).name + '/model')
def pruned_from(job, repo): # the same, or one with less dropout
    return base_of(job, repo) if job.before == 'paper' else LM.from_pretrained(first_of(job).name + '/model')

def heads_of(job, repo, corpus, hooks): # (l h) flags
    r = replace(RECIPES[job.text], seed=job.seed)
    sparsity, base = 1 - job.heads/(r.n_layer*r.n_head), pruned_from(job, repo)
    scores = score(base, corpus.train[:20_000], 'leave_one_out')
    if job.arm == 'pruned': return keep_mask(scores, sparsity)
    # gates that are trained as `best` is, and begin with what leave_one_out says
    r = replace(r, sparsity=sparsity, prune_steps=r.gate_steps, prune_warmup=r.gate_steps//20, prune_dropout=False, prune_lr=2e-3)
    gates, how = gates_for(r)
    with torch.no_grad(): gates.log_alpha.copy_(1 + keep_mask(scores, sparsity).float()) # 2 for what stays, else 1
    train(base.with_dropout(dropout=0., attn_dropout=0.), corpus, r, gates, Path(job.name)/'gating', resume=True, start=r.steps,
          text_loss=Taught(base_of(job, repo), .5), **how, **hooks)
    return gates.open_mask()

def model_of(job, repo, corpus, hooks): # before these steps
    r = recipe_of(job)
    drop = dict(dropout=r.dropout, attn_dropout=r.attn_dropout)
    if job.arm == 'whole': return base_of(job, repo)
    if job.arm == 'shipped': return LM.from_pretrained(repo/'allatt_prune/models'/SHIPPED[job.text][job.training])
    if job.arm in ('pruned', 'gates'):
        return scaled(pruned_from(job, repo), heads_of(job, repo, corpus, hooks)).with_dropout(**drop).train()
    if job.training in ('paper', 'best'): return LM.from_pretrained(first_of(job).name + '/model').with_dropout(**drop).train()
    torch.manual_seed(job.seed)
    return LM(r.config(len(corpus.vocab)))

def first_of(job): # of a pruned model: the whole one, trained with this dropout
    whole = dict(arm='base', heads=24) if job.arm in ('pruned', 'gates') else {}
    return replace(job, training='first', now='none', steps=0, **whole)

@torch.no_grad()
def passages(model, ids): # nats and symbols of each passage: the symbols of a text by 2,500, with memory all through
    ids, mems, out = torch.from_numpy(np.asarray(ids).astype(np.int64)), None, []
    mode, _ = model.training, model.eval()
    for a in range(0, len(ids), PASSAGE):
        edges, total = [max(a, 1), *range(a + 125, min(a + PASSAGE, len(ids)), 125), min(a + PASSAGE, len(ids))], 0.
        for i, j in zip(edges, edges[1:]):
            loss, mems = model(ids[None, i-1:j-1], ids[None, i:j], mems)
            total += loss.double().item() * (j - i)
        out.append([total, edges[-1] - edges[0]])
    model.train(mode)
    return out

def as_usual(rows, unit): # bits per character, or perplexity
    nats = sum(n for n, _ in rows) / sum(k for _, k in rows)
    return nats/math.log(2) if unit == 'char' else math.exp(nats)

def result(job): return json.loads(f.read_text()) if (f := Path(f'{job.name}.json')).exists() else None

def candidates(text, arm, training, heads=15, seed=0): # what dropout is chosen from
    both = [(x, x) for x in LEVELS]
    if training == 'best' and text == 'char': both = [(x, 'none') for x in LEVELS]
    pruned = arm in ('pruned', 'gates')
    if text == 'word' and training == 'paper': both += [('half', 'none'), ('paper', 'none')]
    elif training == 'paper' and heads == 10: both = [('paper' if pruned else 'half', 'none' if pruned else 'half'), ('half', 'none')]
    elif training == 'paper' and pruned: both = [*(('paper', x) for x in LEVELS), ('half', 'none'), ('half', 'half')]
    elif training == 'paper' and arm == 'small': both += [('half', 'none'), ('paper', 'none')]
    return [Job(text, arm, heads, seed, training, *x) for x in both]

def chosen(text, arm, training, heads, seed): # the job with the dropout that was best on validation; None: not known yet
    size = heads if training == 'paper' else 15
    tried = [(result(j), j) for j in candidates(text, 'pruned' if arm == 'gates' else arm, training, size)]
    if not all(x for x, _ in tried): return None
    best = min(tried, key=lambda x: x[0]['valid'])[1]
    return replace(best, arm=arm, heads=heads, seed=seed)

def jobs(): # in order of importance; what depends on a choice that is not made yet is left out
    C = 'char'
    for x in SHIPPED[C]: yield Job(C, 'shipped', 15, 0, x)
    for seed in range(3): yield Job(C, 'whole', 24, seed, 'first')
    for arm in ('small', 'narrow', 'pruned'): yield Job(C, arm, 15, 0, 'best')
    for arm in ('narrow', 'small', 'pruned'): yield from candidates(C, arm, 'best')
    def all_arms(text, training, heads, seeds):
        for seed in seeds:
            for arm in ('pruned', 'small', 'narrow'):
                if job := chosen(text, arm, training, heads, seed): yield job
    for arm, n in (('pruned', 1500), ('pruned', 3000), ('small', 3000), ('small', 6000), ('small', 12000)):
        short = dict(training='short', before='none') if arm == 'small' else {}
        yield replace(Job(C, arm, 15, 0, 'best', steps=n), **short)
    yield from all_arms(C, 'best', 15, (1, 2)) # the first verdict
    for seed in range(3):
        if job := chosen(C, 'gates', 'best', 15, seed): yield job
    yield from all_arms(C, 'best', 10, (0, 1, 2)) # the second size
    W = 'word'
    for arm in ('narrow', 'small', 'pruned'): yield from candidates(W, arm, 'best')
    yield from all_arms(W, 'best', 15, (1, 2))
    for arm in ('pruned', 'narrow', 'small'): yield from candidates(C, arm, 'paper')
    yield from all_arms(C, 'paper', 15, (1, 2))
    for arm in ('pruned', 'narrow', 'small'): yield from candidates(C, arm, 'paper', 10)
    yield from all_arms(C, 'paper', 10, (1, 2))
    for arm in ('pruned', 'narrow', 'small'): yield from candidates(W, arm, 'paper')
    yield from all_arms(W, 'paper', 15, (1, 2))

def do(job, repo, stop): # what it comes to, in a file beside its folder
    folder, r, p = Path(job.name), recipe_of(job), predicted(job)
    corpus = load_corpus(r.corpus)
    LOG.info(f'{job.name}: predicted {p if p is None else round(p, 4)} on validation, before it is run')
    def after(t):
        if time.time() > stop: os.kill(os.getpid(), signal.SIGTERM) # saves, and ends in Stopped
    model, curve, seconds = model_of(job, repo, corpus, dict(after=after)), [], 0
    if job.arm not in ('whole', 'shipped'):
        how = dict(text_loss=Taught(base_of(job, repo), r.teacher)) if r.teacher else {}
        start = RECIPES[job.text].steps if job.training in ('paper', 'best') else 0
        records = train(model, corpus, r, run_dir=folder, start=start, resume=True, after=after, **how)
        curve = [[x['step'], round(x['loss'], 4), *([round(x['valid'], 5)] if 'valid' in x else [])] for x in records]
        seconds = sum(sum(read_log(f)['seconds'].values()) for f in (folder, folder/'gating') if f.exists())
    rows = {k: passages(model, ids) for k, ids in dict(valid=corpus.valid, test=corpus.test).items()}
    cut = r.eval_tokens // PASSAGE # what the recipe scores
    about = dict(job=asdict(job), predicted=p, unit=corpus.unit, heads=model.cfg.layer_heads, params=count_params(model),
                 valid=as_usual(rows['valid'][:cut], corpus.unit), test=as_usual(rows['test'], corpus.unit),
                 valid_whole=as_usual(rows['valid'], corpus.unit), test_cut=as_usual(rows['test'][:cut], corpus.unit),
                 seconds=round(seconds), environment=environment('cpu'), recipe=asdict(r), curve=curve, passages=rows)
    if job.arm not in ('whole', 'shipped') and not (folder/'model').exists():
        model.save_pretrained(folder/'model', vocab=dict(unit=corpus.unit, symbols=corpus.vocab), recipe=asdict(r))
    write_file(Path(f'{job.name}.json'), (json.dumps(about) + '\n').encode())
    for f in (folder, folder/'gating'): shutil.rmtree(f/'checkpoints', ignore_errors=True) # 4 MB, of no more use
    LOG.info(f'{job.name}: valid {about["valid"]:.4f}, predicted {p}; test {about["test"]:.4f}, its first part '
             f'{about["test_cut"]:.4f}; {seconds/60:.1f} min, {1000*seconds/max(1, r.steps):.1f} ms a step')

def one_more(repo, stop): # was there a job to do?
    for wanted in jobs():
        after_first = wanted.training in ('paper', 'best') and (wanted.arm in ('small', 'narrow') or wanted.arm in ('pruned', 'gates') and wanted.before != 'paper')
        teacher = [teacher_of(wanted)] if wanted.text == 'word' else []
        for job in dict.fromkeys(([first_of(wanted)] if after_first else []) + teacher + [wanted]):
            if result(job): continue
            try:
                with FileLock(f'{job.name}.lock', timeout=0):
                    if not result(job):
                        do(job, repo, stop)
                        return True
            except Timeout: pass # another process is at it
            break # the second needs the first
    return False

def listed(): # what is planned now, and what is done
    for wanted in dict.fromkeys(jobs()):
        x = result(wanted)
        print(f"{wanted.name:45} {'done' if x else 'to do':6} predicted {predicted(wanted)} "
              + (f"valid {x['valid']:.4f} test {x['test']:.4f}" if x else ''))

if __name__ == '__main__':
    say = argparse.ArgumentParser()
    say.add_argument('repo', type=Path)
    say.add_argument('--until', help='14:25, UTC')
    say.add_argument('--list', action='store_true')
    given, now = say.parse_args(), datetime.datetime.now(datetime.timezone.utc)
    logging.basicConfig(format='%(asctime)s %(message)s', level=logging.WARNING)
    logging.Formatter.converter = time.gmtime
    LOG.setLevel(logging.INFO)
    torch.set_num_threads(1)
    if given.list: raise SystemExit(listed())
    h, m = map(int, (given.until or '23:59').split(':'))
    stop = now.replace(hour=h, minute=m, second=0).timestamp()
    if stop < time.time(): stop += 86_400
    try:
        while time.time() < stop - 60 and one_more(given.repo, stop): pass
        LOG.info('no job is left that can be begun' if time.time() < stop - 60 else 'the time is over')
    except Stopped: LOG.info('stopped; what was done is saved')
