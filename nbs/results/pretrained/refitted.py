"""Heads that ../pretrained.json chose, removed and refitted by least squares, as `hf.prune` does: SmolLM2 and MiniLM as an encoder.

    PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=1 python refitted.py DATA

Writes refitted.json beside this file. The texts are those of jobs.py and minilm.py; least squares read what the scores read. float32, one thread.

Predictions, written before the run. SmolLM2 without a fifth of its groups, nats lost on WikiText / Python's reference: gates .125 to .16 / .2,
leave_one_out .155 / .24, gradient .182 / .25, random .35 to 2. MiniLM without half of its heads, cosine: leave_one_out .945, gates .94,
output_difference .925, random .87.

`python refitted.py DATA default` writes refitted-default.json: SmolLM2's groups chosen by `fisher`. Prediction, written when all above
but leave_one_out was known (gradient .183 / .411): .18 / .40. `python refitted.py DATA random` writes refitted-random.json: seven more
draws of SmolLM2. Prediction, with the first three known (.24 to .46 / .53 to .77): .2 to .7 / .5 to 1.
"""
import json, sys, time, torch
from pathlib import Path
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from transformers import AutoModel
from allatt_prune import hf
from allatt_prune.repair import least_squares
from experiment import recorded
from jobs import batches, losses, smollm2, texts, timed
from minilm import MiniLM

def masks(parts, methods, rate, draws): # seeds -> method, seed, mask
    for name, part in parts.items():
        for r in part['runs']:
            if r['method'] in methods and r.get('rate') == rate and r.get('seed', 0) in draws:
                yield r['method'], r.get('seed', 0), torch.tensor(r['keep'])

def smollm2_arms(data, parts, methods=('gates', 'leave_one_out', 'gradient', 'random'), draws=range(3)):
    model, tokenizer = smollm2(torch.float32)
    text = texts(tokenizer, data)
    def judged(model): return {name: losses(model, text[name]) for name in ('test', 'docs')}
    yield dict(method='whole', seed=0, **judged(model))
    names = [n for n in parts if n.startswith(('gates-', 'score-', 'random-'))]
    for method, seed, keep in masks({n: parts[n] for n in names}, methods, .2, draws):
        yield dict(method=method, seed=seed, **judged(least_squares(model, keep, batches(text['choose'], 8))))

def minilm_arms(data, parts):
    m = MiniLM(data, None)
    model, read = AutoModel.from_pretrained(m.whole).eval(), [*m.batches(m.read, labels=False)]
    @torch.no_grad()
    def vectors(model):
        out = []
        for x in m.batches(m.test, 128, labels=False):
            real = x['attention_mask'][..., None]
            out.append((model(**x)[0] * real).sum(1) / real.sum(1))
        return torch.cat(out)
    whole = vectors(model)
    for method, seed, keep in masks({'encoder': parts['minilm-encoder']}, ('gates', 'leave_one_out', 'output_difference', 'random'), .5, range(10)):
        near = torch.cosine_similarity(vectors(least_squares(model, keep, read)), whole, dim=-1)
        yield dict(method=method, seed=seed, cosine=[round(float(c.mean()), 5) for c in near.tensor_split(64)])

def default_arm(data, parts):
    model, tokenizer = smollm2(torch.float32)
    text, heads = texts(tokenizer, data), hf.HFHeads(model, None)
    share = .2 * float(heads.costs().sum()) / model.num_parameters()
    small, seconds = timed(hf.prune, model, batches(text['choose'], 8), share, 'heads', hf.fisher, progress=False)
    yield dict(method='fisher', seed=0, seconds=seconds, report=small.config.report, **{name: losses(small, text[name]) for name in ('test', 'docs')})

if __name__ == '__main__':
    torch.set_num_threads(1)
    data, parts = Path(sys.argv[1]), json.loads((HERE.parent/'pretrained.json').read_text())['parts']
    def run(arms):
        found = []
        for x in arms(data, parts):
            found.append(x)
            print(time.strftime('%H:%M'), x['method'], x['seed'], {k: round(sum(v) / len(v), 4) for k, v in x.items() if isinstance(v, list)}, flush=True)
        return found
    def more(*args): return smollm2_arms(*args, ('random',), range(3, 10))
    arms = {'': dict(minilm=minilm_arms, smollm2=smollm2_arms), '-default': dict(smollm2=default_arm), '-random': dict(smollm2=more)}
    name = ''.join('-' + a for a in sys.argv[2:])
    recorded(HERE/f'refitted{name}.json', lambda: {k: run(f) for k, f in arms[name].items()}, __file__)
