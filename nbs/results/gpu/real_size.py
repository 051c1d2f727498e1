"""Prune or train small, with 90 million characters of text and a larger model, on a GPU.

  python real_size.py TEXT SEED OUT.json COMMIT [--steps 6000]

TEXT: a file of characters a-z and space; 90 % are for training, the last 5 % for the test. All models are trained alike, without
dropout: STEPS steps at 2e-3, then STEPS/2 at 1.3e-3, each with warm-up and a cosine. `small` has half of the heads from its first
step; the pruned models lose half of the baseline's between the two phases. What is finished is written after each model."""
import argparse, json, math, time
from dataclasses import asdict, replace
from pathlib import Path
import numpy as np, torch, torch.nn.functional as F
from allatt_prune.config import get_recipe
from allatt_prune.cost import count_params
from allatt_prune.data import Corpus
from allatt_prune.engine.checkpoint import build
from allatt_prune.importance import keep_mask, score
from allatt_prune.remove import remove_heads
from allatt_prune.repair import scaled
from allatt_prune.engine.report import environment
from experiment import provenance # of nbs/experiments, which PYTHONPATH names
from allatt_prune.training import train_steps
from allatt_prune.engine.run import way

SYMBOLS, PASSAGE, STREAMS = ' abcdefghijklmnopqrstuvwxyz', 2_500, 200
PREDICTED = dict(baseline=1.60, control=1.57, leave_one_out=1.61, small=1.61, gates=1.62, random=1.64) # bits of the test text, before any run, for 6,000 steps
torch._dynamo.config.recompile_limit = 64

def load(path):
    table = np.zeros(128, np.uint8)
    table[[ord(c) for c in SYMBOLS]] = range(27)
    ids = table[np.fromfile(path, np.uint8)]
    a, b = round(.9*len(ids)), round(.95*len(ids))
    return Corpus(Path(path).stem, ids[:a], ids[a:b], ids[b:], list(SYMBOLS), 'char')

@torch.no_grad()
def passages(model, ids, segment=250): # bits of each passage; every stream starts without memory
    n = len(ids) - 1
    n -= n % (STREAMS * PASSAGE)
    x, y = (torch.from_numpy(a[:n].astype(np.int64)).view(STREAMS, -1).cuda() for a in (ids, ids[1:]))
    out, mems = [], None
    model.eval()
    for i in range(0, x.shape[1], segment):
        with torch.autocast('cuda', torch.bfloat16): logits, mems = model(x[:, i:i+segment], None, mems)
        out.append(F.cross_entropy(logits.mT, y[:, i:i+segment], reduction='none').sum(1))
    each = torch.stack(out, 1).view(STREAMS, -1, PASSAGE // segment).sum(-1) / PASSAGE / math.log(2)
    return [round(b, 5) for b in each.flatten().tolist()]

def trained(model, corpus, r, gates=None, penalty=None, start=0, compiled=False):
    curve, since = [], time.time()
    if compiled:
        for layer in model.layers: layer.compile()
    for s in train_steps(model, corpus, r, gates, penalty=penalty, start=start):
        if s.step % 100 == 0: curve.append([s.step, round(s.loss, 4)])
    for layer in model.layers: layer._compiled_call_impl = None
    return curve, round(time.time() - since, 1)

def models(corpus, r): # yields name, model, curve, seconds
    phase2, whole = r.pruning(), r.config(27)
    torch.manual_seed(r.seed)
    base = build(whole).cuda()
    yield 'baseline', base, *trained(base, corpus, r, compiled=True)
    def copy(): return base.with_config()
    def second(model, compiled=False): return model, *trained(model, corpus, phase2, start=r.steps, compiled=compiled)
    keep = keep_mask(score(base, corpus.train[:20_000], 'leave_one_out'), .5)
    yield 'leave_one_out', *second(scaled(base, keep))
    torch.manual_seed(r.seed)
    small = build(replace(whole, heads=[whole.n_head//2]*whole.n_layer)).cuda()
    first, seconds = trained(small, corpus, r, compiled=True)
    small, curve, more = second(small, compiled=True)
    yield 'small', small, first + curve, seconds + more
    yield 'control', *second(copy(), compiled=True)
    mine, model = way(replace(r, sparsity=.5)), copy()
    curve, seconds = trained(model, corpus, r, mine.gates.cuda(), mine.penalty.cuda(), start=r.steps)
    yield 'gates', remove_heads(model, mine.gates), curve, seconds
    drawn = torch.rand(whole.n_layer, whole.n_head, generator=torch.Generator().manual_seed(100 + r.seed))
    yield 'random', *second(scaled(base, keep_mask(drawn, .5)))

if __name__ == '__main__':
    say = argparse.ArgumentParser()
    for name in ('text', 'seed', 'out', 'commit'): say.add_argument(name)
    say.add_argument('--steps', type=int, default=6000)
    say.add_argument('--small', action='store_true')
    given = say.parse_args()
    n, shape = given.steps, dict(n_layer=2, d_model=32, n_persistent=16, seg_len=16, mem_len=16, batch=8) if given.small else {}
    r = get_recipe('text8', **dict(n_layer=6, d_model=256, n_persistent=1024, seg_len=256, mem_len=256) | shape, dropout=0., attn_dropout=0.,
                   optimizer='adamw', dtype='bfloat16', seed=int(given.seed), steps=n, warmup=n//20, lr=2e-3, prune_steps=n//2,
                   prune_warmup=n//40, prune_lr=1.3e-3, gate_steps=n//10, lam_warmup=n//40, gate_lr=.02)
    corpus, found = load(given.text), []
    about = dict(recipe=asdict(r), predicted=PREDICTED, environment=environment('cuda') | dict(commit=given.commit), passage=PASSAGE,
                 provenance=provenance(__file__, corpus.train, corpus.valid, corpus.test))
    for name, model, curve, seconds in models(corpus, r):
        bits = passages(model, corpus.test)
        found.append(dict(model=name, heads=model.cfg.layer_heads, blocks=count_params(model)['blocks'], bits=sum(bits)/len(bits),
                          seconds=seconds, curve=curve, passages=bits))
        print(f"seed {r.seed} {name}: {found[-1]['bits']:.4f} bits, predicted {PREDICTED[name]}, heads {model.cfg.layer_heads}, {seconds} s", flush=True)
        Path(given.out + '.tmp').write_text(json.dumps(about | dict(models=found)))
        Path(given.out + '.tmp').rename(given.out)
