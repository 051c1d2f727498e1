"Every way to choose heads meets the share that is asked for, at every seed, through interruptions."
from dataclasses import replace
import pytest, torch
from allatt_prune.config import RECIPES, SETTINGS, get_recipe
from allatt_prune.engine import resume
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.engine.run import Way, run, way
from allatt_prune.gates import HeadGates
from allatt_prune import LM
from allatt_prune.remove import remove_heads
from allatt_prune.targets import Target, TargetGates
from allatt_prune.training import train

TOY = get_recipe('tiny', n_layer=3, d_model=32, n_head=4, n_persistent=8, seg_len=16, mem_len=16, batch=4, steps=4, warmup=1,
                 prune_steps=24, prune_warmup=2, gate_steps=20, gate_lr=.3, lam_warmup=8, log_every=2, valid_every=0,
                 eval_tokens=500)

@pytest.fixture(scope='module')
def corpus(): return load_corpus('pydocs')

@pytest.mark.parametrize('sparsity', [.1, .5, .75])
def test_the_count_is_exact(corpus, sparsity):
    for seed in range(5):
        r = replace(TOY, sparsity=sparsity, seed=seed)
        mine = way(r)
        torch.manual_seed(seed)
        records = train(LM(r.config(27)), corpus, r, mine.gates, penalty=mine.penalty)
        assert int(mine.gates.open_mask().sum()) == 12 - round(12 * sparsity) == sum(records[-1]['open'])
        assert ((mine.gates() != 0) == mine.gates.open_mask()).all()

@pytest.mark.parametrize('rows', [[[1., 1, 1], [1, 1, 1]], [[-5., -4, -3], [-2, -1, -.5]], [[0., 0, 0], [-1, 1, 0]],
                                  [[1e4, -1e4, 3e-8], [2e-8, 0, -1e-9]]])
def test_freezing_at_a_number_whatever_the_gates_are(rows):
    for keep in range(7):
        gates = TargetGates(2, 3, keep)
        with torch.no_grad(): gates.log_alpha.copy_(torch.tensor(rows))
        best = torch.tensor(rows).flatten().sort(descending=True).values[:keep].sum()
        gates.freeze()
        assert int(gates.open_mask().sum()) == keep and torch.tensor(rows)[gates.open_mask()].sum() == best
        once = gates.log_alpha.clone()
        assert torch.equal(gates.freeze().log_alpha, once)                               # twice is once

def test_interrupted_it_ends_with_the_same_bits(corpus, tmp_path):
    r = replace(TOY, sparsity=.5, save_every=4)
    def go(folder, stop=None):
        torch.manual_seed(0)
        mine, model = way(r), LM(r.config(27))
        def after(s):
            if s.step == stop: raise resume.Stopped(15)
        resume.train_run(model, corpus, r, mine.gates, tmp_path/folder, after=after, penalty=mine.penalty, resume=True)
        parts = [m for m in (model, mine.gates, mine.penalty) if m is not None]
        return [x for m in parts for x in m.state_dict().values()]
    whole = go('a')
    for stop in (6, 14, 22):
        with pytest.raises(resume.Stopped): go('b', stop)
    assert all(torch.equal(x, y) for x, y in zip(whole, go('b'), strict=True))

def test_a_run_with_a_share_says_so_and_goes_on(tmp_path):
    for method, models in dict(gates=4, gradient=3).items():
        r = replace(TOY, method=method, sparsity=.25)
        rows = run(r, None, tmp_path/method)
        assert len(rows) == models and {x['heads'] for x in rows if x['model'] in ('gated', 'pruned')} == {9}
        assert '0.25' in (tmp_path/method/'report.md').read_text()
        assert run(r, None, tmp_path/method, resume=True) == rows

def test_the_multiplier_is_what_the_penalty_says():
    gates, target = HeadGates(2, 3, init=0.), Target(.75, 4, rate=.1, rho=2.)
    lam, first = 0., .5
    for step in range(6):
        e = first + (.75 - first) * min(1, step/4) - .5
        assert target(gates, step).item() == pytest.approx(6 * (lam*e + e**2), abs=1e-6)
        lam += .1 * e
    gates.log_alpha.grad = None
    target(gates, 9).backward()                                                          # (lambda_1 + rho e) times the slope of sigma
    assert gates.log_alpha.grad[0, 0].item() == pytest.approx((lam + 2*.25) * .25, rel=1e-5)

def test_heads_are_removed_to_the_number_also_before_gates_are_frozen():
    gates = TargetGates(3, 4, 5)
    assert sum(remove_heads(LM(TOY.config(27)), gates).cfg.layer_heads) == 5 and not gates.frozen

@pytest.mark.parametrize('wrong,said', [
    (dict(method='taylor'), 'sparsity=None'), (dict(sparsity=0), 'no head would go'), (dict(sparsity=.04), 'no head would go'),
    (dict(method='taylor', sparsity=.97), 'all heads would go'), (dict(sparsity=.97), 'all heads would go'),
    (dict(repair='least_squares'), 'for scores'), (dict(method='taylor', sparsity=.5, repair='magic'), 'give nothing or'), (dict(method='magic'), 'method=magic'),
    (dict(method='entropy', sparsity=.5, score_tokens=256), 'need 257')])
def test_contradictions_are_refused_before_training(wrong, said):
    with pytest.raises(ValueError, match=said): way(replace(TOY, **wrong))

def test_gates_of_another_kind_go_the_whole_way(tmp_path):
    class Plain(torch.nn.Module): # neither log_alpha nor open_prob
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        def forward(self): return torch.sigmoid(self.x) if self.x.requires_grad else self.open_mask().float()
        def open_mask(self): return self.x.detach() > 0
        def freeze(self): return self.requires_grad_(False)
    plain = lambda recipe: Way(Plain(), lambda gates, step: gates.x.sum() * 0)
    rows = run(TOY, None, tmp_path/'run', way=plain)
    heads = {x['model']: x['heads'] for x in rows}
    assert 0 < heads['gated'] == heads['pruned'] < heads['control'] == 12
    assert run(TOY, None, tmp_path/'run', way=plain, resume=True) == rows

def test_a_run_without_a_folder_takes_the_name_of_its_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = {k: getattr(TOY, k) for k in SETTINGS if getattr(TOY, k) != getattr(RECIPES['tiny'], k)}
    for recipe, name, changes in (('best', 'best', short), (TOY, 'tiny', {})):
        rows = run(recipe, 'pydocs', models=('baseline',), **changes)
        assert str(rows.run_dir) == f'runs/{name}'
        assert run(recipe, 'pydocs', models=('baseline',), resume=True, **changes) == rows
