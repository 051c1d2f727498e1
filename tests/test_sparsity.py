"A share of the heads that is asked for is met, at every seed, for every kind of gates, through interruptions."
from dataclasses import replace
import pytest, torch
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.gates import HeadGates
from allatt_prune.importance import keep_mask
from allatt_prune.model import LM
from allatt_prune.config import get_recipe
from allatt_prune.remove import remove_heads
from allatt_prune.repair import chooser
from allatt_prune.engine.resume import Stopped, train as resumed
from allatt_prune.engine.run import run
from allatt_prune.experiment import finished
from allatt_prune.targets import Target, TargetGates, gates_for
from allatt_prune.train import train

TOY = get_recipe('tiny', n_layer=3, d_model=32, n_head=4, n_persistent=8, seg_len=16, mem_len=16, batch=4, steps=4, warmup=1,
                 prune_steps=24, prune_warmup=2, gate_steps=20, gate_lr=.3, lam_warmup=8, log_every=2, valid_every=0, eval_tokens=500)

@pytest.fixture(scope='module')
def corpus(): return load_corpus('pydocs')

@pytest.mark.parametrize('method', ['gates', 'subset'])
@pytest.mark.parametrize('sparsity', [.1, .25, .5, .75])
def test_the_count_is_exact(corpus, method, sparsity):
    for seed in range(5):
        r = replace(TOY, method=method, sparsity=sparsity, seed=seed)
        gates, how = gates_for(r)
        torch.manual_seed(seed)
        model = LM(r.config(27))
        records = train(model, corpus, r, gates, penalty=how.get('penalty'))
        assert int(gates.open_mask().sum()) == 12 - round(12 * sparsity) == sum(records[-1]['open'])
        assert ((gates() != 0) == gates.open_mask()).all()

@pytest.mark.parametrize('rows', [[[1., 1, 1], [1, 1, 1]], [[-5., -4, -3], [-2, -1, -.5]], [[0., 0, 0], [-1, 1, 0]], [[1e4, -1e4, 3e-8], [2e-8, 0, -1e-9]]])
def test_freezing_at_a_number_whatever_the_gates_are(rows):
    for keep in range(7):
        gates = TargetGates(2, 3, keep)
        with torch.no_grad(): gates.log_alpha.copy_(torch.tensor(rows))
        best = torch.tensor(rows).flatten().sort(descending=True).values[:keep].sum()
        gates.freeze()
        assert int(gates.open_mask().sum()) == keep and torch.tensor(rows)[gates.open_mask()].sum() == best
        once = gates.log_alpha.clone()
        assert torch.equal(gates.freeze().log_alpha, once)                               # twice is once
        plain = HeadGates(2, 3)
        plain.load_state_dict(gates.state_dict())
        assert torch.equal(plain.open_mask(), gates.open_mask())

@pytest.mark.parametrize('method', ['gates', 'subset'])
def test_interrupted_it_ends_with_the_same_bits(corpus, method, tmp_path):
    r = replace(TOY, method=method, sparsity=.5, save_every=4)
    def go(folder, stop=None, **how):
        torch.manual_seed(0)
        (gates, more), model = gates_for(r), LM(r.config(27))
        def after(t):
            if t.step == stop: raise Stopped(15)
        resumed(model, corpus, r, gates, tmp_path/folder, after=after, **more, **how)
        return [*model.state_dict().values(), *gates.state_dict().values(), *(p for m in more.get('keep', {}).values() for p in m.state_dict().values())]
    whole = go('a')
    for stop in (6, 14, 22):
        with pytest.raises(Stopped): go('b', stop, resume=True)
    assert all(torch.equal(x, y) for x, y in zip(whole, go('b', resume=True), strict=True))

def test_a_run_with_a_share_says_so_and_goes_on(tmp_path):
    for method in ('gates', 'subset'):
        r = replace(TOY, method=method, sparsity=.25)
        rows = run(r, None, tmp_path/method, gating=gates_for)
        assert {x['model']: x['heads'] for x in rows} == dict(baseline=12, gated=9, pruned=9, control=12)
        assert f'Sparsity 0.25, trained {method}' in (tmp_path/method/'report.md').read_text()
        assert run(r, None, tmp_path/method, resume=True, gating=gates_for) == rows

