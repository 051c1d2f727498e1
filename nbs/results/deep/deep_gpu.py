"""The same as deep.py with sixteen layers of width 256, for twelve minutes of a GPU: three seeds, 1,000 steps of each variant.

    python deep_gpu.py [--toy] [--minutes 12]

Each result is saved at once; what there is no time for is left out, and made when the script is started again."""
import argparse, logging, time
from dataclasses import replace
from pathlib import Path
import torch
import deep
from allatt_prune import get_recipe
from allatt_prune.engine.run import pick_device

# as deep.py: lambda is halved once more, as there are 128 heads, not 48, and the same total price
SHAPE = dict(n_layer=16, n_head=8, d_model=256, n_persistent=512, batch=32, steps=4_000, warmup=200, lam=.015, save_every=1_000)
SHORT = dict(prune_steps=1_000, prune_warmup=50, gate_steps=700, lam_warmup=150, gate_lr=.08, log_every=10)

# Written before the first run: nats of training loss above the control's in steps 1 to 120, and after that at most; a run is unstable if
# its loss ever rises by more than 1 nat above the control's after step 120.
PREDICTED = dict(start=dict(all=.1, warmup=.3, init=1.2, scale=.1), unstable='none')

if __name__ == '__main__':
    say = argparse.ArgumentParser()
    say.add_argument('--toy', action='store_true')
    say.add_argument('--minutes', type=float, default=12)
    given, since = say.parse_args(), time.monotonic()
    logging.basicConfig(format='%(asctime)s %(message)s', level=logging.INFO)
    deep.PREDICTED, device = PREDICTED, pick_device('auto')
    deep.environment = lambda _, about=deep.environment: about(device)
    if device == 'cuda': torch.set_float32_matmul_precision('high')
    jobs = []
    for seed in range(3):
        r = get_recipe('tiny-books', seed=seed, **SHAPE | SHORT, corpus='books8-small')
        if given.toy: r = replace(r, corpus='pydocs', **deep.TOY)
        base = Path(f'gpu-whole-{seed}/baseline')
        jobs += [(f'gpu-whole-{seed}', r, ('baseline',), None), (f'gpu-control-{seed}', r, ('baseline', 'control'), base)]
        jobs += [(f'gpu-{name}-{seed}', replace(r, **change), ('baseline', 'gated', 'pruned'), base) for name, change in deep.VARIANTS.items()]
    longest = 0
    for job in jobs:
        began = time.monotonic()
        if (began - since + longest) / 60 > given.minutes: break
        deep.do(*job, given.toy)
        longest = max(longest, time.monotonic() - began)
    logging.info(f'{sum(Path(f"{name}.json").exists() for name, *_ in jobs)} of {len(jobs)} results')
