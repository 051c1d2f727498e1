"""Shared helpers of the experiments: runs, sweeps, result files"""

import hashlib, json, re, statistics, time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
import numpy as np, torch
from allatt_prune.engine.checkpoint import load, read, verify, write_file
from allatt_prune.engine.report import environment, markdown
from allatt_prune.engine.run import MODELS, pick_device, run
from allatt_prune.config import Recipe

SMALL = dict(corpus='pydocs', n_layer=1, d_model=32, n_persistent=16, seg_len=16, mem_len=16, batch=8,
             steps=20, warmup=2, prune_steps=20, prune_warmup=2, gate_steps=15, gate_lr=.3, lam_warmup=2,
             eval_tokens=2000)

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
    run(recipe, None, folder, resume=Path(folder).exists(), models=models, baseline=baseline, **dict(way=way) if way else {})
    return outcome(folder)

def provenance(script: str|Path|None, *texts: np.ndarray) -> dict[str, str]: # file; ids of the texts it reads
    "Date, CPU model, script and hashes (SHA-256) of a file of results."
    def sha(*parts): return hashlib.sha256(b''.join(parts)).hexdigest()
    info = Path('/proc/cpuinfo')
    lines = re.findall(r'(?:cpu family|model|model name|stepping)\s*:\s*(.+)', info.read_text()) if info.exists() else []
    about = dict(date=f'{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC', cpu=' / '.join(lines[:4]),
                 script=script and Path(script).name, script_sha256=script and sha(Path(script).read_bytes()),
                 text_sha256=texts and sha(*(np.asarray(t).tobytes() for t in texts)))
    return {k: x or 'not recorded' for k, x in about.items()}

def recorded(
    file: str|Path, make: Callable[[], dict], # JSON file; runs the experiment
    script: str|Path|None = None, texts: tuple = () # as for `provenance`
) -> dict: # its results, with environment (hardware, versions, commit) and seconds
    "Results from a file; if there is none, make them and write it."
    file, since = Path(file), time.monotonic()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        found = make()
        about = dict(environment=environment(pick_device('auto')), seconds=round(time.monotonic() - since),
                     provenance=provenance(script, *texts))
        write_file(file, (json.dumps(about | found) + '\n').encode())
    return json.loads(file.read_text(encoding='utf-8'))

def joint(parts: list[dict]) -> dict:
    "Environment and seconds of an experiment in several parts."
    environments = [p['environment'] for p in parts]
    about = {k: ', '.join(dict.fromkeys(x for e in environments for x in e[k].split(', '))) for k in environments[0]}
    seconds = [sum(s.values()) if isinstance(s := p.get('seconds', 0), dict) else s for p in parts]
    return dict(environment=about, seconds=round(sum(seconds)))

def made(found: dict) -> str:
    "Hardware, versions, commit and minutes of an experiment, in one line."
    minutes = dict(minutes=round(s / 60)) if (s := found['seconds']) else {} # 0: not recorded
    return '; '.join(f'{k} {x}' for k, x in (found['environment'] | minutes).items())

def by_seed(found: list[dict], model: str, lam: float|None = None) -> dict[int, dict]:
    "The row of a model in each seed; with a lambda, from its run, else from the last run that has it."
    runs = [f for f in found if lam in (None, f['recipe']['lam'])]
    return {f['recipe']['seed']: r for f in runs for r in f['rows'] if r['model'] == model}

# Student's t, 97.5 %, by seeds; of more than ten, that of ten
T = dict(zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)))

def interval(
    x: np.ndarray # paired differences (seeds, passages)
) -> np.ndarray: # (2,); of one seed only what passages vary, of one passage only what seeds vary
    "95 % interval of the mean: Student's t over the seeds and the normal quantile over the passages, added in squares."
    (seeds, passages), square = x.shape, 0.
    if max(seeds, passages) == 1: raise ValueError(f'x.shape={x.shape}: nothing varies; give seeds or passages')
    if seeds > 1: square += T[min(seeds, 10)]**2 * x.mean(1).var(ddof=1) / seeds
    if passages > 1: square += 1.96**2 * x.mean(0).var(ddof=1) / passages
    return x.mean() + np.array([-1, 1]) * square**.5

def passage_bits(passages: list) -> np.ndarray: # (..., passages, 2) nats and symbols; (..., passages)
    "Bits of each passage, over the mean number of symbols: their mean is the bits per symbol of the text."
    nats, n = np.moveaxis(np.asarray(passages, float), -1, 0)
    return nats / n.mean(-1, keepdims=True) / np.log(2)

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

def unclear(x: np.ndarray, note: str = ' (no clear difference)') -> str: # as for `interval`
    "A note if the interval includes 0."
    low, high = interval(x)
    return note if low <= 0 <= high else ''

def between(x: np.ndarray) -> str: # as for `interval`
    "An interval in words, which says where it includes 0."
    return '{:.3f} to {:.3f}'.format(*interval(x)) + unclear(x)