def test_the_multiplier_is_what_the_penalty_says():
    gates, target = HeadGates(2, 3, init=0.), Target(.75, 4, rate=.1, rho=2.)
    lam, first = 0., .5
    for step in range(6):
        e = first + (.75 - first) * min(1, step/4) - .5
        assert target(gates, step).item() == pytest.approx(6 * (lam*e + e**2), abs=1e-6)
        lam += .1 * e
    gates.log_alpha.grad = None
    target(gates, 9).backward()
    assert gates.log_alpha.grad[0, 0].item() == pytest.approx((lam + 2*.25) * .25, rel=1e-5)   # (lambda_1 + rho e) times the slope of sigma

def test_heads_are_removed_to_the_number_also_before_gates_are_frozen():
    torch.manual_seed(0)
    model, gates = LM(TOY.config(27)), TargetGates(3, 4, 5)
    small = remove_heads(model, gates)
    assert sum(small.cfg.layer_heads) == 5 and not gates.frozen

def test_bad_shares():
    for given in (dict(sparsity=.5), dict(sizes=[3, 5])):
        with pytest.raises(ValueError, match='for other gates; give targets.gates_for'): replace(TOY, **given).gates()
    for bad, said in ((dict(sparsity=1.2), 'sparsity=1.2: not a share'), (dict(sparsity=-.1), 'sparsity=-0.1'),
                      (dict(sizes=[0, 3]), r'sizes=\[0, 3\]: not different numbers of 12 heads')):
        with pytest.raises(ValueError, match=said): replace(TOY, **bad)
    with pytest.raises(ValueError, match='sparsity=0: method subset needs a share'): gates_for(replace(TOY, method='subset'))
    with pytest.raises(ValueError, match='sparsity=0: method taylor needs a share'): chooser(replace(TOY, method='taylor'))
    with pytest.raises(ValueError, match='keep=13: not a number of 12'): TargetGates(3, 4, 13)
    for method, ask in (('gates', gates_for), ('subset', gates_for), ('taylor', chooser)): # before any training
        with pytest.raises(ValueError, match='sparsity=0.97: all heads would go'): ask(replace(TOY, method=method, sparsity=.97))
    with pytest.raises(ValueError, match='sparsity=0.9: all heads would go'): chooser(replace(TOY, method='taylor', sparsity=.9, per_layer=True))
    for method, ask in (('gates', gates_for), ('subset', gates_for), ('taylor', chooser)):
        with pytest.raises(ValueError, match='sparsity=0.04: no head would go'): ask(replace(TOY, method=method, sparsity=.04))
    for f, x in dict(repair='least_squares', rounds=3, per_layer=True).items():
        with pytest.raises(ValueError, match=f'{f}={x}: only for heads that a score chooses'): chooser(replace(TOY, **{f: x}))
    for method, need in dict(taylor=129, leave_one_out=129, entropy=257).items():
        few = replace(TOY, method=method, sparsity=.5, score_tokens=need - 1)
        with pytest.raises(ValueError, match=f'score_tokens={need - 1}: 8 streams need {need}'): chooser(few)
        chooser(replace(few, score_tokens=need))
    chooser(replace(TOY, method='random', sparsity=.5, score_tokens=1))                      # reads nothing

def test_gates_of_another_kind_go_the_whole_way(tmp_path):
    class Plain(torch.nn.Module): # neither log_alpha nor open_prob
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        def forward(self): return torch.sigmoid(self.x) if self.x.requires_grad else self.open_mask().float()
        def open_mask(self): return self.x.detach() > 0
        def freeze(self): return self.requires_grad_(False)
    made = lambda recipe: (Plain(), dict(penalty=lambda gates, step: gates.x.sum() * 0))
    for _ in range(2): found = finished(TOY, tmp_path/'run', gating=made)
    heads = {x['model']: x['heads'] for x in found['rows']}
    assert 0 < heads['gated'] == heads['pruned'] < heads['control'] == 12
    assert 'pi' not in found and '(gates.png)' not in (tmp_path/'run'/'report.md').read_text()
