"""SmolLM2 without 10 % of the parameters of its blocks: ours and criteria of others, before and after equal healing.

    PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=1 python peers.py DATA FOLDER [names, as in a shell [seed [steps [percent]]]]

DATA has wikitext-103/wiki.{valid,test}.tokens.xz. Each arm is a file of FOLDER: losses of 16 passages of 512 tokens of WikiText-103's test part
and of 8 of Python's reference, as removed, after least squares, and (files named -200) after 200 steps of `hf.heal` of 2 x 128 tokens of the
validation part (embeddings frozen, products in bfloat16). Files named -200-20 are without 20 % of these parameters. The whole model, and ours, gates and layers before healing, are in ../neurons (whole, fisher-sorted16,
both, layers). Scores read 8,192 tokens of the validation part, least squares 16,384. A seed draws the rows that scores, least squares and healing
read. The arm torch_pruning needs torch-pruning 1.6.1. CPU seconds are of one thread of a busy machine.
Criteria of others are written from their formulas and choose among single neurons of all layers, or of each layer alike (uniform):

- llm_pruner (Ma et al. 2023): |weight x slope|, summed over the weights of a neuron.
- flap (An et al. 2024): variance of a neuron times the squared norm of its output weights, standardised in each layer. Without the bias.
- wanda_sp: norm of a neuron times the absolute sum of its output weights, uniform.
- magnitude: norm of a neuron's weights.
- torch_pruning: GroupTaylorImportance, channels of the MLPs, uniform.
- whole_tuned, ours_tuned: the whole model, and ours after least squares, tuned on the text itself for as many steps: the control of tuning.
- gates: heads and groups of 64 neighbouring neurons (../../pretrained.json, both-both). layers: `hf.prune(units='layers')`, as ShortGPT.

Predictions, written before the runs (nats lost on WikiText, as removed / after least squares / healed): ours .19 / .124 / .11, llm_pruner .23 / .155 /
.13, torch_pruning .28 / - / .17, gates .32 / - / .23, layers .34 / - / .20, flap 2 / .6, wanda_sp 6 / 3, magnitude 5 / 2. The order stays, but
layers pass gates. On Python's reference healing changes nothing by more than .03, but for layers and gates (.06 better).
"""
import copy, sys, time
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from unittest.mock import patch
sys.path.insert(0, str(Path(__file__).parents[1]))
import json, numpy as np, torch, transformers
from allatt_prune import hf, repair
from allatt_prune.hf_models import layers, units_of
from allatt_prune.importance import keep_mask, score
from experiment import recorded
from jobs import batches, losses, smollm2, texts, timed

SHARE, RATE = 6144 / 46080, 4e-5 # of healing
PARTS = Path(__file__).parents[2]/'pretrained.json'

def norms(heads): # -> (l n) of single neurons: sum of squares, variance over tokens
    found = {}
    def look(i, x):
        x = x.float()
        old = found.get(i, (0, 0, 0))
        found[i] = old[0] + len(x), old[1] + x.sum(0), old[2] + x.square().sum(0)
    with torch.no_grad(): heads.outputs(look)
    return torch.stack([q for _, _, q in found.values()]), torch.stack([q / n - (s / n)**2 for n, s, q in found.values()])

