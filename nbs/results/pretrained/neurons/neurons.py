"""Neurons of SmolLM2, 10 and 20 % of the block parameters: what chooses them, how they are grouped, what least squares adds.

    PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=1 python neurons.py DATA FOLDER [names, as in a shell]

DATA has wikitext-103/wiki.{valid,test}.tokens.xz. Each arm is a file of FOLDER, with the losses of 16 passages of 512 tokens of WikiText-103's
test part and of 8 of Python's reference, without repair and after least squares from 16,384 tokens of the validation part. Scores read 8,192.
CPU seconds are of one thread of a busy machine. Neurons only: 6,144 and 12,288 of 46,080 are 10 and 20 % of the block parameters (96 and 192
groups of 64). Seed 0. Files named plain-* are of an earlier commit, where least squares did not shorten long tokens. Gates: 150 steps at a rate of 0.2; "both" takes the gates of ../../pretrained.json (300 steps at 0.08, seed 0).

Predictions, written before the runs (nats per token of WikiText lost at 10 %, without repair / after least squares):

- score, groups of 64 neighbours: .45 / .30. A group of neighbours mixes good and bad neurons, so no score can do well.
- score, sorted groups of 64: .19 / .12; single neurons: .19 / .12; sorted groups of 16: as single neurons, to .01.
- gates, groups of neighbours: .30 / .25; gates, sorted groups: .17 / .12.
- So sorting is worth more than training, and least squares takes a third off every choice that did not remove a neuron with huge outputs.
- gates, heads and neighbours ("both"): .33, and above 1 after least squares: the gates close a group that holds such a neuron, because the
  loss hardly needs its outputs. They are most of the squared error, so least squares gives them to other neurons, which then ruin other tokens.
- whole layers, chosen by how little they turn their input (ShortGPT): .35 with 3 layers, .80 with 6, least seconds.
- fisher (squares of the slopes of examples, in place of absolute values), sorted groups of 16: .13 after least squares, as in a trial before
  this line was written; .31 at 20 %. Single neurons and sorted groups of 64 the same to .01, neighbours .30.
- After plain-both had shown this (2.6 nats lost by least squares; in layer 28 the gates close a neuron with 90 % of the squared outputs),
  least squares shortens tokens of more than twice the median length. In a trial with all tokens of one length, that made .137 of the gates' .213 with neurons alone, and .124 of .126 for fisher.
- Python's reference loses two to three times as much as WikiText, in the same order.
"""
import sys, time
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from unittest.mock import patch
sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np, torch, transformers
from allatt_prune import hf, repair
from allatt_prune.hf_models import units_of
from allatt_prune.importance import gradients, keep_mask, score
from allatt_prune.repair import least_squares
from experiment import recorded
from jobs import batches, losses, smollm2, texts, timed

BLOCKS = {.1: 6144, .2: 12288} # share of the block parameters -> single neurons
PARTS = Path(__file__).parents[2]/'pretrained.json'

def order_by(model, scores): # in place: the best neurons of each layer first, which changes nothing else
    for x, s in zip(units_of(model, 'neurons', scores.shape[1]), scores):
        order, (*inputs, out) = s.argsort(descending=True, stable=True), x.modules
        for f in inputs: f.weight.data = f.weight.data[order].contiguous()
        out.weight.data = out.weight.data[:, order].contiguous()
    return model

