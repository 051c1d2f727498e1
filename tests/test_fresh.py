"""Folders of pruned models in other tools, where this package cannot be imported.

FRESH_PYTHON names the Python of another environment; without it, a process of this one that hides the package."""
import os, subprocess, sys
from textwrap import indent
import pytest, torch
transformers = pytest.importorskip('transformers')
from tokenizers import Tokenizer, models, pre_tokenizers
from allatt_prune import hf
from test_hf import made

WORDS = 'heads of a model are not equal some carry more than others and can be removed'.split()
TEXTS = [' '.join(WORDS[i:i + n]) for i, n in ((0, 5), (3, 8), (1, 3), (6, 6))]
SIZES = dict(intermediate_size=64)

@pytest.fixture(scope='module')
def folders(tmp_path_factory): # (kind, units) -> folder of a model and its tokenizer, with what it gives
    home = tmp_path_factory.mktemp('fresh')
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(['<pad>', '<s>', '</s>', *WORDS])}, unk_token='<pad>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token='<pad>', bos_token='<s>', eos_token='</s>', unk_token='<pad>',
                                                     model_input_names=['input_ids', 'attention_mask'])
    x = tokenizer(TEXTS, padding=True, return_tensors='pt')
    for kind, task in (('bert', ''), ('bert', 'SequenceClassification'), ('llama', 'CausalLM')):
        model = made(kind, task=task, **SIZES)
        data = dict(x, labels=torch.tensor([0, 1, 0, 1])) if task.startswith('Seq') else dict(x)
        for units, share in (('neurons', .1), ('heads', .1), ('layers', .2)):
            small = hf.prune(model, data, share, units)
            if units == 'heads': small = hf.remove_heads(small, hf.units_left(small, 'heads', 4) & torch.tensor([[False], [True], [True]])) # an empty layer
            folder = home/f'{kind}-{task}-{units}'
            small.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            with torch.no_grad(): torch.save(small(**x)[0], folder/'want')
            torch.save(dict(x), folder/'x')
    return home

HEAD = '''
import sys, warnings, torch, transformers
from pathlib import Path
sys.modules['allatt_prune'] = None # cannot be imported
warnings.filterwarnings('ignore')
folder = Path(sys.argv[1])
def trust(path): return dict(trust_remote_code=True) if units != 'layers' else {} # an ordinary model needs none
def opened(auto, name):
    path = folder/f'{name}-{units}'
    return getattr(transformers, auto).from_pretrained(path, **trust(path)).eval(), torch.load(path/'x'), torch.load(path/'want'), path
def same(a, b, eps=1e-5): assert (torch.as_tensor(a) - b).abs().max() < eps, (torch.as_tensor(a) - b).abs().max()
'''
TOOLS = dict(
    transformers='''
with torch.no_grad(): same(encoder(**x)[0], want, 1e-9)
model, x, want, path = opened('AutoModelForSequenceClassification', 'bert-SequenceClassification')
with torch.no_grad(): same(model(**x)[0], want, 1e-9)
pipe = transformers.pipeline('text-classification', model=str(path), **trust(path))
found = pipe('heads of a model are', top_k=None)
assert abs(sum(row['score'] for row in found) - 1) < 1e-4 and abs(max(row['score'] for row in found) - want[0].softmax(-1).max()) < 1e-4

model, x, want, path = opened('AutoModelForCausalLM', 'llama-CausalLM')
ids = x['input_ids'][:1, :3]
with torch.no_grad():
    for _ in range(6): ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
for cache in ('dynamic', 'static'):
    found = model.generate(x['input_ids'][:1, :3], max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation=cache, eos_token_id=None)
    assert torch.equal(found, ids), (found, ids)

path = folder/f'llama-CausalLM-{units}'
pipe = transformers.pipeline('text-generation', model=str(path), **trust(path))
assert pipe('heads of', max_new_tokens=4, do_sample=False)[0]['generated_text'].startswith('heads of')
path = folder/f'bert--{units}'
found = transformers.pipeline('feature-extraction', model=str(path), **trust(path))('heads of a model are')
same(found, torch.load(path/'want')[:1, :5])''',
    sentence_transformers='''
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(str(path), **trust(path)) # adds the mean over tokens
real = x['attention_mask'][..., None]
same(model.encode(['heads of a model are']), ((want * real).sum(1) / real.sum(1))[:1])''',
    onnx='''
import onnxruntime
class Plain(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, input_ids, attention_mask): return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
torch.onnx.export(Plain(encoder), (x['input_ids'], x['attention_mask']), str(path/'model.onnx'), dynamo=True, verbose=False)
session = onnxruntime.InferenceSession(str(path/'model.onnx'))
same(session.run(None, {k: x[k].numpy() for k in ('input_ids', 'attention_mask')})[0], want, 1e-4)''',
    export='''
for model, x, want in ((encoder, x, want), opened('AutoModelForCausalLM', 'llama-CausalLM')[:3]):
    program = torch.export.export(model, (), dict(x, use_cache=False) if hasattr(model, 'lm_head') else dict(x))
    torch.export.save(program, path/'model.pt2')
    with torch.no_grad(): same(torch.export.load(path/'model.pt2').module()(**(dict(x, use_cache=False) if hasattr(model, 'lm_head') else x))[0], want)''')
NEEDS = dict(sentence_transformers=['sentence_transformers'], onnx=['onnx', 'onnxscript', 'onnxruntime'])
UNITS = '''
for units in ('neurons', 'heads', 'layers'):
    encoder, x, want, path = opened('AutoModel', 'bert-')
'''

@pytest.mark.parametrize('tool', TOOLS)
def test_a_folder_opens_without_this_package(tool, folders):
    for name in NEEDS.get(tool, ()): pytest.importorskip(name)
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'} | dict(HF_HOME=str(folders/'home'), HF_HUB_OFFLINE='1')
    found = subprocess.run([os.environ.get('FRESH_PYTHON', sys.executable), '-c', HEAD + UNITS + indent(TOOLS[tool], '    '), folders], capture_output=True, text=True, env=env)
    assert found.returncode == 0, found.stderr[-3000:]

def test_a_sentence_transformer_keeps_its_other_modules(folders, tmp_path):
    st, parts = (pytest.importorskip(f'sentence_transformers{part}') for part in ('', '.models'))
    whole = st.SentenceTransformer(str(folders/'bert--layers')) # adds a mean over tokens
    whole.append(parts.Normalize())
    batches, before = [dict(torch.load(folders/'bert--layers/x'))], torch.tensor(whole.encode(TEXTS))
    small = hf.prune(whole, batches, .15)
    assert [type(m) for m in small] == [type(m) for m in whole] and '\n' in small[0].auto_model.config.report
    gone = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in small.parameters())
    assert gone == whole[0].auto_model.num_parameters() - small[0].auto_model.num_parameters() > 0
    def distance(): return (torch.tensor(small.encode(TEXTS)) - before).square().sum()
    was = distance()
    assert hf.heal(small, whole, batches, 40, lr=1e-3) is small and 0 < distance() < was / 2
    assert torch.equal(torch.tensor(whole.encode(TEXTS)), before)
    small.save_pretrained(str(tmp_path))
    again = st.SentenceTransformer(str(tmp_path), trust_remote_code=True)
    assert torch.equal(torch.tensor(again.encode(TEXTS)), torch.tensor(small.encode(TEXTS))) and [type(m) for m in again] == [type(m) for m in whole]