class Arms:
    def __init__(self, data, seed, steps=30, percent=10):
        self.steps, self.seed, self.part, (self.whole, tokenizer) = steps, seed, percent / 100, smollm2()
        self.share = self.part * 10 * SHARE                    # of all neurons
        text = texts(tokenizer, data)
        self.test, self.docs = text['test'][::2][:16], text['docs'][:8]
        choose, tune = text['choose'], text['tune'][:2*steps]
        if seed: # other rows
            x = text['tune'][torch.randperm(len(text['tune']), generator=torch.Generator().manual_seed(seed))]
            choose, tune = x[:128], x[128:128 + 2*steps]
        self.few, self.read, self.tune = batches(choose[:64], 8), batches(choose, 8), batches(tune, 2)
    def judged(self, model): return dict(test=losses(model, self.test), docs=losses(model, self.docs))
    def healed(self, small):
        small = small.to(torch.float32)
        small.get_input_embeddings().requires_grad_(False)
        with torch.autocast('cpu', torch.bfloat16):
            _, seconds = timed(hf.heal, small, self.whole, self.tune, self.steps, lr=RATE, progress=False)
        return self.judged(small.bfloat16()), seconds
    def about(self, small, seconds, heal, **more):
        found = dict(seed=self.seed, date=time.strftime('%Y-%m-%d'), transformers=transformers.__version__,
                     steps=self.steps, rate=RATE, parameters=small.num_parameters(), seconds=seconds) | more
        if heal: found['healed'], seconds['heal'] = self.healed(small)
        return found
    @cached_property
    def gram(self): return timed(repair.gram, hf.HFHeads(self.whole, self.read, 'neurons', 1))
    def neurons(self, scored, heal=True, uniform=False, before=True): # function -> (l n) scores
        x, seconds = timed(scored)
        keep = keep_mask(x, self.share, multiple=16)
        if uniform: keep = torch.zeros_like(keep).scatter(1, x.topk(round(1536 * (1 - self.share) / 16) * 16).indices, True)
        grams, read = self.gram
        with patch.object(repair, 'gram', lambda heads: grams): small, fit = timed(repair.least_squares, hf.HFHeads(self.whole, None, 'neurons', 1), keep, None)
        found = dict(kept=keep.sum(1).tolist())
        if before: found |= dict(nothing=self.judged(hf.remove_heads(self.whole, keep, units='neurons')), least_squares=self.judged(small))
        return self.about(small, dict(choose=seconds, least_squares=round(read + fit, 1)), heal, **found)
    def ours(self): return score(hf.HFHeads(self.whole, self.few, 'neurons', 1), None, hf.fisher)
    @cached_property
    def sloped(self): # float32, with slopes of the mean loss
        net, _ = smollm2(torch.float32)
        with torch.autocast('cpu', torch.bfloat16):
            for x in self.few: net(**x).loss.backward()
        return net
    def rows(self, name): return [(f.weight, f.weight.grad) for x in layers(self.sloped) for f in [getattr(x.mlp, name)]]
    def llm_pruner(self):
        found = 0
        for name, dim in (('gate_proj', 1), ('up_proj', 1), ('down_proj', 0)):
            found = found + torch.stack([(w * g).abs().sum(dim).detach() for w, g in self.rows(name)])
        return found
    def out(self): return torch.stack([x.mlp.down_proj.weight.detach().float() for x in layers(self.whole)]) # (l c n)
    def wanda_sp(self): return norms(hf.HFHeads(self.whole, self.few, 'neurons', 1))[0].sqrt() * self.out().abs().sum(1)
    def flap(self):
        x = norms(hf.HFHeads(self.whole, self.few, 'neurons', 1))[1] * self.out().square().sum(1)
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    def magnitude(self):
        return sum(torch.stack([getattr(x.mlp, name).weight.detach().float().square().sum(dim) for x in layers(self.whole)])
                   for name, dim in (('gate_proj', 1), ('up_proj', 1), ('down_proj', 0))).sqrt()
    def torch_pruning(self):
        import torch_pruning as tp
        net = copy.deepcopy(self.sloped)
        for p, q in zip(net.parameters(), self.sloped.parameters()): p.grad = q.grad
        net.set_attn_implementation('eager')
        net.config.use_cache = False
        mlp = {f for x in layers(net) for f in (x.mlp.gate_proj, x.mlp.up_proj)}
        def prune():
            pruner = tp.pruner.MetaPruner(net, self.few[0]['input_ids'][:1], tp.importance.GroupTaylorImportance(), pruning_ratio=self.share, round_to=16,
                                          ignored_layers=[f for f in net.modules() if isinstance(f, torch.nn.Linear) and f not in mlp],
                                          output_transform=lambda out: out.logits.sum(), forward_fn=lambda m, x: m(input_ids=x))
            pruner.step()
        _, seconds = timed(prune)
        net.set_attn_implementation('sdpa')
        net = net.bfloat16()
        return self.about(net, dict(choose=seconds), True, widths=[x.mlp.down_proj.in_features for x in layers(net)], nothing=self.judged(net))
    def gates(self):
        part = json.loads(PARTS.read_text())['parts'][f'both-both-{self.seed}']
        small = hf.remove_heads(self.whole, torch.tensor(part['runs'][0]['keep']), units='both')
        return self.about(small, dict(choose=part['seconds']), True)
    def tuned(self, small): # on the text itself, with the schedule of `hf.heal`
        optimizer = torch.optim.AdamW(small.parameters(), lr := RATE, weight_decay=0.)
        small.get_input_embeddings().requires_grad_(False)
        def tune():
            for step in range(self.steps):
                optimizer.param_groups[0]['lr'] = lr * min(1, (step + 1) / 20) * (1 - step / self.steps)
                x = self.tune[step % len(self.tune)]
                with torch.autocast('cpu', torch.bfloat16): loss = small(**x).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        _, seconds = timed(tune)
        return self.about(small, dict(tune=seconds), False, tuned=self.judged(small.bfloat16()))
    def whole_tuned(self): return self.tuned(smollm2(torch.float32)[0])
    def ours_tuned(self):
        keep = keep_mask(self.ours(), self.share, multiple=16)
        return self.tuned(repair.least_squares(hf.HFHeads(self.whole, self.read, 'neurons', 1), keep, None).to(torch.float32))
    def layers(self):
        x, seconds = timed(score, hf.HFHeads(self.whole, self.few, 'layers'), None, hf.influence)
        keep = keep_mask(x, self.part)
        small = hf.remove_heads(self.whole, keep, units='layers')
        found = dict(nothing=self.judged(small)) if self.part > .1 else {}
        return self.about(small, dict(choose=seconds), True, **found, removed=(~keep[:, 0]).nonzero().flatten().tolist())

