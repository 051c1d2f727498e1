"""MiniLM as a sentence encoder without 10 % of its parameters: neurons, layers and heads by `hf.prune`, random neurons; before and after `hf.heal`.

    PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=1 python minilm.py DATA FOLDER

DATA has sentence_polarity.zip. `hf.prune` reads 512 film reviews without labels; `hf.heal` reads 960 others, 32 in a step, at a rate of 1e-4.
The records hold the cosine of sentence vectors to the whole model's, means of 64 parts of 512 further sentences, and of as many sentences of
Python's reference (another kind of text). float32, one thread, seed 0.

Predictions, written before the run, but for the first cosine of layers and of random neurons (.93, .78), seen in a trial: cosine before and after
healing, reviews / reference: neurons .96 and .975 / .95 and .96, layers (one of six) .93 and .96 / .91 and .93, random neurons .78 and .90 / .75 and
.83, heads (64 % of them) .85 and .92 / .84 and .88.
"""
import sys
from pathlib import Path
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]
import random, re, time, torch, transformers
from pydoc_data.topics import topics
from transformers import AutoModel
from allatt_prune import hf
from allatt_prune.importance import keep_mask, score
from experiment import recorded
import importlib.util
spec = importlib.util.spec_from_file_location('first_minilm', HERE.parent/'minilm.py')
first = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first)

STEPS = 30

class Arms:
    def __init__(self, data):
        self.m = first.MiniLM(data, None)
        self.whole = AutoModel.from_pretrained(self.m.whole).eval()
        self.read = [*self.m.batches(self.m.read, labels=False)]
        unread = [x for x in self.m.train if x not in self.m.read]
        rows = random.Random(1).sample(unread, 32*STEPS)
        self.tune = [next(self.m.batches(rows[i:i + 32], labels=False)) for i in range(0, len(rows), 32)]
        found = [s for s in re.split(r'(?<=[.!?])\s+', ' '.join(' '.join(topics.values()).split())) if 40 < len(s) < 200]
        self.texts = dict(test=self.m.test[:512], docs=[(s, 0) for s in random.Random(0).sample(found, 512)])
        self.vectors = {k: self.embedded(self.whole, x) for k, x in self.texts.items()}
    @torch.no_grad()
    def embedded(self, model, found):
        out = []
        for x in self.m.batches(found, 128, labels=False):
            real = x['attention_mask'][..., None]
            out.append((model(**x)[0] * real).sum(1) / real.sum(1))
        return torch.cat(out)
    def judged(self, model):
        return {k: [round(float(c.mean()), 5) for c in torch.cosine_similarity(self.embedded(model, x), self.vectors[k], dim=-1).tensor_split(64)]
                for k, x in self.texts.items()}
    def arm(self, units):
        if units == 'random':
            neurons = hf.HFHeads(self.whole, None, 'neurons', 1)
            removed = .1 * self.whole.num_parameters() / float(neurons.costs().mean()) / neurons.units_left.numel()
            small, seconds = hf.remove_heads(self.whole, keep_mask(score(neurons, None, 'random'), removed), units='neurons'), 0
        else: small, seconds = first.timed(hf.prune, self.whole, self.read, .1, units, progress=False)
        before = self.judged(small)
        _, heal = first.timed(hf.heal, small, self.whole, self.tune, STEPS, lr=1e-4, progress=False)
        return dict(seed=0, date=time.strftime('%Y-%m-%d'), transformers=transformers.__version__, whole=self.whole.num_parameters(),
                    parameters=small.num_parameters(), seconds=dict(prune=seconds, heal=heal), before=before, healed=self.judged(small))

if __name__ == '__main__':
    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    arms = Arms(data)
    for units in ('neurons', 'layers', 'random', 'heads'):
        found = recorded(folder/f'minilm-{units}.json', lambda: arms.arm(units), __file__, [s for x in arms.texts.values() for s, _ in x])
        print(time.strftime('%H:%M'), units, found['parameters'], {k: [round(sum(v) / 64, 4) for v in found[k].values()] for k in ('before', 'healed')}, flush=True)
