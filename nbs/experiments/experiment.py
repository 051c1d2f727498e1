"""Shared helpers of the experiments: runs, sweeps, result files"""

import json, os, statistics, time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from allatt_prune.engine.checkpoint import load, read, verify, write_file
from allatt_prune.engine.report import markdown
from allatt_prune.engine.run import MODELS, pick_device, run
from allatt_prune.engine.report import environment
from allatt_prune.config import Recipe

SMALL = dict(corpus='pydocs', n_layer=1, d_model=32, n_persistent=16, seg_len=16, mem_len=16, batch=8,
             steps=20, warmup=2, prune_steps=20, prune_warmup=2, gate_steps=15, gate_lr=.3, lam_warmup=2,
             eval_tokens=1000)

def outcome(run_dir: str|Path) -> dict: # its report; curves: step, loss, expected open heads; final pi
    "Summary of a finished run."
    verify(run_dir)
    found, curves = json.loads((Path(run_dir)/'report.json').read_bytes()), {}
    for r in map(json.loads, read(run_dir, 'metrics.jsonl').splitlines()):
        opened = [round(sum(map(sum, r['open_prob'])), 2)] if 'open_prob' in r else []
        curves.setdefault(r['phase'], []).append([r['step'], round(r['loss'], 4), *opened])
    gates = load(Path(run_dir)/'gated')[1]['gates'] if 'gated' in curves else {}
    found['curves'], pi = curves, gates.get('log_alpha')
    if pi is not None: found['pi'] = [[round(x, 3) for x in row] for row in pi.tolist()]
    return found

def finished(
    recipe: Recipe, folder: str|Path, models: tuple = MODELS, # as for `run`
    baseline: str|Path|None = None, way: Callable|None = None # as for `run`; None: the recipe's own way
) -> dict:
    "The `outcome` of a run that is started, resumed, or only read."
    more = dict(way=way) if way else {}
    run(recipe, None, folder, resume=Path(folder).exists(), models=models, baseline=baseline, **more)
    return outcome(folder)

def recorded(
    file: str|Path, make: Callable[[], dict] # JSON file; runs the experiment
) -> dict: # its results, with environment (hardware, versions, commit) and seconds
    "Results from a file; if there is none, make them and write it."
    file, since = Path(file), time.monotonic()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        found = make()
        seconds = round(time.monotonic() - since)
        about = dict(environment=environment(pick_device('auto')), seconds=seconds)
        write_file(file, (json.dumps(about | found) + '\n').encode())
    return json.loads(file.read_text(encoding='utf-8'))

def joint(parts: list[dict]) -> dict:
    "Environment and seconds of an experiment in several parts."
    environments = [p['environment'] for p in parts]
    about = {k: ', '.join(dict.fromkeys(e[k] for e in environments)) for k in environments[0]}
    seconds = [sum(s.values()) if isinstance(s := p['seconds'], dict) else s for p in parts]
    return dict(environment=about, seconds=round(sum(seconds)))

def peak_memory(job: Callable[[], object]) -> float: # MiB
    "Most memory that PyTorch adds while a job runs once on a CPU."
    os.environ.setdefault('KINETO_LOG_LEVEL', '6') # no messages from the profiler
    with torch.autograd.profiler.profile(profile_memory=True) as seen: job()
    sizes = [e.nbytes() for e in seen.kineto_results.events() if e.name() == '[memory]']
    return float(np.cumsum(sizes).max(initial=0)) / 2**20

def made(found: dict) -> str:
    "Hardware, versions, commit and minutes of an experiment, in one line."
    about = found['environment'] | dict(minutes=round(found['seconds']/60))
    return '; '.join(f'{k} {x}' for k, x in about.items())

def sweep(
    recipe: Recipe, folder: str|Path, # the folder gets a run directory per seed and lambda
    lams: list[float], # the run of the first one also makes the seed's baseline and control
    seeds: list[int] = (0,),
    baseline: str|None = None # trained model to start from, {seed} in place of the seed; None: train one
) -> dict: # environment, seconds; runs: the `outcome` of each
    "Baseline, control, and models pruned with several lambdas. Paper, Tables 1 and 2."
    found = []
    for seed in seeds:
        models, start = MODELS, baseline and baseline.format(seed=seed)
        for lam in map(float, lams):
            run_dir = Path(folder)/f'{seed}-{lam}'
            found.append(finished(replace(recipe, seed=seed, lam=lam), run_dir, models, start))
            if models == MODELS: models, start = ('baseline', 'gated', 'pruned'), run_dir/'baseline'
    return joint(found) | dict(runs=found)

