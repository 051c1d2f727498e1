"""Figure 3 on words: is a pruned All-attention model better than a narrower Transformer-XL?

    python figure3_words.py DATA --until 14:25 [--list] [--toy]

Run it in a folder of its own, with the package's repository on PYTHONPATH. DATA has books-word with by_book; books-word-small is cut
from it here. The jobs of `jobs()` are done in their order; those with a file of results are skipped, half-done ones go on, and a job
is locked while it is worked on, so that two processes can share them. SIGTERM at any time: started again, the training goes on."""
import argparse, datetime, hashlib, json, logging, lzma, math, os, shutil, signal, threading, time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
import numpy as np, torch
from filelock import FileLock, Timeout
from allatt_prune import LM
from allatt_prune.config import get_recipe
from allatt_prune.cost import count_params
from allatt_prune.data import symbol_ids
from allatt_prune.engine.checkpoint import build, write_file
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.engine.processes import LOG, Stopped
from allatt_prune.engine.resume import train_run
from allatt_prune.importance import keep_mask, score
from allatt_prune.remove import remove_heads
from allatt_prune.repair import scaled
from allatt_prune.targets import TargetGates
from allatt_prune.engine.report import environment
from predictions import BOOKS, GAPS, VERDICT

SEEDS, ARMS = (3, 4, 5, 6, 7), ('gates', 'narrow', 'small', 'leave_one_out') # seeds 0 to 2 were used before
RULE = (('gates', 'narrow'), ('gates', 'small'), ('gates', 'leave_one_out'), ('leave_one_out', 'narrow'), ('small', 'narrow'))
KEPT, OF = 15, 24 # heads
SCHEDULE = dict(steps=6_000, warmup=300, prune_steps=3_000, prune_warmup=150, gate_steps=600, lam_warmup=150)
TOY = dict(steps=30, warmup=3, prune_steps=30, prune_warmup=3, gate_steps=10, lam_warmup=2)
# lambda and the gates' rate: a quarter of the recipe's steps, so four times its rate (see README.txt)
GATES = dict(lam=.055, gate_lr=.08)
SHAPES = dict(small=dict(heads=[4, 4, 4, 3]), narrow=dict(n_persistent=0, d_model=78, d_ff=135)) # as in prune_or_small
CORPUS, PASSAGE = 'books-word-small', 2_500
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776} # Student's t, 95 %, by the number of seeds

def recipe_of(arm, seed, toy): # dropout: half of the paper's, in all steps of all arms
    r = get_recipe('tiny-books-word', save_every=1000, valid_every=1000, **GATES | (TOY if toy else SCHEDULE))
    return replace(r, seed=seed, dropout=r.dropout/2, attn_dropout=r.attn_dropout/2, **SHAPES.get(arm, {}))

def jobs(): # seed, arm, phase; in order of importance: whole seeds one after the other
    for seed in SEEDS:
        yield from ((seed, arm, phase) for arm, phase in (('base', 'first'), ('gates', 'last'), ('narrow', 'first'), ('narrow', 'last'),
                                                          ('small', 'first'), ('small', 'last'), ('leave_one_out', 'last')))
    yield from ((0, name, 'shipped') for name in SHIPPED) # only scored

SHIPPED = {'tiny-books-word': '', 'tiny-books-word-best': '', 'tiny-books-word-pruned': '',
           'tiny-books-word-1': 'nbs/results/', 'tiny-books-word-2': 'nbs/results/'}

def name_of(seed, arm, phase): return f'{arm}-{seed}-{phase}'
def needs(seed, arm, phase): # the job whose model it starts from
    return (seed, arm if arm in SHAPES else 'base', 'first') if phase == 'last' else None
def result(job): return json.loads(f.read_text()) if (f := Path(f'{name_of(*job)}.json')).exists() else None
def sha(data): return hashlib.sha256(data).hexdigest()

# texts

