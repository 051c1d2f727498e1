"One number, whatever the number of streams and the length of segments."
import warnings
import pytest, torch
from allatt_prune.engine.checkpoint import build
from allatt_prune.engine.text import from_text
from allatt_prune.model import LMConfig
from allatt_prune.training import evaluate

CFG = dict(vocab=40, n_layer=2, d_model=16, n_head=2, n_persistent=4, seg_len=8, mem_len=8, cutoffs=[10, 20])

def make(**changes):
    torch.manual_seed(0)
    model = build(LMConfig(**CFG | changes)).double()
    with torch.no_grad():
        for p in model.parameters(): p.normal_(std=.5)
    return model, torch.randint(40, (503,)).numpy()

@pytest.mark.parametrize('seg_len', (1, 5, 64, 200, 900))
def test_segments(seg_len):
    (model, ids), (other, _) = make(), make(seg_len=seg_len)
    assert abs(evaluate(model, ids) - evaluate(other, ids)) < 1e-12

@pytest.mark.parametrize('batch', (1, 2, 3, 10, 100, 502))
def test_every_token_once(batch):
    model, ids = make()
    with torch.no_grad():
        for p in (*model.words.emb, model.words.clusters.weight): p.zero_()     # what is left is the biases: each word has a cost
    cost = -model.words.logits(torch.zeros(1, 16).double())[0]
    assert abs(evaluate(model, ids, batch=batch) - cost[torch.from_numpy(ids[1:])].mean()) < 1e-12

def test_pieces_begin_without_memory():
    model, ids = make()
    cut = [ids[:252], ids[251:]]                                                # 251 targets each; the second begins with a known symbol
    parts = [evaluate(model, part) for part in cut]
    assert abs(evaluate(model, ids, batch=2) - sum(parts) / 2) < 1e-12
    assert abs(evaluate(model, ids, batch=2) - evaluate(model, ids)) > 1e-6

def test_the_loss_of_a_short_text_is_said_to_be_coarse():
    text = from_text('one two buckle my shoe ' * 2_000)
    model = make(vocab=len(text.vocab), cutoffs=[])[0]
    with pytest.warns(UserWarning, match='^text=1,997 symbols: so few give a coarse loss') as said:
        evaluate(model, text.test[:1997])
    assert len(said) == 1 and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        evaluate(model, text.test[:2000]), evaluate(model, text.test[:1998], progress=False)
