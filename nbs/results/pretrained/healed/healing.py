"""SmolLM2 without 10 % of the parameters of its blocks, pruned and healed within 15 CPU minutes: on one kind of text, or on a mixture?

    PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=1 python healing.py DATA FOLDER [names, as in a shell]

DATA has wikitext-103/wiki.{valid,test}.tokens.xz, books-word/wiki.valid.tokens.xz and sentence_polarity.zip. Each arm is a file of FOLDER:
losses of 16 passages of 512 tokens of WikiText-103's test part (its own kind of text) and of 8 of Python's reference (another kind), before
and after `hf.heal`. The whole model is ../neurons/whole.json; the whole model tuned on WikiText is tuned-whole-0.2 of ../../pretrained.json.

The mixture: half of the rows are WikiText-103's validation part; the rest are docstrings of Python's standard library, film reviews, novels,
and text that the whole model writes itself, in equal parts. Python's reference is not in it; docstrings are its relatives. Scores read 96 rows of
128 tokens, least squares 192, healing 2 rows in a step. Embeddings are frozen, products in
bfloat16. CPU seconds are of one thread. Seed 0.

Trials before these runs (one seed, nats lost on validation text: 32 rows of WikiText, 5 passages of other parts of Python's reference, 16 rows of
novels; not recorded elsewhere): without healing, read by scores and least squares: 64 rows of WikiText .093 / .447 / .173; with 48 rows of docstrings,
reviews and novels .182 / .114 / .110; with 32 written ones .108 / .250 / .136; with both .176 / .103 / .098, so this one.
"""
import ast, sys, sysconfig, time
from fnmatch import fnmatch
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1]))
import lzma, random, zipfile, numpy as np, torch, transformers
from allatt_prune import hf
from allatt_prune.importance import keep_mask, score
from allatt_prune.repair import least_squares
from experiment import recorded
from jobs import batches, losses, plain, rows, smollm2, texts, timed
from peers import Arms as Peers

SHARE, ROWS, LENGTH = 6144 / 46080, 192, 128

class LLMPruner(Peers): # its criterion, on other text
    def __init__(self, few): self.few = few

def docstrings():
    found = set()
    for f in sorted(Path(sysconfig.get_path('stdlib')).glob('*.py')):
        for n in ast.walk(ast.parse(f.read_text(encoding='utf-8', errors='replace'))):
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and len(d := ast.get_docstring(n) or '') > 80: found.add(d)
    return sorted(found)

def reviews(data):
    with zipfile.ZipFile(data/'sentence_polarity.zip') as z:
        return sorted({x for n in z.namelist() if n.endswith(('.neg', '.pos')) for x in z.read(n).decode('latin-1').splitlines()})

def novels(data):
    text = plain(lzma.open(data/'books-word/wiki.valid.tokens.xz', 'rt').read())
    return [x for x in text.split('\n') if '<unk>' not in x and len(x) > 200]

def packed(tokenizer, found, n): # texts in a fixed random order -> n rows
    random.Random(0).shuffle(found)
    ids = []
    for x in found:
        ids += tokenizer(x + '\n')['input_ids']
        if len(ids) >= n*LENGTH: return rows(torch.tensor(ids), LENGTH)[:n]
    raise ValueError('too little text')

@torch.no_grad()
def written(model, tokenizer, n): # by the model itself, from its first token
    torch.manual_seed(0)
    start = torch.full((n, 1), tokenizer.bos_token_id)
    return model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=LENGTH - 1, min_new_tokens=LENGTH - 1,
                          do_sample=True, top_k=0, pad_token_id=0)

class Arms:
    def __init__(self, data, steps=200):
        self.steps, (self.whole, self.tokenizer) = steps, smollm2()
        text = texts(self.tokenizer, data)
        self.test, self.docs = text['test'][::2][:16], text['docs'][:8]
        self.own, n = torch.cat([text['choose'], text['tune']]), (ROWS + 2*steps) // 8
        kinds, self.seconds = timed(lambda: [packed(self.tokenizer, docstrings(), n), packed(self.tokenizer, reviews(data), n),
                                             packed(self.tokenizer, novels(data), n), written(self.whole, self.tokenizer, n)])
        other = torch.stack(kinds, 1).flatten(0, 1)            # one of each kind in turn
        self.mixture = torch.stack([self.own[:len(other)], other], 1).flatten(0, 1)
    def judged(self, model): return dict(test=losses(model, self.test), docs=losses(model, self.docs))
    def arm(self, units, text, steps, lr, peer=False):
        found = dict(wikitext=self.own, mixture=self.mixture)[text]
        few, read, tune = batches(found[:ROWS // 2], 8), batches(found[:ROWS], 8), batches(found[ROWS:ROWS + 2*steps], 2)
        def prune(): # as `hf.prune`, whose score would read all rows
            heads = hf.HFHeads(self.whole, few, units, 1)
            if units == 'layers': return heads.remove(keep_mask(score(heads, None, hf.influence), .1))
            scores = LLMPruner(few).llm_pruner() if peer else score(heads, None, hf.fisher)
            keep = keep_mask(scores, SHARE, multiple=16)
            return least_squares(hf.HFHeads(self.whole, read, units, 1), keep, None)
        small, seconds = timed(prune)
        before, small = self.judged(small), small.to(torch.float32)
        small.get_input_embeddings().requires_grad_(False)
        with torch.autocast('cpu', torch.bfloat16): _, heal = timed(hf.heal, small, self.whole, tune, steps, lr=lr, progress=False)
        return dict(seed=0, date=time.strftime('%Y-%m-%d'), transformers=transformers.__version__, units=units, text=text, steps=steps, rate=lr,
                    parameters=small.num_parameters(), seconds=dict(text=self.seconds, prune=seconds, heal=heal),
                    before=before, healed=self.judged(small.bfloat16()))

def plan(arms):
    yield 'neurons-mixture-200', lambda: arms.arm('neurons', 'mixture', 200, 4e-5)
    yield 'llm_pruner-mixture-200', lambda: arms.arm('neurons', 'mixture', 200, 4e-5, True) # the control

if __name__ == '__main__':
    data, folder, only = Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ['*'])[0]
    torch.set_num_threads(1)
    arms = Arms(data)
    for name, f in plan(arms):
        if not fnmatch(name, only): continue
        found = recorded(folder/f'{name}.json', f, __file__, (arms.test, arms.docs, arms.mixture))
        print(time.strftime('%H:%M'), name, {k: [round(float(np.mean(x)), 4) for x in found[k].values()] for k in ('before', 'healed')}, found['seconds'], flush=True)
