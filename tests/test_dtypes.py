"Losses, scores and teachers in half precision against float64 sums over the same numbers."
from contextlib import nullcontext
import pytest, torch, torch.nn.functional as F
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.engine.text import from_texts
from allatt_prune.distill import Distill
from allatt_prune.importance import METHODS, score
from allatt_prune.engine.checkpoint import build
from allatt_prune import LM, LMConfig
from allatt_prune.config import get_recipe
from allatt_prune.training import evaluate, train
from allatt_prune.engine.run import way

CFG = dict(vocab=40, n_layer=2, d_model=16, n_head=2, n_persistent=4, seg_len=8, mem_len=8)
HALF = pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16))
BANDS = pytest.mark.parametrize('cutoffs', ([], [10, 20]))

def make(dtype, cutoffs):
    torch.manual_seed(0)
    model = build(LMConfig(**CFG, cutoffs=cutoffs)).eval()
    with torch.no_grad():
        for p in model.parameters(): p.normal_(std=.5)
    return model.to(dtype), torch.randint(40, (200*128 + 1,))

@HALF
@BANDS
@pytest.mark.parametrize('batch', (1, 64, 200))
def test_evaluate(dtype, cutoffs, batch):
    model, ids = make(dtype, cutoffs)
    x, y = (a.view(batch, -1) for a in (ids[:-1], ids[1:]))
    total, mems = torch.zeros((), dtype=torch.float64), None
    with torch.no_grad():
        for i in range(0, x.shape[1], 128):
            logits, mems = model(x[:, i:i+128], None, mems)
            total += F.cross_entropy(logits.double().mT, y[:, i:i+128], reduction='sum')
    assert abs(evaluate(model, ids, batch=batch) - total / y.numel()) < 1e-5

@HALF
@BANDS
def test_teacher(dtype, cutoffs):
    (teacher, ids), (student, _) = make(dtype, cutoffs), make(dtype, cutoffs)
    x, y = ids[:2560].view(-1, 8), ids[1:2561].view(-1, 8)
    with torch.no_grad():
        for p in student.parameters(): p += .02 * torch.randn(p.shape).to(p)         # close to the teacher, so the KL is small
        loss, _, nll = Distill(teacher, .5)(student, x, y, None, None)
        p, q = (m(x)[0].double().log_softmax(-1) for m in (teacher, student))
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert 1e-3 < kl < .3 and abs(loss - (nll + kl) / 2) < 1e-5

@HALF
@pytest.mark.parametrize('method', METHODS)
def test_scores(dtype, method):
    model, ids = make(dtype, [])
    exact = score(make(dtype, [])[0].double(), ids[:1025], method)
    assert (score(model, ids[:1025], method) - exact).abs().max() < .02 * exact.abs().max()

TOY = dict(n_layer=2, d_model=32, n_head=4, n_persistent=16, seg_len=16, mem_len=16, batch=8, steps=4, warmup=1, prune_steps=4,
           prune_warmup=1, gate_steps=3, lam_warmup=2, log_every=1, dropout=.1, attn_dropout=.1)
SETTINGS = dict(plain={}, teacher=dict(teacher=.5), no_dropout=dict(prune_dropout=False), unscaled=dict(output_scale=False),
                sparsity=dict(sparsity=.5))

@pytest.mark.parametrize('setting', SETTINGS)
def test_training(setting):
    "In bfloat16 each step minimises what it minimises in float32."
    found, corpus = {}, load_corpus('pydocs')
    for dtype in ('float32', 'bfloat16'):
        recipe = get_recipe('tiny', **TOY | SETTINGS[setting], dtype=dtype)
        torch.manual_seed(0)
        model, teacher = (LM(recipe.config(27)) for _ in range(2))
        mine, more = way(recipe), dict(text_loss=Distill(teacher, recipe.teacher)) if recipe.teacher else {}
        found[dtype] = [x['loss'] for x in train(model, corpus, recipe, mine.gates, penalty=mine.penalty, **more)]
    assert found['float32'] == pytest.approx(found['bfloat16'], rel=.02) and len(found['float32']) == 4
    assert found['float32'] != found['bfloat16']

@pytest.mark.parametrize('fast', (True, False))
def test_each_step_of_training_inside_autocast_sees_the_one_before(fast):
    corpus = from_texts([['returns the value of the name ' * 100]])
    recipe, ends = get_recipe('tiny', **{k: x for k, x in CFG.items() if k != 'vocab'}, dropout=0., attn_dropout=0., dtype='bfloat16', steps=5, batch=4), []
    for outer in (False, True):
        torch.manual_seed(0)
        cfg = recipe.config(len(corpus.vocab))
        model = build(cfg) if fast else LM(cfg)
        with torch.autocast('cpu', torch.bfloat16) if outer else nullcontext(): train(model, corpus, recipe, progress=False)
        ends.append([*model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends))