def plan(arms): # the most telling first
    new = arms.steps == 30 or arms.part > .1                   # no record of these without healing
    yield 'ours', lambda: arms.neurons(arms.ours, before=new and (arms.seed > 0 or arms.part > .1))
    yield 'layers', arms.layers
    yield 'llm_pruner', lambda: arms.neurons(arms.llm_pruner, before=new)
    yield 'gates', arms.gates
    yield 'torch_pruning', arms.torch_pruning
    yield 'flap', lambda: arms.neurons(arms.flap, before=new)
    yield 'whole_tuned', arms.whole_tuned
    yield 'ours_tuned', arms.ours_tuned
    yield 'wanda_sp', lambda: arms.neurons(arms.wanda_sp, heal=False, uniform=True)
    yield 'magnitude', lambda: arms.neurons(arms.magnitude, heal=False)

if __name__ == '__main__':
    data, folder, only, seed, steps, percent = sys.argv[1:] + ['*', 0, 30, 10][len(sys.argv) - 3:]
    data, folder, seed, steps, percent = Path(data), Path(folder), int(seed), int(steps), int(percent)
    torch.set_num_threads(1)
    arms = Arms(data, seed, steps, percent)
    for name, f in plan(arms):
        if not fnmatch(name, only): continue
        found = recorded(folder/f'{name}-{seed}{"" if steps == 30 else f"-{steps}"}{"" if percent == 10 else f"-{percent}"}.json', f, __file__, (arms.test, arms.docs))
        print(time.strftime('%H:%M'), name, {k: [round(float(np.mean(x)), 4) for x in found[k].values()]
                                             for k in ('nothing', 'least_squares', 'healed', 'tuned') if k in found}, flush=True)