def by_seed(found: list[dict], model: str, lam: float|None = None) -> dict[int, dict]:
    "The row of a model in each seed; with a lambda, from its run, else from the last run that has it."
    runs = [f for f in found if lam in (None, f['recipe']['lam'])]
    return {f['recipe']['seed']: r for f in runs for r in f['rows'] if r['model'] == model}

def interval(
    x: np.ndarray, n: int = 10_000 # paired differences (seeds, passages); draws
) -> np.ndarray: # (2,)
    "95 % bootstrap interval of the mean: seeds and passages are drawn again, with replacement."
    g = np.random.default_rng(0)
    rows, columns = g.integers(len(x), size=(n, len(x))), g.integers(x.shape[1], size=(n, x.shape[1]))
    return np.percentile([x[r][:, c].mean() for r, c in zip(rows, columns)], [2.5, 97.5])

def passage_bits(passages: list) -> np.ndarray: # (..., 2) nats and symbols of each passage; (...)
    "Bits per symbol of each passage."
    nats, n = np.moveaxis(np.asarray(passages, float), -1, 0)
    return nats / n / np.log(2)

def by_t(x: np.ndarray) -> np.ndarray: # of three seeds, as for `interval`; (2,)
    "95 % interval of the mean by Student's t over the seeds."
    assert len(x) == 3 # 4.303 is for two degrees of freedom
    m = x.mean(1)
    return m.mean() + np.array([-1, 1]) * 4.303 * m.std(ddof=1) / 3**.5

def each(xs: list[float], form: str) -> str: # format of a number, as for `format`
    "Mean ± standard deviation of three seeds or more; mean and both values of two."
    mean, *values = [format(x, form) for x in (statistics.mean(xs), *xs)]
    if len(set(xs)) == 1: return mean
    if len(xs) == 2: return f"{mean} ({', '.join(values)})"
    return f"{mean} ± {format(statistics.stdev(xs), form.lstrip('+'))}"

def arm_costs(
    gates: list[dict], # the `outcome` of each gated run; some have the control
    others: list[dict], # results of other choices: arm, lam, seed, keep (l h), valid, test
    split: str = 'test' # or 'valid'
) -> dict: # by arm and lambda, then by seed: share of heads removed, score minus the control's
    "Cost of trained gates and of other choices of heads."
    control, out = by_seed(gates, 'control'), {}
    mine = [dict(r, **f['recipe'], arm='gates', keep=f['keep'])
            for f in gates for r in f['rows'] if r['model'] == 'pruned']
    for x in mine + others:
        lost = x[split] - control[x['seed']][split]
        out.setdefault((x['arm'], x['lam']), {})[x['seed']] = 1 - float(np.mean(x['keep'])), lost
    return out

def result(name: str): # name of a file of results, without .json
    return json.loads((Path(__file__).parent.parent/f'results/{name}.json').read_text(encoding='utf-8'))
def between(x: np.ndarray) -> str: return '{:.3f} to {:.3f}'.format(*interval(x))

def saved(name: str, arm: str) -> str: # of choice
    "Share saved of what random heads cost, after 1,500 steps, and in how many cases."
    found, cost = result(name), {}
    control = [c['rows'][1]['test'] for c in found['controls']]
    for x in found['runs']: cost.setdefault((x['arm'].split()[0], x['seed'], x['lam']), []).append(x['test'] - control[x['seed']])
    seeds, lams = (sorted({k[i] for k in cost}) for i in (1, 2))
    mine, chance = (np.array([[np.mean(cost[a, s, lam]) for lam in lams] for s in seeds]) for a in (arm, 'random'))
    return f'{1 - (mine.sum(1) / chance.sum(1)).mean():.0%} (less in {(mine < chance).sum()} of {mine.size} cases)'

def verdict_bits(arm: str) -> np.ndarray: # (seeds, passages)
    "Bits of the pruned models of three seeds, trained on for 12,000 steps."
    found = [result(f'verdicts/{arm}-0.08-{seed}') for seed in range(3)]
    return passage_bits([x['models']['pruned']['passages']['test'] for x in found])

