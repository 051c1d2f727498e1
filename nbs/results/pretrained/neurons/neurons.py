"""Neurons of SmolLM2, 10 and 20 % of the block parameters: what chooses them, how they are grouped, what least squares adds.

    PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=1 python neurons.py DATA FOLDER [names, as in a shell]

DATA has wikitext-103/wiki.{valid,test}.tokens.xz. Each arm is a file of FOLDER, with the losses of 16 passages of 512 tokens of WikiText-103's
test part and of Python's reference, without repair and after least squares from 8,192 tokens. CPU seconds are of one thread of a shared machine.
Neurons only: 6,144 and 12,288 of 46,080 are 10 and 20 % of the block parameters (96 and 192 groups of 64). Seed 0.

Predictions, written before the runs (nats per token of WikiText lost at 10 %, without repair / after least squares):

- score, groups of 64 neighbours: .45 / .30. A group of neighbours mixes good and bad neurons, so no score can do well.
- score, sorted groups of 64: .19 / .12; single neurons: .19 / .12; sorted groups of 16: as single neurons, to .01.
- gates, groups of neighbours: .30 / .25; gates, sorted groups: .17 / .12; gates, single neurons: .6 / .4 (46,080 gates, 300 steps).
- So sorting is worth more than training, and least squares takes a third off every choice that did not remove a neuron with huge outputs.
- gates, heads and neighbours ("both"): .33, and above 1 after least squares: the gates close a group that holds such a neuron, because the
  loss hardly needs its outputs. They are most of the squared error, so least squares gives them to other neurons, which then ruin other tokens.
- whole layers, chosen by how little they turn their input (ShortGPT): .35 with 3 layers, .80 with 6, least seconds.
- Python's reference loses two to three times as much as WikiText, in the same order.
"""
import sys, time
from fnmatch import fnmatch
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np, torch, transformers
from torch import nn
from allatt_prune import hf
from allatt_prune.hf_models import layers, units_of
from allatt_prune.importance import keep_mask, score
from allatt_prune.repair import least_squares
from experiment import recorded
from jobs import batches, losses, smollm2, texts, timed

BLOCKS = {.1: 6144, .2: 12288} # share of the block parameters -> single neurons

def sorted_by(model, scores): # a copy that computes the same, the best neurons of each layer first
    model = smollm2()[0]
    for x, s in zip(units_of(model, 'neurons', scores.shape[1]), scores):
        order, (*inputs, out) = s.argsort(descending=True, stable=True), x.modules
        for f in inputs: f.weight.data = f.weight.data[order].contiguous()
        out.weight.data = out.weight.data[:, order].contiguous()
    return model