def runs(lines, n, tokens): # as in nbs/results/books.py: n runs of lines, evenly spaced, each of at least so many tokens
    for i in range(n):
        found = 0
        for line in lines[i*len(lines)//n:]:
            if found >= tokens: break
            yield line
            found += len(line.split()) + 1

def cut(data, repo): # books-word-small, compared with its recorded hashes
    was = json.loads((repo/'nbs/results/small-corpora.json').read_text())['files']
    splits = dict(train=120, valid=10, test=10)
    full = [lzma.decompress((data/f'books-word/wiki.{s}.tokens.xz').read_bytes()).decode().split('\n')[:-1] for s in splits]
    short, count = [[*runs(lines, n, 5_000)] for lines, n in zip(full, splits.values())], Counter()
    for line in short[0]: count.update(line.split())
    known = lambda line: ' ' + ' '.join(w if count[w] >= 3 else '<unk>' for w in line.split()) + ' '
    Path(CORPUS).mkdir(exist_ok=True)
    for s, lines in zip(splits, short):
        text = ''.join(f'{known(line)}\n' for line in lines).encode()
        if sha(text) != was[name := f'{CORPUS}/wiki.{s}.tokens'][1]: raise ValueError(f'{name}: not the recorded text')
        write_file(Path(name), text)

def books(data, vocab): # ids by name; SHA-256 of all texts in a row
    files = sorted((data/'books-word/by_book').glob('*.tokens.xz'))
    texts = {f.name.removesuffix('.tokens.xz'): lzma.decompress(f.read_bytes()) for f in files}
    symbols = {k: [w for line in t.decode().splitlines() for w in line.split() + ['<eos>']] for k, t in texts.items()}
    return {k: np.array(symbol_ids(x, vocab, 'word', k)) for k, x in symbols.items()}, sha(b''.join(texts.values()))

# scores

@torch.no_grad()
def passages(model, ids, size, z=None): # nats and symbols of each passage; the memory goes on through the text, empty at its start
    ids, mems, out = torch.from_numpy(np.asarray(ids).astype(np.int64)), None, []
    mode, _ = model.training, model.eval()
    for a in range(0, len(ids), size):
        end = min(a + size, len(ids))
        edges, total = [max(a, 1), *range(a + 500, end, 500), end], 0.
        for i, j in zip(edges, edges[1:]):
            loss, mems = model(ids[None, i-1:j-1], ids[None, i:j], mems, z)
            total += loss.double().item() * (j - i)
        out.append([round(total, 4), edges[-1] - edges[0]])
    model.train(mode)
    return out

def nats(rows): return sum(n for n, _ in rows) / sum(k for _, k in rows)

def interval(x): # of the mean of paired differences (seeds, passages); 95 %
    n, p = x.shape
    half = math.sqrt(T[n]**2 * x.mean(1).var(ddof=1) / n + 1.96**2 * x.mean(0).var(ddof=1) / p)
    return x.mean() - half, x.mean() + half

def verdict(low, high): return 'holds' if high < 0 else 'does not hold' if low > 0 else 'undecided'

def gaps(a, b, seeds): # nats per word of a minus those of b, (seeds, books)
    of = lambda arm: np.array([[n/k for n, k in result((s, arm, 'last'))['books'].values()] for s in seeds])
    return of(a) - of(b)

# jobs

def model_of(job, r, corpus): # before these steps
    seed, arm, phase = job
    if phase == 'first':
        torch.manual_seed(seed)
        return build(r.config(len(corpus.vocab)))
    base = LM.from_pretrained(f'{name_of(*needs(*job))}/model')
    if arm != 'leave_one_out': return base.train()
    keep = keep_mask(score(base, corpus.train[:20_000], 'leave_one_out'), 1 - KEPT/OF, least=1) # no layer without heads
    return scaled(base, keep, None).train()

def trained(job, r, corpus): # -> model, records, what the gates did
    seed, arm, phase = job
    folder, how = Path(name_of(*job)), dict(start=r.steps if phase == 'last' else 0, resume=True)
    model = model_of(job, r, corpus)
    if arm != 'gates': return model, train_run(model, corpus, r.pruning() if phase == 'last' else r, None, folder, **how), {}
    gates = TargetGates(r.n_layer, r.n_head, KEPT, r.gate_init, scale=r.output_scale) # the paper's, but exactly so many stay open
    records = train_run(model, corpus, r, gates, folder, **how) # loss: the paper's, lambda times the L0 loss
    z = gates.eval()()
    small = remove_heads(model, z != 0, z)
    ids = corpus.valid[:PASSAGE]
    off = abs(passages(model, ids, PASSAGE, z)[0][0] - passages(small, ids, PASSAGE)[0][0]) / len(ids)
    if off > 1e-5: raise ValueError(f'removal changes the loss by {off} nats')
    alone = next((x['open'] for x in records if x['step'] == r.gate_steps), None) # open before the freezing made them 15
    return small, records, dict(keep=(z != 0).int().tolist(), open_alone=alone, removal=off)

def do(job, data, toy):
    (seed, arm, phase), folder, r = job, Path(name_of(*job)), recipe_of(job[1], job[0], toy)
    corpus, about, since = load_corpus(CORPUS), environment('cpu'), time.time()
    if not toy and about['commit'].endswith(('dirty', 'unknown')): raise ValueError(f"commit={about['commit']}: not a clean checkout")
    p = BOOKS.get(arm) if phase == 'last' else None
    LOG.info(f'{folder}: begins; predicted on the twenty books: {p}')
    if phase == 'shipped':
        model, records, more = LM.from_pretrained(REPO/SHIPPED[arm]/arm if SHIPPED[arm] else arm), [], {}
        if json.loads((REPO/(SHIPPED[arm] or 'allatt_prune/models')/arm/'vocab.json').read_text())['symbols'] != corpus.vocab:
            raise ValueError(f'{arm}: another vocabulary')
    else:
        shutil.rmtree(folder/'model', ignore_errors=True) # of a process that was killed before its file of results; the last checkpoint has it
        model, records, more = trained(job, r, corpus)
    by, text = books(data, corpus.vocab)
    rows = {k: passages(model, ids, len(ids))[0] for k, ids in by.items()}
    as_before = {s: passages(model, getattr(corpus, s), PASSAGE) for s in ('valid', 'test')}
    found = dict(
        job=dict(seed=seed, arm=arm, phase=phase), date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
        predicted=p, measured=math.exp(nats(rows.values())), valid=math.exp(nats(as_before['valid'][:r.eval_tokens//PASSAGE])),
        valid_whole=math.exp(nats(as_before['valid'])), test=math.exp(nats(as_before['test'])), heads=model.cfg.layer_heads,
        params=count_params(model), books=rows, passages=as_before, **more, environment=about,
        script=sha(Path(__file__).read_bytes()), predictions=sha(Path(__file__).with_name('predictions.py').read_bytes()),
        texts=dict(books=text, vocab=corpus.hash, **{s: sha(Path(f'{CORPUS}/wiki.{s}.tokens').read_bytes()) for s in ('train', 'valid', 'test')}),
        unknown=sum((ids == corpus.vocab.index('<unk>')).sum() for ids in by.values()).item() / sum(map(len, by.values())),
        recipe=asdict(r), minutes=round((time.time() - since)/60, 1), # of this process; more if it was stopped before
        curve=[[x['step'], round(x['loss'], 4), *([round(x['valid'], 5)] if 'valid' in x else [])]
               for x in records if x['step'] % (1 if toy else 500) == 0])
    if phase != 'shipped': model.save_pretrained(folder/'model', vocab=dict(unit=corpus.unit, symbols=corpus.vocab), recipe=asdict(r))
    write_file(Path(f'{folder}.json'), (json.dumps(found) + '\n').encode())
    LOG.info(f"{folder}: {found['measured']:.2f} on the twenty books, predicted {p}; valid {found['valid']:.2f}, test {found['test']:.2f}, "
             f"heads {found['heads']}, blocks {found['params']['blocks']:,}, {found['minutes']} minutes")

def one_more(data, toy): # was there a job to do?
    for job in jobs():
        if result(job) or (before := needs(*job)) and not result(before): continue
        try:
            with FileLock(f'{name_of(*job)}.lock', timeout=0):
                if not result(job):
                    do(job, data, toy)
                    return True
        except Timeout: pass # another process is at it
    return False

def listed():
    for job in jobs():
        x = result(job)
        print(f'{name_of(*job):32}', f"{x['measured']:.2f} predicted {x['predicted']}" if x else 'to do')
    seeds = [s for s in SEEDS if all(result((s, arm, 'last')) for arm in ARMS)]
    print(len(seeds), 'whole seeds', '' if len(seeds) == len(SEEDS) else '(no verdict before there are five)')
    for arm in ARMS:
        if seeds: print(f"{arm:16} {np.mean([result((s, arm, 'last'))['measured'] for s in seeds]):.2f}, predicted {BOOKS[arm]}")
    for a, b in RULE:
        if len(seeds) > 1:
            d = gaps(a, b, seeds)
            per_cent = [f'{100*math.expm1(x):+.2f}' for x in (d.mean(), *interval(d))]
            print(f"{a} - {b}, perplexity: {per_cent[0]} % ({per_cent[1]} to {per_cent[2]}), predicted {GAPS.get((a, b))}: {verdict(*interval(d))}")
    print('predicted verdict:', VERDICT)

if __name__ == '__main__':
    say = argparse.ArgumentParser()
    say.add_argument('data', type=Path)
    say.add_argument('--until', help='14:25, today, UTC')
    say.add_argument('--list', action='store_true')
    say.add_argument('--toy', action='store_true', help='a few steps, to try the script')
    given, now = say.parse_args(), datetime.datetime.now(datetime.timezone.utc)
    REPO = Path(__file__).resolve().parents[3]
    logging.basicConfig(format='%(asctime)s %(message)s', level=logging.WARNING)
    logging.Formatter.converter = time.gmtime
    LOG.setLevel(logging.INFO)
    torch.set_num_threads(1)
    if given.list: raise SystemExit(listed())
    h, m = map(int, (given.until or '23:59').split(':'))
    left = (now.replace(hour=h, minute=m, second=0) - now).total_seconds()
    if left <= 0: raise SystemExit(f'--until {given.until}: over')
    clock = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM)) # in training: the state is saved first
    clock.daemon = True
    clock.start()
    with FileLock(f'{CORPUS}.lock'):
        if not all(Path(f'{CORPUS}/wiki.{s}.tokens').exists() for s in ('train', 'valid', 'test')): cut(given.data, REPO)
    try:
        while one_more(given.data, given.toy): pass
        LOG.info('no job is left that can be begun')
    except Stopped: LOG.info('stopped; what was done is saved')
