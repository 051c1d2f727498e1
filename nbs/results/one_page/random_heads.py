"""The page against random heads: python random_heads.py SEED -> SEED.json, in about two minutes.
Runs the cells of one_page.ipynb up to the gated model with another seed, then trains the baseline for the same
300 steps with random heads closed from the first step: as many in each layer (twice), and as many in all.
Expected: random heads cost no more than those that gates close in most of nine cases."""
import copy, json, sys, time
from pathlib import Path
import torch
from allatt_prune.engine.report import environment
sys.path.append(str(Path(__file__).resolve().parents[2]/'experiments'))
from experiment import provenance

seed, since = int(sys.argv[1]), time.monotonic()
page = json.loads((Path(__file__).parent.parent.parent/'one_page.ipynb').read_text(encoding='utf-8'))['cells']
code = [''.join(c['source']) for c in page if c['cell_type'] == 'code']
code = [x for x in code if '#| code-fold' not in x and 'import allatt_prune' not in x]
names = {}
for cell in code: # training ends with the cell that makes the gated model; then `bits`
    if 'def milliseconds' in cell or 'def write' in cell: continue
    exec(cell.replace('torch.manual_seed(0)', f'torch.manual_seed({seed})'), names)

baseline, keep, bits, corpus = (names[k] for k in ('baseline', 'keep', 'bits', 'corpus'))
draw = torch.Generator().manual_seed(seed)
def in_each_layer(): return torch.stack([row[torch.randperm(len(row), generator=draw)] for row in keep])
def in_all(): return keep.flatten()[torch.randperm(keep.numel(), generator=draw)].view_as(keep)
masks = [('random, each layer', in_each_layer()), ('random, each layer', in_each_layer()), ('random, all layers', in_all())]
models = [('baseline', baseline, None), ('control', names['control'], None), ('gates', names['gated'], keep)]
for name, mask in masks:
    model = copy.deepcopy(baseline)
    with torch.enable_grad(): list(names['train'](model, mask.float() * 2 - 1, range(450, 750), peak=3e-3))
    models.append((name, model, mask))
rows = []
for name, model, mask in models:
    if mask is not None: model = names['remove'](model, mask, names['scaled'](mask.float()))
    found = {part: bits(model, corpus.test[a:b]) for part, (a, b) in dict(page=(60_000, 90_000), first=(0, 30_000)).items()}
    rows.append(dict(model=name, heads=None if mask is None else mask.sum(1).tolist(), bits=found))
    print(rows[-1], flush=True)
about = dict(environment=environment('cpu'), seconds=round(time.monotonic() - since), seed=seed,
             provenance=provenance(__file__, corpus.train, corpus.valid, corpus.test))
Path(f'{seed}.json').write_text(json.dumps(about | dict(rows=rows), indent=1) + '\n')