class Arms:
    def __init__(self, data):
        self.model, tokenizer = smollm2()
        text = texts(tokenizer, data)
        self.test, self.docs = text['test'][::4], text['docs'][::2]
        self.read = batches(text['choose'], 8)                 # 16,384 tokens
        self.rows = batches(text['choose'], 2)                 # for gates
        self.cache = {}
    def judged(self, model): return dict(test=losses(model, self.test), docs=losses(model, self.docs))
    def about(self, **more):
        return dict(seed=0, date=time.strftime('%Y-%m-%d'), transformers=transformers.__version__) | more
    def whole(self): return self.about(**self.judged(self.model))
    def scores(self, group, batches=16): # once
        key = group, batches
        if key not in self.cache:
            heads = hf.HFHeads(self.model, self.read[:batches], 'neurons', group)
            self.cache[key] = timed(score, heads, None, 'gradient')
        return self.cache[key]
    def removed(self, model, keep, group, seconds, read=8, **more): # without repair and after least squares
        keep = torch.as_tensor(keep).bool()
        small, _ = timed(hf.remove_heads, model, keep, None, 'neurons')
        heads = hf.HFHeads(model, self.read[:read], 'neurons', group)
        fitted, fit = timed(least_squares, heads, keep, None)
        kept = [x.nonzero().flatten().tolist() if group == 64 else int(x.sum()) for x in keep]
        return self.about(seconds=dict(choose=seconds, least_squares=fit), tokens=dict(least_squares=1024 * read), kept=kept,
                          nothing=self.judged(small), least_squares=self.judged(fitted), **more)
    def by_score(self, how, share, batches=16, read=8):
        if how == 'neighbours':
            x, seconds = self.scores(64, batches)
            return self.removed(self.model, keep_mask(x, BLOCKS[share] / 46080), 64, seconds, read)
        x, seconds = self.scores(1, batches)
        group = dict(single=1, sorted16=16, sorted64=64)[how]
        ranked, order = x.sort(dim=1, descending=True)
        keep = keep_mask(ranked.unflatten(1, (-1, group)).sum(-1), BLOCKS[share] / 46080).repeat_interleave(group, 1)
        keep = torch.zeros_like(keep).scatter(1, order, keep)
        return self.removed(self.model, keep, 1, seconds, read, scored=1024 * batches)
    def by_gates(self, how, share):
        model, group = self.model, 1 if how == 'single' else 64
        if how == 'sorted64': model = sorted_by(model, self.scores(1)[0])
        gates, seconds = timed(hf.train_gates, model, self.rows, BLOCKS[share] / 46080, 'neurons', group)
        return self.removed(model, gates.open_mask(), group, seconds)
    def both(self, share): # heads and groups of neighbours; least squares on the neurons alone
        h = hf.shape(self.model)[1]
        gates, seconds = timed(hf.train_gates, self.model, self.rows, share, 'both')
        heads, neurons = gates.open_mask().split([h, gates.open_mask().shape[1] - h], 1)
        small = hf.remove_heads(self.model, heads)
        again = self.removed(small, neurons, 64, seconds)
        return again | dict(heads=[x.nonzero().flatten().tolist() for x in heads])
    def influence(self): # of each layer: 1 - cosine of its input and output, over tokens
        found, n = torch.zeros(len(layers(self.model))), 0
        def look(i, f, args, out):
            found[i] += (1 - torch.cosine_similarity(args[0].float(), (out[0] if isinstance(out, tuple) else out).float(), dim=-1)).sum()
        hooks = [f.register_forward_hook(lambda f, args, out, i=i: look(i, f, args, out)) for i, f in enumerate(layers(self.model))]
        with torch.no_grad():
            for x in self.read: self.model.model(input_ids=x['input_ids'])
        for hook in hooks: hook.remove()
        return found
    def whole_layers(self, n):
        found, seconds = timed(self.influence)
        small = smollm2()[0]
        gone = found.argsort()[:n].tolist()
        small.model.layers = nn.ModuleList(f for i, f in enumerate(small.model.layers) if i not in gone)
        small.config.num_hidden_layers = len(small.model.layers)
        return self.about(seconds=dict(choose=seconds), removed=sorted(gone), influence=found.tolist(), nothing=self.judged(small))

def plan(arms):
    yield 'whole', arms.whole
    for share in BLOCKS:
        for how in ('single', 'sorted16', 'sorted64', 'neighbours'): yield f'score-{how}-{share}', lambda: arms.by_score(how, share)
    for share in BLOCKS: yield f'half-sorted16-{share}', lambda: arms.by_score('sorted16', share, 8)
    yield 'more-sorted16-0.2', lambda: arms.by_score('sorted16', .2, 16, 16)
    for n, share in ((3, .1), (6, .2)): yield f'layers-{share}', lambda: arms.whole_layers(n)
    yield 'gates-neighbours-0.1', lambda: arms.by_gates('neighbours', .1)
    yield 'both-0.1', lambda: arms.both(.1)
    for how, share in (('sorted64', .1), ('neighbours', .2), ('sorted64', .2), ('single', .1)):
        yield f'gates-{how}-{share}', lambda: arms.by_gates(how, share)

if __name__ == '__main__':
    data, folder, only = Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ['*'])[0]
    torch.set_num_threads(1)
    arms = Arms(data)
    for name, f in plan(arms):
        if not fnmatch(name, only): continue
        found = recorded(folder/f'{name}.json', f)
        print(time.strftime('%H:%M'), name, {k: round(float(np.mean(found[k]['test'])), 4) for k in ('nothing', 'least_squares') if k in found}, flush=True)