def which_method(experiments: str, brief: bool = False) -> str: # path of the folder of experiments
    "Which method to use, with the recorded numbers that say so, as a table; brief: of three rows."
    parts = result('pretrained')['parts']
    def decoder(m): return np.array([r['test'] for p in parts.values() for r in p.get('runs', ()) if (r['method'], r.get('rate')) == (m, .2) and 'test' in r])
    def encoder(m): return np.array([r['cosine'] for r in parts['minilm-encoder']['runs'] if (r['method'], r['rate']) == (m, .5)])
    def right(x): return np.array([*x['right']], int)[None]
    def correct(m): return np.concatenate([right(r) for r in parts['minilm-classifier']['runs'] if (r['method'], r.get('rate')) == (m, .5)])
    def tuned(m, text): return np.array(parts[f'tuned-{m}-0.2'][text])[None]
    after = {r['method']: right(r) for r in parts['minilm-tuned']['tuned']}
    whole = np.mean(parts['whole']['runs'][0]['test'])

    choice, pretrained = (f'[{name}]({experiments}/{name}.ipynb)' for name in ('choice', 'pretrained'))
    a, b, share = 'choice-after', 'choice-word', lambda *which: saved(*which).split()[0]
    if brief: return markdown(['my model', 'use', 'because'], [
        ['All-attention, trained here', '*leave_one_out*, then fine-tune',
         f"on characters, its heads cost {share(a, 'leave_one_out')} less than random heads, those of gates {share(a, 'gates')} less (after 1,500 steps of fine-tuning); on words neither is sure to help ({choice})"],
        ['a decoder from transformers', 'gates if you have minutes, else *gradient*',
         f"without a fifth of its groups SmolLM2 loses {decoder('gates').mean() - whole:.3f} nats with gates, {decoder('gradient').mean() - whole:.2f} with *gradient*, {decoder('random').mean() - whole:.1f} with random groups (*leave_one_out*: {decoder('leave_one_out').mean() - whole:.2f}, but in {parts['score-leave_one_out']['seconds'] / 60:.0f} minutes; {pretrained})"],
        ['an encoder', 'gates if you have minutes, else *output_difference*',
         f"without half of MiniLM's heads, the cosine to the whole model is {encoder('gates').mean():.2f}, {encoder('output_difference').mean():.2f}, and {encoder('random').mean():.2f} with random heads ({pretrained})"]], text=3)
    rows = [
        ['All-attention, trained here', 'seconds', '*leave_one_out*, then 1,500 steps of fine-tuning',
         f"it has saved {saved(a, 'leave_one_out')} of what random heads cost on characters, gates {saved(a, 'gates')}; "
         f"on words {saved(b, 'leave_one_out')} and {saved(b, 'gates')}, so neither is sure to help there", choice],
        ['', 'minutes', 'the same on characters; on words, heads that gates close in 2,400 earlier steps, then the weights of before (*rewound*)',
         f"words: they save {saved(b, 'rewound')}", choice],
        ['', 'hours to train', '*leave_one_out* (tried on characters)',
         f"after 12,000 steps it is {between(verdict_bits('gates') - verdict_bits('leave_one_out'))} bits per character better than gates", choice],
        ['a decoder from transformers', 'seconds', '*gradient*',
         f"without a fifth of its groups SmolLM2 loses {decoder('gradient').mean() - whole:.2f} nats, with random groups {decoder('random').mean() - whole:.1f}", pretrained],
        ['', 'minutes', 'gates', f"it loses {between(decoder('leave_one_out') - decoder('gates'))} nats less than with *leave_one_out*, the best score", pretrained],
        ['', 'hours to train', 'gates', f"one seed: *gradient* is {between(tuned('gates', 'test') - tuned('gradient', 'test'))} nats better on the text trained on, "
         f"{between(tuned('gradient', 'docs') - tuned('gates', 'docs'))} worse on another", pretrained],
        ['an encoder', 'seconds', '*output_difference*',
         f"without half of MiniLM's heads, cosine to the whole model {encoder('output_difference').mean():.2f}, random {encoder('random').mean():.2f}", pretrained],
        ['', 'minutes', 'gates', f"accuracy {between(correct('gates') - correct('leave_one_out'))} above *leave_one_out* as a classifier; "
         f"as an encoder cosine {encoder('gates').mean():.2f} and {encoder('leave_one_out').mean():.2f}", pretrained],
        ['', 'hours to train', '*gradient*, the cheapest', f"one seed: after it, gates are {between(after['gates'] - after['gradient'])} more accurate: no clear difference", pretrained]]
    return markdown(['my model', 'I have', 'use', 'because', 'see'], rows, text=5)

BESIDE = dict(loc='center left', bbox_to_anchor=(1.02, .5), fontsize=8, frameon=False)