def short_costs(name: str, split: str = 'test') -> dict[str, np.ndarray]: # choice-after or choice-word; (seeds, lambdas)
    "Score of each choice of heads minus the control's, after 1,500 steps; of random heads the mean over the draws."
    found, cost = result(name), {}
    control = [c['rows'][1][split] for c in found['controls']]
    for x in found['runs']:
        by = cost.setdefault(x['arm'].split()[0], {})
        by.setdefault((x['seed'], x['lam']), []).append(x[split] - control[x['seed']])
    return {arm: np.reshape([np.mean(of[k]) for k in sorted(of)], (len(control), -1)) for arm, of in cost.items()}

def shares_saved(name: str, arm: str, split: str = 'test') -> np.ndarray: # (seeds, 1)
    "Share that a choice saves of what random heads cost, by seed."
    cost = short_costs(name, split)
    return 1 - cost[arm].sum(1, keepdims=True) / cost['random'].sum(1, keepdims=True)

def saved(name: str, arm: str, split: str = 'test') -> str:
    "Share saved and its interval over the seeds."
    x = shares_saved(name, arm, split)
    return '{:.0%} ({:.0f} to {:.0f})'.format(x.mean(), *(100 * interval(x)))

def which_method(experiments: str, brief: bool = False) -> str: # path of the folder of experiments
    "Which method to use, with the recorded numbers that say so, as a table; brief: of five rows."
    parts, refitted = result('pretrained')['parts'], {}
    for name in ('', '-default', '-random'):
        for model in ('smollm2', 'minilm'): refitted.setdefault(model, []).extend(result(f'pretrained/refitted{name}').get(model, ()))
    def nats(m): return np.array([r['test'] for r in refitted['smollm2'] if r['method'] == m]) # of SmolLM2 without a fifth of its groups
    def cosine(m): return np.array([r['cosine'] for r in refitted['minilm'] if r['method'] == m]) # of MiniLM without half of its heads
    def right(answers): return np.array([[*x] for x in answers], int)
    def half(m): return right([r['right'] for r in parts['minilm-classifier']['runs'] if (r['method'], r.get('rate')) == (m, .5)])
    def tuned(m, text): return np.array(parts[f'tuned-{m}-0.2'][text])[None]
    def bits(arm): return passage_bits([result(f'verdicts/{arm}-0.08-{seed}')['models']['pruned']['passages']['test'] for seed in range(3)])
    def lost(m): return nats(m).mean() - nats('whole').mean()
    draws = nats('random').mean(1) - nats('whole').mean()      # nats that random groups lose
    def cut(files, how='nothing', text='test'): # nats that SmolLM2 loses without 10 % of the parameters of its blocks, mean of the files
        return losses(files, how, text).mean() - np.mean(result('pretrained/neurons/whole')[text])
    def losses(files, how, text='test'): return np.array([result(f'pretrained/{x}')[how][text] for x in files])
    ours, llm_pruner = ['neurons/fisher-sorted16-0.1', 'healed/ours-1', 'healed/ours-2'], [f'healed/llm_pruner-{n}' for n in range(3)]
    mixture = ['healed/neurons-mixture-200']
    def healed(name, *seeds, text='test'): return cut([f'healed/{name}-{n}-200' for n in seeds or range(3)], 'healed', text)
    def more(name, *seeds, text='test'): # than ours, healed alike
        return np.subtract(*(losses([f'healed/{x}-{n}-200' for n in seeds or range(3)], 'healed', text) for x in (name, 'ours')))

    after, minutes = {r['method']: right([r['right']]) for r in parts['minilm-tuned']['tuned']}, f"{parts['score-leave_one_out']['seconds'] / 60:.0f} minutes"
    neurons = '`hf.prune`, which removes neurons', (
        f"without 10 % of the parameters of its blocks SmolLM2 loses {cut(ours, 'least_squares'):.2f} nats after least squares "
        f"(LLM-Pruner's criterion {cut(llm_pruner, 'least_squares'):.2f}{unclear(losses(llm_pruner, 'least_squares') - losses(ours, 'least_squares'), ', no clear difference')}; three seeds), with gates on heads and neurons {cut(['neurons/both-0.1'], 'least_squares'):.2f} (one seed), "
        f"without three whole layers {cut(['neurons/layers-0.1']):.2f} (as removed, neurons {cut(ours):.2f}); give text of each kind that it will read: on Python's reference it loses "
        f"{' to '.join(f'{x:.2f}' for x in sorted(cut([x], 'least_squares', 'docs') for x in ours)[::2])} if it saw WikiText only, and in the seed with the most {cut(mixture, 'before', 'docs'):.2f} "
        f"with a mixture that holds docstrings, which loses {cut(mixture, 'before'):.2f} on WikiText")
    choice, pretrained = (f'[{name}]({experiments}/{name}.ipynb)' for name in ('which_heads', 'pretrained'))
    a, b, seconds = 'choice-after', 'choice-word', 'gates if you have minutes, else *{}*'.format
    def less(*which): return saved(*which).split()[0] + ' less' + unclear(shares_saved(*which))
    apart = short_costs(a)['gates'] - short_costs(a)['leave_one_out']
    if brief: return markdown(['my model', 'use', 'because'], [
        ['All-attention, on characters', "the score `leave_one_out`, then train on, as in [Your own text](#your-own-text)",
         f"with 21 to 58 % of the heads removed, and 1,500 steps more, its heads cost {less(a, 'leave_one_out')} than random heads, those of gates {less(a, 'gates')}; between the two are {apart.mean():.3f} bits per character ({between(apart.mean(1, keepdims=True))}; {choice})"],
        ['All-attention, on words', "*rewound*: train gates on a copy, `train(copy, corpus, recipe, gates)` ([04_train](method/04_train.ipynb)); then `remove_heads(model, gates.open_mask())`, and train on",
         f"its heads cost {less(b, 'rewound')} than random heads ({saved(b, 'rewound').split('(')[1]}; those of `leave_one_out` {less(b, 'leave_one_out')} ({choice})"],
        ['from transformers, to remove parameters', '`hf.prune(model, batches, share)` removes neurons; give text of each kind that the model will read',
         f"without 8 % of its parameters, and healed, SmolLM2 loses {healed('ours'):.3f} nats (by LLM-Pruner's criterion {healed('llm_pruner'):.3f}{unclear(more('llm_pruner'), ', no clear difference')}; whole layers {healed('layers', 0):.3f}). "
         f"On a kind of text that it has not read, it loses {healed('ours', text='docs'):.2f}, more than these two; {cut(mixture, 'healed', 'docs'):.2f} if it has read that kind, too ({pretrained})"],
        ['from transformers, to remove heads', "`hf.prune(model, batches, share, 'heads', 'gates')` trains gates, for minutes",
         f"without a fifth of its groups (`share` .04), SmolLM2 loses {lost('gates'):.3f} nats, with `gradient`, the best score, {(nats('gradient') - nats('gates')).mean():.3f} more ({between(nats('gradient') - nats('gates'))}), "
         f"with random groups removed {min(draws):.2f} to {max(draws):.1f} (ten draws; {pretrained})"],
        ['the same, quicker', "`hf.prune(model, batches, share, 'heads')`: by the score `gradient`, or `output_difference` for encoders without labels",
         f"SmolLM2 loses {lost('gradient'):.3f}; without half of its heads (`share` .078), the vectors of MiniLM keep a cosine of {cosine('output_difference').mean():.3f}, with gates {cosine('gates').mean():.3f}"
         f"{unclear(cosine('gates') - cosine('output_difference'), ' (no clear difference)')}, with random heads removed {cosine('random').mean():.3f} ({pretrained})"]], text=3)
    return markdown(['my model', 'I have', 'use', 'because', 'see'], [
        ['All-attention, trained here', 'seconds', '*leave_one_out*, then 1,500 steps of fine-tuning',
         f"of what random heads cost it saves {saved(a, 'leave_one_out')} on characters, gates {saved(a, 'gates')}; on words "
         f"{saved(b, 'leave_one_out')} of test and {saved(b, 'leave_one_out', 'valid')} of validation text, gates {saved(b, 'gates')} and {saved(b, 'gates', 'valid')}", choice],
        ['', 'minutes', 'the same on characters; on words, heads that gates close in 2,400 earlier steps, then the weights of before (*rewound*)',
         f"words: they save {saved(b, 'rewound')} of test and {saved(b, 'rewound', 'valid')} of validation text", choice],
        ['', 'hours to train', '*leave_one_out* (tried on characters)',
         f"bits per character that it is better than gates after 12,000 steps: {between(bits('gates') - bits('leave_one_out'))}", choice],
        ['from transformers, to remove parameters', 'minutes', *neurons, pretrained],
        ['a decoder, to remove heads, and refit', 'seconds', '*gradient*',
         f"without a fifth of its groups SmolLM2 loses {lost('gradient'):.2f} nats, with random groups {np.median(draws):.2f} (median of ten draws)", pretrained],
        ['', 'minutes', 'gates', f"nats that it loses less than with *gradient*: {between(nats('gradient') - nats('gates'))}, "
         f"than with *leave_one_out*, which takes {minutes}: {between(nats('leave_one_out') - nats('gates'))}", pretrained],
        ['', 'hours to train', 'gates', f"one seed: *gradient* is {between(tuned('gates', 'test') - tuned('gradient', 'test'))} nats better on the text trained on, "
         f"{between(tuned('gradient', 'docs') - tuned('gates', 'docs'))} worse on another", pretrained],
        ['an encoder, to remove heads, and refit', 'seconds', '*output_difference*',
         f"without half of MiniLM's heads, cosine to the whole model {cosine('output_difference').mean():.2f}, random {cosine('random').mean():.2f}", pretrained],
        ['', 'minutes', 'gates', f"accuracy as a classifier above *leave_one_out*: {between(half('gates') - half('leave_one_out'))}; "
         f"cosine as an encoder: {between(cosine('gates') - cosine('leave_one_out'))}", pretrained],
        ['', 'hours to train', '*gradient*, the cheapest', f"one seed: accuracy of gates above it: {between(after['gates'] - after['gradient'])}", pretrained]], text=5)

BESIDE = dict(loc='center left', bbox_to_anchor=(1.02, .5), fontsize=8, frameon=False)