class Arms:
    def __init__(self, data):
        self.model, tokenizer = smollm2()
        text = texts(tokenizer, data)
        self.test, self.docs = text['test'][::2][:16], text['docs'][:8]
        self.read = batches(text['choose'], 8)                 # 16,384 tokens
        self.rows = batches(text['choose'], 2)                 # for gates
    def judged(self, model): return dict(test=losses(model, self.test), docs=losses(model, self.docs))
    def about(self, **more):
        return dict(seed=0, date=time.strftime('%Y-%m-%d'), transformers=transformers.__version__) | more
    def whole(self): return self.about(**self.judged(self.model))
    @cached_property
    def slopes(self): # (examples l n) of single neurons; those of a group are their sum
        found = []
        def method(heads, z): return found.append(gradients(heads, z)) or found[0].abs().sum(0)
        _, seconds = timed(score, hf.HFHeads(self.model, self.read[:8], 'neurons', 1), None, method)
        return found[0], seconds
    @cached_property
    def gram(self): return timed(repair.gram, hf.HFHeads(self.model, self.read, 'neurons', 1)) # serves all choices
    def removed(self, keep, seconds, heads=None): # mask of single neurons -> without repair and after least squares
        small, _ = timed(hf.remove_heads, self.model, keep, None, 'neurons')
        grams, read = self.gram
        with patch.object(repair, 'gram', lambda heads: grams): fitted, fit = timed(least_squares, hf.HFHeads(self.model, None, 'neurons', 1), keep, None)
        if heads is not None: small, fitted = (hf.remove_heads(net, heads) for net in (small, fitted))
        return self.about(seconds=dict(choose=seconds, least_squares=round(read + fit, 1)), kept=keep.sum(1).tolist(),
                          nothing=self.judged(small), least_squares=self.judged(fitted))
    def by_score(self, method, how, share):
        x, seconds = self.slopes
        def scored(x): return x.square().sum(0) if method == 'fisher' else x.abs().sum(0)
        if how == 'neighbours':
            keep = keep_mask(scored(x.unflatten(2, (24, 64)).sum(-1)), BLOCKS[share] / 46080).repeat_interleave(64, 1)
        else: keep = keep_mask(scored(x), BLOCKS[share] / 46080, multiple=dict(single=1, sorted16=16, sorted64=64)[how])
        return self.removed(keep, seconds)
    def by_gates(self, how, share):
        x, seconds = torch.zeros(30, 1536), 0
        if how == 'sorted64': x, seconds = self.slopes[0].square().sum(0), self.slopes[1]
        gates, trained = timed(hf.train_gates, order_by(smollm2()[0], x), self.rows, BLOCKS[share] / 46080, 'neurons', 64, steps=150, lr=.2)
        keep = gates.open_mask().repeat_interleave(64, 1)
        keep = torch.zeros_like(keep).scatter(1, x.argsort(descending=True, stable=True), keep)
        return self.removed(keep, round(seconds + trained, 1))
    def both(self): # heads and groups of neighbours; least squares on the neurons alone
        import json
        part = json.loads(PARTS.read_text())['parts']['both-both-0']
        keep = torch.tensor(part['runs'][0]['keep']).bool()
        h = hf.shape(self.model)[1]
        neurons = keep[:, h:].repeat_interleave(64, 1)
        return self.removed(neurons, part['seconds'], keep[:, :h])
    def whole_layers(self, share):
        x, seconds = timed(score, hf.HFHeads(self.model, self.read[:8], 'layers'), None, hf.influence)
        keep = keep_mask(x, share)
        return self.about(seconds=dict(choose=seconds), removed=(~keep[:, 0]).nonzero().flatten().tolist(), influence=x.flatten().tolist(),
                          nothing=self.judged(hf.remove_heads(self.model, keep, units='layers')))

def plan(arms): # the most telling first
    yield 'whole', arms.whole
    for share in BLOCKS: yield f'fisher-sorted16-{share}', lambda: arms.by_score('fisher', 'sorted16', share)
    yield 'both-0.1', arms.both
    yield 'fisher-neighbours-0.1', lambda: arms.by_score('fisher', 'neighbours', .1)
    yield 'layers-0.1', lambda: arms.whole_layers(.1)
    yield 'gates-neighbours-0.1', lambda: arms.by_gates('neighbours', .1)
    for how in ('single', 'sorted64'): yield f'fisher-{how}-0.1', lambda: arms.by_score('fisher', how, .1)
    yield 'layers-0.2', lambda: arms.whole_layers(.2)
    for share in BLOCKS: yield f'gradient-sorted16-{share}', lambda: arms.by_score('gradient', 'sorted16', share)
    yield 'gates-sorted64-0.1', lambda: arms.by_gates('sorted64', .1)

if __name__ == '__main__':
    data, folder, only = Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ['*'])[0]
    torch.set_num_threads(1)
    arms = Arms(data)
    for name, f in plan(arms):
        if not fnmatch(name, only): continue
        found = recorded(folder/f'{name}.json', f)
        print(time.strftime('%H:%M'), name, {k: [round(float(np.mean(x)), 4) for x in found[k].values()] for k in ('nothing', 'least_squares') if k in found}, flush=True)
