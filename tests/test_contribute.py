"The five additions of the README's table, each made from outside the package."
import hashlib, zipfile
from dataclasses import replace
import pytest, torch
from torch import nn
from allatt_prune import get_recipe, load_corpus, train
from allatt_prune.engine import corpora
from allatt_prune.engine.run import WAYS, Way, run
from allatt_prune.gates import straight_through
from allatt_prune.importance import METHODS, keep_mask, score
from allatt_prune import LM

TOY = get_recipe('tiny', n_layer=2, d_model=32, n_head=4, n_persistent=8, seg_len=16, mem_len=16, batch=4, steps=6, warmup=1,
                 prune_steps=8, prune_warmup=1, gate_steps=6, lam_warmup=2, valid_every=0, log_every=1, eval_tokens=500)

class Threshold(nn.Module):
    "A weight per head, rounded."
    def __init__(self, n_layer, n_head):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, n_layer*n_head).view(n_layer, n_head))
    def forward(self): return straight_through(self.weight)
    def open_mask(self): return self.weight.detach() >= .5
    def freeze(self): return self.requires_grad_(False)
    def l0(self): return self.weight.sum()

def test_gates(tmp_path, monkeypatch):
    monkeypatch.setitem(WAYS, 'threshold', lambda recipe: Way(Threshold(recipe.n_layer, recipe.n_head)))
    r = replace(TOY, method='threshold')
    rows = run(r, None, tmp_path/'run')
    (heads,) = {x['heads'] for x in rows if x['model'] in ('gated', 'pruned')}
    assert 0 < heads < 8
    assert run(r, None, tmp_path/'run', resume=True) == rows                              # made again by its name

def test_a_score(monkeypatch):
    def last_heads(heads, z): return torch.arange(z.numel()).view(z.shape) # later heads matter more
    model, ids = LM(TOY.config(27)), torch.randint(27, (200,))
    monkeypatch.setitem(METHODS, 'last', last_heads)
    for method in (last_heads, 'last'):
        assert keep_mask(score(model, ids, method), .5).tolist() == [[False]*4, [True]*4]

def test_a_data_set(tmp_path, monkeypatch):
    text = 'one two buckle my shoe three four knock at the door ' * 20
    (tmp_path/'rhymes').mkdir()
    with zipfile.ZipFile(tmp_path/'rhymes'/'rhymes.zip', 'w') as f: f.writestr('rhymes.txt', text) # as if downloaded before
    sha256 = hashlib.sha256((tmp_path/'rhymes'/'rhymes.zip').read_bytes()).hexdigest()
    monkeypatch.setitem(corpora.SOURCES, 'rhymes', ('https://example.org/rhymes.zip', sha256, ['rhymes.txt']))
    corpus = load_corpus('rhymes', tmp_path)
    assert corpus.decode(corpus.train) == text[:len(corpus.train)] and corpus.unit == 'char'

def test_a_schedule():
    corpus = load_corpus('pydocs')
    records = train(LM(TOY.config(27)), corpus, TOY, lr=lambda step: 1e-3 / (1 + step))
    assert [r['lr'] for r in records] == [1e-3 / (1 + step) for step in range(6)]
    model, gates, seen = LM(TOY.config(27)), Threshold(2, 4), []
    def penalty(gates, step):
        seen.append(step)
        return .1 * step * gates.l0()
    train(model, corpus, TOY, gates, penalty=penalty)
    assert seen == list(range(TOY.gate_steps))

def test_an_architecture(tmp_path):
    transformers = pytest.importorskip('transformers')
    from allatt_prune import hf
    hf.add_architecture('phi', 'layers', 'self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense')
    whole = transformers.PhiForCausalLM(transformers.PhiConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    ids = torch.randint(31, (2, 12))
    keep = keep_mask(score(whole, [dict(input_ids=ids, labels=ids)], 'gradient'), .5)
    small = hf.remove_heads(whole, keep).eval()
    with torch.no_grad():
        with hf.masked(whole, keep.float()): masked = whole(ids).logits
        assert (small(ids).logits - masked).abs().max() < 1e-5
    small.save_pretrained(tmp_path/'small')
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path/'small').eval()
    assert torch.equal(again(ids).logits, small(ids).logits)
