"Scores, masks and repairs where they can break: other kinds of models, whole layers gone, texts that are too short."
import copy, math
import pytest, torch
from allatt_prune.engine.checkpoint import build
from allatt_prune.gates import HeadGates
from allatt_prune.importance import METHODS, attention_statistics, keep_mask, score, tokens_needed
from allatt_prune.model import LMConfig
from allatt_prune.remove import remove_heads
from allatt_prune.repair import REPAIRS
from allatt_prune.targets import TargetGates
from allatt_prune.training import evaluate

KINDS = dict(plain={}, xl=dict(n_persistent=0, d_ff=16), words=dict(vocab=40, cutoffs=[10, 20]),
             memoryless=dict(mem_len=0), short=dict(mem_len=3), long=dict(mem_len=20))
DTYPES = dict(double=dict(dtype=torch.float64), half=dict(dtype=torch.bfloat16))
IDS = torch.randint(9, (600,), generator=torch.Generator().manual_seed(0)).numpy()
KEEP = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()

def model(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    usual = dict(vocab=9, n_layer=3, d_model=16, n_head=4, n_persistent=6, seg_len=8, mem_len=8)
    return build(LMConfig(**usual | changes)).to(dtype)

def same(a, b): # two models, bit by bit
    a, b = a.state_dict(), b.state_dict()
    return {*a} == {*b} and all(torch.equal(x, b[name]) for name, x in a.items())

@pytest.mark.parametrize('changes', (KINDS | DTYPES).values(), ids=KINDS | DTYPES)
def test_every_method_scores_every_kind_of_model(changes):
    net, z = model(**changes).train(), torch.ones(3, 4)
    before, z[1, 2] = copy.deepcopy(net), 0
    for method in METHODS:
        if method == 'persistent' and not net.cfg.n_persistent:
            with pytest.raises(ValueError, match='scores: all equal'): score(net, IDS, method, batch=4)
            continue
        found = score(net, IDS, method, batch=4)
        assert found.shape == (3, 4) and found.isfinite().all() and not found.requires_grad
        assert torch.equal(found, score(net, IDS, method, batch=4))
        assert score(net, IDS, method, z=z, batch=4).isinf().nonzero().tolist() == [[1, 2]]
    assert net.training and same(net, before) and all(p.grad is None for p in net.parameters())
    assert not any('attend' in vars(layer.attn) for layer in net.layers)           # looked at, not touched

def test_taylor_and_gradient_are_derivatives():
    net, ids, eps = model(mem_len=0).double(), IDS[:4*8*5 + 1], 1e-3  # without memory nothing is cut off
    def loss(i, h, step):
        z = torch.ones(3, 4, dtype=torch.float64)
        z[i, h] += step
        return evaluate(net, ids, z, batch=4)
    found = score(net, ids, 'taylor', batch=4)
    for i, h in ((0, 0), (1, 3), (2, 2)):
        assert found[i, h] == pytest.approx((loss(i, h, -eps) - loss(i, h, eps)) / (2*eps), rel=1e-3, abs=1e-6)
    assert (score(net, ids, 'gradient', batch=4) >= found.abs() - 1e-6).all()

def test_the_highest_scores_stay():
    for seed in range(20):
        scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        for sparsity in (0, .1, .37, .9):
            keep = keep_mask(scores, sparsity)
            assert int((~keep).sum()) == round(35 * sparsity)
            assert scores[keep].min() > scores[~keep].max() if sparsity else keep.all()
    assert keep_mask(torch.zeros(20, 30), .5).tolist() == 10 * [[True] * 30] + 10 * [[False] * 30] # equal ones: the first
    for bad in (math.nan, -.1, 1.01, 1.):
        with pytest.raises(ValueError, match='sparsity='): keep_mask(scores, bad)

@pytest.mark.parametrize('kind', KINDS)
def test_repairs_of_whole_layers_and_of_nothing(kind):
    net, whole, gone = model(**KINDS[kind]).eval(), torch.ones(3, 4).bool(), torch.ones(3, 4).bool()
    gone[1] = False
    for repair in REPAIRS.values():
        assert evaluate(repair(net, whole, IDS), IDS) == pytest.approx(evaluate(net, IDS), abs=1e-4)
        small = repair(net, gone, IDS)
        assert small.cfg.heads == [4, 0, 4] and math.isfinite(evaluate(small, IDS))

def test_the_shortest_texts():
    for method, n in (('gradient', 8*model().cfg.seg_len + 1), ('entropy', tokens_needed(model().cfg))):
        assert score(model(), IDS[:n], method).isfinite().all()
        with pytest.raises(ValueError): score(model(), IDS[:n-1], method)

def test_wrong_numbers_are_refused_and_the_model_left_in_its_mode():
    net, ones = model().train(), torch.ones(3, 4)
    small = REPAIRS['nothing'](net, KEEP)
    for ask in (lambda: score(net, IDS + 27, 'gradient'), lambda: score(net, -1 - IDS, 'output_difference'),
                lambda: score(net, IDS.astype(float), 'gradient'), lambda: score(net, IDS, 'random', z=ones[:2]),
                lambda: score(net, IDS, lambda *_: math.nan * ones), lambda: score(net, IDS, lambda *_: ones[:2]),
                lambda: keep_mask([[1., math.nan]], .5), lambda: attention_statistics(small, IDS),
                lambda: remove_heads(net, ones - 2), lambda: remove_heads(net, math.nan * ones),
                *(lambda repair=repair: repair(net, .5 * ones, IDS) for repair in REPAIRS.values()),
                lambda: REPAIRS['least_squares'](small, ones, IDS)):
        with pytest.raises((ValueError, IndexError)): ask()
        assert net.training

def test_too_little_text_for_least_squares_is_said():
    net = model(d_model=128)
    with pytest.warns(UserWarning, match='tokens for'): REPAIRS['least_squares'](net, KEEP, IDS[:65])

def test_a_mask_alone_multiplies_by_one():
    net, keep = model().eval().double(), KEEP.double()
    want = evaluate(net, IDS, keep)
    for mask in (keep, KEEP, KEEP.tolist()):
        assert evaluate(remove_heads(net, mask), IDS) == pytest.approx(want, rel=1e-12)
        for repair in REPAIRS.values(): assert same(repair(net, mask, IDS), repair(net, KEEP, IDS))
    five = [(TargetGates(3, 4, keep=5, scale=scale), 5) for scale in (True, False)]
    for gates, kept in ((HeadGates(3, 4), 12), *five):
        small = remove_heads(net, gates.double())                                      # not frozen: their copy is
        z = copy.deepcopy(gates).freeze().eval()()
        assert evaluate(small, IDS) == pytest.approx(evaluate(net, IDS, z), rel=1e-12)
        assert sum(small.cfg.heads or [12]) == kept and not gates.frozen and gates.training

def test_models_in_wrappers(): # which nobody calls: that would compile
    plain = model().eval()
    net = torch.nn.DataParallel(torch.compile(plain))
    for repair in REPAIRS.values(): assert same(repair(net, KEEP, IDS), repair(plain, KEEP, IDS))
    for method in METHODS: assert torch.equal(score(net, IDS, method, batch=4), score(plain, IDS, method, batch=4))

def test_a_score_from_outside_works_for_both_kinds_of_model():
    transformers = pytest.importorskip('transformers')
    cfg = transformers.GPT2Config(vocab_size=9, n_embd=16, n_layer=3, n_head=4, n_positions=40)
    gpt2, net = transformers.AutoModelForCausalLM.from_config(cfg).eval(), model(mem_len=0).eval()
    rows = dict(input_ids=torch.tensor(IDS[None, :40]))
    def loudness(heads, z): # mean square of what each head puts out
        found = torch.zeros(z.shape)
        def look(i, x): found[i] += x.detach().unflatten(-1, (z.shape[1], -1)).square().sum((0, 2))
        heads.outputs(look)
        return found * z
    seen, attend = [], net.layers[1].attn.attend
    own = net.layers[1].attn.attend = lambda *args, **how: seen.append(attend(*args, **how)) or seen[-1]
    gpt2.transformer.h[1].attn.c_proj.register_forward_pre_hook(lambda f, args: seen.append(args[0].detach()))
    found = score(net, IDS[:41], loudness, batch=1)[1]
    torch.testing.assert_close(found, sum(x.detach().square().sum((0, 2, 3)) for x in seen))
    assert vars(net.layers[1].attn)['attend'] is own and 'attend' not in vars(net.layers[0].attn)
    seen.clear()
    found = score(gpt2, rows, loudness)
    torch.testing.assert_close(found[1], seen[0].unflatten(-1, (4, -1)).square().sum((0, 1, 3)))
    small = REPAIRS['least_squares'](gpt2, keep_mask(found, .5), rows)
    assert sum(map(len, small.config.kept_heads)) == 6
